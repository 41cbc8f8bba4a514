"""Values between judge and solution: JSON frames of exact builtin types, never pickle or repr.

Plain data crosses by value; a subclass crosses as its plain base; anything else becomes a handle
that stays with its owner. A frame is four length bytes and JSON text, at most MAX_FRAME.
"""

import collections
import datetime
import decimal
import fractions
import json
import math
import struct
from os import read, write  # by value: a program may put others in os
from typing import Any

MAX_FRAME = 4 << 20
MAX_DEPTH = 200
SAFE_INT = 1 << 53


class CodecError(Exception):
    """A value or frame outside the format; ``str`` is a reason code."""


class Connection:
    """Length-framed JSON over a stream. ``receive`` raises EOFError when the peer is gone."""

    def __init__(self, descriptor):
        self._descriptor = descriptor

    def send(self, message):
        try:
            text = json.dumps(message).encode()
        except (ValueError, RecursionError) as error:
            raise CodecError("not_plain") from error
        if len(text) > MAX_FRAME:
            raise CodecError("result_too_large")
        text = struct.pack(">I", len(text)) + text
        while text:
            text = text[write(self._descriptor, text) :]

    def receive(self):
        (size,) = struct.unpack(">I", self._read(4))
        if size > MAX_FRAME:
            raise CodecError("result_too_large")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise CodecError("broken_frame") from error

    def _read(self, size):
        parts = []
        while size:
            part = read(self._descriptor, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def encode(value, handle, depth=0):
    """JSON form of ``value``; ``handle(value)`` returns the JSON body for what is not plain."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        if len(value) > MAX_FRAME:
            raise CodecError("result_too_large")
        return value
    if kind is int:
        return value if -SAFE_INT < value < SAFE_INT else {"i": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if depth > MAX_DEPTH:
        raise CodecError("too_deep")
    down = depth + 1
    if kind is list:
        return [encode(item, handle, down) for item in value]
    if kind is tuple:
        return {"t": [encode(item, handle, down) for item in value]}
    if kind is dict:
        return {"d": _pairs(value, handle, down)}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [encode(item, handle, down) for item in value]}
    if kind is bytes or kind is bytearray:
        return {"b" if kind is bytes else "a": value.hex()}
    if kind is complex:
        return {"c": [repr(value.real), repr(value.imag)]}
    if kind is range:
        return {"r": [hex(value.start), hex(value.stop), hex(value.step)]}
    if kind is decimal.Decimal:
        return {"m": str(value)}
    if kind is fractions.Fraction:
        return {"q": [hex(value.numerator), hex(value.denominator)]}
    if kind is collections.deque:
        return {"e": [[encode(item, handle, down) for item in value], value.maxlen]}
    if kind is collections.Counter or kind is collections.OrderedDict:
        return {"o" if kind is collections.OrderedDict else "n": _pairs(value, handle, down)}
    if kind in (datetime.date, datetime.time, datetime.datetime):
        return {"l": [kind.__name__, value.isoformat()]}
    if kind is datetime.timedelta:
        return {"l": ["timedelta", value.days, value.seconds, value.microseconds]}
    for base in (bool, int, float, str, list, tuple, dict, set, frozenset, bytes):
        if issubclass(kind, base):
            return encode(_plain_base(value, base), handle, down)
    return {"h": handle(value)}


def _pairs(value, handle, depth):
    return [
        [encode(key, handle, depth), encode(item, handle, depth)] for key, item in dict.items(value)
    ]


def _plain_base(value, base):
    """The content of a subclass instance, read past whatever the subclass overrides."""
    if base is int:
        return int.__index__(value) + 0
    if base is float:
        return float.__float__(value) + 0.0
    if base is str:
        return str.__str__(value)[:] if type(value) is str else "".join(str.__iter__(value))
    if base is dict:
        return dict(dict.items(value))
    if base is bytes:
        return bytes(bytes.__iter__(value))
    return base(base.__iter__(value))


def decode(data, handle, depth=0) -> Any:
    """The value of a JSON form; ``handle(body)`` returns the stand-in for a handle."""
    kind = type(data)
    if data is None or kind in (bool, str, int, float):
        return data
    if depth > MAX_DEPTH:
        raise CodecError("too_deep")
    down = depth + 1
    if kind is list:
        return [decode(item, handle, down) for item in data]
    if kind is not dict or len(data) != 1:
        raise CodecError("broken_frame")
    ((tag, body),) = data.items()
    try:
        return _DECODERS[tag](body, handle, down)
    except CodecError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CodecError("broken_frame") from error


def _items(body, handle, depth):
    if type(body) is not list:
        raise CodecError("broken_frame")
    return [decode(item, handle, depth) for item in body]


def _mapping(body, handle, depth):
    return {decode(key, handle, depth): decode(item, handle, depth) for key, item in body}


def _calendar(body, handle, depth):
    name, *values = body
    if name == "timedelta":
        return datetime.timedelta(*map(int, values))
    kinds = {"date": datetime.date, "time": datetime.time, "datetime": datetime.datetime}
    return kinds[name].fromisoformat(*values)


def _integer(text):
    return int(text, 16)


_DECODERS = {
    "i": lambda body, handle, depth: _integer(body),
    "f": lambda body, handle, depth: float(body),
    "t": lambda body, handle, depth: tuple(_items(body, handle, depth)),
    "d": _mapping,
    "s": lambda body, handle, depth: set(_items(body, handle, depth)),
    "z": lambda body, handle, depth: frozenset(_items(body, handle, depth)),
    "b": lambda body, handle, depth: bytes.fromhex(body),
    "a": lambda body, handle, depth: bytearray.fromhex(body),
    "c": lambda body, handle, depth: complex(float(body[0]), float(body[1])),
    "r": lambda body, handle, depth: range(*map(_integer, body)),
    "m": lambda body, handle, depth: decimal.Decimal(body),
    "q": lambda body, handle, depth: fractions.Fraction(*map(_integer, body)),
    "e": lambda body, handle, depth: collections.deque(
        _items(body[0], handle, depth), None if body[1] is None else int(body[1])
    ),
    "o": lambda body, handle, depth: collections.OrderedDict(_mapping(body, handle, depth)),
    "n": lambda body, handle, depth: collections.Counter(_mapping(body, handle, depth)),
    "l": _calendar,
    "h": lambda body, handle, depth: handle(body),
}


def canonical(value):
    """One text per value, whatever the order of its sets and dicts: for comparing two runs."""

    def refuse(other):
        raise CodecError("not_plain")

    return json.dumps(_sorted_sets(encode(value, refuse)))


def _sorted_sets(data):
    if type(data) is list:
        return [_sorted_sets(item) for item in data]
    if type(data) is not dict:
        return data
    ((tag, body),) = data.items()
    body = _sorted_sets(body) if type(body) is list else body
    if tag in "szdn":
        body = sorted(body, key=json.dumps)
    return {tag: body}
