"""Units behind a number: which are the same, which convert, which contradict."""

from __future__ import annotations

import re
from fractions import Fraction

from sage_jax.verify.spelled import NOT_UNITS

# name: (dimension, size in that dimension's unit)
_TABLE: dict[str, tuple[str, Fraction]] = {}


def _add(dimension: str, entries: str) -> None:
    for entry in entries.split(";"):
        names, size = entry.split("=")
        for name in names.split(","):
            _TABLE[name.strip()] = (dimension, Fraction(size.strip()))


_add(
    "length",
    "mm,millimeter,millimetre=1/1000; cm,centimeter,centimetre=1/100; m,meter,metre=1; "
    "km,kilometer,kilometre=1000; in,inch,inche=254/10000; ft,foot,feet=3048/10000; "
    "yd,yard=9144/10000; mi,mile=1609344/1000",
)
_add("time", "s,sec,second=1; min,minute=60; h,hr,hrs,hour=3600; day=86400; week=604800")
_add(
    "mass",
    "mg,milligram=1/1000; g,gram=1; kg,kilogram=1000; ton,tonne=1000000; "
    "lb,lbs,pound=45359237/100000; oz,ounce=45359237/1600000",
)
_add(
    "volume",
    "ml,milliliter,millilitre=1/1000; l,liter,litre=1; cup=473176473/2000000000; "
    "pint=473176473/1000000000; quart=946352946/1000000000; gallon=3785411784/1000000000",
)
_add("money", "dollar,usd=1; cent=1/100")
_add("angle", "degree,deg=1")
_add("turn", "radian,rad=1")
_add("year", "month=1/12; year,yr,yrs=1; decade=10; century=100")
_IGNORED = {"unit", "of", "the", "", "total"}
_SHORT = {name for name in _TABLE if len(name) <= 3}

_MACRO_UNIT = re.compile(
    r"^(?P<value>.*?(?:[\d})\]!%]|\\pi))\s*(?P<unit>(?:\\text\s*\{[^{}]*\}\s*"
    r"(?:\^\s*\{?-?\d\}?)?\s*(?:[/.]|\\cdot|\\times)?\s*)+)$"
)
_WORD_UNIT = re.compile(r"^(?P<value>.*[\d})\]!%])\s+(?P<unit>[A-Za-z]{2,}(?:[ /][A-Za-z.]+)*)$")
_FUNCTION = re.compile(r"\\circ|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_DEGREES = re.compile(
    r"^(?P<value>.*?)\s*\^\s*\\circ\s*(?:\\text\s*\{\s*(?P<a>[CFK]?)\s*\}|(?P<b>[CF]))?$"
)
_TEMPERATURE = re.compile(r"\b(?:degrees? )?(c|f|celsius|fahrenheit)\b")


def split(text: str) -> tuple[str, str]:
    """A quantity as (value, unit text); the unit is "" when there is none."""
    match = _DEGREES.match(text)
    if match and match["value"] and not _FUNCTION.search(match["value"]):
        return match["value"], f"degree {match['a'] or match['b'] or ''}".strip()
    match = _MACRO_UNIT.match(text)
    if match:
        unit = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", match["unit"])
        unit = re.sub(r"\\(?:cdot|times)", " ", unit)
        unit = re.sub(r"[{}.]", "", unit).strip()
        return (match["value"], unit) if _is_unit(unit) else (text, "")
    match = _WORD_UNIT.match(text)
    if match:
        first = re.split(r"[ /]", match["unit"])[0].casefold()
        known = len(first) >= 4 or first in _SHORT or first in ("mph", "sq")
        if known and _is_unit(match["unit"]):
            return match["value"], match["unit"]
    return text, ""


def _is_unit(unit: str) -> bool:
    """Whether words behind a number leave its value alone."""
    if not re.fullmatch(r"(?:[A-Za-z/\u00b5\u03bc][A-Za-z\s/^*\d,\u00b5\u03bc-]*)?", unit.strip()):
        return False
    return not NOT_UNITS & set(re.findall(r"[a-z]+", unit.casefold()))


def same(gold: str, other: str) -> Fraction | None:
    """Factor that turns a value in ``other`` into one in ``gold``; None if they contradict.

    A unit missing on one side is no contradiction.
    """
    if not gold or not other:
        return Fraction(1)
    scales = [_TEMPERATURE.search(unit.casefold()) for unit in (gold, other)]
    if scales[0] and scales[1]:
        return Fraction(1) if scales[0][1][0] == scales[1][1][0] else None
    if scales[0] or scales[1]:
        gold, other = (_TEMPERATURE.sub("degree", unit.casefold()) for unit in (gold, other))
    a, b = _parse(gold), _parse(other)
    if a is None or b is None:
        return Fraction(1) if _plain(gold) == _plain(other) else None
    if not a[0] or not b[0]:
        return Fraction(1)
    return b[1] / a[1] if a[0] == b[0] else None


def _plain(unit: str) -> str:
    found = re.findall(r"[A-Za-z]+|\d", unit)  # MHz is not mHz
    return " ".join(
        w if len(w) < 4 and w.casefold() not in ("am", "pm") else _singular(w.casefold())
        for w in found
    )


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _plural_in_es(word: str) -> tuple[str, Fraction] | None:
    return _TABLE.get(word[:-2]) if word.endswith("es") else None


def _parse(unit: str) -> tuple[dict[str, int], Fraction] | None:
    """Dimensions with powers and size; None when a word is unknown."""
    dimensions: dict[str, int] = {}
    size, last_size, sign, power = Fraction(1), Fraction(1), 1, 1
    text = unit.casefold().replace("mph", "mile per hour").replace("^", " ^")
    for word in re.findall(r"[a-z]+|/|\^\s*-?\d", text):
        if word in ("/", "per"):
            sign = -1
        elif word in ("square", "sq"):
            power = 2
        elif word in ("cubic", "cu"):
            power = 3
        elif word.startswith("^"):
            extra = int(word[1:]) - 1
            if not dimensions:
                return None
            last = list(dimensions)[-1]
            dimensions[last] += sign * extra
            size *= last_size ** (sign * extra)
        elif _singular(word) in _IGNORED or word in _IGNORED:
            continue
        else:
            known = _TABLE.get(word) or _TABLE.get(_singular(word)) or _plural_in_es(word)
            if known is None:
                return None
            dimension, last_size = known
            dimensions[dimension] = dimensions.get(dimension, 0) + sign * power
            size *= last_size ** (sign * power)
            power = 1
    return {name: p for name, p in dimensions.items() if p}, size
