"""The three jitted functions of a rollout: prefill, insert and decode.

Row facts (key, temperature, stop set, budget) live in arrays, so one compiled program serves rows
of all roles side by side.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.core.mesh import Layout
from sage_jax.models import cache as kv
from sage_jax.models import qwen
from sage_jax.rollout.sampling import Array, Truncation, sample

MAX_STOPS = 16

# What the host tells of a row that starts, all in one transfer: its slot (one past the last: no
# row), which prompt of the prefill it answers, and its facts; the stop set is padded with -1.
START = np.dtype(
    [
        ("slot", np.int32),
        ("source", np.int32),
        ("key", np.uint32, (2,)),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("stop", np.int32, (MAX_STOPS,)),
        ("budget", np.int32),
    ]
)


class RowFacts(NamedTuple):
    """What sampling needs to know of each row [s], see START."""

    key_s2: Array
    temperature_s: Array
    cut: Truncation
    stop_sn: Array
    budget_s: Array


class Slots(NamedTuple):
    """The running batch. `token_s` is sampled but not yet in the cache; it goes to `position_s`."""

    cache: Any  # kv.Cache; inside `decode` a kv.Chunk where its form is `aside`
    token_s: jax.Array
    position_s: jax.Array
    facts: RowFacts
    live_s: jax.Array
    count_s: jax.Array
    tokens_sc: jax.Array
    logps_sc: jax.Array


@partial(jax.jit, static_argnums=range(4), static_argnames=("dtype", "layout", "form"))
def empty_slots(
    cfg: qwen.QwenConfig,
    slots: int,
    length: int,
    max_new: int,
    *,
    dtype,
    layout: Layout | None,
    form: str,
) -> Slots:
    """No live rows; the cache, in a form of `kv.AXES`, holds `length` tokens a slot. All else is
    whole on every device."""
    everywhere = None if layout is None else layout.sharding(())

    def full(shape, value, kind):
        return jnp.full(shape, value, kind, device=everywhere)

    def zeros(shape, kind):
        return full(shape, 0, kind)

    facts = RowFacts(
        zeros((slots, 2), jnp.uint32),
        zeros(slots, jnp.float32),
        Truncation(zeros(slots, jnp.int32), full(slots, 1, jnp.float32), zeros(slots, jnp.float32)),
        full((slots, MAX_STOPS), -1, jnp.int32),
        zeros(slots, jnp.int32),
    )
    return Slots(
        cache=kv.init(cfg, slots, length, dtype, layout, form),
        token_s=zeros(slots, jnp.int32),
        position_s=zeros(slots, jnp.int32),
        facts=facts,
        live_s=zeros(slots, bool),
        count_s=zeros(slots, jnp.int32),
        tokens_sc=zeros((slots, max_new), jnp.int32),
        logps_sc=zeros((slots, max_new), jnp.float32),
    )


@partial(jax.jit, static_argnames=("cfg", "dtype", "layout", "attend"))
def prefill(params, tokens_bp, lengths_b, *, cfg, dtype, layout, attend):
    """Last hidden state [b, d] and cache prefix {k, v: [l, b, p, k, h]} of right-padded prompts."""
    return qwen.prefill(
        params, cfg, tokens_bp, lengths_b, dtype=dtype, layout=layout, attend=attend
    )


def _readable(slots: Slots, layout: Layout | None, form: str) -> Slots:
    """The slots as `empty_slots` places them. All but the cache is small and whole on every device:
    so each process can read it, and the next call finds its input where this one left it."""
    if layout is None:
        return slots
    whole = jax.lax.with_sharding_constraint(slots._replace(cache={}), layout.sharding(()))
    cache = {name: layout.constrain(c, *kv.AXES[form]) for name, c in slots.cache.items()}
    return whole._replace(cache=cache)


def _draw(logits_sv: jax.Array, count_s: jax.Array, facts: RowFacts):
    """Token and log-prob [s] at response position `count_s` of each row."""
    return sample(logits_sv, facts.key_s2, count_s, facts.temperature_s, facts.cut)


def _ended(token_s: jax.Array, count_s: jax.Array, facts: RowFacts) -> jax.Array:
    """True [s] where a row's response of `count_s` tokens ends with `token_s`."""
    return jnp.any(token_s[:, None] == facts.stop_sn, axis=1) | (count_s >= facts.budget_s)


