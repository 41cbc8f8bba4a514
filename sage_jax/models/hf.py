"""Hugging Face model folders: streamed into place on load, checked after export.

Safetensors only, and no code from a folder is ever run.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sage_jax.core import hosts
from sage_jax.core.mesh import Layout, whole
from sage_jax.core.model_files import REMEDY, is_there, read_object
from sage_jax.core.tokens import resolve
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.models.qwen_params import Param, Params, param_table

INDEX = "model.safetensors.index.json"
PRINTED_PROBLEMS = 30
DTYPES = ("F32", "BF16", "F16")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def load(
    path: str | Path, dtype: DTypeLike = jnp.float32, layout: Layout | None = None
) -> tuple[Params, QwenConfig]:
    """Params in `dtype`, placed by `layout` (update or decode rules), and the config of a folder.

    Each process reads the parts of its own devices, one shard of a parameter after another: its
    host holds that shard and one tensor. ValueError listing all of: missing, repeated and unknown
    tensors, wrong shapes and types, shards and index entries that do not match, unsupported config
    fields.
    """
    folder = resolve(path)
    cfg = read_config(folder)
    table = param_table(cfg)
    stored = _find(folder, table, cfg)
    flat = {name: _place(p, stored, dtype, layout) for name, p in table.items()}
    return unflatten_dict(flat, sep="."), cfg


def read_config(folder: Path) -> QwenConfig:
    """The architecture in a folder's config.json. ValueError naming file, fields and values."""
    content = read_object(folder / "config.json")
    try:
        return QwenConfig.from_hf(content)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def hf_names(param: Param) -> list[str]:
    """Names of the tensors that hold a parameter, one a layer where it is stacked."""
    if param.axes[0] != "layers":
        return [param.hf_name]
    return [param.hf_name.format(layer=i) for i in range(param.shape[0])]


@dataclass(frozen=True)
class _Stored:
    """Where one tensor lies. The file is opened for each read: a lasting map of it would stay in
    memory beside the params."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or the `part` of it that these slices name."""
        with safe_open(self.file, framework="np") as handle:
            return handle.get_tensor(name) if part is None else handle.get_slice(name)[part]


def _find(folder: Path, table: dict[str, Param], cfg: QwenConfig) -> dict[str, _Stored]:
    """Every tensor of the folder by Hugging Face name, checked to be just what the table needs."""
    files, index, problems = _weight_files(folder)
    found: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as handle:
                parts = {name: handle.get_slice(name) for name in handle.keys()}
                new = {
                    name: _Stored(file, tuple(part.get_shape()), part.get_dtype())
                    for name, part in parts.items()
                }
        except (OSError, SafetensorError) as error:
            problems.append(f"{file.name} cannot be read ({error}): {REMEDY}")
            continue
        for name in sorted(set(new) & set(found)):
            problems.append(f"{name} is in both {found[name].file.name} and {file.name}")
        found |= new
    problems += [
        f"{INDEX} places {name} in {file}, which does not hold it"
        for name, file in index.items()
        if name in found and found[name].file.name != file
    ]
    expected = {name: p.hf_shape for p in table.values() for name in hf_names(p)}
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name} is missing{_head_hint(name)}")
            continue
        stored = found[name]
        if stored.shape != shape:
            problems.append(f"{name} has shape {stored.shape}, config.json asks for {shape}")
        if stored.dtype not in DTYPES:
            problems.append(f"{name} has type {stored.dtype}, not one of {DTYPES}")
    for name in sorted(set(found) - set(expected)):
        if name == "lm_head.weight":
            if not problems and not _same(found, name, "model.embed_tokens.weight"):
                problems.append(
                    f"{name} differs from the embedding, but config.json ties them: set "
                    "tie_word_embeddings to false"
                )
        elif not name.endswith("rotary_emb.inv_freq"):  # a constant in old checkpoints
            problems.append(f"{name} is not a parameter of a {cfg.model_type} model")
    if problems:
        raise ValueError(f"weights of {folder}:\n  " + "\n  ".join(shortened(problems)))
    return found


