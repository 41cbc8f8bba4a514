"""Attention of one new token a row over the cache, by programs of the same mathematics.

One for each form of the cache, see `cache.py`. Softmax and its sums are float32 in all of them.

Shape suffixes: l layers, s slots, t positions (r of them read), c steps of a chunk, n query heads,
k key/value heads, g query heads a key/value head, h head dim.
"""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from sage_jax.core.mesh import Layout
from sage_jax.models import attention
from sage_jax.models.cache import AXES, RECENT_AXES, Cache, Chunk, at_layer, page_of

# One (layer, position) a row, rows as a batch dimension: nothing moves between devices.
_ROW_WRITE = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)
_PAGES_AT_ONCE = 8
_NEVER = -1e30
_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def attend(
    form: str,
    cache: Any,
    layer: Any,
    qkv: tuple[jax.Array, ...],
    position_s: jax.Array,
    read_length: int,
    layout: Layout | None,
) -> tuple[jax.Array, Any]:
    """Attention output [s, 1, n, h] of one token a row, given its q [s, 1, n, h] and k, v
    [s, 1, k, h] in `layer`, and the cache with these keys and values.

    `position_s` is the token's place in its row, below `read_length` where the row counts. A cache
    in the form `aside` is an open `Chunk`.
    """
    programs = {
        "scatter": _scatter,
        "cudnn": partial(_scatter, implementation="cudnn"),
        "aside": _aside,
        "paged": _paged,
        "apart": _apart,
    }
    return programs[form](cache, layer, qkv, position_s, read_length, layout)


