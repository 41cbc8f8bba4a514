"""Per-token terms of the training loss; reductions and role weights live in update.py."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class PolicyTerms(NamedTuple):
    """Per-token loss, probability ratio, and which bound took effect (booleans)."""

    loss: jax.Array
    ratio: jax.Array
    clipped: jax.Array
    dual_clipped: jax.Array


def policy_loss(
    logp: jax.Array,
    old_logp: jax.Array,
    adv: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PolicyTerms:
    """Clipped policy-gradient loss per token (arXiv 1707.06347), all arguments of one shape.

    ratio = exp(logp - old_logp), the exponent kept within +-20. Loss is the larger of -adv ratio
    and -adv clip(ratio, 1 - clip_low, 1 + clip_high) (asymmetric bounds: DAPO, arXiv 2503.14476);
    for adv < 0 it is at most -adv dual_clip (arXiv 1912.09729), which bounds the push on a token
    that already became much more likely. dual_clip must be above 1.
    """
    if not dual_clip > 1:
        raise ValueError(f"update.dual_clip={dual_clip} must be above 1 (3 is usual)")
    ratio = jnp.exp(jnp.clip(logp - old_logp, -20.0, 20.0))
    plain = -adv * ratio
    bounded = -adv * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(plain, bounded)
    ceiling = -adv * dual_clip
    dual_clipped = (adv < 0) & (loss > ceiling)
    return PolicyTerms(
        loss=jnp.where(dual_clipped, ceiling, loss),
        ratio=ratio,
        clipped=bounded > plain,
        dual_clipped=dual_clipped,
    )


def kl_k3(logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
    """Per-token estimate exp(-d) + d - 1 of KL(policy || reference), d = logp - ref_logp.

    Never negative and low in variance (Schulman 2020, "Approximating KL divergence", k3). -d is
    kept within +-20 and the result below 10.
    """
    d = jnp.clip(logp - ref_logp, -20.0, 20.0)
    return jnp.minimum(jnp.exp(-d) + d - 1, 10.0)


def importance_weight(old_logp: jax.Array, sampler_logp: jax.Array, cap: float) -> jax.Array:
    """min(exp(old_logp - sampler_logp), cap) without gradient: truncated importance sampling.

    Corrects for a sampler whose numerics differ from the learner's; cap is usually 2.
    """
    gap = jax.lax.stop_gradient(old_logp - sampler_logp)
    return jnp.minimum(jnp.exp(jnp.clip(gap, -20.0, 20.0)), cap)
