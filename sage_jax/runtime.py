"""What every mode needs, built from the config: mesh, model, tokens, engine, verifier."""

import contextlib
import dataclasses
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from sage_jax.config import ROLES, ConfigError
from sage_jax.core import hosts
from sage_jax.core.mesh import DECODE_RULES, ROWS_RULES, UPDATE_RULES, Layout, make_mesh
from sage_jax.core.tokens import Tokens, resolve
from sage_jax.models import hf, lora, peft, qwen, qwen_params
from sage_jax.models.lora import LoraSettings
from sage_jax.models.stack import apart
from sage_jax.roles import PromptSet, load_prompts
from sage_jax.rollout.decode import MAX_STOPS
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.verdicts import SharedVerifier
from sage_jax.spelling import hint
from sage_jax.verify import Verifier

ASSETS = Path(__file__).parent / "assets"


def model_path(name: str) -> str:
    """`asset:NAME` as the packaged folder, anything else unchanged."""
    if not name.startswith("asset:"):
        return name
    folder = ASSETS / name.removeprefix("asset:")
    if not folder.is_dir():
        known = sorted(f"asset:{p.parent.name}" for p in ASSETS.glob("*/config.json"))
        raise ConfigError(
            f"model.path={name!r}: no such packaged model; there is {', '.join(known)}"
            f"{hint(name, known)}"
        )
    return str(folder)


def enable_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user has chosen a place already."""
    # The attributes of jax.config are made at run time, unseen by a type checker.
    if not jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "sage_jax" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where arrays live: None on a single device, else one layout for updates, one for decoding.

    `apart`: the sampler's weights are `stack.apart`.
    """

    update: Layout | None
    decode: Layout | None
    shape: dict[str, int]
    apart: bool = False


