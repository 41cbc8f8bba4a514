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
    temperature_bt: jax.Array,
    *,
    position_bt: jax.Array | None = None,
    segment_bt: jax.Array | None = None,
    dtype: Any = jnp.float32,
    layout: Layout | None = None,
    remat: str = "none",
    attend: str = "auto",
    chunk: int = 512,
    entropy: bool = False,
    totals: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-prob [b, t] of each token given those before it, and the entropy it was drawn from.

    Both in nats, float32, of the untruncated distribution at the token's temperature ([b, t] or
    [b, 1]; 0 counts as 1); 0 at position 0 of a row. Where rows share a sequence, `segment_bt`
    numbers them and `position_bt` counts from 0 in each. The entropy is None unless asked for.
    `totals` takes up the gradient of the layers, see `run_layers`.

    The head and its logsumexp run over at most about `chunk` positions at a time (at least one
    per row), rematerialised in the backward pass, so memory holds [chunk, vocab] instead of
    [b, t, vocab]. A chunk takes positions of every row, so rows sharded over devices stay put.
    """
    if chunk < 1:
        raise ValueError(f"optim.logit_chunk={chunk} must be at least 1 position")
    hidden_btd = qwen.forward(
        params,
        cfg,
        tokens_bt,
        dtype=dtype,
        layout=layout,
        remat=remat,
        attend=attend,
        position_bt=position_bt,
        segment_ids_bt=segment_bt,
        totals=totals,
    )
    rows, length = tokens_bt.shape
    width = min(max(chunk // rows, 1), max(length - 1, 1))
    temperature_bt = jnp.broadcast_to(temperature_bt, tokens_bt.shape)

    def in_chunks(x_bt: jax.Array) -> jax.Array:
        extra = -x_bt.shape[1] % width
        padded_bt = jnp.pad(x_bt, [(0, 0), (0, extra)] + [(0, 0)] * (x_bt.ndim - 2))
        split_bnw = padded_bt.reshape(rows, -1, width, *x_bt.shape[2:])
        return jnp.moveaxis(split_bnw, 1, 0)

    head, place = _spread_head(params, cfg, layout)

    def score_chunk(inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array | None]:
        hidden_bwd, token_bw, temperature_bw = inputs
        hidden_xd = place(hidden_bwd, None, None).reshape(rows * width, -1)
        logits_xv = place(qwen.head_logits(head, cfg, hidden_xd), "vocab")
        temperature_x = temperature_bw.reshape(-1)
        logp_x = logprob.log_prob(logits_xv, token_bw.reshape(-1), temperature_x)
        if not entropy:
            return logp_x.reshape(rows, width), None
        entropy_x = logprob.entropy(logits_xv, temperature_x)
        return logp_x.reshape(rows, width), entropy_x.reshape(rows, width)

    def in_rows(x_nbw: jax.Array) -> jax.Array:
        x_bt = jnp.moveaxis(x_nbw, 0, 1).reshape(rows, -1)[:, : length - 1]
        x_bt = jnp.pad(x_bt, [(0, 0), (1, 0)])
        # The last state of a row predicts nothing, not the first token of the next row.
        return x_bt if position_bt is None else jnp.where(position_bt == 0, 0.0, x_bt)

    # The state at position i predicts the token at i + 1. Inside a loop the rematerialised body
    # cannot be merged with the forward one, so no barrier against that is needed.
    with jax.named_scope("score"):
        following = (in_chunks(tokens_bt[:, 1:]), in_chunks(temperature_bt[:, 1:]))
        scored = jax.lax.map(
            jax.checkpoint(score_chunk, prevent_cse=False),
            (in_chunks(hidden_btd[:, :-1]), *following),
        )
        return jax.tree.map(in_rows, scored)


def _spread_head(params: Any, cfg: qwen.QwenConfig, layout: Layout | None):
    """Params of the head, and how to place what it meets: place(x, *axes behind the rows).

    On a mesh the head's vocabulary is split over fsdp as well as tensor, and the rows of a chunk,
    far smaller than it, are gathered over fsdp: neither head nor gradient is ever whole on a
    device. Where the vocabulary does not divide, the head is gathered.
    """
    name = qwen.head_name(cfg)
    if layout is None:
        return {name: params[name]}, lambda x, *axes: x
    spread = layout.divides("all_vocab", cfg.vocab_size)
    batch, vocab = ("outer_batch", "all_vocab") if spread else ("batch", "vocab")

    def place(x: jax.Array, *axes: str | None) -> jax.Array:
        return layout.constrain(x, batch, *(vocab if axis == "vocab" else axis for axis in axes))

    return {name: layout.constrain(params[name], vocab, None)}, place
