"""Whether two formulas have the same value: exact, then numeric, then at sample points.

The tolerance policy is in docs/verifiers.md; in short: integers and terminating decimals are
exact, a value without a finite decimal accepts one with four significant digits, a decimal gold
of three accepts the exact value it is a rounding of.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath

from sage_jax.verify.evaluate import (
    DIGITS,
    MORE_DIGITS,
    Undefined,
    exact,
    numeric,
    points,
)
from sage_jax.verify.grammar import Node, variables

PREDICTION_DIGITS, GOLD_DIGITS = 4, 3
ENOUGH_POINTS, CONFIRMED = 3, 4
CLOSE, MORE_CLOSE = 40, 110  # of DIGITS and MORE_DIGITS; the rest may be lost to cancellation


class GoldUndefined(ValueError):
    """The gold has no value, so nothing can be compared with it."""


def same_value(gold: Node, other: Node, tolerance: float | None = None) -> bool:
    """Whether ``other`` counts as ``gold``. Raises GoldUndefined."""
    with mpmath.workdps(DIGITS):
        if variables(gold) or variables(other):
            return _same_function(gold, other)
        return _same_number(gold, other, tolerance)


def scaled(node: Node, factor: Fraction) -> Node:
    """The formula times a factor; a decimal stays one."""
    return ("mul", node, ("num", factor)) if factor != 1 else node


def _same_number(gold: Node, other: Node, tolerance: float | None) -> bool:
    gold_exact = _exact_or_none(gold)
    try:
        other_exact = _exact_or_none(other)
        if gold_exact is not None and other_exact is not None and gold_exact == other_exact:
            return True
        gold_value = _gold_value(gold)
        other_value = numeric(other)
    except Undefined:
        return False
    if tolerance is not None:
        return bool(abs(gold_value - other_value) <= tolerance)
    if gold_exact is None or other_exact is None:
        if _close(gold_value, other_value) and _confirmed(gold, other, {}):
            return True
        if _vanishing(gold, other, gold_value, other_value):
            return True
    return _rounds(gold, gold_exact, gold_value, other, other_exact, other_value)


def _exact_or_none(node: Node) -> Fraction | None:
    try:
        return exact(node)
    except Undefined:
        return None


def _gold_value(node: Node) -> Any:
    try:
        return numeric(node)
    except Undefined as error:
        raise GoldUndefined(str(error)) from error


def _close(a: Any, b: Any, digits: int = CLOSE) -> bool:
    if mpmath.isinf(a) or mpmath.isinf(b):
        return bool(a == b)
    return bool(abs(a - b) <= mpmath.mpf(10) ** -digits * max(abs(a), abs(b)))


def _vanishing(gold: Node, other: Node, a: Any, b: Any) -> bool:
    """Both zero, but for rounding: what is left shrinks when more digits are carried."""
    small = mpmath.mpf(10) ** -45
    if abs(a) > small or abs(b) > small:
        return False
    try:
        finer = [numeric(node, digits=MORE_DIGITS) for node in (gold, other)]
    except Undefined:
        return False
    return all(
        abs(value) < mpmath.mpf(10) ** -140 and abs(value) <= abs(coarse) * small
        for value, coarse in zip(finer, (a, b), strict=True)
    )


def _confirmed(gold: Node, other: Node, point: Mapping[str, Fraction]) -> bool:
    """The same again with more digits: a difference below the first ones is still one."""
    try:
        a, b = (numeric(node, point, digits=MORE_DIGITS) for node in (gold, other))
    except Undefined:
        return False
    with mpmath.workdps(MORE_DIGITS):
        return _close(a, b, MORE_CLOSE) or max(abs(a), abs(b)) < mpmath.mpf(10) ** -140


def _rounds(
    gold: Node,
    gold_exact: Fraction | None,
    gold_value: Any,
    other: Node,
    other_exact: Fraction | None,
    other_value: Any,
) -> bool:
    gold_decimal, other_decimal = _decimal(gold), _decimal(other)
    if mpmath.im(gold_value) or mpmath.im(other_value) or mpmath.isinf(gold_value):
        return False
    if other_decimal and not gold_decimal and not _terminates(gold_exact):
        value, places, digits = other_decimal
        if digits < PREDICTION_DIGITS:
            return False
        with mpmath.workdps(max(DIGITS, places + 30)):
            value_there = numeric(gold, digits=max(DIGITS, places + 30))
            return _shown(value_there, value, places, truncated=True)
    if gold_decimal and not other_decimal and not mpmath.isinf(other_value):
        value, places, digits = gold_decimal
        if digits >= GOLD_DIGITS and (other_exact is None or other_exact.denominator != 1):
            return _shown(other_value, value, places, truncated=False)
    return False


def _decimal(node: Node) -> tuple[Fraction, int, int] | None:
    """Value, decimal places and significant digits of a written decimal."""
    if node[0] == "neg":
        inner = _decimal(node[1])
        return (-inner[0], inner[1], inner[2]) if inner else None
    return (node[1], node[2], node[3]) if node[0] == "dec" else None


def _terminates(value: Fraction | None) -> bool:
    if value is None:
        return False
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def _shown(value: Any, written: Fraction, places: int, truncated: bool) -> bool:
    """Whether ``written`` is ``value`` rounded (or cut) at ``places`` decimals."""
    unit = mpmath.mpf(10) ** -places
    difference = value - mpmath.mpf(written.numerator) / written.denominator
    if abs(difference) <= unit / 2:
        return True
    outward = difference * (1 if written >= 0 else -1)
    return truncated and bool(0 <= outward < unit)


# --- formulas with variables --------------------------------------------------------------


def _same_function(gold: Node, other: Node) -> bool:
    real, complex_ = [], []
    gold_defined = confirmed = 0
    for point in points(variables(gold) | variables(other)):
        try:
            a = numeric(gold, point)
            gold_defined += 1
            b = numeric(other, point)
        except Undefined:
            continue
        agree = _close(a, b) or max(abs(a), abs(b)) < 1e-50
        agree = agree and (confirmed >= CONFIRMED or _same_there(gold, other, point))
        confirmed += agree
        complex_.append(agree)
        if _is_real(a) and _is_real(b):
            real.append(agree)
            if not agree:
                return False
    if not gold_defined:
        raise GoldUndefined("no sample point in the domain")
    if len(real) >= ENOUGH_POINTS:
        return all(real)
    return len(complex_) >= ENOUGH_POINTS and all(complex_)


def _same_there(gold: Node, other: Node, point: Mapping[str, Fraction]) -> bool:
    """Whether two formulas that agree at a point to some digits agree exactly, or to more."""
    try:
        a, b = exact(gold, point), exact(other, point)
    except Undefined:
        a = b = None
    if a is not None and b is not None:
        return a == b
    return _confirmed(gold, other, point)


def _is_real(value: Any) -> bool:
    return bool(abs(mpmath.im(value)) <= mpmath.mpf(10) ** -45 * abs(value))


def proportional(gold: Node, other: Node, factor_one: bool = False) -> bool:
    """Whether two formulas vanish together: a constant non-zero ratio at all sample points."""
    names = variables(gold) | variables(other)
    with mpmath.workdps(DIGITS):
        return bool(names) and _proportional(gold, other, names, factor_one)


def _proportional(gold: Node, other: Node, names: set[str], factor_one: bool) -> bool:
    ratios = []
    for point in points(names):
        try:
            a, b = numeric(gold, point), numeric(other, point)
        except Undefined:
            continue
        if abs(a) < 1e-50 or abs(b) < 1e-50:
            if max(abs(a), abs(b)) > 1e-40:
                return False
            continue
        ratios.append(a / b)
    if len(ratios) < ENOUGH_POINTS:
        return False
    wanted = mpmath.mpf(1) if factor_one else ratios[0]
    return all(_close(ratio, wanted) for ratio in ratios)
