"""Logits to tokens: one key a row and position, so a row's draw never depends on its neighbours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sage_jax.core.logprob import log_prob

Array = Any  # numpy on the host, a jax array once placed on devices


class Truncation(NamedTuple):
    """What is cut from each row's [s] distribution: top_k 0, top_p 1 and min_p 0 cut nothing."""

    top_k_s: Array
    top_p_s: Array
    min_p_s: Array


def _ordered(x: jax.Array) -> jax.Array:
    """float32 as uint32 that compare alike."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _largest_cut(x_sv: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Per row the largest value such that `enough(_ordered(x_sv) >= value)`, found bit by bit.

    32 passes over the vocabulary in place of a sort; `enough` maps a mask [s, v] to [s] and may
    only turn false as the mask shrinks. The order is taken anew in each pass, which costs less
    than to hold it.
    """

    def settle(i: jax.Array, cut_s: jax.Array) -> jax.Array:
        trial_s = cut_s | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(_ordered(x_sv) >= trial_s[:, None]), trial_s, cut_s)

    return jax.lax.fori_loop(0, 32, settle, jnp.zeros(x_sv.shape[0], jnp.uint32))


def truncate(logits_sv: jax.Array, cut: Truncation) -> jax.Array:
    """Logits with what is cut at -inf: top-k, then of what is left the smallest set of mass top_p,
    then what has less than min_p of the best token's probability. The best token always stays;
    tokens that tie with the last one kept stay too.
    """
    k_s = jnp.where(cut.top_k_s > 0, cut.top_k_s, logits_sv.shape[-1])
    last_s = _largest_cut(logits_sv, lambda mask_sv: mask_sv.sum(axis=-1) >= k_s)
    kept_sv = _ordered(logits_sv) >= last_s[:, None]
    probs_sv = jax.nn.softmax(jnp.where(kept_sv, logits_sv, -jnp.inf), axis=-1)
    last_s = _largest_cut(
        logits_sv, lambda mask_sv: jnp.where(mask_sv, probs_sv, 0.0).sum(axis=-1) >= cut.top_p_s
    )
    kept_sv &= (_ordered(logits_sv) >= last_s[:, None]) | (cut.top_p_s >= 1)[:, None]
    best_s1 = logits_sv.max(axis=-1, keepdims=True)
    # In logs: a product with a tiny min_p would be 0.
    kept_sv &= logits_sv - best_s1 >= jnp.log(cut.min_p_s)[:, None]
    return jnp.where(kept_sv | (logits_sv == best_s1), logits_sv, -jnp.inf)


def _first_largest(x_sv: jax.Array) -> jax.Array:
    """argmax over the vocabulary, int32 [s], as two reductions that XLA vectorises on a CPU."""
    index_v = jnp.arange(x_sv.shape[-1], dtype=jnp.int32)
    largest_sv = x_sv == x_sv.max(axis=-1, keepdims=True)
    return jnp.where(largest_sv, index_v, x_sv.shape[-1] - 1).min(axis=-1)


def sample(
    logits_sv: jax.Array,
    key_s2: jax.Array,
    index_s: jax.Array,
    temperature_s: jax.Array,
    cut: Truncation,
) -> tuple[jax.Array, jax.Array]:
    """Next tokens int32 [s] and their log-probs fp32 [s].

    `index_s` is the position within the response; it and the row's key give the noise. Temperature
    0 is greedy. The log-prob is of the untruncated distribution at the row's temperature (at 1 when
    greedy), whatever the truncation leaves.
    """
    greedy_s = temperature_s == 0
    scaled_sv = logits_sv / jnp.where(greedy_s, 1.0, temperature_s)[:, None]
    some = (cut.top_k_s > 0) | (cut.top_p_s < 1) | (cut.min_p_s > 0)

    def noise(key_2: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), logits_sv.shape[-1:])

    def draw(x_sv: jax.Array) -> jax.Array:
        noise_sv = jnp.where(greedy_s[:, None], 0.0, jax.vmap(noise)(key_s2, index_s))
        return _first_largest(x_sv + noise_sv)

    def pick(x_sv: jax.Array) -> jax.Array:
        # A batch of greedy rows skips the noise, the dearest part of sampling on a CPU.
        return jax.lax.cond(jnp.all(greedy_s), _first_largest, draw, x_sv)

    # Branches give tokens: what a branch gives is held whole, and [s, v] is large.
    token_s = jax.lax.cond(jnp.any(some), lambda x: pick(truncate(x, cut)), pick, scaled_sv)
    return token_s, log_prob(logits_sv, token_s, temperature_s)
