"""Causal self-attention over packed rows by four programs of the same mathematics.

`xla` holds the scores of all pairs of positions. `blocked` (any device), `splash` (TPU) and `cudnn`
(GPU) hold those of one pair of blocks: softmax is accumulated from block to block, and computed
again in the backward pass (arXiv 2205.14135). Scores and sums are float32 in all of them.

Shape suffixes: b rows, t positions, q and s positions of a block (of queries, of keys), n query
heads, k key/value heads, g query heads a key/value head, h head dim, i blocks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from sage_jax.core.mesh import Layout

KINDS = ("auto", "xla", "blocked", "splash", "cudnn")
# What a remat policy may keep, by name: output and log of the softmax's sum.
SAVED = "attention"
BLOCK = 256
# A single pair of blocks leaves nothing to skip, and its loops cost more than they save.
PLAIN_UP_TO = BLOCK
SPLASH_BLOCK = 512
_SPLASH_TILES = (
    *("block_q", "block_kv", "block_kv_compute"),
    *("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"),
)
LANES = 128  # of a TPU: block lengths and head dims are padded to a multiple
_NEVER = -1e30


def choose(kind: str, length: int, packed: bool, layout: Layout | None) -> str:
    """The program of `kind` for rows of `length` tokens, 'auto' resolved.

    auto: up to 256 tokens xla; beyond, splash on TPU, cudnn on GPU unless rows are `packed` (its
    public form has no segments), else blocked. Likewise cudnn gives way to blocked where rows are
    packed. ValueError on an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"model.attention={kind!r}: choose one of {', '.join(KINDS)}")
    if kind == "auto":
        on_gpu = "blocked" if packed else "cudnn"
        long = {"tpu": "splash", "gpu": on_gpu}.get(platform(layout), "blocked")
        return "xla" if length <= PLAIN_UP_TO else long
    return "blocked" if kind == "cudnn" and packed else kind


def attend(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_bt: jax.Array | None = None,
    *,
    kind: str = "auto",
    layout: Layout | None = None,
) -> jax.Array:
    """Attention output [b, t, n, h]: each position over itself and those before it in its segment.

    `segment_bt` numbers the rows packed into a sequence; it must not decrease along t, and without
    it a sequence is one segment. The program is that of `choose`. `splash` off a TPU runs in the
    Pallas interpreter, which is for tests of small sizes only.
    """
    asked, kind = kind, choose(kind, q_btnh.shape[1], segment_bt is not None, layout)
    if asked == "auto" and kind == "cudnn" and q_btnh.dtype.itemsize > 2:
        kind = "blocked"  # cuDNN has no float32
    if kind == "cudnn":
        return jax.nn.dot_product_attention(
            q_btnh, k_btkh, v_btkh, is_causal=True, implementation="cudnn"
        )
    if kind == "xla":
        mask = None
        if segment_bt is not None:
            mask = (segment_bt[:, :, None] == segment_bt[:, None, :])[:, None]
        return jax.nn.dot_product_attention(q_btnh, k_btkh, v_btkh, mask=mask, is_causal=True)
    if segment_bt is None:
        segment_bt = jnp.zeros(q_btnh.shape[:2], jnp.int32)
    if kind == "splash":
        program = partial(_splash, interpret=platform(layout) != "tpu")
    else:
        program = partial(_blocked, block=BLOCK)
    return _on_shards(program, layout)(q_btnh, k_btkh, v_btkh, segment_bt)


def platform(layout: Layout | None) -> str:
    """Where the program will run: the mesh may be of chips that are not here."""
    platform = layout.mesh.devices.flat[0].platform if layout else jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


def _on_shards(program: Callable[..., jax.Array], layout: Layout | None) -> Callable[..., Any]:
    """`program` on each device's rows and heads, which need nothing of one another."""
    if layout is None:
        return program

    def spec(*axes: str):
        return layout.sharding(axes).spec

    q = spec("batch", "seq", "q_heads", "head_dim")
    kv = spec("batch", "seq", "kv_heads", "head_dim")
    return jax.shard_map(
        program,
        mesh=layout.mesh,
        in_specs=(q, kv, kv, spec("batch", "seq")),
        out_specs=q,
        check_vma=False,  # a Pallas call does not say over which axes its result varies
    )


