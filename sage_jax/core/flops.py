"""FLOPs of a traced program: every matrix product, loop bodies as often as they run."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import Literal


def count(jaxpr: Any, kernel_share: float = 1.0) -> float:
    """FLOPs of the matrix products in a jaxpr (two a multiply-add), recomputation included.

    On all devices together: what `shard_map` holds runs on each. A scan counts its length, a while
    loop one trip, of a conditional's branches the dearest. Of the steps of a Pallas kernel's grid
    `kernel_share` count: a mask skips the others. What nothing needs does not count: the compiler
    leaves it out.
    """
    needed = set(_variables(_open(jaxpr).outvars))
    total = 0.0
    for equation in reversed(_open(jaxpr).eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(_variables(equation.invars))
            total += _equation(equation, kernel_share)
    return total


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _equation(equation: Any, kernel_share: float) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product(equation)
    if name == "cond":
        return max(count(branch, kernel_share) for branch in params["branches"])
    times = 1.0
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":
        times = params["mesh"].size
    elif name == "pallas_call":
        times = math.prod(params["grid_mapping"].grid) * kernel_share
    return times * sum(count(inner, kernel_share) for inner in _inner(params))


def _product(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = math.prod(left[axis] for axis in contracted)
    return 2 * depth * math.prod(equation.outvars[0].aval.shape)


def _inner(params: dict[str, Any]) -> list[Any]:
    leaves = jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(_open(x), "eqns"))
    return [leaf for leaf in leaves if hasattr(_open(leaf), "eqns")]
