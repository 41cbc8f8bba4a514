"""The three jitted functions of a rollout: prefill, insert and decode.

Row facts (key, temperature, stop set, budget) live in arrays, so one compiled program serves rows
of all roles side by side.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sage_jax.core.mesh import Layout
from sage_jax.models import qwen
from sage_jax.rollout.sampling import Array, Truncation, sample

MAX_STOPS = 16


class RowFacts(NamedTuple):
    """What sampling needs to know of each row [s]; the stop set is padded with -1."""

    key_s2: Array
    temperature_s: Array
    cut: Truncation
    stop_sn: Array
    budget_s: Array


class Slots(NamedTuple):
    """The running batch. `token_s` is sampled but not yet in the cache; it goes to `position_s`."""

    cache: dict[str, jax.Array]
    token_s: jax.Array
    position_s: jax.Array
    facts: RowFacts
    live_s: jax.Array
    count_s: jax.Array
    tokens_sc: jax.Array
    logps_sc: jax.Array


@partial(jax.jit, static_argnums=range(6))
def empty_slots(
    cfg: qwen.QwenConfig, slots: int, length: int, max_new: int, dtype, layout: Layout | None
) -> Slots:
    """No live rows; the cache holds `length` tokens a slot, all else is whole on every device."""
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
        cache=qwen.init_cache(cfg, slots, length, dtype, layout),
        token_s=zeros(slots, jnp.int32),
        position_s=zeros(slots, jnp.int32),
        facts=facts,
        live_s=zeros(slots, bool),
        count_s=zeros(slots, jnp.int32),
        tokens_sc=zeros((slots, max_new), jnp.int32),
        logps_sc=zeros((slots, max_new), jnp.float32),
    )


@partial(jax.jit, static_argnames=("cfg", "dtype", "layout"))
def prefill(params, tokens_bp, lengths_b, *, cfg, dtype, layout):
    """Last hidden state [b, d] and cache prefix {k, v: [l, b, p, k, h]} of right-padded prompts."""
    return qwen.prefill(params, cfg, tokens_bp, lengths_b, dtype=dtype, layout=layout)


def _readable(slots: Slots, layout: Layout | None) -> Slots:
    """The slots as `empty_slots` places them. All but the cache is small and whole on every device:
    so each process can read it, and the next call finds its input where this one left it."""
    if layout is None:
        return slots
    whole = jax.lax.with_sharding_constraint(slots._replace(cache={}), layout.sharding(()))
    cache = {name: layout.constrain(c, *qwen.CACHE_AXES) for name, c in slots.cache.items()}
    return whole._replace(cache=cache)


def _emit(slots: Slots, logits_sv: jax.Array, fresh_s: jax.Array) -> Slots:
    """Sample one token in every row of `fresh_s`, store it, and retire rows that are done."""
    token_s, logp_s = sample(
        logits_sv,
        slots.facts.key_s2,
        slots.count_s,
        slots.facts.temperature_s,
        slots.facts.cut,
    )
    # Rows that sample nothing write out of range, which drops the update.
    column_s = jnp.where(fresh_s, slots.count_s, slots.tokens_sc.shape[1])
    rows_s = jnp.arange(token_s.shape[0])
    count_s = slots.count_s + fresh_s
    stopped_s = jnp.any(token_s[:, None] == slots.facts.stop_sn, axis=1)
    ended_s = fresh_s & (stopped_s | (count_s >= slots.facts.budget_s))
    return slots._replace(
        token_s=jnp.where(fresh_s, token_s, slots.token_s),
        tokens_sc=slots.tokens_sc.at[rows_s, column_s].set(token_s, mode="drop"),
        logps_sc=slots.logps_sc.at[rows_s, column_s].set(logp_s, mode="drop"),
        count_s=count_s,
        live_s=(slots.live_s | fresh_s) & ~ended_s,
    )


@partial(jax.jit, static_argnames=("cfg", "dtype", "layout"), donate_argnames=("slots",))
def insert(params, slots, hidden_bd, prefix, lengths_b, source_s, facts, *, cfg, dtype, layout):
    """Put prompts into slots and sample their first tokens.

    `source_s` int32 [s]: the prompt row of `prefix` that starts in each slot, -1 where the slot is
    left alone; several slots may name the same prompt. `facts` count only where a row starts.
    """
    fresh_s = source_s >= 0
    from_s = jnp.maximum(source_s, 0)
    # Slots left alone write out of range, which drops the update.
    to_s = jnp.where(fresh_s, jnp.arange(source_s.shape[0]), source_s.shape[0])

    def place(layer, cache):
        return {
            name: cache[name]
            .at[layer, to_s, : part.shape[2]]
            .set(jax.lax.dynamic_index_in_dim(part, layer, 0, keepdims=False)[from_s], mode="drop")
            for name, part in prefix.items()
        }

    def choose(new, old):
        return jnp.where(jnp.expand_dims(fresh_s, tuple(range(1, new.ndim))), new, old)

    slots = slots._replace(
        # Layer by layer: the gathered prefix never exists for the whole model.
        cache=jax.lax.fori_loop(0, cfg.num_layers, place, slots.cache),
        position_s=jnp.where(fresh_s, lengths_b[from_s], slots.position_s),
        facts=jax.tree.map(choose, facts, slots.facts),
        count_s=jnp.where(fresh_s, 0, slots.count_s),
    )
    logits_bv = qwen.head_logits(params, cfg, hidden_bd.astype(dtype))
    return _readable(_emit(slots, logits_bv[from_s], fresh_s), layout)


@partial(
    jax.jit,
    static_argnames=("cfg", "steps", "read_length", "dtype", "layout"),
    donate_argnames=("slots",),
)
def decode(params, slots, *, cfg, steps, read_length, dtype, layout):
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
        )
        live_s = slots.live_s
        slots = slots._replace(cache=cache, position_s=slots.position_s + live_s)
        return step + 1, _emit(slots, qwen.head_logits(params, cfg, hidden_sd), live_s)

    return _readable(jax.lax.while_loop(alive, advance, (jnp.int32(0), slots))[1], layout)
