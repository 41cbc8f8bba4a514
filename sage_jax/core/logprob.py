"""The one log-probability function: sampler, scorer and learner all call it.

Both functions describe the tempered, untruncated distribution softmax(logits / temperature).
Temperature 0 (greedy) counts as 1, so a greedy row reports the model's own distribution.
"""

import jax
import jax.numpy as jnp


def log_prob(logits_xv: jax.Array, token_x: jax.Array, temperature_x: jax.Array) -> jax.Array:
    """Log-probability (nats, float32, shape x) of `token_x` under softmax(logits / temperature)."""
    scaled_xv = _tempered(logits_xv, temperature_x)
    # A comparison instead of a gather: with the vocabulary sharded it stays local to each shard,
    # and its gradient is a select instead of a scatter.
    vocab_v = jnp.arange(logits_xv.shape[-1], dtype=token_x.dtype)
    hit_xv = jnp.expand_dims(token_x, -1) == vocab_v.reshape((1,) * token_x.ndim + (-1,))
    chosen_x = jnp.sum(scaled_xv, axis=-1, where=hit_xv)
    return chosen_x - jax.nn.logsumexp(scaled_xv, axis=-1)


def entropy(logits_xv: jax.Array, temperature_x: jax.Array) -> jax.Array:
    """Entropy (nats, float32, shape x) of softmax(logits / temperature)."""
    logp_xv = jax.nn.log_softmax(_tempered(logits_xv, temperature_x), axis=-1)
    prob_xv = jnp.exp(logp_xv)
    # 0 log 0 is 0: a logit of -inf must not turn the sum into NaN.
    return -jnp.sum(prob_xv * logp_xv, axis=-1, where=prob_xv > 0)


def _tempered(logits_xv: jax.Array, temperature_x: jax.Array) -> jax.Array:
    temperature_x = temperature_x.astype(jnp.float32)
    divisor_x = jnp.where(temperature_x == 0, 1.0, temperature_x)
    return logits_xv.astype(jnp.float32) / jnp.expand_dims(divisor_x, -1)
