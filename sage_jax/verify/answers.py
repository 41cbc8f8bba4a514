"""Comparison of two answers by shape; numbers and formulas go to ``equivalence``.

Each comparison returns True, False, or None for "not understood", which leaves the answer to the
last rung of the ladder.
"""

from __future__ import annotations

import re
from fractions import Fraction

from sage_jax.verify import units
from sage_jax.verify.equivalence import proportional, same_value, scaled
from sage_jax.verify.grammar import Node, uses, variables
from sage_jax.verify.normalise import squeeze
from sage_jax.verify.regions import as_region, turned
from sage_jax.verify.structure import (
    Based,
    Bracket,
    Listing,
    Matrix,
    Ratio,
    Raw,
    Relation,
    Text,
    Union,
    Value,
)

_MANY = {"infinitely many", "infinitely many solutions", "infinite", "infinite solutions"}
_CHAIN = ("when", "if", "where", "for", "with")
_NOTHING = {"no solution", "no solutions", "none", "no real solution", "no real solutions"}
_UNDEFINED = {"dne", "does not exist", "undefined", "not defined"}


def equal(gold, other, tolerance: float | None = None) -> bool | None:
    """Whether ``other`` counts as ``gold``."""
    if isinstance(gold, Raw) or isinstance(other, Raw):
        same = isinstance(gold, Raw) and isinstance(other, Raw) and _same_raw(gold, other)
        return True if same else None
    if isinstance(other, Listing) and len(other.items) == 1 and not isinstance(gold, Listing):
        return equal(gold, other.items[0], tolerance)
    rule = _RULES.get(type(gold))
    return rule(gold, other, tolerance) if rule else None


def _same_raw(gold: Raw, other: Raw) -> bool:
    return squeeze(gold.text) == squeeze(other.text)


def _text(gold: Text, other, tolerance) -> bool:
    if isinstance(other, Listing) and not other.items:
        return gold.words in _NOTHING
    if not isinstance(other, Text):
        return False
    for group in (_NOTHING, _UNDEFINED, _MANY):
        if gold.words in group and other.words in group:
            return True
    return gold.words == other.words


def _value(gold: Value, other, tolerance) -> bool | None:
    if isinstance(other, Value):
        return _values(gold, other, tolerance)
    if isinstance(other, Relation) and (_conditional(other) or _broken(other)):
        return None
    if isinstance(other, Ratio):
        return _ratio_value(other, gold)
    if isinstance(other, Relation) and other.operators[-1] == "=":
        return equal(gold, other.terms[-1], tolerance)
    if isinstance(other, Relation) and other.operators[-1] == "\\approx":
        left = other.terms[:-1]
        exact = left[0] if len(left) == 1 else left[-1]
        return equal(gold, exact, tolerance) or equal(gold, other.terms[-1], tolerance)
    return False


def _conditional(relation: Relation) -> bool:
    """``x = 5 when y = 2``: the last side is not what the first one is."""
    texts = " ".join(term.text for term in relation.terms if isinstance(term, Raw))
    return any(word in re.findall("[a-z]+", texts) for word in _CHAIN)


def _broken(relation: Relation) -> bool:
    return any(isinstance(term, Raw) for term in relation.terms[1:-1])


def _values(gold: Value, other: Value, tolerance) -> bool:
    kinds = _angle(gold), _angle(other)
    if set(kinds) == {"degree", "radian"}:
        nodes = [
            ("call", "degrees", value.node) if kind == "degree" else value.node
            for value, kind in zip((gold, other), kinds, strict=True)
        ]
        return same_value(nodes[0], nodes[1], tolerance)
    factor = units.same(gold.unit, other.unit)
    if factor is None:
        return False
    node = scaled(other.node, factor)
    hundredth = Fraction(1, 100)
    if same_value(gold.node, node, tolerance):
        return True
    if gold.percent and not other.percent:
        return same_value(scaled(gold.node, hundredth), node, tolerance)
    if other.percent and not gold.percent:
        return same_value(gold.node, scaled(node, hundredth), tolerance)
    return False


def _angle(value: Value) -> str | None:
    """The measure of an angle: degrees by their sign, radians by their name or by pi."""
    unit = value.unit.casefold().rstrip("s")
    if unit in ("degree", "radian"):
        return unit
    return "radian" if not unit and uses(value.node, "pi") else None


