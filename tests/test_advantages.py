from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.learn.advantages import (
    RewardRow,
    flat_groups,
    grpo,
    masked_whiten,
    normalise,
    reinforce_plus_plus,
    sequence_z_score,
)


def rows_of(rewards, lengths=None, role="solver", groups=None, prefix="r"):
    lengths = lengths or [4] * len(rewards)
    groups = groups or [None] * len(rewards)
    return [
        RewardRow(f"{prefix}{i}", reward, length, role, group)
        for i, (reward, length, group) in enumerate(zip(rewards, lengths, groups, strict=True))
    ]


# Published vectors.


def test_grpo_vector_unbiased_std():
    np.testing.assert_allclose(grpo([1, 0, 0, 0], "aaaa"), [1.5, -0.5, -0.5, -0.5], atol=1e-5)


def test_grpo_equal_rewards_give_zero_and_a_singleton_keeps_its_reward():
    np.testing.assert_array_equal(grpo([1, 1, 1], "aaa"), [0, 0, 0])
    np.testing.assert_allclose(grpo([1.0], "a"), [1.0], atol=1e-5)


def test_reinforce_plus_plus_weights_rewards_by_length():
    mask_bt = np.array([[1, 1, 1], [1, 0, 0]])
    np.testing.assert_allclose(
        reinforce_plus_plus([1, 0], mask_bt), [[0.5, 0.5, 0.5], [-1.5, 0, 0]], atol=1e-6
    )


def test_sequence_level_vector():
    np.testing.assert_allclose(sequence_z_score([1, 0]), [0.70711, -0.70711], atol=1e-5)


def test_whitening_uses_masked_in_tokens_only():
    x_bt = np.array([[1.0, 3.0, np.nan], [5.0, np.nan, np.nan]])
    white_bt = masked_whiten(x_bt, ~np.isnan(x_bt))
    np.testing.assert_allclose(white_bt, [[-1, 0, 0], [1, 0, 0]], atol=1e-7)
    with pytest.raises(ValueError, match="needs at least 2"):
        masked_whiten(x_bt, np.zeros_like(x_bt))


# The training path.


def test_role_token_equals_reinforce_plus_plus_run_on_each_role():
    solver = rows_of([1, 0, 0.25], [3, 1, 2])
    critic = rows_of([0.5, 1], [1, 1], "critic", prefix="c")
    mixed = [solver[0], critic[0], solver[1], critic[1], solver[2]]
    mask_bt = np.arange(3)[None] < np.array([[3], [1], [2]])
    expected = reinforce_plus_plus([1, 0, 0.25], mask_bt)[:, 0]
    adv = normalise("role_token", mixed)
    np.testing.assert_allclose(adv[[0, 2, 4]], expected, rtol=1e-6)
    np.testing.assert_allclose(adv[[1, 3]], [-0.70711, 0.70711], atol=1e-5)


def test_role_sequence_ignores_length_and_keeps_roles_apart():
    mixed = rows_of([1, 0], [9, 1]) + rows_of([5, 5, 6], role="planner", prefix="p")
    adv = normalise("role_sequence", mixed)
    np.testing.assert_allclose(adv[:2], [0.70711, -0.70711], atol=1e-5)
    np.testing.assert_allclose(adv[2:], sequence_z_score([5, 5, 6]), rtol=1e-6)


def test_grouped_never_mixes_roles_that_share_a_group_key():
    rows = rows_of([1, 0, 0, 0], groups=["q"] * 4) + rows_of(
        [3, 4], role="critic", groups=["q"] * 2
    )
    adv = normalise("grouped", rows)
    np.testing.assert_allclose(adv[:4], [1.5, -0.5, -0.5, -0.5], atol=1e-5)
    np.testing.assert_allclose(adv[4:], [-0.70711, 0.70711], atol=1e-5)


@pytest.mark.parametrize("kind", ["role_token", "role_sequence", "grouped"])
def test_groups_without_signal_give_exactly_zero(kind):
    assert normalise(kind, rows_of([0.3])).tolist() == [0.0]
    assert normalise(kind, rows_of([0.3, 0.3])).tolist() == [0.0, 0.0]
    residue = [0.1 + 0.2, 0.3, 0.3]
    assert residue[0] != residue[1]
    assert normalise(kind, rows_of(residue)).tolist() == [0.0] * 3
    assert normalise(kind, []).tolist() == []


def test_seven_equal_and_one_zero_stays_bounded():
    adv = normalise("role_sequence", rows_of([0.35] * 7 + [0.0]))
    np.testing.assert_allclose(adv, [0.35355] * 7 + [-2.47487], atol=1e-4)


def test_a_row_alone_in_its_group_gives_zero_beside_a_full_group():
    adv = normalise("grouped", rows_of([1, 0, 0.7], groups=["a", "a", "b"]))
    assert adv[2] == 0.0 and adv[0] > 0 > adv[1]


@pytest.mark.parametrize("kind", ["role_token", "role_sequence", "grouped"])
def test_invalid_rows_get_zero_and_leave_the_statistics_alone(kind):
    clean = rows_of([1, 0, 0.5], [2, 3, 4])
    broken = replace(clean[0], id="x", reward=float("nan"), length=100, valid=False)
    adv = normalise(kind, [*clean, broken])
    assert adv[3] == 0.0
    np.testing.assert_array_equal(adv[:3], normalise(kind, clean))


def test_token_whitening_skips_rows_without_tokens():
    rows = rows_of([1, 0, -9], [3, 1, 0])
    np.testing.assert_allclose(normalise("role_token", rows), [0.5, -1.5, 0], atol=1e-6)


def test_bad_input_names_the_row_and_the_field():
    with pytest.raises(ValueError, match=r"row 'r1': reward=nan"):
        normalise("role_token", rows_of([0.0, float("nan")]))
    with pytest.raises(ValueError, match=r"row 'r0': reward=inf"):
        normalise("grouped", rows_of([float("inf")]))
    with pytest.raises(ValueError, match=r"row 'r0': length=-1"):
        normalise("role_token", rows_of([0.0], [-1]))
    with pytest.raises(ValueError, match="'group'.*role_token, role_sequence, grouped"):
        normalise("group", rows_of([0.0]))


def test_flat_groups_explains_zero_advantages():
    rows = rows_of([1, 0, 1, 1, 0.2], groups=["a", "a", "b", "b", "c"])
    assert flat_groups("grouped", rows) == {"solver": (2, 3)}
    assert flat_groups("role_sequence", rows) == {"solver": (0, 1)}


@settings(deadline=None, max_examples=50)
@given(
    rewards=st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=12),
    length=st.integers(2, 30),
    seed=st.integers(0, 2**31 - 1),
)
def test_equal_lengths_make_token_and_sequence_level_agree_up_to_ddof(rewards, length, seed):
    rows = rows_of(rewards, [length] * len(rewards))
    token, sequence = normalise("role_token", rows), normalise("role_sequence", rows)
    n = len(rewards)
    if np.ptp(rewards) > 1e-2:
        factor = np.sqrt((n * length - 1) / (length * (n - 1)))
        np.testing.assert_allclose(token, sequence * factor, rtol=1e-3, atol=1e-5)
    assert np.all(np.isfinite(token)) and np.all(np.abs(sequence) <= (n - 1) / np.sqrt(n) + 1e-4)
    order = np.random.default_rng(seed).permutation(n)
    np.testing.assert_allclose(
        normalise("role_token", [rows[i] for i in order]), token[order], rtol=1e-5, atol=1e-6
    )
