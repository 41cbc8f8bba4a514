"""What the judge does with plain values: compare, copy back, write as literals."""

import ast
import math

from codec import CodecError
from remote import Remote

MAX_INT_BITS = 14_000


def parse_input(text):
    """Argument tuple of one input line: ``3, [1]`` and ``(3, [1])`` are two arguments."""
    value = ast.literal_eval(text.strip())
    return value if type(value) is tuple else (value,)


def matches(got, want, compare, atol):
    """Whether a result meets the expected value of an io test (``set``, ``not_none``, ``eq``)."""
    if compare == "not_none":
        return got == want if type(got) is bool else (got is not None) == want
    if compare == "set":
        try:
            return set(got) == set(want)
        except TypeError:
            return False
    return _equal(got, want, atol)


def _equal(got, want, atol):
    if isinstance(got, Remote):
        return False
    numbers = (int, float)
    if type(got) in numbers and type(want) in numbers:
        if got == want or (got != got and want != want):
            return True
        return bool(atol) and abs(got - want) <= atol + 1e-7 * abs(want)
    if type(got) is not type(want):
        return bool(got == want)
    if type(got) in (list, tuple):
        return len(got) == len(want) and all(
            _equal(a, b, atol) for a, b in zip(got, want, strict=True)
        )
    if type(got) is dict:
        return got.keys() == want.keys() and all(_equal(got[k], want[k], atol) for k in want)
    return bool(got == want)


def copy_back(own, changed):
    """Make an argument of the tests look as the solution left it."""
    if type(own) is not type(changed):
        return
    if type(own) in (list, bytearray):
        own[:] = changed
    elif type(own).__name__ == "deque" or type(own) in (dict, set):
        own.clear()
        (own.extend if hasattr(own, "extend") else own.update)(changed)


def literal(value):
    """Python literal of plain data, one text per value; CodecError for anything else."""
    kind = type(value)
    if kind is float and not math.isfinite(value):
        raise CodecError("not_plain")
    if value is None or kind in (bool, float, str, bytes, complex):
        return repr(value)
    if kind is int:
        if value.bit_length() > MAX_INT_BITS:  # Python does not write it in decimal
            raise CodecError("result_too_large")
        return repr(value)
    if kind is list:
        return "[" + ", ".join(map(literal, value)) + "]"
    if kind is tuple:
        return "(" + ", ".join(map(literal, value)) + (",)" if len(value) == 1 else ")")
    if kind is set:
        return "{" + ", ".join(sorted(map(literal, value))) + "}" if value else "set()"
    if kind is dict:
        pairs = (f"{literal(key)}: {literal(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise CodecError("not_plain")