def _listing(gold: Listing, other, tolerance) -> bool | None:
    if gold.items and all(isinstance(item, Relation) for item in gold.items):
        region = as_region(gold)
        if region is not None:
            return _regions(region, as_region(other), tolerance)
    if isinstance(other, Text) and not gold.items:
        return other.words in _NOTHING
    items = other.items if isinstance(other, Listing) else (other,)
    if isinstance(other, Bracket) and len(gold.items) == len(other.items) > 1:
        named = all(_is_assignment(item) for item in gold.items)
        values = [item.terms[1] for item in gold.items] if named else []
        return _all_equal(values, other.items, tolerance) if named else False
    if isinstance(other, Bracket | Union):
        return equal(gold.items[0], other, tolerance) if len(gold.items) == 1 else False
    if len(items) != len(gold.items):
        return False
    names = {_region_name(item) for item in gold.items if _is_assignment(item)}
    if len(names) == len(gold.items) > 1 and not any(isinstance(i, Relation) for i in items):
        return _all_equal([item.terms[1] for item in gold.items], items, tolerance)
    left = list(items)
    unknown = False
    for item in gold.items:
        for place, candidate in enumerate(left):
            nested = isinstance(item, Listing) != isinstance(candidate, Listing)
            verdict = not nested and equal(item, candidate, tolerance)
            unknown = unknown or verdict is None
            if verdict:
                del left[place]
                break
        else:
            return None if unknown else False
    return True


def _bracket(gold: Bracket, other, tolerance) -> bool | None:
    if isinstance(other, Bracket):
        if (gold.opening, gold.closing) != (other.opening, other.closing):
            return False
        return _all_equal(gold.items, other.items, tolerance)
    if isinstance(other, Matrix):
        cells = _vector(other)
        if cells is None:
            return False
        return _all_equal(gold.items, cells, tolerance)
    if isinstance(other, Listing):
        assignments = [item for item in other.items if _is_assignment(item)]
        if len(assignments) == len(other.items) == len(gold.items):
            return _all_equal(gold.items, [item.terms[1] for item in assignments], tolerance)
    region = as_region(other)
    return _regions(as_region(gold), region, tolerance) if region is not None else False


def _union(gold: Union, other, tolerance) -> bool | None:
    return _regions(as_region(gold), as_region(other), tolerance)


def _matrix(gold: Matrix, other, tolerance) -> bool | None:
    if isinstance(other, Bracket):
        cells = _vector(gold)
        return False if cells is None else _all_equal(cells, other.items, tolerance)
    if not isinstance(other, Matrix) or len(gold.rows) != len(other.rows):
        return False
    verdicts = [_all_equal(a, b, tolerance) for a, b in zip(gold.rows, other.rows, strict=True)]
    return _and(verdicts)


def _vector(matrix: Matrix) -> tuple | None:
    if len(matrix.rows) == 1:
        return matrix.rows[0]
    if all(len(row) == 1 for row in matrix.rows):
        return tuple(row[0] for row in matrix.rows)
    return None


def _ratio(gold: Ratio, other, tolerance) -> bool:
    if isinstance(other, Value):
        return _ratio_value(gold, other)
    if not isinstance(other, Ratio) or len(gold.parts) != len(other.parts):
        return False
    if gold.padded != other.padded:
        return False
    if gold.clock and other.clock:
        return _and([equal(a, b) for a, b in zip(gold.parts, other.parts, strict=True)]) is True
    ends = [getattr(ratio.parts[-1], "unit", "") for ratio in (gold, other)]
    if units.same(*ends) is None:  # a.m. and p.m.
        return False
    pairs = list(zip(gold.parts, other.parts, strict=True))
    shares: list[Fraction] = []
    for a, b in pairs:
        x, y = _number(a), _number(b)
        if x is None or y is None:
            return _and([equal(a, b) for a, b in pairs]) is True
        if not x or not y:  # a time of day
            return all(_number(a) == _number(b) for a, b in pairs)
        shares.append(x / y)
    return len(set(shares)) == 1


def _ratio_value(ratio: Ratio, value: Value) -> bool:
    """``2:3`` as the fraction 2/3; a whole number is no ratio."""
    parts = [_number(part) for part in ratio.parts]
    if ratio.clock or len(parts) != 2 or not all(parts) or value.node[0] != "div":
        return False
    return same_value(("div", ratio.parts[0].node, ratio.parts[1].node), value.node)


def _number(value) -> Fraction | None:
    if isinstance(value, Value) and value.node[0] in ("num", "dec"):
        return value.node[1]
    return None


def _based(gold: Based, other, tolerance) -> bool:
    return gold == other


# --- equations and inequalities -----------------------------------------------------------


def _relation(gold: Relation, other, tolerance) -> bool | None:
    if set(gold.operators) == {"="}:
        return _equation(gold, other, tolerance)
    region = as_region(gold)
    if region is not None:
        found = as_region(other)
        if found is not None:
            return _regions(region, found, tolerance) and _same_name(gold, other)
    if not isinstance(other, Relation) or len(gold.operators) != len(other.operators):
        return False
    for candidate in (other, turned(other)):
        if candidate is not None and candidate.operators == gold.operators:
            if _and([equal(a, b) for a, b in zip(gold.terms, candidate.terms, strict=True)]):
                return True
            if len(gold.operators) == 1 and _same_sides(gold, candidate, factor_one=True):
                return True
    return False


