"""Masked reductions that select instead of multiplying, so a NaN in a masked slot cannot leak."""

import jax
import jax.numpy as jnp

Axis = int | tuple[int, ...] | None


def masked_sum(x: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
    """Sum of `x` over the slots where the boolean `mask` (shape of `x`) is true; 0 if none is."""
    return jnp.sum(x, axis=axis, where=mask)


def masked_mean(x: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
    """Mean of `x` over the slots where the boolean `mask` is true; 0 if none is."""
    count = jnp.sum(mask, axis=axis, dtype=x.dtype)
    return masked_sum(x, mask, axis) / jnp.maximum(count, 1)


def masked_max(x: jax.Array, mask: jax.Array, axis: Axis = None, empty: float = 0.0) -> jax.Array:
    """Largest `x` over the slots where the boolean `mask` is true; `empty` if none is."""
    largest = jnp.max(x, axis=axis, where=mask, initial=-jnp.inf)
    return jnp.where(jnp.any(mask, axis=axis), largest, jnp.asarray(empty, x.dtype))
