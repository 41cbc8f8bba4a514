"""Adapter folders in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from sage_jax.core import hosts
from sage_jax.core.mesh import Layout, put, whole
from sage_jax.core.model_files import REMEDY, read_object
from sage_jax.models import hf
from sage_jax.models.lora import TARGETS, LoraSettings, adapter_table
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.models.qwen_params import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FINGERPRINT = "base_fingerprint"
# Fields that change the mathematics, with the values under which they do not.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "use_bdlora": (None, False),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
}
# Their adapters are meant for a base whose weights were changed when they were made.
OTHER_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class Base:
    """The model under an adapter: architecture, path or hub id, and `lora.fingerprint`."""

    cfg: QwenConfig
    path: str
    fingerprint: str


def load(
    path: str | Path, base: Base, settings: LoraSettings, layout: Layout | None = None
) -> Params:
    """The adapter of a folder in float32, placed by `layout`.

    ValueError listing all of: another rank, alpha, set of layers or base than this run has, fields
    that change the mathematics, tensors that are missing, unknown or of another shape.
    """
    folder = Path(path)
    content = read_object(folder / CONFIG)
    tensors, metadata, problems = _read(folder / WEIGHTS)
    problems += _config_problems(content, settings)
    problems += _base_problems(content, metadata, base)
    table = adapter_table(base.cfg, settings.rank)
    expected = {name: p.hf_shape for p in table.values() for name in hf.hf_names(p)}
    if tensors:
        problems += _tensor_problems(tensors, expected)
    if problems:
        raise ValueError("adapter:\n  " + "\n  ".join(hf.shortened(problems)))
    flat = {}
    for name, p in table.items():
        host = np.stack([p.from_hf(tensors[n].astype(np.float32)) for n in hf.hf_names(p)])
        where = None if layout is None else layout.sharding(p.axes, p.shape)
        flat[name] = put(host, where)
    return unflatten_dict(flat, sep=".")


def _read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, str], list[str]]:
    if not file.is_file():
        return {}, {}, [f"{file.name} is absent: only safetensors are read; {REMEDY}"]
    try:
        with safe_open(file, framework="np") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
            return tensors, handle.metadata() or {}, []
    except (OSError, SafetensorError, TypeError) as error:
        return {}, {}, [f"{file.name} cannot be read ({error}): {REMEDY}"]


def _config_problems(content: dict[str, Any], settings: LoraSettings) -> list[str]:
    problems = []
    for field, name, here in (
        ("r", "lora.rank", settings.rank),
        ("lora_alpha", "lora.alpha", settings.alpha),
    ):
        if content.get(field) != here:
            problems.append(f"{field} is {content.get(field)!r}, {name} is {here:g}: make them one")
    targets = content.get("target_modules")
    if targets != "all-linear":
        names = targets if isinstance(targets, list) else [targets]
        if set(map(str, names)) != set(TARGETS):
            problems.append(
                f"target_modules is {targets!r:.120}: only adapters on all of "
                f"{', '.join(TARGETS)} are read"
            )
    problems += [
        f"{field} is {content[field]!r:.80}: only {allowed[-1]!r} is supported"
        for field, allowed in PLAIN.items()
        if field in content and content[field] not in allowed
    ]
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(OTHER_BASE):
        problems.append(
            f"init_lora_weights is {start!r}, which changes the base: convert it to a plain adapter"
        )
    return problems


def _base_problems(content: dict[str, Any], metadata: dict[str, str], base: Base) -> list[str]:
    named = content.get("base_model_name_or_path")
    if mark := metadata.get(FINGERPRINT):
        if mark == base.fingerprint:
            return []
        return [
            f"it was trained on other weights ({named}, fingerprint {mark}) than model.path="
            f"{base.path} holds ({base.fingerprint}): give that model"
        ]
    # Without a fingerprint only the name can tell, and folders differ between machines.
    if not named or _last(str(named)) == _last(base.path):
        return []
    return [
        f"base_model_name_or_path is {named!r}, model.path is {base.path!r}: give that model, or "
        f"correct {CONFIG} if they are the same"
    ]


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()


def _tensor_problems(
    tensors: dict[str, np.ndarray], expected: dict[str, tuple[int, ...]]
) -> list[str]:
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [
        f"{name} has shape {x.shape}, expected {expected[name]}"
        if name in expected
        else f"{name} belongs to no adapted layer of this model"
        for name, x in sorted(tensors.items())
        if expected.get(name) != x.shape
    ]
    return problems


def export(adapter: Params, base: Base, settings: LoraSettings, out_dir: str | Path) -> Path:
    """Write an adapter folder that PEFT and serving engines load, then read it back and compare.

    Tensors in float32. Returns the folder. ValueError when `out_dir` already holds weights; OSError
    when a tensor reads back different. On several processes all must call it; process 0 writes.
    """
    out = Path(out_dir)
    with hosts.together():
        if hosts.first():
            out.mkdir(parents=True, exist_ok=True)
            if any(out.glob("*.safetensors*")):
                raise ValueError(f"{out} already holds weights: choose a new folder")
    flat: dict[str, Any] = dict(flatten_dict(adapter, sep="."))
    tensors = {
        name: np.ascontiguousarray(p.to_hf(layer))
        for key, p in adapter_table(base.cfg, settings.rank).items()
        for name, layer in zip(hf.hf_names(p), whole(flat[key]).astype(np.float32), strict=True)
    }
    if hosts.first():
        _write(out, tensors, base, settings)
    return out


def _write(out: Path, tensors: dict[str, np.ndarray], base: Base, settings: LoraSettings) -> None:
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt", FINGERPRINT: base.fingerprint})
    (out / WEIGHTS).chmod(0o644)  # made for the owner only; engines may run as another user
    written, _, problems = _read(out / WEIGHTS)
    if problems or any(written[name].tobytes() != x.tobytes() for name, x in tensors.items()):
        raise OSError(f"{out / WEIGHTS} reads back different {problems}")
    # Last: a folder without it does not load, so a killed export cannot pass for a whole one.
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha % 1 == 0 else settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(TARGETS),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (out / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