def _emit(slots: Slots, logits_sv: jax.Array) -> Slots:
    """Sample one token in every live row, store it, and retire rows that are done."""
    live_s, facts = slots.live_s, slots.facts
    token_s, logp_s = _draw(logits_sv, slots.count_s, facts)
    # Rows that sample nothing write out of range, which drops the update.
    column_s = jnp.where(live_s, slots.count_s, slots.tokens_sc.shape[1])
    rows_s = jnp.arange(token_s.shape[0])
    count_s = slots.count_s + live_s
    return slots._replace(
        token_s=jnp.where(live_s, token_s, slots.token_s),
        tokens_sc=slots.tokens_sc.at[rows_s, column_s].set(token_s, mode="drop"),
        logps_sc=slots.logps_sc.at[rows_s, column_s].set(logp_s, mode="drop"),
        count_s=count_s,
        live_s=live_s & ~_ended(token_s, count_s, facts),
    )


@partial(jax.jit, static_argnames=("cfg", "dtype", "layout", "form"), donate_argnames=("slots",))
def insert(params, slots, hidden_bd, prefix, lengths_b, starts_rn, *, cfg, dtype, layout, form):
    """Put prompts of `prefix` into slots and sample their first tokens.

    `starts_rn`: an array START [r] seen as int32 [r, n]; several may name the same source.
    """
    slot_r, source_r, facts = _read_starts(starts_rn)

    def place(layer, cache):
        of_layer = {
            name: jax.lax.dynamic_index_in_dim(part, layer, keepdims=False)[source_r]
            for name, part in prefix.items()
        }
        return kv.place(cache, layer, of_layer, slot_r, form)

    # Layer by layer: the gathered prefix never exists for the whole model.
    if form == "apart":
        cache = reduce(lambda cache, layer: place(layer, cache), range(cfg.num_layers), slots.cache)
    else:
        cache = jax.lax.fori_loop(0, cfg.num_layers, place, slots.cache)
    logits_bv = qwen.head_logits(params, cfg, hidden_bd.astype(dtype))
    first_r = jnp.zeros_like(slot_r)
    token_r, logp_r = _draw(logits_bv[source_r], first_r, facts)

    def put(new_r, old_s):
        return old_s.at[slot_r].set(new_r, mode="drop")

    slots = slots._replace(
        cache=cache,
        token_s=put(token_r, slots.token_s),
        position_s=put(lengths_b[source_r], slots.position_s),
        facts=jax.tree.map(put, facts, slots.facts),
        live_s=put(~_ended(token_r, first_r + 1, facts), slots.live_s),
        count_s=put(first_r + 1, slots.count_s),
        tokens_sc=slots.tokens_sc.at[slot_r, 0].set(token_r, mode="drop"),
        logps_sc=slots.logps_sc.at[slot_r, 0].set(logp_r, mode="drop"),
    )
    return _readable(slots, layout, form)


def _read_starts(starts_rn: jax.Array) -> tuple[jax.Array, jax.Array, RowFacts]:
    fields: Any = START.fields

    def column(name: str) -> jax.Array:
        kind, offset = fields[name][:2]
        first, words = offset // 4, kind.itemsize // 4
        x = jax.lax.bitcast_convert_type(starts_rn[:, first : first + words], kind.base)
        return x if kind.shape else x[:, 0]

    cut = Truncation(column("top_k"), column("top_p"), column("min_p"))
    facts = column("key"), column("temperature"), cut, column("stop"), column("budget")
    return column("slot"), column("source"), RowFacts(*facts)


@partial(
    jax.jit,
    static_argnames=("cfg", "steps", "read_length", "dtype", "layout", "form"),
    donate_argnames=("slots",),
)
def decode(params, slots, *, cfg, steps, read_length, dtype, layout, form):
    """Up to `steps` more tokens for all live rows; stops early when none is left.

    `read_length`: cache positions read, at least the longest live row plus `steps`.
    """

    def alive(carry):
        step, slots = carry
        return (step < steps) & jnp.any(slots.live_s)

    def advance(carry):
        step, slots = carry
        hidden_sd, cache = qwen.decode_step(
            params,
            cfg,
            slots.token_s,
            slots.position_s,
            slots.cache,
            read_length=read_length,
            dtype=dtype,
            layout=layout,
            form=form,
        )
        slots = slots._replace(cache=cache, position_s=slots.position_s + slots.live_s)
        return step + 1, _emit(slots, qwen.head_logits(params, cfg, hidden_sd))

    if form == "aside":
        opened = kv.open_chunk(slots.cache, slots.position_s, steps, layout)
        slots = slots._replace(cache=opened)
    slots = jax.lax.while_loop(alive, advance, (jnp.int32(0), slots))[1]
    if form == "aside":
        closed = kv.close_chunk(slots.cache, slots.position_s, layout)
        slots = slots._replace(cache=closed)
    return _readable(slots, layout, form)
