"""What a model has to compute and to read, from its sizes alone.

A product of [m, k] and [k, n] costs 2 m k n FLOPs; norms, softmax and the like are left out.
"""

import math
from dataclasses import dataclass

from sage_jax.models import lora, qwen_params
from sage_jax.models.qwen_config import QwenConfig


@dataclass(frozen=True)
class Weights:
    """How many parameters there are, by what is computed with them."""

    layers: int
    adapter: int
    head: int
    total: int

    @classmethod
    def of(cls, cfg: QwenConfig, rank: int = 0) -> "Weights":
        """`layers`, `adapter` and `head` count matrices, `total` all but the adapter."""
        sizes = {name: math.prod(p.shape) for name, p in qwen_params.param_table(cfg).items()}
        factors = lora.adapter_table(cfg, rank).values()
        return cls(
            layers=sum(n for name, n in sizes.items() if name.endswith("_proj")),
            adapter=sum(math.prod(p.shape) for p in factors),
            head=cfg.vocab_size * cfg.hidden_size,
            total=sum(sizes.values()),
        )


def attention_flops(cfg: QwenConfig, seen: float) -> float:
    """Forward FLOPs of a token that attends to `seen` positions, in all layers: q k and p v."""
    return 4.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * seen


def forward_flops(cfg: QwenConfig, tokens: int, rank: int = 0, head_tokens: int = -1) -> float:
    """Forward FLOPs of one causal row of `tokens`, logits at `head_tokens` of them (-1: all)."""
    w = Weights.of(cfg, rank)
    positions = tokens if head_tokens < 0 else head_tokens
    matrices = 2.0 * (w.layers + w.adapter) * tokens + 2.0 * w.head * positions
    return matrices + tokens * attention_flops(cfg, (tokens + 1) / 2)


def update_flops(cfg: QwenConfig, tokens: int, rank: int = 0) -> float:
    """FLOPs of one causal row of `tokens` that an update needs, nothing computed twice.

    All weights trained: 3 x forward (backward: gradients of inputs and of weights). An adapter: 3 x
    for factors and attention, 2 x for the frozen matrices, which have no gradient.
    """
    whole = 3.0 * forward_flops(cfg, tokens, rank)
    if not rank:
        return whole
    w = Weights.of(cfg)
    return whole - 2.0 * (w.layers + w.head) * tokens


def decode_flops(cfg: QwenConfig, position: float, rank: int = 0) -> float:
    """FLOPs of one new token that sees `position` positions."""
    w = Weights.of(cfg, rank)
    return 2.0 * (w.layers + w.adapter + w.head) + attention_flops(cfg, position)


def cache_bytes(cfg: QwenConfig, width: int) -> int:
    """Bytes of keys and values of one token in all layers, `width` bytes a number."""
    return 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * width
