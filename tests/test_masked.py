import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.core.masked import masked_max, masked_mean, masked_sum

X = jnp.array([[1.0, 2.0, jnp.nan], [jnp.inf, -3.0, jnp.nan]])
MASK = jnp.array([[True, True, False], [False, True, False]])


def test_nan_and_inf_in_masked_slots_do_not_leak():
    assert float(masked_sum(X, MASK)) == 0.0
    assert float(masked_mean(X, MASK)) == 0.0
    np.testing.assert_array_equal(masked_mean(X, MASK, axis=1), [1.5, -3.0])
    np.testing.assert_array_equal(masked_max(X, MASK, axis=1), [2.0, -3.0])


def test_all_masked_gives_a_number():
    none = jnp.zeros_like(MASK)
    assert float(masked_sum(X, none)) == 0.0
    assert float(masked_mean(X, none)) == 0.0
    assert float(masked_max(X, none, empty=-7.0)) == -7.0


def test_gradient_is_zero_in_masked_slots_and_shared_in_others():
    grad = jax.grad(lambda x: masked_mean(x, MASK))(X)
    np.testing.assert_allclose(grad, np.where(MASK, 1 / 3, 0.0), rtol=1e-6)