def placement(config, devices: Sequence[Any] | None = None) -> Placement:
    """The mesh of the config over `devices` (default: all of this run). ConfigError when sizes and
    devices do not fit together."""
    m, count = config.mesh, jax.device_count() if devices is None else len(devices)
    shape = {"data": m.data, "fsdp": m.fsdp, "tensor": m.tensor}
    alone = all(size == 1 for size in shape.values()) and hosts.count() == 1
    alone |= count == 1 and all(size in (1, -1) for size in shape.values())
    platform = jax.default_backend() if devices is None else devices[0].platform
    if config.model.attention == "cudnn" and platform not in ("gpu", "cuda", "rocm"):
        raise ConfigError(
            f"model.attention=cudnn: needs a GPU, the devices here are of {platform}; use auto"
        )
    if alone and devices is not None and platform != jax.default_backend():
        devices = devices[:1]  # only a mesh says that they are not those of this machine
    elif alone:
        on_cpu = jax.default_backend() == "cpu"
        return Placement(None, None, dict.fromkeys(shape, 1), apart=on_cpu)
    try:
        mesh = make_mesh(**shape, devices=devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, value in (
        ("rollout.slots", config.rollout.slots),
        ("rollout.prefill_rows", config.rollout.prefill_rows),
        ("optim.micro_rows", config.optim.micro_rows),
    ):
        if value % rows:
            raise ConfigError(
                f"{name}={value}: must be a multiple of mesh.data x mesh.fsdp = {rows}, "
                f"for example {rows * max(1, round(value / rows))}"
            )
    if config.lora.rank % mesh.shape["fsdp"]:
        raise ConfigError(
            f"lora.rank={config.lora.rank}: must be a multiple of mesh.fsdp="
            f"{mesh.shape['fsdp']}, over which the factors are split; change one of them"
        )
    if devices is None:
        hosts.meet(mesh)
    sharded = mesh.shape["fsdp"] * mesh.shape["tensor"]
    rows_suffice = config.optim.micro_rows % mesh.size == 0 and config.lora.rank % sharded == 0
    rules = ROWS_RULES if mesh.shape["tensor"] > 1 and rows_suffice else UPDATE_RULES
    return Placement(Layout(mesh, rules), Layout(mesh, DECODE_RULES), dict(mesh.shape))


@dataclasses.dataclass
class Model:
    """Weights in fp32, their architecture and the tokenizer, from one folder.

    With `lora` the weights are the frozen base in compute type, told from others by `fingerprint`,
    and `adapter` (fp32) is trained.
    """

    params: dict
    cfg: qwen.QwenConfig
    tokens: Tokens
    folder: Path
    lora: LoraSettings | None = None
    adapter: dict | None = None
    fingerprint: str = ""

    @property
    def weights(self) -> dict:
        """What the model functions take: the params, with the adapter attached if there is one."""
        if self.lora is None or self.adapter is None:
            return self.params
        return lora.attach(self.params, lora.scaled(self.adapter, self.lora.scale))


def lora_settings(config) -> LoraSettings | None:
    """The adapter's part of the config, None when all weights are trained."""
    c = config.lora
    return LoraSettings(c.rank, c.alpha) if c.rank else None


def load_model(config, place: Placement) -> Model:
    """The checkpoint of model.path, sharded straight into place, and with lora.rank an adapter on
    it: that of lora.path or a new one. ConfigError if one of them is unusable."""
    settings = lora_settings(config)
    dtype = jnp.dtype(config.model.dtype if settings else "float32")
    with hosts.together(), _blaming(f"model.path={config.model.path}"):
        folder = resolve(model_path(config.model.path))
        hf.read_config(folder)  # before transformers sees it, which trusts its numbers
        tokens = Tokens.load(
            folder,
            stop_ids=config.tokens.stop_ids,
            enable_thinking=config.tokens.enable_thinking,
        )
        params, cfg = hf.load(folder, dtype, place.update)
        sizes = sorted((p.name, p.stat().st_size) for p in folder.glob("*.*") if p.is_file())
    hosts.check_same({"files of model.path": f"{zlib.crc32(repr(sizes).encode()):08x}"})
    given, size = tuple(config.tokens.stop_ids), cfg.vocab_size
    if len(tokens.stop_ids) > MAX_STOPS or any(i >= size for i in given):
        raise ConfigError(
            f"tokens.stop_ids={given}: with the model's own {tokens.stop_ids}; at most "
            f"{MAX_STOPS} in all, each below {size}"
        )
    try:
        tokens.check_vocabulary(size)
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    if settings is None:
        return Model(params, cfg, tokens, folder)
    mark = lora.fingerprint(params)
    if config.lora.path:
        with hosts.together(), _blaming(f"lora.path={config.lora.path}"):
            base = peft.Base(cfg, model_path(config.model.path), mark)
            adapter = peft.load(config.lora.path, base, settings, place.update)
    else:
        adapter = lora.init(cfg, settings.rank, jax.random.key(config.seed), place.update)
    return Model(params, cfg, tokens, folder, settings, adapter, mark)


@contextlib.contextmanager
def _blaming(field: str) -> Iterator[None]:
    """Faults of what a field of the config names, as ConfigError with that name."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"{field}: {error}") from error


def make_prompts(config) -> PromptSet:
    """The prompt set of the config. ConfigError when it is absent or wrong."""
    try:
        return load_prompts(config.method.prompts)
    except (ValueError, OSError) as error:
        raise ConfigError(f"method.prompts={config.method.prompts!r}: {error}") from error


def check_positions(config, cfg: qwen.QwenConfig) -> None:
    """ConfigError when prompts and responses can grow beyond the positions the model knows."""
    longest = config.tokens.max_prompt + max(config.rollout.max_new[role] for role in ROLES)
    if longest > cfg.max_position:
        raise ConfigError(
            f"tokens.max_prompt={config.tokens.max_prompt} + the largest rollout.max_new = "
            f"{longest} tokens: the model has {cfg.max_position} positions; lower one of them"
        )


def make_engine(
    config, cfg: qwen.QwenConfig, place: Placement, notice: Callable[[str], None]
) -> Engine:
    """The engine of the config; `notice` is told before a program is compiled.

    ConfigError when prompts and responses can grow beyond the positions the model knows.
    """
    check_positions(config, cfg)
    r = config.rollout
    return Engine(
        cfg,
        slots=r.slots,
        buckets=tuple(r.buckets),
        max_new=max(r.max_new[role] for role in ROLES),
        chunk=r.chunk,
        prefill_rows=r.prefill_rows,
        dtype=jnp.dtype(config.model.dtype),
        layout=place.decode,
        attend=config.model.attention,
        notice=notice,
    )


def make_verifier(config, policy: str) -> Verifier | SharedVerifier:
    """The verifier pool of the config, of several processes one. Raises where the sandbox misses
    the required level."""
    s = config.sandbox
    with hosts.together():
        verifier = Verifier(
            workers=s.workers,
            policy=policy,
            math_time_limit=s.math_time_limit,
            time_limit=s.time_limit,
            cpu_limit=s.cpu_limit,
            memory_mb=s.memory_mb,
            require_level=s.require_level,
        )
    return verifier if hosts.count() == 1 else SharedVerifier(verifier)


class CompileCounter:
    """Programs compiled by JAX since this was made, the small ones included."""

    def __init__(self):
        self.count = self._told = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def new(self) -> int:
        """How many were compiled since this was last asked."""
        fresh, self._told = self.count - self._told, self.count
        return fresh

    def _hear(self, event: str, duration_secs: float, **kwargs) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def decode_weights(params: dict, cfg: qwen.QwenConfig, place: Placement, dtype: str) -> dict:
    """Weights in compute type and decode layout: cast and resharded once, not per token.

    `params`: a model's, an adapter's, or both attached. What is in place already is not copied,
    unless layers are set apart.
    """
    flat: dict[str, Any] = dict(flatten_dict(params, sep="."))
    table = qwen_params.param_table(cfg) | lora.adapter_table(cfg, lora.rank_of(params))
    axes = {name: table[name].axes for name in flat}

    def in_place(name: str, x: jax.Array) -> bool:
        if x.dtype != jnp.dtype(dtype):
            return False
        layout = place.decode
        return layout is None or x.sharding.is_equivalent_to(
            layout.sharding(axes[name], x.shape), x.ndim
        )

    ready = {name: x for name, x in flat.items() if in_place(name, x)}
    rest = {name: x for name, x in flat.items() if name not in ready}
    placed = tuple((name, axes[name]) for name in rest)
    cast = cast_weights(rest, axes=placed, dtype=dtype, layout=place.decode) if rest else {}
    weights = unflatten_dict({name: (ready | cast)[name] for name in flat}, sep=".")
    return apart(weights) if place.apart else weights


@partial(jax.jit, static_argnames=("axes", "dtype", "layout"))
def cast_weights(flat: dict, *, axes: tuple, dtype: str, layout: Layout | None) -> dict:
    """Flat params in another type and layout; `axes`: (name, logical axes) of each."""
    cast = {name: x.astype(dtype) for name, x in flat.items()}
    if layout is None:
        return cast
    # By way of the tensor-parallel layout of updates: from one with all axes on `embed` in a single
    # move, XLA would put every weight whole on every device first.
    halfway = Layout(layout.mesh, UPDATE_RULES)
    cast = {name: halfway.constrain(cast[name], *of) for name, of in axes}
    return {name: layout.constrain(cast[name], *of) for name, of in axes}
