"""Keys and values of the tokens so far, in the form that suits the attention over them.

scatter, cudnn  {k, v: [l, s, t, k, h]}; a new token's are written at once, each row at its own
                position.
aside           {k, v: [l, s, k, h, t]}, as the products with queries and weights read them, written
                once a chunk of steps. Until then the chunk's own wait in a buffer, where those of a
                step have the same place in all rows. A TPU wants a cache that rows are written into
                at positions of their own in one order of memory, one that is attended to in
                another, and copies it between them at every step.
paged           {k, v: [k, l, s, t, h]}, of which a run of positions is a page to the TPU's kernel.
apart           {k, v: a [s, k, t, h] for each layer}, beside weights that are `stack.apart`: a CPU
                copies what it reads out of a stack, and turns it around where heads come last.

Shape suffixes: l layers, s slots, t positions (p of a prompt), c steps of a chunk, k key/value
heads, h head dim.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from sage_jax.core.mesh import Layout
from sage_jax.models import attention
from sage_jax.models.qwen_config import QwenConfig

Cache = dict[str, Any]  # of arrays; in the form `apart` of a tuple of them, a layer each

PREFIX_AXES = ("layers", "batch", "seq", "kv_heads", "head_dim")
AXES = {
    "scatter": PREFIX_AXES,
    "cudnn": PREFIX_AXES,
    "aside": ("layers", "batch", "kv_heads", "head_dim", "seq"),
    "paged": ("kv_heads", "layers", "batch", "seq", "head_dim"),
    "apart": ("batch", "kv_heads", "seq", "head_dim"),
}
RECENT_AXES = PREFIX_AXES
# The kernel copies pages of this many positions; 16 are the rows of a tile of 16-bit numbers.
PAGE, LEAST_PAGE = 128, 16


class Chunk(NamedTuple):
    """An `aside` cache while a chunk of steps runs: `cache` as it was before, below `start_s` each
    row's own; `recent` {k, v: [l, s, c, k, h]} of the steps since, of which `step` are done."""

    cache: Cache
    recent: Cache
    start_s: jax.Array
    step: jax.Array


def choose(
    kind: str,
    cfg: QwenConfig,
    length: int,
    dtype: Any,
    layout: Layout | None,
    apart: bool = False,
) -> str:
    """The form of a cache of `length` positions for `kind` of attention.KINDS; `apart` where the
    weights are `stack.apart`.

    auto: as xla on CPU, else aside. xla: apart if the weights are, else scatter. blocked: aside.
    splash: paged, the library's kernel, where it can serve: it takes heads of whole lanes, computes
    in bfloat16 and wants whole pages; else aside. cudnn: cudnn. Off a TPU the kernel runs in the
    Pallas interpreter, which is for tests of small sizes only, and not on a mesh: there devices
    would wait for one another.
    """
    platform = attention.platform(layout)
    if kind == "auto":
        kind = "xla" if platform == "cpu" else "blocked"
    whole = cfg.head_dim % attention.LANES == 0 and length % LEAST_PAGE == 0
    serves = whole and jnp.dtype(dtype) == jnp.bfloat16 and (platform == "tpu" or layout is None)
    if kind == "splash" and serves:
        return "paged"
    at_once = "apart" if apart else "scatter"
    return {"xla": at_once, "cudnn": "cudnn"}.get(kind, "aside")


def page_of(length: int) -> int:
    """Positions of a page in a cache of `length`."""
    return math.gcd(length, PAGE)


def init(
    cfg: QwenConfig,
    slots: int,
    length: int,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    form: str = "scatter",
) -> Cache:
    """Empty cache for `slots` rows of `length` tokens, placed in shards.

    On CPU make it float32 whatever the compute type is: XLA there widens a 16-bit cache whole
    around each write.
    """
    sizes = {
        "layers": cfg.num_layers,
        "batch": slots,
        "seq": length,
        "kv_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
    }
    shape = tuple(sizes[axis] for axis in AXES[form])
    if form == "apart":  # which is for a single device
        layers = range(cfg.num_layers)
        return {name: tuple(jnp.zeros(shape, dtype) for _ in layers) for name in ("k", "v")}
    sharding = None if layout is None else layout.sharding(AXES[form], shape)
    return {name: jnp.zeros(shape, dtype, device=sharding) for name in ("k", "v")}


