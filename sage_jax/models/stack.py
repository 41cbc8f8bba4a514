"""The loop over layers, stacked or apart, and a backward pass that adds gradients in place.

Differentiated as it is, a loop gives the gradients of all layers as new arrays, held beside the
totals they are then added to: a second copy of all gradients. Here the totals are carried backwards
through the layers, and each layer's gradient, never more than one, is added to its part of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Weights = dict[str, jax.Array]  # stacked on a leading axis of layers
Body = Callable[[jax.Array, Weights, Any], jax.Array]


def apart(params: dict[str, Any]) -> dict[str, Any]:
    """The same params with each layer in arrays of its own ("layers" is a tuple of trees), and the
    head in a second form, "head" [d, v].

    For decoding on a CPU, where a loop over stacked layers copies each out of the stack at every
    step, and a product is fastest over the rows of the weight. A copy of the weights.
    """
    return _apart(params, count=jax.tree.leaves(params["layers"])[0].shape[0])


@partial(jax.jit, static_argnames="count")
def _apart(params: dict[str, Any], count: int) -> dict[str, Any]:
    layers = tuple({n: x[i] for n, x in params["layers"].items()} for i in range(count))
    head_vd = params.get("lm_head", params.get("embed"))
    head = {} if head_vd is None else {"head": head_vd.T}
    rest = {name: x for name, x in params.items() if name not in ("layers", "lm_head")}
    return {**rest, **head, "layers": layers}


def over_layers(body: Callable, carry: Any, layers: Any) -> tuple[Any, Any]:
    """`carry, kept = body(carry, (number, weights))` layer by layer, stacked or `apart`; what was
    kept is stacked. Not for training: see `run_layers`."""
    if not isinstance(layers, tuple):
        count = jax.tree.leaves(layers)[0].shape[0]
        return jax.lax.scan(body, carry, (jnp.arange(count), layers))
    kept = []
    for numbered in enumerate(layers):
        carry, of_layer = body(carry, numbered)
        kept.append(of_layer)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *kept)


def run_layers(
    body: Body, x: jax.Array, layers: Weights, context: Any, totals: Weights | None
) -> jax.Array:
    """`x` after x = body(x, weights of a layer, context) over all layers.

    With `totals`, like those of `layers` that are trained and under their names: the gradient with
    respect to `totals` is totals + the gradient of these weights. No gradient reaches `layers`
    themselves then, and none is computed for the others.
    """
    if totals is None:
        return jax.lax.scan(lambda x, w: (body(x, w, context), None), x, layers)[0]
    trained = {name: w for name, w in layers.items() if name in totals}
    frozen = {name: w for name, w in layers.items() if name not in totals}
    return _run(body, x, trained, frozen, context, totals)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(body: Body, x, trained: Weights, frozen: Weights, context, totals: Weights) -> jax.Array:
    def step(x, layer):
        weights, others = layer
        return body(x, {**weights, **others}, context), None

    return jax.lax.scan(step, x, (trained, frozen))[0]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Plan:
    """How a layer's pull-back is put together again: its structure, and which of its arrays are
    not kept since the backward pass has them anyway (an index into these, else None)."""

    structure: Any
    given: tuple[int | None, ...]


def _forward(body: Body, x, trained: Weights, frozen: Weights, context, totals: Weights):
    plans = []

    def step(x, layer):
        weights, others = layer
        y, pull_back = jax.vjp(lambda x, w: body(x, {**w, **others}, context), x, weights)
        leaves, structure = jax.tree.flatten(pull_back)
        at_hand = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((layer, context)))}
        given = tuple(at_hand.get(id(leaf)) for leaf in leaves)
        plans.append(_Plan(structure, given))
        return y, [leaf for leaf, index in zip(leaves, given, strict=True) if index is None]

    x, kept = jax.lax.scan(step, x, (trained, frozen))
    return x, (plans[-1], kept, trained, frozen, context, totals)


def _backward(body: Body, saved, dx: jax.Array):
    plan, kept, trained, frozen, context, totals = saved

    def step(carry, layer):
        dx, totals = carry
        index, kept, *weights = layer
        at_hand, own = jax.tree.leaves((tuple(weights), context)), iter(kept)
        leaves = [next(own) if i is None else at_hand[i] for i in plan.given]
        dx, gradient = jax.tree.unflatten(plan.structure, leaves)(dx)
        return (dx, jax.tree.map(partial(_add_at, index), totals, gradient)), None

    number = jnp.arange(jax.tree.leaves(trained)[0].shape[0])
    layers = (number, kept, trained, frozen)
    (dx, totals), _ = jax.lax.scan(step, (dx, totals), layers, reverse=True)
    return dx, None, None, None, totals


def _add_at(index: jax.Array, total: jax.Array, gradient: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_index_in_dim(total, index, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, part + gradient, index, 0)


_run.defvjp(_forward, _backward)