def shortened(problems: list[str]) -> list[str]:
    """The first of many problems, and how many more there are."""
    more = len(problems) - PRINTED_PROBLEMS
    return problems[:PRINTED_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str], list[str]]:
    """Safetensors files to read, the index (tensor -> file name; empty if none), problems."""
    present = sorted(folder.glob("*.safetensors"))
    if not is_there(folder / INDEX):
        problem = "no *.safetensors file: other formats are not read, convert the checkpoint"
        return present, {}, [] if present else [problem]
    index = read_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        problem = f"{INDEX}: weight_map {index!r:.80} does not map tensors to file names; {REMEDY}"
        return [], {}, [problem]
    listed = sorted(set(index.values()))
    problems = [
        f"{INDEX} lists {f!r}, which is not a file name within the folder; correct the index"
        if Path(f).name != f
        else f"{INDEX} lists {f}, which is absent; {REMEDY}"
        for f in listed
        if folder / f not in present
    ]
    if "model.safetensors" not in listed and folder / "model.safetensors" in present:
        problems.append(f"both model.safetensors and {INDEX} are there: remove the stale one")
    return [file for file in present if file.name in listed], index, problems


def _head_hint(name: str) -> str:
    if name != "lm_head.weight":
        return ""
    return ": if the head is tied to the embedding, set tie_word_embeddings to true"


def _same(found: dict[str, _Stored], first: str, second: str) -> bool:
    return np.array_equal(found[first].read(first), found[second].read(second))


def _place(
    param: Param, stored: dict[str, _Stored], dtype: DTypeLike, layout: Layout | None
) -> jax.Array:
    if layout is None:
        return jax.device_put(_read_shard(param, stored, dtype, param.shape, None))
    sharding = layout.sharding(param.axes, param.shape)
    shape = sharding.shard_shape(param.shape)
    alike: dict[tuple, list] = {}  # devices that hold the same shard
    for device, index in sharding.addressable_devices_indices_map(param.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), param.shape, strict=True))
        alike.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in alike.items():
        index = tuple(slice(*pair) for pair in bounds)
        host = _read_shard(param, stored, dtype, shape, None if shape == param.shape else index)
        arrays += [jax.device_put(host, device) for device in devices]
    return jax.make_array_from_single_device_arrays(param.shape, sharding, arrays)


