"""Values of parsed formulas: exact fractions where possible, else mpmath to 60 digits.

Every operation that could run away is bounded before it is started.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sage_jax.verify.grammar import Node

DIGITS, MORE_DIGITS = 60, 160
MAX_EXPONENT = 10_000
MAX_BITS = 200_000
MAX_FACTORIAL = 1000
POINT_PRIME = 2**31 - 1
MAX_LOG2 = 1e7  # of the size of any intermediate value


class Undefined(ArithmeticError):
    """No value: division by zero, a function outside its domain, or a result beyond the bounds."""


def exact(node: Node, values: Mapping[str, Fraction] = {}) -> Fraction | None:
    """The value as a fraction, None where it is not one or not obviously one.

    Raises Undefined for a division by zero or a power beyond the bounds.
    """
    kind = node[0]
    if kind in ("num", "dec"):
        return node[1]
    if kind == "var":
        return values.get(node[1])
    if kind == "neg":
        value = exact(node[1], values)
        return None if value is None else -value
    if kind in ("add", "mul", "div"):
        a, b = exact(node[1], values), exact(node[2], values)
        if kind == "div" and b == 0:
            raise Undefined("division by zero")
        if a is None or b is None:
            return None
        return _bounded(a + b if kind == "add" else a * b if kind == "mul" else a / b)
    if kind == "pow":
        return _exact_power(exact(node[1], values), exact(node[2], values))
    if kind == "root":
        return _exact_root(exact(node[1], values), exact(node[2], values))
    if kind == "call":
        return _exact_call(node[1], [exact(part, values) for part in node[2:]])
    return None


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Undefined("too many digits")
    return value


def _exact_power(base: Fraction | None, power: Fraction | None) -> Fraction | None:
    if base is None or power is None:
        return None
    if base == 0 and power <= 0:
        if power < 0:
            raise Undefined("division by zero")
        return Fraction(1)
    if power.denominator != 1:
        root = _exact_root(base, Fraction(power.denominator)) if base >= 0 else None
        return None if root is None else _exact_power(root, Fraction(power.numerator))
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1):
        if abs(power) > MAX_EXPONENT or size * abs(power.numerator) > MAX_BITS:
            raise Undefined("power beyond the bounds")
        return base**power.numerator
    return base if power.numerator % 2 else abs(base)


def _exact_root(value: Fraction | None, index: Fraction | None) -> Fraction | None:
    if value is None or index is None or index.denominator != 1 or not 2 <= index <= 64:
        return None
    sign = -1 if value < 0 and index % 2 else 1
    if value < 0 and sign == 1:
        return None
    parts = [_integer_root(abs(p), int(index)) for p in (value.numerator, value.denominator)]
    if parts[0] is None or not parts[1]:
        return None
    return sign * Fraction(parts[0], parts[1])


def _integer_root(value: int, index: int) -> int | None:
    if index == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 1000:
        return None
    root = round(value ** (1 / index)) if value.bit_length() < 1000 else 0
    for guess in (root - 1, root, root + 1):
        if guess >= 0 and guess**index == value:
            return guess
    return None


def _exact_call(name: str, values: list[Fraction | None]) -> Fraction | None:
    if any(value is None for value in values):
        return None
    numbers = [value for value in values if value is not None]
    whole = all(value.denominator == 1 for value in numbers)
    if name == "abs":
        return abs(numbers[0])
    if name == "floor":
        return Fraction(math.floor(numbers[0]))
    if name == "ceil":
        return Fraction(math.ceil(numbers[0]))
    if name in ("max", "min"):
        return max(numbers) if name == "max" else min(numbers)
    if name == "factorial":
        if not whole or not 0 <= numbers[0] <= MAX_FACTORIAL:
            raise Undefined("factorial beyond the bounds")
        return Fraction(math.factorial(int(numbers[0])))
    if name == "binomial" and whole:
        n, k = int(numbers[0]), int(numbers[1])
        if not 0 <= n <= MAX_FACTORIAL or k < 0:
            raise Undefined("binomial beyond the bounds")
        return Fraction(math.comb(n, k))
    if name in ("gcd", "lcm") and whole:
        integers = [int(value) for value in numbers]
        return Fraction(math.gcd(*integers) if name == "gcd" else math.lcm(*integers))
    return None


def numeric(node: Node, values: Mapping[str, Any] = {}, digits: int = DIGITS) -> Any:
    """The value as an mpmath number. ``log`` without a base is decimal.

    Raises Undefined where there is none.
    """
    import mpmath

    with mpmath.workdps(digits):
        try:
            return _Numeric(mpmath, values).value(node)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise Undefined(str(error)) from error


class _Numeric:
    def __init__(self, mpmath: Any, values: Mapping[str, Any]) -> None:
        self._mp, self._values = mpmath, values

    def value(self, node: Node) -> Any:
        mp, kind = self._mp, node[0]
        if kind in ("num", "dec"):
            return mp.mpf(node[1].numerator) / node[1].denominator
        if kind == "var":
            value = self._values[node[1]]
            return mp.mpf(value.numerator) / value.denominator
        if kind == "const":
            return {"pi": +mp.pi, "e": +mp.e, "i": mp.mpc(0, 1), "inf": mp.inf}[node[1]]
        if kind == "call":
            return self._call(node[1], [self.value(part) for part in node[2:]])
        a = self.value(node[1])
        if kind == "neg":
            return -a
        b = self.value(node[2])
        if kind == "add":
            result = a + b
        elif kind == "mul":
            result = a * b
        elif kind == "div":
            result = a / b
        elif kind == "root":
            result = self._root(a, b)
        else:
            result = self._power(a, b)
        return self._finite(result, a, b)

    def _finite(self, value: Any, *parts: Any) -> Any:
        mp = self._mp
        if (
            mp.isnan(value)
            or any(mp.isinf(part) for part in parts)
            or (mp.isinf(value) and not isinstance(value, mp.mpf))
        ):
            raise Undefined("not finite")
        return value

    def _power(self, base: Any, power: Any) -> Any:
        mp = self._mp
        if base == 0:
            if mp.re(power) < 0:
                raise Undefined("division by zero")
            return mp.mpf(1) if power == 0 else mp.mpf(0)
        if mp.isinf(base) or mp.isinf(power):
            raise Undefined("infinite power")
        size = abs(mp.re(power)) * abs(mp.log(abs(base))) + abs(mp.im(power)) * 4
        if size > MAX_LOG2:
            raise Undefined("power beyond the bounds")
        return base**power

    def _root(self, value: Any, index: Any) -> Any:
        mp = self._mp
        if mp.im(value) == 0 and mp.im(index) == 0 and index == int(mp.re(index)):
            if int(index) % 2 and mp.re(value) < 0:
                return -((-value) ** (1 / index))
        return self._power(value, 1 / index)

    def _call(self, name: str, arguments: list[Any]) -> Any:
        mp, x = self._mp, arguments[0]
        for value in arguments:
            if mp.isinf(value) or abs(value) > mp.mpf(10) ** 1000:
                raise Undefined("argument beyond the bounds")
        if name in ("log", "ln"):
            if x == 0:
                raise Undefined("logarithm of zero")
            if len(arguments) == 2:
                return mp.log(x) / mp.log(arguments[1])
            return mp.log(x) / (1 if name == "ln" else mp.log(10))
        if name in ("factorial", "binomial"):
            if any(abs(value) > MAX_FACTORIAL for value in arguments):
                raise Undefined(f"{name} beyond the bounds")
            return mp.factorial(x) if name == "factorial" else mp.binomial(*arguments)
        if name in ("floor", "ceil", "max", "min"):
            if any(mp.im(value) for value in arguments):
                raise Undefined(f"{name} of a complex number")
            if name in ("max", "min"):
                return max(arguments) if name == "max" else min(arguments)
            return mp.floor(x) if name == "floor" else mp.ceil(x)
        if name == "abs":
            return abs(x)
        if name == "degrees":
            return x * mp.pi / 180
        names = {"arc" + n: "a" + n for n in ("sin", "cos", "tan", "cot", "sec", "csc")}
        names |= {"arsinh": "asinh", "arcosh": "acosh", "artanh": "atanh"}
        names |= {f"arc{n}h": f"a{n}h" for n in ("sin", "cos", "tan", "cot")}
        function = getattr(mp, names.get(name, name), None)
        if function is None or name in ("gcd", "lcm"):
            raise Undefined(f"no value for {name}")
        if "h" in name and abs(mp.re(x)) > MAX_LOG2:
            raise Undefined("hyperbolic function beyond the bounds")
        return function(x)


def points(names: set[str]) -> list[dict[str, Fraction]]:
    """Fixed sample points for variables: small, negative and larger values.

    Their denominator is a large prime, so that no formula can be made to vanish at all of them
    by a period.
    """
    source = random.Random("points" + ",".join(sorted(names)))
    ranges = [(0.2, 3.0)] * 4 + [(-3.0, -0.2)] * 3 + [(-0.95, 0.95)] * 3 + [(3.0, 12.0)] * 3
    return [
        {
            name: Fraction(int(source.uniform(low, high) * POINT_PRIME), POINT_PRIME)
            for name in sorted(names)
        }
        for low, high in ranges
    ]