def _pad(x: jax.Array, axis: int, size: int, mode: str = "constant") -> jax.Array:
    """`x` with `axis` grown to a multiple of `size`; segment ids grow by their last (mode edge)."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths, mode=mode)


# ---- Pallas splash attention -------------------------------------------------------------------


def _splash(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_bt: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    length, heads, head_dim = q_btnh.shape[1:]
    block = SPLASH_BLOCK if length >= SPLASH_BLOCK else LANES
    tiles: dict[str, Any] = dict.fromkeys(_SPLASH_TILES, block)

    def by_head(x_btnh: jax.Array) -> jax.Array:
        return _pad(_pad(jnp.swapaxes(x_btnh, 1, 2), 2, block), 3, LANES)

    # The kernel does not scale. In float32, so that bfloat16 queries are rounded once only.
    q_btnh = (q_btnh.astype(jnp.float32) * head_dim**-0.5).astype(q_btnh.dtype)
    q_bnth, k_bkth, v_bkth = by_head(q_btnh), by_head(k_btkh), by_head(v_btkh)
    segment_bt = _pad(segment_bt, 1, block, mode="edge")
    padded = segment_bt.shape[1]
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((padded, padded))] * heads),
        block_sizes=splash.BlockSizes(**tiles),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )
    segments = splash.SegmentIds(segment_bt, segment_bt)
    z_bnth: Any = jax.vmap(kernel)(q_bnth, k_bkth, v_bkth, segments)
    return jnp.swapaxes(z_bnth, 1, 2)[:, :length, :, :head_dim]


# ---- blocks in plain XLA -----------------------------------------------------------------------


def _blocked(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    segment_bt: jax.Array,
    *,
    block: int,
) -> jax.Array:
    rows, length, heads, head_dim = q_btnh.shape
    kv_heads = k_btkh.shape[2]
    q_btkgh = q_btnh.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    q_btkgh, k_btkh, v_btkh = (_pad(x, 1, block) for x in (q_btkgh, k_btkh, v_btkh))
    z_btkgh: Any = _flash(q_btkgh, k_btkh, v_btkh, _pad(segment_bt, 1, block, mode="edge"), block)
    return z_btkgh.reshape(rows, -1, heads, head_dim)[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q_btkgh, k_btkh, v_btkh, segment_bt, block: int) -> jax.Array:
    return _flash_forward(q_btkgh, k_btkh, v_btkh, segment_bt, block)[0]


def _first_blocks(segment_bt: jax.Array, block: int) -> jax.Array:
    """[i] the first block of keys that any row's block i of queries must see."""
    first_bi = segment_bt[:, ::block]
    before_bi = jnp.sum(segment_bt[:, None, :] < first_bi[:, :, None], axis=-1)
    return jnp.min(before_bi, axis=0) // block


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q_bqkgh, k_bskh, segment_bt, i, j, block: int) -> jax.Array:
    """Scores [b, k, g, q, s] of query block i on key block j, float32, masked."""
    scores = _product("bqkgh,bskh->bkgqs", q_bqkgh, k_bskh)
    query, key = i * block + jnp.arange(block), j * block + jnp.arange(block)
    segment_bq, segment_bs = (_block(segment_bt, x, block) for x in (i, j))
    seen_bqs = segment_bq[:, :, None] == segment_bs[:, None, :]
    seen_bqs &= (query[:, None] >= key[None, :])[None]
    return jnp.where(seen_bqs[:, None, None], scores * q_bqkgh.shape[-1] ** -0.5, _NEVER)


def _block(x_bt: jax.Array, i, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x_bt, i * block, block, axis=1)


def _whole(x_ibq: jax.Array) -> jax.Array:
    """Blocks [i, b, q, ...] as [b, t, ...]."""
    return jnp.moveaxis(x_ibq, 0, 1).reshape(x_ibq.shape[1], -1, *x_ibq.shape[3:])