def _read_shard(
    param: Param,
    stored: dict[str, _Stored],
    dtype: DTypeLike,
    shape: tuple[int, ...],
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """The shard [shape] of a parameter that `index` names, None for all of it."""
    host, names, part = np.empty(shape, jnp.dtype(dtype)), hf_names(param), None
    layers = host[None]
    if param.axes[0] == "layers":
        layers = host
        names = names if index is None else names[index[0]]
    if index is not None:
        part = _hf_block(param, index)
    for layer, name in zip(layers, names, strict=True):
        # Laid out anew before the cast: numpy casts a transposed array far slower than it copies.
        layer[...] = np.ascontiguousarray(param.from_hf(stored[name].read(name, part), layer.shape))
    return host


def _hf_block(param: Param, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The block of one Hugging Face tensor that holds the shard `index` of a parameter.

    ValueError where the shard is not one block of it, as when inner dimensions are split too.
    """
    linear = param.transform == "linear"
    stacked = param.axes[0] == "layers"
    dims = list(zip(param.shape, index, strict=True))[stacked:]
    block = []
    for size in param.hf_shape[::-1] if linear else param.hf_shape:
        start, stop, covered = 0, 1, 1
        while covered < size:
            n, s = dims.pop(0)
            if stop - start > 1 and (s.start, s.stop) != (0, n):
                raise ValueError(f"{param.hf_name}: shard {index} is not one block of the tensor")
            start, stop, covered = start * n + s.start, (stop - 1) * n + s.stop, covered * n
        block.append(slice(start, stop))
    return tuple(block[::-1] if linear else block)


def export(
    params: Params,
    cfg: QwenConfig,
    out_dir: str | Path,
    source_dir: str | Path | None = None,
    *,
    dtype: DTypeLike | None = None,
    shard_bytes: int = 4_000_000_000,
) -> Path:
    """Write a folder that transformers and serving engines load, then read it back and compare.

    Weights go to model.safetensors, or to shards of at most `shard_bytes` with an index, in
    `dtype` (default: the params' own). From `source_dir` come the tokenizer files and the fields
    of config.json that the architecture does not fix, such as token ids. Returns the folder.
    ValueError when `out_dir` already holds weights, or params and config do not match; OSError
    when a tensor reads back different. On several processes all must call it; process 0 writes.
    """
    out, writes = Path(out_dir), hosts.first()
    with hosts.together():
        if writes:
            out.mkdir(parents=True, exist_ok=True)
            if any(out.glob("*.safetensors*")):
                raise ValueError(f"{out} already holds weights: choose a new folder")
    table = param_table(cfg)
    flat: dict[str, Any] = dict(flatten_dict(params, sep="."))
    expected = {name: p.shape for name, p in table.items()}
    given = {name: x.shape for name, x in flat.items()}
    if expected != given:
        wrong = sorted(dict(expected.items() ^ given.items()))
        raise ValueError(f"params do not match the config at {wrong}")

    shards = _shards(table, flat, dtype, shard_bytes)
    for file, names in shards.items():
        tensors = {}
        for hf_name, where in names.items():
            value = _to_host(table, flat, dtype, *where)
            if writes:
                tensors[hf_name] = value
        if writes:
            save_file(tensors, out / file, metadata={"format": "pt"})
            (out / file).chmod(0o644)  # made for the owner only; engines may run as another user
    source = None if source_dir is None else resolve(source_dir)
    if writes:
        _write_rest(out, source, shards)
    written = _find(out, table, cfg) if writes else {}
    for names in shards.values():
        for hf_name, where in names.items():
            value = _to_host(table, flat, dtype, *where)
            if writes and written[hf_name].read(hf_name).tobytes() != value.tobytes():
                raise OSError(f"{hf_name} reads back different from {out}")
    # Last, because a folder without it does not load: a killed export cannot pass for a whole one.
    if writes:
        base = {} if source is None else read_object(source / "config.json")
        stored = jnp.dtype(dtype or flat["embed"].dtype).name
        base = {k: v for k, v in base.items() if k not in ("dtype", "rope_scaling")}
        _write_json(out / "config.json", {**base, **cfg.to_hf(), "torch_dtype": stored})
    return out


def _write_rest(out: Path, source: Path | None, shards: dict[str, dict]) -> None:
    """The index of several shards, and the tokenizer files of `source`."""
    if len(shards) > 1:
        weight_map = {hf_name: file for file, names in shards.items() for hf_name in names}
        _write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map})
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _shards(
    table: dict[str, Param], flat: dict[str, jax.Array], dtype: DTypeLike | None, limit: int
) -> dict[str, dict[str, tuple[str, int | None]]]:
    """File name -> {Hugging Face name -> (parameter, layer or None)}, tensors in table order."""
    groups: list[dict[str, tuple[str, int | None]]] = [{}]
    used = 0
    for name, param in table.items():
        stacked = param.axes[0] == "layers"
        size = int(np.prod(param.hf_shape)) * jnp.dtype(dtype or flat[name].dtype).itemsize
        for layer, hf_name in enumerate(hf_names(param)):
            if used and used + size > limit:
                groups.append({})
                used = 0
            groups[-1][hf_name] = (name, layer if stacked else None)
            used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": g for i, g in enumerate(groups, start=1)}


def _to_host(
    table: dict[str, Param],
    flat: dict[str, jax.Array],
    dtype: DTypeLike | None,
    name: str,
    layer: int | None,
) -> np.ndarray:
    array = whole(flat[name] if layer is None else flat[name][layer])
    return np.ascontiguousarray(table[name].to_hf(array).astype(jnp.dtype(dtype or array.dtype)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
