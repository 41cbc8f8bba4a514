import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.learn.objective import importance_weight, kl_k3, policy_loss


def terms(ratio, adv, clip_low=0.2, clip_high=0.28, dual_clip=3.0):
    logp = jnp.log(jnp.array(ratio, jnp.float32))
    adv = jnp.array(adv, jnp.float32)
    return policy_loss(logp, jnp.zeros_like(logp), adv, clip_low, clip_high, dual_clip)


def test_dual_clip_vector():
    out = terms([10.0], [-1.0])
    np.testing.assert_allclose(out.loss, [3.0], rtol=1e-6)
    assert bool(out.dual_clipped[0])
    np.testing.assert_allclose(terms([10.0], [-1.0], dual_clip=100.0).loss, [10.0], rtol=1e-5)


def test_clip_bounds_are_asymmetric_and_one_sided():
    out = terms([1.5, 1.5, 0.5, 0.5, 1.25, 0.85], [1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    np.testing.assert_allclose(out.loss, [-1.28, 1.5, -0.5, 0.8, -1.25, 0.85], rtol=1e-5)
    assert out.clipped.tolist() == [True, False, False, True, False, False]
    assert not out.dual_clipped.any()


def test_on_policy_gradient_is_minus_advantage():
    logp = jnp.array([-0.5, -2.0])
    adv = jnp.array([0.7, -1.3])
    old = jax.lax.stop_gradient(logp)
    grad = jax.grad(lambda x: policy_loss(x, old, adv, 0.2, 0.28, 3.0).loss.sum())(logp)
    np.testing.assert_allclose(grad, -adv, rtol=1e-6)


def test_clipped_and_dual_clipped_tokens_get_no_gradient():
    def loss(logp):
        adv = jnp.array([1.0, -1.0, -1.0])
        return policy_loss(logp, jnp.zeros(3), adv, 0.2, 0.28, 3.0).loss.sum()

    grad = jax.grad(loss)(jnp.log(jnp.array([2.0, 0.5, 5.0])))
    np.testing.assert_array_equal(grad, [0.0, 0.0, 0.0])


def test_huge_log_ratio_stays_finite():
    out = policy_loss(jnp.array([500.0]), jnp.array([-500.0]), jnp.array([1.0]), 0.2, 0.28, 3.0)
    assert jnp.isfinite(out.ratio).all() and jnp.isfinite(out.loss).all()


def test_dual_clip_must_exceed_one():
    with pytest.raises(ValueError, match="update.dual_clip=1.0"):
        terms([1.0], [1.0], dual_clip=1.0)


def test_k3_vectors():
    d = jnp.array([0.0, 1.0, -50.0])
    np.testing.assert_allclose(kl_k3(d, jnp.zeros(3)), [0.0, np.exp(-1), 10.0], atol=1e-6)


def test_k3_gradient_pulls_towards_the_reference():
    grad = jax.grad(lambda x: kl_k3(x, jnp.zeros(2)).sum())(jnp.array([0.5, -0.5]))
    assert grad[0] > 0 > grad[1]


def test_importance_weight_is_truncated_and_carries_no_gradient():
    old, sampler = jnp.log(jnp.array([0.2, 0.9])), jnp.log(jnp.array([0.4, 0.1]))
    np.testing.assert_allclose(importance_weight(old, sampler, 2.0), [0.5, 2.0], rtol=1e-6)
    grad = jax.grad(lambda x: importance_weight(x, sampler, 2.0).sum())(old)
    np.testing.assert_array_equal(grad, [0.0, 0.0])
