"""LoRA adapters (arXiv 2106.09685) on all linear layers of every block; not embedding and head.

An adapted layer computes x W + alpha / rank * (x A) B with W frozen. The factors stand beside the
weights in the same pytree, so one set of model functions serves the base (no adapter attached), the
learner and the sampler. They are never merged for decoding: a merged bfloat16 weight rounds away
what small updates add to it, and a merged copy would have to live beside the frozen base.
"""

import hashlib
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from sage_jax.core.mesh import Layout
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.models.qwen_params import LORA_A, LORA_B, Param, Params, param_table

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSettings:
    """Rank of the factors, and alpha: the adapter's output is scaled by alpha / rank."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def _uniform(key, shape, dtype):
    """Kaiming uniform with a = sqrt(5), as PEFT: bounds +-1/sqrt(inputs); shape [l, inputs, r]."""
    bound = float(np.prod(shape[1:-1])) ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def adapter_table(cfg: QwenConfig, rank: int) -> dict[str, Param]:
    """The factors by their path in the params pytree, named and stored on disk as PEFT does.

    A [l, inputs, r] is sharded like the inputs of its weight and B [l, r, outputs] like the
    outputs; the one of the two without the `embed` axis is split along the rank over fsdp instead,
    so that factors, gradient and optimizer state are split as the weights are. Empty at rank 0.
    """
    table = param_table(cfg)
    factors = {}
    for target in TARGETS if rank else ():
        p = table[f"layers.{target}"]
        name = PEFT_PREFIX + p.hf_name.removesuffix("weight")
        outputs, inputs = p.hf_shape
        split = 1 + next(i for i in (1, 2) if np.prod(p.shape[1 : 1 + i]) == inputs)
        embed_first = p.axes[1] == "embed"
        factors[f"layers.{target}{LORA_A}"] = Param(
            (*p.shape[:split], rank),
            (*p.axes[:split], None if embed_first else "lora_rank"),
            _uniform,
            name + "lora_A.weight",
            (rank, inputs),
            "linear",
        )
        factors[f"layers.{target}{LORA_B}"] = Param(
            (p.shape[0], rank, *p.shape[split:]),
            (p.axes[0], "lora_rank" if embed_first else None, *p.axes[split:]),
            jax.nn.initializers.zeros,
            name + "lora_B.weight",
            (outputs, rank),
            "linear",
        )
    return factors


@partial(jax.jit, static_argnames=("cfg", "rank", "layout"))
def init(cfg: QwenConfig, rank: int, key: jax.Array, layout: Layout | None = None) -> Params:
    """A new adapter in float32, made in place: A random, B zero, so that it changes nothing yet."""
    table = adapter_table(cfg, rank)
    keys = jax.random.split(key, len(table))
    flat = {
        name: p.init(k, p.shape, jnp.float32)
        for k, (name, p) in zip(keys, table.items(), strict=True)
    }
    if layout is not None:
        flat = {name: layout.constrain(x, *table[name].axes) for name, x in flat.items()}
    return unflatten_dict(flat, sep=".")


@partial(jax.jit, static_argnames="scale")
def scaled(adapter: Params, scale: float) -> Params:
    """The adapter with alpha / rank multiplied into B, as the model functions take it."""
    factors = adapter["layers"].items()
    return {"layers": {n: x * scale if n.endswith(LORA_B) else x for n, x in factors}}


def attach(base: Params, adapter: Params) -> Params:
    """Base and scaled adapter as one pytree for the model functions; nothing is copied."""
    layers, factors = base["layers"], adapter["layers"]
    if isinstance(layers, tuple):  # see stack.apart
        return {**base, "layers": tuple(w | f for w, f in zip(layers, factors, strict=True))}
    return {**base, "layers": layers | factors}


def merge(base: Params, adapter: Params) -> Params:
    """Weights in float32 with the scaled adapter added: W + A B, one stacked weight at a time."""
    factors = adapter["layers"]
    merged = jax.tree.map(lambda x: x.astype(jnp.float32), base)
    for target in TARGETS:
        a, b = factors[target + LORA_A], factors[target + LORA_B]
        merged["layers"][target] = _add_product(merged["layers"][target], a, b)
    return merged


@jax.jit
def _add_product(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    # On accelerators the default precision of a product is below float32.
    product = partial(jnp.tensordot, axes=1, precision=jax.lax.Precision.HIGHEST)
    return w + jax.vmap(product)(a, b)


def rank_of(params: Params) -> int:
    """Rank of the adapter in a pytree of params, 0 when it has none."""
    factor = params["layers"].get(TARGETS[0] + LORA_A)
    return 0 if factor is None else factor.shape[-1]


def fingerprint(base: Params) -> str:
    """16 hexadecimal digits that tell one frozen base from another.

    Sums of the bits of its bfloat16 values, so the same on any mesh and in any compute type.
    """
    sums = jax.device_get(_bit_sums(dict(flatten_dict(base, sep="."))))
    text = " ".join(f"{name} {int(total)}" for name, total in sorted(sums.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@jax.jit
def _bit_sums(flat: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    return {name: jnp.sum(bits(x), dtype=jnp.uint32) for name, x in flat.items()}
