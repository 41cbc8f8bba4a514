"""The training loss: per-token terms, and their reduction over a micro-batch.

Sums over tokens are divided by counts of the whole update, so that the split into micro-batches,
buckets and devices changes nothing:

    loss = sum over roles of weight_role / tokens_role * (sum of the role's token losses)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sage_jax.core.masked import masked_max, masked_sum
from sage_jax.learn.optimizer import UpdateSettings
from sage_jax.learn.pack import MicroBatch

Metrics = dict[str, jax.Array]


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
        raise ValueError(f"optim.dual_clip={dual_clip} must be above 1 (3 is usual)")
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


def completion_mask(micro: MicroBatch) -> jax.Array:
    """True [b, t] at the tokens the model generated, its stop token included; from lengths only."""
    return (micro.position_bt >= micro.prompt_length_bt) & (micro.position_bt < micro.length_bt)


def micro_objective(
    logp_bt: jax.Array,
    entropy_bt: jax.Array | None,
    ref_logp_bt: jax.Array | None,
    micro: MicroBatch,
    role_tokens_r: jax.Array,
    role_weights_r: jax.Array,
    settings: UpdateSettings,
) -> tuple[jax.Array, tuple[Metrics, Metrics]]:
    """This micro-batch's part of the loss, and (sums, maxima) over its tokens for the metrics.

    `role_tokens_r` counts the completion tokens of each role in the whole update. `entropy_bt` is
    needed with optim.entropy_coef only.
    """
    mask_bt = completion_mask(micro)

    def keep(x_bt: jax.Array) -> jax.Array:
        # Before any arithmetic: 0 times the gradient of an overflow would be NaN.
        return jnp.where(mask_bt, x_bt, 0.0)

    logp_bt, sampler_bt = keep(logp_bt), keep(micro.sampler_logp_bt)
    old_bt = jax.lax.stop_gradient(logp_bt)
    if micro.old_logp_bt is not None:
        old_bt = keep(micro.old_logp_bt)
    bounds = settings.clip_low, settings.clip_high, settings.dual_clip
    terms = policy_loss(logp_bt, old_bt, keep(micro.adv_bt), *bounds)
    loss_bt, kl_bt, weight_bt = terms.loss, jnp.zeros_like(logp_bt), jnp.ones_like(logp_bt)
    if settings.importance_cap:
        weight_bt = importance_weight(old_bt, sampler_bt, settings.importance_cap)
        loss_bt *= weight_bt
    if entropy_bt is not None:
        loss_bt -= settings.entropy_coef * keep(entropy_bt)
    if ref_logp_bt is not None:
        kl_bt = kl_k3(logp_bt, keep(ref_logp_bt))
        loss_bt += settings.kl_coef * kl_bt
    scale_r = role_weights_r / jnp.maximum(role_tokens_r, 1)
    loss = masked_sum(loss_bt * scale_r[micro.role_bt], mask_bt)
    gap_bt = jnp.abs(logp_bt - sampler_bt)
    per_token = {
        "gap": gap_bt,
        "clipped": terms.clipped,
        "dual_clipped": terms.dual_clipped,
        "weight": weight_bt,
        "kl": kl_bt,
    }
    sums = {name: masked_sum(x_bt.astype(jnp.float32), mask_bt) for name, x_bt in per_token.items()}
    sums["loss"] = loss
    sums["tokens"] = jnp.sum(mask_bt, dtype=jnp.float32)
    maxima = {"ratio": masked_max(terms.ratio, mask_bt), "gap": masked_max(gap_bt, mask_bt)}
    return loss, jax.lax.stop_gradient((sums, maxima))
