from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.learn.objective import (
    completion_mask,
    importance_weight,
    kl_k3,
    micro_objective,
    policy_loss,
)
from sage_jax.learn.optimizer import UpdateSettings
from sage_jax.learn.pack import TrainRow, pack

ROLES = ("challenger", "planner", "solver", "critic")
EOS = 23
SETTINGS = UpdateSettings()


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
    with pytest.raises(ValueError, match="optim.dual_clip=1.0"):
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


# The reduction over a micro-batch.


def make_rows(count):
    """Rows of different lengths in all roles, each ending in EOS."""
    return [
        TrainRow(
            id=f"row{i}",
            role=ROLES[i % 4],
            prompt=[3] * (1 + i % 3),
            completion=[*range(5, 5 + i), EOS],
            logps=[-1.0] * (i + 1),
            advantage=0.5 - i,
        )
        for i in range(count)
    ]


def objective(logp_bt, micro, role_tokens, settings=SETTINGS, weights=(1, 1, 1, 1), **kwargs):
    entropy_bt = kwargs.get("entropy_bt", jnp.ones_like(logp_bt))
    return micro_objective(
        logp_bt,
        entropy_bt,
        kwargs.get("ref_logp_bt"),
        jax.tree.map(jnp.asarray, micro),
        jnp.asarray(role_tokens),
        jnp.array(weights, jnp.float32),
        settings,
    )


def test_gradient_reaches_every_completion_token_with_its_eos_and_nothing_else():
    packed = pack(make_rows(6), ROLES, [16], 8, share=False)
    micro = packed.micros[0]
    logp_bt = jnp.full(micro.tokens_bt.shape, -1.0)
    grad_bt = jax.grad(lambda x: objective(x, micro, packed.role_tokens)[0])(logp_bt)
    expected_bt = np.zeros(logp_bt.shape, bool)
    rows = {row.id: row for row in make_rows(6)}
    for b, id in enumerate(packed.ids[0]):
        prompt, row = len(rows[id].prompt), rows[id]
        expected_bt[b, prompt : prompt + len(row.completion)] = True
        assert micro.tokens_bt[b, row.length - 1] == EOS and expected_bt[b, row.length - 1]
    np.testing.assert_array_equal(np.asarray(grad_bt) != 0, expected_bt)
    np.testing.assert_array_equal(completion_mask(micro), expected_bt)


def test_pad_id_equal_to_eos_is_still_trained():
    eos_is_pad = TrainRow("a", "solver", [0, 3], [5, 0], [-1.0, -1.0], 1.0)
    micro = pack([eos_is_pad], ROLES, [6], 1).micros[0]
    assert completion_mask(micro).tolist() == [[False, False, True, True, False, False]]


def test_loss_is_the_sum_of_role_token_means_with_their_weights():
    rows = [
        TrainRow("a", "solver", [1], [1, 2, 3], [0.0] * 3, 2.0),
        TrainRow("b", "solver", [1], [1], [0.0], -1.0),
        TrainRow("c", "critic", [1], [1, 2], [0.0] * 2, 0.5),
    ]
    packed = pack(rows, ROLES, [4], 4)
    logp_bt = jnp.zeros((4, 4))
    loss, (sums, _) = objective(
        logp_bt, packed.micros[0], packed.role_tokens, weights=(1, 1, 0.5, 2)
    )
    solver, critic = -(3 * 2.0 - 1.0) / 4, -0.5
    np.testing.assert_allclose(loss, 0.5 * solver + 2 * critic, rtol=1e-6)
    assert sums["tokens"] == 6


def test_nan_outside_the_completion_reaches_neither_loss_nor_gradient():
    packed = pack(make_rows(3), ROLES, [16], 4)
    micro = packed.micros[0]
    hole_bt = jnp.where(completion_mask(micro), 0.0, jnp.nan)
    micro = micro._replace(sampler_logp_bt=micro.sampler_logp_bt + hole_bt)
    settings = replace(SETTINGS, importance_cap=2.0, entropy_coef=0.1, kl_coef=0.1)

    def loss(logp_bt):
        return objective(
            logp_bt,
            micro,
            packed.role_tokens,
            settings,
            entropy_bt=-logp_bt,
            ref_logp_bt=hole_bt - 1,
        )

    (value, (sums, maxima)), grad_bt = jax.value_and_grad(loss, has_aux=True)(hole_bt - 2)
    assert jnp.isfinite(value) and jnp.isfinite(grad_bt).all()
    assert all(jnp.isfinite(x).all() for x in [*sums.values(), *maxima.values()])


def test_entropy_bonus_and_kl_enter_with_their_coefficients():
    packed = pack([TrainRow("a", "solver", [1], [1, 2], [0.0] * 2, 0.0)], ROLES, [4], 1)
    args = (jnp.zeros((1, 4)), packed.micros[0], packed.role_tokens)
    bonus, _ = objective(*args, replace(SETTINGS, entropy_coef=0.1), entropy_bt=jnp.full((1, 4), 3))
    np.testing.assert_allclose(bonus, -0.3, rtol=1e-6)
    kl, (sums, _) = objective(
        *args, replace(SETTINGS, kl_coef=0.5), ref_logp_bt=jnp.full((1, 4), -1.0)
    )
    np.testing.assert_allclose(kl, 0.5 * np.exp(-1), rtol=1e-6)
    np.testing.assert_allclose(sums["kl"], 2 * np.exp(-1), rtol=1e-6)


def test_importance_weights_are_truncated_and_off_by_default():
    row = TrainRow("a", "solver", [1], [1, 2], [np.log(0.5), np.log(0.01)], 1.0)
    packed = pack([row], ROLES, [3], 1)
    logp_bt = jnp.log(jnp.array([[1.0, 0.25, 0.25]]))
    off, _ = objective(logp_bt, packed.micros[0], packed.role_tokens)
    on, _ = objective(
        logp_bt, packed.micros[0], packed.role_tokens, replace(SETTINGS, importance_cap=2.0)
    )
    np.testing.assert_allclose([off, on], [-1.0, -(0.5 + 2) / 2], rtol=1e-6)


def test_stored_old_logps_give_the_ratio_and_the_clip_share():
    row = TrainRow("a", "solver", [1], [1, 2], [0.0, 0.0], 1.0)
    packed = pack([row], ROLES, [3], 1)
    micro = packed.micros[0]._replace(old_logp_bt=jnp.log(jnp.array([[9.0, 1.0, 2.0]])))
    loss, (sums, maxima) = objective(
        jnp.log(jnp.array([[1.0, 1.0, 8.0]])), micro, packed.role_tokens
    )
    np.testing.assert_allclose(loss, -(1 + 1.28) / 2, rtol=1e-6)
    np.testing.assert_allclose(maxima["ratio"], 4.0, rtol=1e-6)
    assert float(sums["clipped"]) == 1
