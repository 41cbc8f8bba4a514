"""Greedy decoding over the model functions, for tests only."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.models import cache as kv
from sage_jax.models import qwen


def pad(rows, length, fill=0):
    """Rows of ids right padded to [b, length], and their lengths."""
    tokens_bt = np.full((len(rows), length), fill, np.int32)
    for row, ids in zip(tokens_bt, rows, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(tokens_bt), jnp.asarray([len(ids) for ids in rows], jnp.int32)


def greedy(params, cfg, prompts, new_tokens, dtype=jnp.float32):
    """`new_tokens` greedy ids a prompt: one prefill, then one decode step a token."""
    longest = max(len(ids) for ids in prompts)
    length = longest + new_tokens
    hidden_sd, filled = qwen.prefill(params, cfg, *pad(prompts, longest), dtype=dtype)
    cache = kv.init(cfg, len(prompts), length)
    cache = {name: c.at[:, :, :longest].set(filled[name]) for name, c in cache.items()}
    step = jax.jit(
        partial(qwen.decode_step, read_length=length, dtype=dtype),
        static_argnums=1,
        donate_argnums=4,
    )
    position_s = jnp.asarray([len(ids) for ids in prompts])
    out = []
    for _ in range(new_tokens):
        token_s = qwen.head_logits(params, cfg, hidden_sd).argmax(-1)
        out.append(np.asarray(token_s))
        hidden_sd, cache = step(params, cfg, token_s, position_s, cache)
        position_s += 1
    return np.stack(out, axis=1)
