"""The parts of the real line that an answer stands for: intervals, unions, solved inequalities."""

from __future__ import annotations

from sage_jax.verify.grammar import variables
from sage_jax.verify.structure import Bracket, Listing, Relation, Union, Value

INFINITY: Value = Value(("const", "inf"))
MINUS_INFINITY: Value = Value(("neg", ("const", "inf")))
_FLIPPED = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "\\neq": "\\neq", "=": "="}


def turned(relation: Relation) -> Relation | None:
    """The same read from right to left; None for an operator that has no mirror."""
    if any(operator not in _FLIPPED for operator in relation.operators):
        return None
    operators = tuple(_FLIPPED[operator] for operator in reversed(relation.operators))
    return Relation(tuple(reversed(relation.terms)), operators)


def as_region(item) -> list[Bracket] | None:
    """The intervals an answer stands for, None if it stands for none."""
    if isinstance(item, Bracket):
        return [item] if len(item.items) == 2 else None
    if isinstance(item, Union | Listing):
        parts: list[Bracket] = []
        for part in item.parts if isinstance(item, Union) else item.items:
            region = as_region(part)
            if region is None:
                return None
            parts += region
        return parts or None
    if isinstance(item, Relation):
        return _solved(item)
    return None


def _solved(relation: Relation) -> list[Bracket] | None:
    """Intervals of a solved inequality: one bare variable, constants on the other sides."""
    terms, operators = relation.terms, relation.operators
    if operators == ("\\in",):
        return as_region(terms[1])
    if any(not isinstance(term, Value) for term in terms):
        return None
    bare = [place for place, term in enumerate(terms) if term.node[0] == "var"]
    others = [term.node for place, term in enumerate(terms) if place not in bare]
    if len(bare) != 1 or any(variables(node) for node in others):
        return None
    if operators == ("\\neq",):
        point = terms[1 - bare[0]]
        return [
            Bracket("(", ")", (MINUS_INFINITY, point)),
            Bracket("(", ")", (point, INFINITY)),
        ]
    if operators[0] in (">", "\\geq"):
        return _solved(turned(relation) or relation) if turned(relation) else None
    if any(operator not in ("<", "\\leq") for operator in operators):
        return None
    if len(operators) == 1:
        if bare[0] == 0:
            closing = "]" if operators[0] == "\\leq" else ")"
            return [Bracket("(", closing, (MINUS_INFINITY, terms[1]))]
        return [Bracket("[" if operators[0] == "\\leq" else "(", ")", (terms[0], INFINITY))]
    if len(operators) == 2 and bare[0] == 1:
        opening = "[" if operators[0] == "\\leq" else "("
        closing = "]" if operators[1] == "\\leq" else ")"
        return [Bracket(opening, closing, (terms[0], terms[2]))]
    return None
