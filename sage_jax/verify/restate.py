"""Whether an answer is a formula of its question, in the same or another spelling.

Two formulas are spellings of one another when their trees agree once sums and products are
flattened and sorted, brackets and signs are gone, and nothing of value 0 or 1 is added or
multiplied. No arithmetic is done: 12 restates neither 3*4 nor 10+2.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from sage_jax.verify.extract import FORMULA
from sage_jax.verify.grammar import Node, ParseError, parse
from sage_jax.verify.normalise import clean, squeeze
from sage_jax.verify.structure import Bracket, Listing, Raw, Relation, Text, Value, read, split_top

MAX_QUESTION = 20_000
MAX_FORMULAS = 200
_PLAIN = re.compile(r"[\d(][\d\s+\-*/^().\u00d7\u00f7\u00b7]{1,200}[\d)!]")
_DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)  # its code may hold the answer
_CROSS = re.compile(r"(?<=\d)\s*x\s*(?=\d)")
_RELATION = ("=", "<", ">", "\\leq", "\\geq", "\\neq", "\\approx", ",", ";")
_ONE, _ZERO = ("num", Fraction(1)), ("num", Fraction(0))


def restates(text: str, gold: str, question: str) -> bool:
    """Whether a composed answer stands in the question, and not in the gold: it shows no work."""
    question = _DRAWING.sub("", question[:MAX_QUESTION])
    shape = read(text)[0]
    if isinstance(shape, Text) or (isinstance(shape, Raw) and shape.text.isalnum()):
        return False
    node = _formula(shape)
    wanted = None if node is None else _spelling(node)
    atom = wanted is not None and _is_atom(wanted)
    if atom and not isinstance(shape, Relation):
        return False
    needle = squeeze(text)
    if atom:  # x = 2 is no part of sec x = 2 cos x
        return any(needle == squeeze(clean(found)) for found in _formula_texts(question))
    if len(needle) > 1 and needle in squeeze(clean(question)):
        return True
    if wanted is None or wanted in (_spelling(found) for found in _formulas(gold)):
        return False  # the gold in another spelling is no worse than the gold
    return any(_holds(found, wanted) for found in _spellings(question))


def _formula(shape) -> Node | None:
    """The formula that an answer gives its value by, whatever is put around it."""
    if isinstance(shape, Value):
        node = shape.node
        return node[2] if node[:2] == ("call", "abs") else node
    if isinstance(shape, Relation):
        return _formula(shape.terms[-1])
    if isinstance(shape, Listing | Bracket) and len(shape.items) == 1:
        return _formula(shape.items[0])
    return None


def _formulas(text: str) -> list[Node]:
    """The formulas on all sides of the relations in a text; what does not parse is left out."""
    found = []
    for part in split_top(clean(text), _RELATION):
        try:
            found.append(parse(part))
        except (ParseError, RecursionError):
            continue
    return found


def _formula_texts(question: str) -> list[str]:
    return [next(group for group in m.groups() if group) for m in FORMULA.finditer(question)]


@lru_cache(maxsize=64)
def _spellings(question: str) -> tuple[Node, ...]:
    """The formulas of a question, marked as such or plain arithmetic in its words."""
    texts = _formula_texts(question) + _PLAIN.findall(_CROSS.sub("*", question))
    found: list[Node] = []
    for text in texts[:MAX_FORMULAS]:
        found += map(_spelling, _formulas(text))
    return tuple(found)


def _spelling(node: Node) -> Node:
    """One tree for all spellings of a formula."""
    kind = node[0]
    if kind == "dec":
        return ("num", node[1])
    if kind in ("num", "var", "const"):
        return node
    if kind == "neg":
        inner = _spelling(node[1])
        return ("num", -inner[1]) if inner[0] == "num" else ("mul", ("num", Fraction(-1)), inner)
    if kind == "div":
        above, below = _spelling(node[1]), _spelling(node[2])
        if above[0] == below[0] == "num":
            return ("over", above[1], below[1])
        return _flat("mul", [above, ("pow", below, "-1")], _ONE) if below != _ONE else above
    if kind == "pow" and node[2] == _ONE:
        return _spelling(node[1])
    if kind == "root":
        return ("root", _spelling(node[1]), _spelling(node[2]))
    if kind in ("add", "mul"):
        return _flat(kind, [_spelling(part) for part in node[1:]], _ZERO if kind == "add" else _ONE)
    return tuple(_spelling(part) if isinstance(part, tuple) else part for part in node)


def _flat(kind: str, parts: list[Node], neutral: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat += part[1:] if part[0] == kind else [part]
    flat = sorted((part for part in flat if part != neutral), key=repr)
    return neutral if not flat else flat[0] if len(flat) == 1 else (kind, *flat)


def _is_atom(spelling: Node) -> bool:
    if spelling[0] == "mul" and len(spelling) == 3 and spelling[1] == ("num", Fraction(-1)):
        spelling = spelling[2]
    return spelling[0] in ("num", "var", "const")


def _holds(tree: Node, wanted: Node) -> bool:
    """Whether the wanted tree is a part of ``tree``, or some terms of one of its sums."""
    if tree == wanted:
        return True
    if tree[0] == wanted[0] and tree[0] in ("add", "mul"):
        left = list(tree[1:])
        for part in wanted[1:]:
            if part not in left:
                break
            left.remove(part)
        else:
            return True
    return any(_holds(part, wanted) for part in tree[1:] if isinstance(part, tuple))