def length_of(cache: Cache | Chunk, form: str) -> int:
    """Positions that a row has."""
    cache = cache.cache if isinstance(cache, Chunk) else cache
    k = cache["k"][0] if form == "apart" else cache["k"]
    return k.shape[AXES[form].index("seq")]


def place(cache: Cache, layer: Any, prefix: Cache, to_s: jax.Array, form: str) -> Cache:
    """The cache with `prefix` {k, v: [s, p, k, h]} as the first tokens of the rows `to_s`, in one
    layer; rows past the last slot are dropped."""
    first = slice(prefix["k"].shape[1])
    if form == "apart":
        new = {
            name: cache[name][layer].at[to_s, :, first].set(jnp.swapaxes(part, 1, 2), mode="drop")
            for name, part in prefix.items()
        }
        return at_layer(cache, layer, new)
    index, order = {
        "aside": ((layer, to_s, ..., first), (0, 2, 3, 1)),
        "paged": ((slice(None), layer, to_s, first), (2, 0, 1, 3)),
    }.get(form, ((layer, to_s, first), (0, 1, 2, 3)))
    return {
        name: cache[name].at[index].set(jnp.transpose(part, order), mode="drop")
        for name, part in prefix.items()
    }


def at_layer(cache: Cache, layer: int, new: dict[str, jax.Array]) -> Cache:
    """A cache in the form `apart` with `new` {k, v: [s, k, t, h]} for one layer."""
    return {name: (*c[:layer], new[name], *c[layer + 1 :]) for name, c in cache.items()}


def open_chunk(cache: Cache, position_s: jax.Array, steps: int, layout: Layout | None) -> Chunk:
    """An `aside` cache for up to `steps` tokens more, of rows that hold `position_s` tokens."""
    layers, slots, kv_heads, head_dim, _ = cache["k"].shape
    shape = layers, slots, steps, kv_heads, head_dim
    at = None if layout is None else layout.sharding(RECENT_AXES, shape)
    recent = {name: jnp.zeros(shape, c.dtype, device=at) for name, c in cache.items()}
    return Chunk(cache, recent, position_s, jnp.int32(0))


def close_chunk(chunk: Chunk, position_s: jax.Array, layout: Layout | None) -> Cache:
    """The cache with what the chunk added to each row, now of `position_s` tokens."""
    program = _write_recent
    if layout is not None:
        cache, recent = (layout.sharding(axes).spec for axes in (AXES["aside"], RECENT_AXES))
        rows = layout.sharding(("batch",)).spec
        program = jax.shard_map(
            program, mesh=layout.mesh, in_specs=(cache, recent, rows, rows), out_specs=cache
        )
    count_s = position_s - chunk.start_s
    return {
        name: program(cache, chunk.recent[name], chunk.start_s, count_s)
        for name, cache in chunk.cache.items()
    }


def _write_recent(cache_lskht, recent_lsckh, start_s, count_s) -> jax.Array:
    """Row by row, as each has a start of its own; all layers of a row at once."""
    layers, slots, kv_heads, head_dim, length = cache_lskht.shape
    steps = recent_lsckh.shape[2]
    # Windows of whole tiles where the cache has such: for others a TPU turns all of it around.
    tile = attention.LANES if length % attention.LANES == 0 else 1
    width = min(length, -(-(tile - 1 + steps) // tile) * tile)
    size = (layers, 1, kv_heads, head_dim, width)

    def write(s, cache_lskht):
        # The window ends where the cache ends, so that it is never moved unasked.
        first = jnp.minimum(start_s[s] // tile, (length - width) // tile) * tile
        old = jax.lax.dynamic_slice(cache_lskht, (0, s, 0, 0, first), size)
        new = jax.lax.dynamic_slice_in_dim(recent_lsckh[:, :, :width], s, 1, axis=1)
        new = jnp.moveaxis(new, 2, -1)
        new = jnp.pad(new, [(0, 0)] * 4 + [(0, width - new.shape[-1])])
        offset = start_s[s] - first
        step = jnp.arange(width) - offset
        own = (step >= 0) & (step < count_s[s])
        window = jnp.where(own, jnp.roll(new, offset, axis=-1), old)
        return jax.lax.dynamic_update_slice(cache_lskht, window, (0, s, 0, 0, first))

    return jax.lax.fori_loop(0, slots, write, cache_lskht)
