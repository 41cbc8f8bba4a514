"""Truncation of the sampling distribution, against a plain sort in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.rollout import sampling
from sage_jax.rollout.sampling import Truncation, sample, truncate

ROWS, VOCAB = 6, 97


def logits(seed=0):
    return np.random.default_rng(seed).normal(0, 3, (ROWS, VOCAB)).astype(np.float32)


def cut(top_k=0, top_p=1.0, min_p=0.0):
    def rows(value, kind):
        return jnp.full(ROWS, value, kind)

    return Truncation(rows(top_k, jnp.int32), rows(top_p, jnp.float32), rows(min_p, jnp.float32))


def kept(x_sv, settings):
    return np.isfinite(np.asarray(jax.jit(truncate)(jnp.asarray(x_sv), settings)))


def by_sorting(x_v, top_k, top_p, min_p):
    """The same set the slow way."""
    order = np.argsort(-x_v, kind="stable")
    keep = order[: top_k or len(order)]
    probs = np.exp(x_v[keep].astype(np.float64) - x_v.max())
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    keep = keep[(before < top_p) & (probs >= min_p * probs.max())]
    return set(keep.tolist()) | {int(order[0])}


@pytest.mark.parametrize("top_k", [0, 1, 5, VOCAB])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_what_is_kept_is_what_a_sort_would_keep(top_k, top_p, min_p):
    x_sv = logits()
    got = kept(x_sv, cut(top_k, top_p, min_p))
    for row in range(ROWS):
        assert set(np.flatnonzero(got[row])) == by_sorting(x_sv[row], top_k, top_p, min_p)


def test_each_row_has_its_own_truncation():
    x_sv = logits(1)
    mixed = Truncation(
        jnp.array([0, 3, 0, 0, 1, 2], jnp.int32),
        jnp.array([1, 1, 0.4, 1, 1, 0.3], jnp.float32),
        jnp.array([0, 0, 0, 0.2, 0, 0], jnp.float32),
    )
    got = kept(x_sv, mixed)
    for row in range(ROWS):
        settings = [float(part[row]) for part in mixed]
        want = by_sorting(x_sv[row], int(settings[0]), settings[1], settings[2])
        assert set(np.flatnonzero(got[row])) == want
    assert got[0].all()


@pytest.mark.parametrize("tiny", [1e-300, 1e-45, 1e-9])
def test_the_best_token_stays_however_little_is_asked_for(tiny):
    x_sv = logits(2)
    best = x_sv.argmax(axis=1)
    got = kept(x_sv, cut(top_p=float(np.float32(tiny))))
    assert (got.sum(axis=1) == 1).all() and (got.argmax(axis=1) == best).all()
    assert kept(x_sv, cut(min_p=float(np.float32(tiny))))[np.arange(ROWS), best].all()


def test_tokens_that_tie_with_the_last_one_stay_together():
    x_sv = np.tile(np.array([2.0, 1.0, 1.0, 0.0, -1.0], np.float32), (ROWS, 1))
    assert kept(x_sv, cut(top_k=2)).tolist() == [[True, True, True, False, False]] * ROWS


def test_a_truncated_row_changes_no_other_and_the_log_prob_is_of_the_whole_distribution():
    x_sv = jnp.asarray(logits(3))
    key_s2 = jnp.arange(2 * ROWS, dtype=jnp.uint32).reshape(ROWS, 2)
    index_s, temperature_s = jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS)
    whole, whole_logp = sample(x_sv, key_s2, index_s, temperature_s, cut())
    one = cut()._replace(top_k_s=jnp.array([1, 0, 0, 0, 0, 0], jnp.int32))
    token_s, logp_s = sample(x_sv, key_s2, index_s, temperature_s, one)
    assert token_s[1:].tolist() == whole[1:].tolist()
    assert np.allclose(logp_s[1:], whole_logp[1:], atol=0)
    assert token_s[0] == x_sv[0].argmax()
    assert np.isclose(logp_s[0], jax.nn.log_softmax(x_sv[0]).max(), atol=1e-6)


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),  # the first of equals, as argmax
        ([0.0, 0.0, 0.0, 1.0], 3),
        ([-np.inf, -np.inf, -5.0, -np.inf], 2),
        ([-np.inf] * 4, 0),
    ],
)
def test_the_largest_is_found_as_argmax_finds_it(row, want):
    assert int(sampling._first_largest(jnp.array([row]))[0]) == want == np.argmax(row)


def test_logits_that_are_no_numbers_give_an_id_of_the_vocabulary():
    assert int(sampling._first_largest(jnp.full((1, 4), jnp.nan))[0]) == 3