def _equation(gold: Relation, other, tolerance) -> bool | None:
    if isinstance(other, Relation):
        if set(other.operators) != {"="}:
            if other.operators[-1] == "\\approx":
                return _equation(gold, Relation(other.terms[:-1], other.operators[:-1]), tolerance)
            return False
        if len(gold.operators) == len(other.operators):
            pairs = zip(gold.terms, other.terms, strict=True)
            if _and([equal(a, b, tolerance) for a, b in pairs]):
                return True
        if len(gold.operators) == len(other.operators) == 1:
            return _same_sides(gold, other, factor_one=False)
        return False
    if isinstance(other, Listing) and len(other.items) != 1:
        return equal(gold.terms[-1], other, tolerance) if _has_name(gold) else False
    return equal(gold.terms[-1], other, tolerance) if _has_name(gold) else False


def _same_sides(gold: Relation, other: Relation, factor_one: bool) -> bool | None:
    sides = [*gold.terms, *other.terms]
    if any(not isinstance(side, Value) for side in sides):
        return False
    a, b = (
        ("add", relation.terms[0].node, ("neg", relation.terms[1].node))
        for relation in (gold, other)
    )
    return proportional(a, b, factor_one)


def _is_assignment(item) -> bool:
    return isinstance(item, Relation) and item.operators == ("=",) and _has_name(item)


def _has_name(relation: Relation) -> bool:
    """Whether the left side only names what the right side gives: x, or f(x)."""
    left = relation.terms[0]
    if isinstance(left, Text) or (isinstance(left, Raw) and not re.search(r"\d|text", left.text)):
        return True
    if not isinstance(left, Value):
        return False
    node = left.node
    call = node[0] == "mul" and node[1][0] == "var" and node[2][0] in ("var", "num")
    return node[0] == "var" or (call and node[1][1] in ("f", "g", "h", "P", "p", "T", "S", "a"))


def _same_name(gold, other) -> bool:
    names = [_region_name(item) for item in (gold, other)]
    return None in names or names[0] == names[1]


def _region_name(item) -> str | None:
    if isinstance(item, Relation):
        for term in item.terms:
            if isinstance(term, Value) and term.node[0] == "var":
                return term.node[1]
    return None


def _regions(gold: list[Bracket] | None, other: list[Bracket] | None, tolerance) -> bool | None:
    if gold is None or other is None:
        return False
    if len(gold) != len(other):
        return False
    left = list(other)
    for part in gold:
        for place, candidate in enumerate(left):
            marks = (part.opening, part.closing) == (candidate.opening, candidate.closing)
            if marks and _all_equal(part.items, candidate.items, tolerance):
                del left[place]
                break
        else:
            return False
    return True


def _all_equal(gold, other, tolerance) -> bool | None:
    if len(gold) != len(other):
        return False
    return _and([equal(a, b, tolerance) for a, b in zip(gold, other, strict=True)])


def _and(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def choice(gold: str, other: str) -> bool | None:
    """Comparison for a multiple-choice gold: a single letter A to J, alone or in brackets."""
    letter = re.fullmatch(r"\(?(?:\\text\s*\{\s*)?\(?([A-J])\)?\s*\}?\)?", gold.strip())
    if not letter:
        return None
    plain = re.sub(r"\\text\s*|[{}]", " ", other).strip()
    found = re.match(r"^(?:\(\s*([A-Za-z])\s*\)(?:[\s.:].*)?|([A-Za-z])(?:[).:].*)?)$", plain, re.S)
    if not found:
        return False
    chosen = found.group(1) or found.group(2)
    rest = plain.partition(chosen)[2]
    if re.search(r"(?<![A-Za-z\d])(?:[A-J]\s*[).:]|[B-J](?![A-Za-z])|A\s*$)", rest):
        return False  # another letter beside it
    return chosen.upper() == letter.group(1)


_RULES = {
    Text: _text, Value: _value, Listing: _listing, Bracket: _bracket, Union: _union,
    Matrix: _matrix, Relation: _relation, Ratio: _ratio, Based: _based,
}  # fmt: skip


def constants(item) -> list[Node] | None:
    """The formulas of an answer without variables, None if it is no definite value."""
    if isinstance(item, Value):
        return None if variables(item.node) else [item.node]
    if isinstance(item, Ratio):
        parts: tuple = item.parts
    elif isinstance(item, Listing | Bracket):
        parts = item.items
    elif isinstance(item, Union):
        parts = item.parts
    elif isinstance(item, Matrix):
        parts = tuple(cell for row in item.rows for cell in row)
    elif isinstance(item, Relation) and item.operators == ("=",) and _has_name(item):
        parts = item.terms[1:]
    else:
        return None
    found: list[Node] = []
    for part in parts:
        nodes = constants(part)
        if nodes is None:
            return None
        found += nodes
    return found
