"""Log-probabilities of given tokens without ever holding logits for all positions."""

from typing import Any

import jax
import jax.numpy as jnp

from sage_jax.core import logprob
from sage_jax.core.mesh import Layout
from sage_jax.models import qwen


def token_logps(
    params: Any,
    cfg: qwen.QwenConfig,
    tokens_bt: jax.Array,
    temperature_b: jax.Array,
    *,
    dtype: Any = jnp.float32,
    layout: Layout | None = None,
    remat: str = "none",
    attend: str = "auto",
    chunk: int = 512,
    entropy: bool = False,
    entropy_gradient: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-prob [b, t] of each token given those before it, and the entropy it was drawn from.

    Both in nats, float32, of the untruncated distribution at the row's temperature (0 counts as
    1); position 0 is 0. The entropy is None unless asked for; without `entropy_gradient` it is a
    constant and the backward pass does no work for it.

    The head and its logsumexp run over at most about `chunk` positions at a time (at least one
    per row), rematerialised in the backward pass, so memory holds [chunk, vocab] instead of
    [b, t, vocab]. A chunk takes positions of every row, so rows sharded over devices stay put.
    """
    if chunk < 1:
        raise ValueError(f"optim.logit_chunk={chunk} must be at least 1 position")
    hidden_btd = qwen.forward(
        params, cfg, tokens_bt, dtype=dtype, layout=layout, remat=remat, attend=attend
    )
    rows, length = tokens_bt.shape
    width = min(max(chunk // rows, 1), max(length - 1, 1))

    def in_chunks(x_bt: jax.Array) -> jax.Array:
        extra = -x_bt.shape[1] % width
        padded_bt = jnp.pad(x_bt, [(0, 0), (0, extra)] + [(0, 0)] * (x_bt.ndim - 2))
        split_bnw = padded_bt.reshape(rows, -1, width, *x_bt.shape[2:])
        return jnp.moveaxis(split_bnw, 1, 0)

    def score_chunk(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        hidden_bwd, token_bw = inputs
        logits_xv = qwen.head_logits(params, cfg, hidden_bwd.reshape(rows * width, -1))
        if layout is not None:
            logits_xv = layout.constrain(logits_xv, "batch", "vocab")
        temperature_x = jnp.repeat(temperature_b, width)
        logp_x = logprob.log_prob(logits_xv, token_bw.reshape(-1), temperature_x)
        if not entropy:
            return logp_x.reshape(rows, width), None
        if not entropy_gradient:
            logits_xv = jax.lax.stop_gradient(logits_xv)
        entropy_x = logprob.entropy(logits_xv, temperature_x)
        return logp_x.reshape(rows, width), entropy_x.reshape(rows, width)

    def in_rows(x_nbw: jax.Array) -> jax.Array:
        x_bt = jnp.moveaxis(x_nbw, 0, 1).reshape(rows, -1)[:, : length - 1]
        return jnp.pad(x_bt, [(0, 0), (1, 0)])

    # The state at position i predicts the token at i + 1. Inside a loop the rematerialised body
    # cannot be merged with the forward one, so no barrier against that is needed.
    with jax.named_scope("score"):
        scored = jax.lax.map(
            jax.checkpoint(score_chunk, prevent_cse=False),
            (in_chunks(hidden_btd[:, :-1]), in_chunks(tokens_bt[:, 1:])),
        )
        return jax.tree.map(in_rows, scored)
