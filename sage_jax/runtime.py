"""What every mode needs, built from the config: mesh, model, tokens, engine, verifier."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from sage_jax.config import ROLES, ConfigError
from sage_jax.core.mesh import DECODE_RULES, UPDATE_RULES, Layout, make_mesh
from sage_jax.core.tokens import Tokens, resolve
from sage_jax.models import hf, qwen
from sage_jax.roles import PromptSet, load_prompts
from sage_jax.rollout.decode import MAX_STOPS
from sage_jax.rollout.engine import Engine
from sage_jax.verify import Verifier

ASSETS = Path(__file__).parent / "assets"


def model_path(name: str) -> str:
    """`asset:NAME` as the packaged folder, anything else unchanged."""
    if not name.startswith("asset:"):
        return name
    folder = ASSETS / name.removeprefix("asset:")
    if not folder.is_dir():
        known = ", ".join(sorted(p.parent.name for p in ASSETS.glob("*/config.json")))
        raise ConfigError(f"model.path={name!r}: no such packaged model; there is {known}")
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
    """Where arrays live: None on a single device, else one layout for updates, one for decoding."""

    update: Layout | None
    decode: Layout | None
    shape: dict[str, int]


def placement(config) -> Placement:
    """The mesh of the config. ConfigError when sizes and devices do not fit together."""
    m = config.mesh
    shape = {"data": m.data, "fsdp": m.fsdp, "tensor": m.tensor}
    if all(size == 1 for size in shape.values()) or (
        jax.device_count() == 1 and all(size in (1, -1) for size in shape.values())
    ):
        return Placement(None, None, dict.fromkeys(shape, 1))
    try:
        mesh = make_mesh(**shape)
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
    layouts = (Layout(mesh, UPDATE_RULES), Layout(mesh, DECODE_RULES))
    return Placement(*layouts, dict(mesh.shape))


@dataclasses.dataclass
class Model:
    """Weights in fp32, their architecture and the tokenizer, from one folder."""

    params: dict
    cfg: qwen.QwenConfig
    tokens: Tokens
    folder: Path


def load_model(config, place: Placement, *, dtype=jnp.float32) -> Model:
    """The checkpoint of model.path, sharded straight into place. ConfigError if it is unusable."""
    try:
        folder = resolve(model_path(config.model.path))
        hf.read_config(folder)  # before transformers sees it, which trusts its numbers
        tokens = Tokens.load(
            folder,
            stop_ids=config.tokens.stop_ids,
            enable_thinking=config.tokens.enable_thinking,
        )
        params, cfg = hf.load(folder, dtype, place.update)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
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
    return Model(params, cfg, tokens, folder)


def make_prompts(config) -> PromptSet:
    """The prompt set of the config. ConfigError when it is absent or wrong."""
    try:
        return load_prompts(config.method.prompts)
    except (ValueError, OSError) as error:
        raise ConfigError(f"method.prompts={config.method.prompts!r}: {error}") from error


def make_engine(
    config, cfg: qwen.QwenConfig, place: Placement, notice: Callable[[str], None]
) -> Engine:
    """The engine of the config; `notice` is told before a program is compiled.

    ConfigError when prompts and responses can grow beyond the positions the model knows.
    """
    r = config.rollout
    longest = config.tokens.max_prompt + max(r.max_new[role] for role in ROLES)
    if longest > cfg.max_position:
        raise ConfigError(
            f"tokens.max_prompt={config.tokens.max_prompt} + the largest rollout.max_new = "
            f"{longest} tokens: the model has {cfg.max_position} positions; lower one of them"
        )
    return Engine(
        cfg,
        slots=r.slots,
        buckets=tuple(r.buckets),
        max_new=max(r.max_new[role] for role in ROLES),
        chunk=r.chunk,
        prefill_rows=r.prefill_rows,
        dtype=jnp.dtype(config.model.dtype),
        layout=place.decode,
        notice=notice,
    )


def make_verifier(config, policy: str) -> Verifier:
    """The verifier pool of the config. Raises where the sandbox misses the required level."""
    s = config.sandbox
    return Verifier(
        workers=s.workers,
        policy=policy,
        math_time_limit=s.math_time_limit,
        time_limit=s.time_limit,
        cpu_limit=s.cpu_limit,
        memory_mb=s.memory_mb,
        require_level=s.require_level,
    )


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
    """Weights in compute type and decode layout: cast and resharded once, not per token."""
    if place.decode is None and dtype == "float32":
        return params
    return _cast(params, cfg=cfg, dtype=dtype, layout=place.decode)


@partial(jax.jit, static_argnames=("cfg", "dtype", "layout"))
def _cast(params: dict, *, cfg: qwen.QwenConfig, dtype: str, layout: Layout | None) -> dict:
    table = qwen.param_table(cfg)
    leaves: dict[str, Any] = dict(flatten_dict(params, sep="."))
    flat = {name: x.astype(dtype) for name, x in leaves.items()}
    if layout is not None:
        flat = {name: layout.constrain(x, *table[name].axes) for name, x in flat.items()}
    return unflatten_dict(flat, sep=".")