def _flash_forward(q_btkgh, k_btkh, v_btkh, segment_bt, block: int):
    rows, length, kv_heads, groups, head_dim = q_btkgh.shape
    first_i = _first_blocks(segment_bt, block)

    def query_block(i):
        q_bqkgh = _block(q_btkgh, i, block)

        def key_block(j, carry):
            top, total, z = carry
            scores = _scores(q_bqkgh, _block(k_btkh, j, block), segment_bt, i, j, block)
            # Of a row that saw nothing yet all is wiped out once it does: exp(_NEVER - top) is 0.
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights, shrink = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            v_bskh = _block(v_btkh, j, block)
            weighted = _product("bkgqs,bskh->bkgqh", weights.astype(v_bskh.dtype), v_bskh)
            return new_top, total * shrink + weights.sum(-1), z * shrink[..., None] + weighted

        shape = rows, kv_heads, groups, block
        start = jnp.full(shape, _NEVER), jnp.zeros(shape), jnp.zeros((*shape, head_dim))
        top, total, z = jax.lax.fori_loop(first_i[i], i + 1, key_block, start)
        z_bqkgh = jnp.moveaxis(z / total[..., None], 3, 1).astype(q_btkgh.dtype)
        return z_bqkgh, jnp.moveaxis(top + jnp.log(total), 3, 1)

    z, log_total = jax.lax.map(query_block, jnp.arange(length // block))
    z_btkgh, log_total_btkg = (checkpoint_name(_whole(x), SAVED) for x in (z, log_total))
    return z_btkgh, (q_btkgh, k_btkh, v_btkh, segment_bt, z_btkgh, log_total_btkg)


def _flash_backward(block: int, saved, dz_btkgh: jax.Array):
    q_btkgh, k_btkh, v_btkh, segment_bt, z_btkgh, log_total_btkg = saved
    dtype, blocks = q_btkgh.dtype, q_btkgh.shape[1] // block
    scale = q_btkgh.shape[-1] ** -0.5
    first_i = _first_blocks(segment_bt, block)
    inner_btkg = jnp.sum(dz_btkgh.astype(jnp.float32) * z_btkgh.astype(jnp.float32), axis=-1)

    def key_block(dq_btkgh, j):
        k_bskh, v_bskh = _block(k_btkh, j, block), _block(v_btkh, j, block)

        def query_block(i, carry):
            dq_btkgh, dk_bskh, dv_bskh = carry
            q_bqkgh, dz_bqkgh = _block(q_btkgh, i, block), _block(dz_btkgh, i, block)
            log_total, inner = (
                jnp.moveaxis(_block(x, i, block), 1, 3)[..., None]
                for x in (log_total_btkg, inner_btkg)
            )
            weights = jnp.exp(_scores(q_bqkgh, k_bskh, segment_bt, i, j, block) - log_total)
            dweights = _product("bqkgh,bskh->bkgqs", dz_bqkgh, v_bskh)
            dscores = (weights * (dweights - inner) * scale).astype(dtype)
            dv_bskh += _product("bkgqs,bqkgh->bskh", weights.astype(dtype), dz_bqkgh)
            dk_bskh += _product("bkgqs,bqkgh->bskh", dscores, q_bqkgh)
            dq_bqkgh = _block(dq_btkgh, i, block)
            dq_bqkgh += _product("bkgqs,bskh->bqkgh", dscores, k_bskh)
            dq_btkgh = jax.lax.dynamic_update_slice_in_dim(dq_btkgh, dq_bqkgh, i * block, axis=1)
            return dq_btkgh, dk_bskh, dv_bskh

        zeros = jnp.zeros(k_bskh.shape, jnp.float32)
        # The blocks of queries that see key block j: from j on, as long as their first is not past.
        last = jnp.sum(first_i <= j)
        dq_btkgh, *dkv = jax.lax.fori_loop(j, last, query_block, (dq_btkgh, zeros, zeros))
        return dq_btkgh, [x.astype(dtype) for x in dkv]

    start = jnp.zeros(q_btkgh.shape, jnp.float32)
    dq_btkgh, (dk, dv) = jax.lax.scan(key_block, start, jnp.arange(blocks))
    return dq_btkgh.astype(dtype), _whole(dk), _whole(dv), None


_flash.defvjp(_flash_forward, _flash_backward)
