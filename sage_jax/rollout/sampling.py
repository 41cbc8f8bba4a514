"""Logits to tokens: one key a row and position, so a row's draw never depends on its neighbours."""

import jax
import jax.numpy as jnp

from sage_jax.core.logprob import log_prob


def _keep_top_p(logits_sv: jax.Array, top_p_s: jax.Array) -> jax.Array:
    """Logits outside the smallest set of mass top_p at -inf; the best token always stays."""
    order_sv = jnp.argsort(-logits_sv, axis=-1)
    probs_sv = jax.nn.softmax(jnp.take_along_axis(logits_sv, order_sv, axis=-1), axis=-1)
    before_sv = jnp.cumsum(probs_sv, axis=-1) - probs_sv
    # fp32 may round top_p to 0.
    kept_sv = (before_sv < top_p_s[:, None]).at[:, 0].set(True)
    rows_s1 = jnp.arange(logits_sv.shape[0])[:, None]
    kept_sv = jnp.zeros_like(kept_sv).at[rows_s1, order_sv].set(kept_sv)
    return jnp.where(kept_sv, logits_sv, -jnp.inf)


def sample(
    logits_sv: jax.Array,
    key_s2: jax.Array,
    index_s: jax.Array,
    temperature_s: jax.Array,
    top_p_s: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Next tokens int32 [s] and their log-probs fp32 [s].

    `index_s` is the position within the response; it and the row's key give the noise. Temperature
    0 is greedy. The log-prob is of the untruncated distribution at the row's temperature (at 1 when
    greedy), whatever top-p leaves.
    """
    greedy_s = temperature_s == 0
    scaled_sv = logits_sv / jnp.where(greedy_s, 1.0, temperature_s)[:, None]
    kept_sv = jax.lax.cond(
        jnp.any(top_p_s < 1), lambda x: _keep_top_p(x, top_p_s), lambda x: x, scaled_sv
    )

    def noise(key_2: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_2, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, index), logits_sv.shape[-1:])

    def noisy(x_sv: jax.Array) -> jax.Array:
        return x_sv + jnp.where(greedy_s[:, None], 0.0, jax.vmap(noise)(key_s2, index_s))

    # A batch of greedy rows skips the noise, the dearest part of sampling on a CPU.
    noisy_sv = jax.lax.cond(jnp.all(greedy_s), lambda x: x, noisy, kept_sv)
    token_s = jnp.argmax(noisy_sv, axis=-1).astype(jnp.int32)
    return token_s, log_prob(logits_sv, token_s, temperature_s)
