"""Settings of an update, and the Optax chain they describe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sage_jax.core.mesh import put
from sage_jax.models.attention import KINDS
from sage_jax.models.qwen import REMAT

_DECAY: dict[str, Callable[[Any], Any]] = {
    "constant": lambda progress: 1.0,
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
}


@dataclass(frozen=True)
class UpdateSettings:
    """Everything about an update but its data; defaults follow the paper (arXiv 2603.15255).

    lr is the peak rate; 0 freezes the weights. clip_norm 0 switches gradient clipping off,
    importance_cap 0 the importance weights, entropy_coef and kl_coef 0 their terms (then not
    computed). role_weights gives each role's share of the loss, 1 where absent. chunk is in
    positions, see `token_logps`; attention is one of attention.KINDS. dtype is that of the matrix
    products; master params and gradients are float32. lora_scale is alpha / rank of the adapter
    that is trained, 0 when all weights are.
    """

    lr: float = 3e-6
    warmup_steps: int = 0
    schedule: str = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    importance_cap: float = 0.0
    role_weights: Mapping[str, float] = field(default_factory=dict)
    chunk: int = 512
    remat: str = "none"
    attention: str = "auto"
    dtype: str = "float32"
    lora_scale: float = 0.0

    def __post_init__(self) -> None:
        bounds = {
            "lr": self.lr >= 0,
            "warmup_steps": self.warmup_steps >= 0,
            "schedule": self.schedule in _DECAY,
            "betas": len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            "eps": self.eps > 0,
            "weight_decay": self.weight_decay >= 0,
            "clip_norm": self.clip_norm >= 0,
            "clip_low": 0 < self.clip_low < 1,
            "clip_high": self.clip_high > 0,
            "dual_clip": self.dual_clip > 1,
            "entropy_coef": self.entropy_coef >= 0,
            "kl_coef": self.kl_coef >= 0,
            "importance_cap": self.importance_cap >= 0,
            "role_weights": all(weight >= 0 for weight in self.role_weights.values()),
            "chunk": self.chunk >= 1,
            "remat": self.remat in REMAT,
            "attention": self.attention in KINDS,
            "dtype": self.dtype in ("float32", "bfloat16"),
            "lora_scale": self.lora_scale >= 0,
        }
        bad = [f"optim.{name}={getattr(self, name)!r}" for name, ok in bounds.items() if not ok]
        if bad:
            raise ValueError(f"out of range: {', '.join(bad)}; see UpdateSettings for the bounds")


def make_schedule(settings: UpdateSettings, total_steps: int) -> Callable[[Any], jax.Array]:
    """Learning rate of each update: linear warm-up, then the chosen decay to 0 at `total_steps`.

    The first update already has lr / warmup_steps: a rate of 0 would waste its rollout.
    """
    warmup = settings.warmup_steps
    if warmup > total_steps:
        raise ValueError(
            f"optim.warmup_steps={warmup} exceeds train.steps={total_steps}: the run would end "
            "before the learning rate is reached; lower it"
        )

    def rate(step: Any) -> jax.Array:
        rise = jnp.minimum((step + 1) / max(warmup, 1), 1.0)
        progress = jnp.clip((step - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
        return settings.lr * rise * _DECAY[settings.schedule](progress)

    return rate


def make_optimizer(
    settings: UpdateSettings, total_steps: int, updates_per_step: int = 1
) -> optax.GradientTransformation:
    """AdamW (decay on all params, as in verl) behind clipping by the global norm.

    The schedule counts steps: all `updates_per_step` updates of a step have its rate.
    """
    rate = make_schedule(settings, total_steps)
    adamw = optax.adamw(
        lambda update: rate(jnp.asarray(update) // updates_per_step),
        b1=settings.betas[0],
        b2=settings.betas[1],
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    return optax.chain(clip, adamw, _scale_by_factor())


class FactorState(NamedTuple):
    """What every update is multiplied by; 1 until `with_lr_factor` changes it."""

    lr_factor: jax.Array


def _scale_by_factor() -> optax.GradientTransformation:
    def update(updates, state, params=None):
        return jax.tree.map(lambda u: u * state.lr_factor, updates), state

    return optax.GradientTransformation(lambda params: FactorState(jnp.ones(())), update)


def lr_factor(opt_state: Any) -> float:
    """The factor on the learning rate in an optimizer state."""
    return float(jax.device_get(optax.tree_utils.tree_get(opt_state, "lr_factor")))


def with_lr_factor(opt_state: Any, factor: float) -> Any:
    """The optimizer state with another factor on the learning rate."""
    now = optax.tree_utils.tree_get(opt_state, "lr_factor")
    new = put(np.asarray(factor, now.dtype), now.sharding)
    return optax.tree_utils.tree_set(opt_state, lr_factor=new)
