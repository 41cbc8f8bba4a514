import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.core.logprob import entropy, log_prob

V = 11


def oracle(logits_xv: np.ndarray, temperature_x: np.ndarray) -> np.ndarray:
    divisor_x = np.where(temperature_x == 0, 1, temperature_x).astype(np.float64)
    scaled_xv = logits_xv.astype(np.float64) / divisor_x[:, None]
    scaled_xv -= scaled_xv.max(-1, keepdims=True)
    return scaled_xv - np.log(np.exp(scaled_xv).sum(-1, keepdims=True))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.6, 1.0, 1.3]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_values_equal_the_float64_oracle_at_any_temperature(seed, temperature, scale):
    rng = np.random.default_rng(seed)
    logits_xv = (scale * rng.standard_normal((5, V))).astype(np.float32)
    token_x = rng.integers(0, V, 5).astype(np.int32)
    temperature_x = np.full(5, temperature, np.float32)
    logp_xv = oracle(logits_xv, temperature_x)
    np.testing.assert_allclose(
        log_prob(jnp.array(logits_xv), jnp.array(token_x), jnp.array(temperature_x)),
        logp_xv[np.arange(5), token_x],
        rtol=2e-6,
        atol=2e-5,
    )
    np.testing.assert_allclose(
        entropy(jnp.array(logits_xv), jnp.array(temperature_x)),
        -(np.exp(logp_xv) * logp_xv).sum(-1),
        atol=2e-5,
    )


def test_each_row_uses_its_own_temperature_and_greedy_counts_as_one():
    logits_xv = jnp.tile(jnp.array([[2.0, 0.0, -1.0]]), (3, 1))
    token_x = jnp.zeros(3, jnp.int32)
    logp_x = log_prob(logits_xv, token_x, jnp.array([0.0, 1.0, 2.0]))
    assert float(logp_x[0]) == float(logp_x[1])
    np.testing.assert_allclose(logp_x[2], oracle(np.array([[2.0, 0, -1]]), np.array([2.0]))[0, 0])
    assert float(entropy(logits_xv, jnp.array([0.0, 1.0, 2.0]))[2]) > float(
        entropy(logits_xv, jnp.array([1.0, 1.0, 1.0]))[2]
    )


def test_bf16_logits_are_normalised_in_float32():
    logits_xv = jax.random.normal(jax.random.key(0), (4, 4096), jnp.bfloat16)
    token_x = jnp.arange(4, dtype=jnp.int32)
    one_x = jnp.ones(4)
    logp_x = log_prob(logits_xv, token_x, one_x)
    assert logp_x.dtype == jnp.float32 and entropy(logits_xv, one_x).dtype == jnp.float32
    exact = oracle(np.asarray(logits_xv, np.float32), np.ones(4))[np.arange(4), np.arange(4)]
    np.testing.assert_allclose(logp_x, exact, atol=1e-5)


def test_excluded_tokens_at_minus_infinity_leave_entropy_finite():
    logits_xv = jnp.array([[0.0, 0.0, -jnp.inf]])
    np.testing.assert_allclose(entropy(logits_xv, jnp.ones(1)), [np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(
        log_prob(logits_xv, jnp.array([1]), jnp.ones(1)), [-np.log(2)], rtol=1e-6
    )


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_leading_shape_is_kept(shape):
    logits_xv = jnp.zeros((*shape, V))
    token_x = jnp.zeros(shape, jnp.int32)
    assert log_prob(logits_xv, token_x, jnp.ones(shape)).shape == shape
    assert entropy(logits_xv, jnp.ones(shape)).shape == shape