def _constrain(layout: Layout | None, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return x if layout is None else layout.constrain(x, *axes)


# ---- written at once -----------------------------------------------------------------------------


def _scatter(cache: Cache, layer, qkv, position_s, read_length, layout, implementation="xla"):
    q_s1nh, *new = qkv
    where_s2 = jnp.stack([jnp.full_like(position_s, layer), position_s], axis=1)
    updated, read = {}, []
    for (name, c), x_s1kh in zip(cache.items(), new, strict=True):
        c = jax.lax.scatter(c, where_s2, x_s1kh[:, 0].astype(c.dtype), _ROW_WRITE)
        updated[name] = _constrain(layout, c, AXES["scatter"])
        size = (1, c.shape[1], read_length, *c.shape[3:])
        part = jax.lax.dynamic_slice(updated[name], (layer, 0, 0, 0, 0), size)[0]
        read.append(part.astype(q_s1nh.dtype))
    if implementation == "cudnn":
        length_s = jnp.minimum(position_s + 1, read_length)
        z = jax.nn.dot_product_attention(
            q_s1nh, *read, key_value_seq_lengths=length_s, implementation="cudnn"
        )
        return z, updated
    mask_sr = jnp.arange(read_length)[None] <= position_s[:, None]
    return jax.nn.dot_product_attention(q_s1nh, *read, mask=mask_sr[:, None, None]), updated


def _apart(cache: Cache, layer: int, qkv, position_s, read_length, layout):
    """Written at once too, heads before positions: each head's keys are one matrix."""
    q_s1nh, *new = qkv
    slots, _, heads, head_dim = q_s1nh.shape
    kv_heads = new[0].shape[2]
    at = jnp.arange(slots)[:, None], jnp.arange(kv_heads)[None], position_s[:, None]
    updated = {
        name: c[layer].at[at].set(x_s1kh[:, 0].astype(c[layer].dtype), mode="drop")
        for (name, c), x_s1kh in zip(cache.items(), new, strict=True)
    }
    k_skrh, v_skrh = (x[:, :, :read_length].astype(q_s1nh.dtype) for x in updated.values())
    q_skgh = q_s1nh.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    scores_skgr = _product("skgh,skrh->skgr", q_skgh, k_skrh) * head_dim**-0.5
    seen_sr = jnp.arange(read_length)[None] <= position_s[:, None]
    weights_skgr = jax.nn.softmax(jnp.where(seen_sr[:, None, None], scores_skgr, _NEVER), axis=-1)
    z_skgh = _product("skgr,skrh->skgh", weights_skgr.astype(q_skgh.dtype), v_skrh)
    z_s1nh = z_skgh.astype(q_skgh.dtype).reshape(q_s1nh.shape)
    return z_s1nh, at_layer(cache, layer, updated)


# ---- a chunk's own aside -------------------------------------------------------------------------


def _aside(chunk: Chunk, layer, qkv, position_s, read_length, layout):
    """One softmax over what the cache held when the chunk began, and the chunk's own."""
    q_s1nh, *new = qkv
    slots, _, heads, head_dim = q_s1nh.shape
    kv_heads = new[0].shape[2]
    q_skgh = q_s1nh.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    old, recent, updated = [], [], {}
    for name, x_s1kh in zip(chunk.cache, new, strict=True):
        c = chunk.cache[name]
        size = (1, *c.shape[1:4], read_length)
        part = jax.lax.dynamic_slice(c, (layer, 0, 0, 0, 0), size)[0]
        old.append(part.astype(q_s1nh.dtype))
        x = x_s1kh[None].astype(c.dtype)
        c = jax.lax.dynamic_update_slice(chunk.recent[name], x, (layer, 0, chunk.step, 0, 0))
        updated[name] = _constrain(layout, c, RECENT_AXES)
        part = jax.lax.dynamic_index_in_dim(updated[name], layer, keepdims=False)
        recent.append(part.astype(q_s1nh.dtype))

    def scores(equation: str, keys: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen, _product(equation, q_skgh, keys) * head_dim**-0.5, _NEVER)

    old_sr = jnp.arange(read_length)[None] < chunk.start_s[:, None]
    recent_c = jnp.arange(chunk.recent["k"].shape[2]) <= chunk.step
    scores_skgr = scores("skgh,skhr->skgr", old[0], old_sr[:, None, None])
    scores_skgc = scores("skgh,sckh->skgc", recent[0], recent_c)
    top_skg1 = jnp.maximum(scores_skgr.max(-1, keepdims=True), scores_skgc.max(-1, keepdims=True))
    weights_skgr, weights_skgc = jnp.exp(scores_skgr - top_skg1), jnp.exp(scores_skgc - top_skg1)
    total_skg1 = weights_skgr.sum(-1, keepdims=True) + weights_skgc.sum(-1, keepdims=True)
    z_skgh = _product("skgr,skhr->skgh", weights_skgr.astype(q_skgh.dtype), old[1])
    z_skgh += _product("skgc,sckh->skgh", weights_skgc.astype(q_skgh.dtype), recent[1])
    z_s1nh = (z_skgh / total_skg1).astype(q_skgh.dtype).reshape(q_s1nh.shape)
    return z_s1nh, chunk._replace(recent=updated)


# ---- pages of a Pallas kernel --------------------------------------------------------------------


def _paged(cache: Cache, layer, qkv, position_s, read_length, layout):
    """The library's kernel, which reads of each row only the pages that it has filled."""
    program = partial(
        _on_pages, read_length=read_length, interpret=attention.platform(layout) != "tpu"
    )
    if layout is not None:
        q = layout.sharding(("batch", "seq", "q_heads", "head_dim")).spec
        new = layout.sharding(("batch", "seq", "kv_heads", "head_dim")).spec
        pages, rows = layout.sharding(AXES["paged"]).spec, layout.sharding(("batch",)).spec
        program = jax.shard_map(
            program,
            mesh=layout.mesh,
            in_specs=((pages, pages), jax.P(), (q, new, new), rows),
            out_specs=(q, (pages, pages)),
            check_vma=False,  # a Pallas call does not say over which axes its result varies
        )
    z_s1nh, (k, v) = program((cache["k"], cache["v"]), jnp.asarray(layer), qkv, position_s)
    return z_s1nh, {"k": k, "v": v}


def _on_pages(cache, layer, qkv, position_s, *, read_length: int, interpret: bool):
    kv_heads, layers, slots, length, head_dim = cache[0].shape
    q_s1nh, *new = qkv

    def write(s, cache):
        # Held to the kernel's order in memory: for a write, as for a scatter, XLA prefers another.
        # Past the end of the cache nothing is written.
        at, size = (0, layer, s, position_s[s], 0), (kv_heads, 1, 1, 1, head_dim)
        written = []
        for c_klsth, x_s1kh in zip(cache, new, strict=True):
            x = jnp.reshape(x_s1kh[s], size).astype(c_klsth.dtype)
            x = jnp.where(position_s[s] < length, x, jax.lax.dynamic_slice(c_klsth, at, size))
            c = jax.lax.dynamic_update_slice(c_klsth, x, at)
            written.append(with_layout_constraint(c, MemoryLayout(tuple(range(5)))))
        return tuple(written)

    cache = jax.lax.fori_loop(0, slots, write, tuple(cache))
    page = page_of(length)
    first_s1 = (layer * slots + jnp.arange(slots))[:, None] * (length // page)
    read = -(-read_length // page)
    at_once = next(n for n in range(_PAGES_AT_ONCE, 0, -1) if read % n == 0)
    # The kernel does not scale. In float32, so that bfloat16 queries are rounded once only.
    q_snh = (q_s1nh[:, 0].astype(jnp.float32) * head_dim**-0.5).astype(q_s1nh.dtype)
    with pltpu.force_tpu_interpret_mode() if interpret else contextlib.nullcontext():
        z_snh = paged_attention(
            q_snh,
            *(c.reshape(kv_heads, -1, page, head_dim) for c in cache),
            jnp.minimum(position_s + 1, read_length).astype(jnp.int32),
            (first_s1 + jnp.arange(read)[None]).astype(jnp.int32),
            pages_per_compute_block=at_once,
        )
    return z_snh[:, None].astype(q_s1nh.dtype), cache
