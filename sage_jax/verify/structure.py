"""The shape of an answer: text, number with unit, list, tuple or interval, matrix, relation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from sage_jax.verify import units
from sage_jax.verify.grammar import Node, ParseError, choose_sign, has_sign_pair, parse
from sage_jax.verify.normalise import words
from sage_jax.verify.spelled import COUNTS
from sage_jax.verify.spelled import number as spelled_number

MAX_ITEMS = 100


@dataclass(frozen=True)
class Text:
    """Words only."""

    words: str


@dataclass(frozen=True)
class Value:
    """A formula with what stood behind it."""

    node: Node
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True)
class Listing:
    """Values in any order: a set, or solutions in a row."""

    items: tuple


@dataclass(frozen=True)
class Bracket:
    """A tuple or an interval; which of them, the other side decides."""

    opening: str
    closing: str
    items: tuple


@dataclass(frozen=True)
class Union:
    parts: tuple


@dataclass(frozen=True)
class Matrix:
    rows: tuple


@dataclass(frozen=True)
class Relation:
    """A chain such as a < b <= c: one more term than operators."""

    terms: tuple
    operators: tuple


@dataclass(frozen=True)
class Ratio:
    parts: tuple
    clock: bool = False  # written like a time of day
    padded: bool = False  # as 7:05, which no ratio is


@dataclass(frozen=True)
class Based:
    digits: str
    base: int


@dataclass(frozen=True)
class Raw:
    """Not understood here."""

    text: str


_CONNECTOR = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])")
_RELATIONS = ("<", ">", "=", "\\leq", "\\geq", "\\neq", "\\in", "\\approx", "\\equiv", "\\ni")
_INEQUALITIES = ("<", ">", "\\leq", "\\geq")
_MATRIX = re.compile(
    r"^([^&]*?)[(\[]?\s*\\begin\s*\{([pb]matrix|matrix)\}(.*)\\end\s*\{\2\}\s*[)\]]?$", re.DOTALL
)
_OUTWARD = re.compile(r"^([\[\](])([^\[\]();]*),([^\[\]();]*)([\[\])])$")
_COUNTED = re.compile(
    rf"^([\d.,]+)\s+(dollars\s+)?({'|'.join(COUNTS)})s?(?:\s+(?:of\s+)?([a-z ]+))?$"
)
_GROUPED = re.compile(r"^-?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_CLOCK = re.compile(r"^\d{1,2}(?::[0-5]\d){1,2}(?!\d)")
_BASE = re.compile(
    r"(?=[0-9A-F]*\d|[A-F]+ ?_)(?P<digits>[0-9A-Fa-f]+) ?(?:_ ?(?:base[ -]?)?| (?:in )?base[ -]?)"
    r"(?P<base>\d{1,2}|[a-z]+)"
)
_REALS = {"all real numbers", "all reals", "real numbers", "all real values"}
_SHORT_WORDS = set("yes no odd even all none one two six ten sun mon tue wed thu fri sat".split())


def understood(shape) -> bool:
    """Whether no part of an answer is ``Raw``."""
    if isinstance(shape, Raw):
        return False
    if isinstance(shape, Matrix):
        return all(understood(cell) for row in shape.rows for cell in row)
    parts = (getattr(shape, name, ()) for name in ("items", "parts", "terms"))
    return all(understood(part) for some in parts for part in some)


def read(text: str) -> list:
    """The possible shapes of an answer in normal spelling, the likeliest first."""
    shapes = [_shape(text)]
    if _GROUPED.match(text):  # 1,234 is a number, but 100,200 may be a list
        shapes.append(Listing(tuple(_shape(part) for part in text.split(","))))
    return shapes


def _shape(text: str):
    text = text.strip()
    if not text:
        return Raw("")
    inside = re.fullmatch(r"\\text\s*\{\s*([A-Za-z]|[\d.,/%-]*\d%?)\s*\}", text)
    if inside:
        return _shape(inside.group(1))
    if (spelled := spelled_number(words(text))) is not None:
        return _shape(spelled)
    if words(text) in _REALS or text.replace(" ", "") == "\\mathbb{R}":
        ends = (Value(("neg", ("const", "inf"))), Value(("const", "inf")))
        return Bracket("(", ")", ends)
    if _is_text(text):
        return Text(words(text))
    if _GROUPED.match(text):
        return _value(text.replace(",", ""))
    connected = _split_connectors(text)
    if len(connected) > 1:
        both = _both(text, connected)
        return both if both is not None else _listing(connected)
    outward = _OUTWARD.match(text)
    if outward and (outward[1] == "]" or outward[4] == "["):  # ]0, 1] is (0, 1]
        ends = (_shape(outward[2]), _shape(outward[3]))
        return Bracket(outward[1].replace("]", "("), outward[4].replace("[", ")"), ends)
    if text.startswith("\\pm") or "\\pm" in text or "\\mp" in text:
        value = _signed_pair(text)
        if value is not None:
            return value
    parts = split_top(text, ("\\cup",))
    if len(parts) > 1:
        return Union(tuple(_shape(part) for part in parts))
    parts = split_top(text, (";",)) if ";" in text else []
    if len(parts) < 2:
        parts = split_commas(text)
    if len(parts) > 1:
        return _listing(parts)
    return _single(text)


def _single(text: str):
    if text in ("\\emptyset", "\\text{empty set}", "\\text{the empty set}"):
        return Listing(())
    match = _MATRIX.match(text)
    if match:
        return _matrix(text, match.group(1), match.group(3))
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2]
        described = re.match(r"\s*[a-zA-Z]\s*(?:\||:|\\text\{\s*such that\s*\})(.*)", inner)
        if described:
            return _shape(described.group(1))
        return Listing(tuple(_shape(part) for part in split_commas(inner)))
    if text[0] in "([" and text[-1] in ")]" and _encloses(text):
        parts = split_commas(text[1:-1], grouped=False)
        if len(parts) > 1:
            items = tuple(_shape(part) for part in parts)
            return Bracket(text[0], text[-1], items)
        if text[0] + text[-1] == "()":
            return _shape(text[1:-1])
    relation = _relation(text)
    if relation is not None:
        return _spread(relation)
    return _ratio(text) or _based(text) or _value(text)


def _value(text: str):
    percent = re.match(r"^(.*?)\s*(?:\\%|%|\\text\s*\{\s*percent\s*\}|percent)$", text, re.DOTALL)
    body, unit = units.split(percent.group(1) if percent else text)
    counted = _COUNTED.match(" ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).split()))
    try:
        if re.search(r"[fgh]\([^()]*[fgh]\(", body):
            raise ParseError("a composition is no product")
        if counted:
            number, dollars, count, unit = counted.groups(default="")
            node = ("mul", parse(number.replace(",", "")), ("num", Fraction(COUNTS[count])))
            return Value(node, (unit or dollars).strip())
        if _GROUPED.match(body):
            body = body.replace(",", "")
        return Value(parse(body), unit, bool(percent))
    except ParseError:
        return Raw(text)


def _listing(parts: list[str]):
    items: list = []
    for part in parts[:MAX_ITEMS]:
        shape = _shape(part)
        items.extend(shape.items if isinstance(shape, Listing) and "\\pm" in part else [shape])
    if len(parts) > MAX_ITEMS:
        return Raw(",".join(parts))
    return Listing(tuple(items))


def _signed_pair(text: str):
    """``a \\pm b`` as its two values, with a left-hand side if there was one."""
    if any(mark in text for mark in (*_INEQUALITIES, ",", ";", "\\cup")):
        return None
    head, equals, tail = text.rpartition("=")
    try:
        node = parse(tail)
        left = Value(parse(head)) if equals else None
    except ParseError:
        return None
    if not has_sign_pair(node):
        return None
    values = [Value(choose_sign(node, upper)) for upper in (True, False)]
    if left is not None:
        return Listing(tuple(Relation((left, value), ("=",)) for value in values))
    return Listing(tuple(values))


def _matrix(text: str, before: str, body: str):
    """A matrix; a factor in front of it goes into its cells."""
    rows = re.split(r"\\\\(?:\[[^\]]*\])?", body.strip().removesuffix("\\\\"))
    cells = [[_shape(cell) for cell in row.split("&")] for row in rows]
    if before.strip():
        try:
            factor = parse(before.strip().removesuffix("\\cdot"))
        except ParseError:
            return Raw(text)
        if not all(isinstance(cell, Value) for row in cells for cell in row):
            return Raw(text)
        cells = [[Value(("mul", factor, cell.node)) for cell in row] for row in cells]
    return Matrix(tuple(tuple(row) for row in cells))


def _spread(relation: Relation):
    """``(x, y) = (1, 2)`` as two equations, ``x \\in \\{1, 2\\}`` as its set."""
    left, right = relation.terms[0], relation.terms[-1]
    if relation.operators == ("\\in",) and isinstance(right, Listing) and right.items:
        return right
    if relation.operators != ("=",) or not isinstance(left, Bracket):
        return relation
    if not isinstance(right, Bracket) or len(left.items) != len(right.items):
        return relation
    if any(not isinstance(name, Value) or name.node[0] != "var" for name in left.items):
        return relation
    pairs = zip(left.items, right.items, strict=True)
    return Listing(tuple(Relation(pair, ("=",)) for pair in pairs))


def _both(text: str, parts: list[str]) -> Relation | Raw | None:
    """``x > 1 and x < 3`` as one chain; None if the parts are no bounds of one variable."""
    if "and" not in text or len(parts) != 2:
        return None
    first, second = (_bound(_shape(part)) for part in parts)
    if first is None or second is None or first[0] != second[0]:
        return None
    if first[1] == second[1]:
        return Raw(text)
    (name, _, low, from_low), (_, _, high, to_high) = (
        (first, second) if second[1] else (second, first)
    )
    return Relation((low, name, high), (from_low, to_high))


def _bound(shape) -> tuple | None:
    """Variable, whether it is bounded above, the bound, and the operator read upwards."""
    if not isinstance(shape, Relation) or len(shape.operators) != 1:
        return None
    left, right = shape.terms
    operator = shape.operators[0]
    if operator not in _INEQUALITIES or not isinstance(left, Value):
        return None
    upwards = {">": "<", "\\geq": "\\leq"}.get(operator, operator)
    if left.node[0] == "var":
        return left, operator == upwards, right, upwards
    if isinstance(right, Value) and right.node[0] == "var":
        return right, operator != upwards, left, upwards
    return None


def _relation(text: str) -> Relation | None:
    terms, operators, start, depth, place = [], [], 0, 0, 0
    while place < len(text):
        depth += _step(text, place)
        found = next((r for r in _RELATIONS if depth == 0 and text.startswith(r, place)), None)
        if found and (found[0] != "\\" or not text[place + len(found) :][:1].isalpha()):
            length = len(found)
            name = found
            for spelling, macro in (("<=", "\\leq"), (">=", "\\geq"), ("==", "=")):
                if text.startswith(spelling, place):
                    name, length = macro, 2
            terms.append(text[start:place].strip())
            operators.append(name)
            place += length
            start = place
        else:
            place += 2 if text[place] == "\\" and place + 1 < len(text) else 1
    if not operators:
        return None
    terms.append(text[start:].strip())
    if not any(terms) or not (terms[0] or terms[-1]):
        return None
    shapes = tuple(_shape(term) if term else Raw("") for term in terms)
    return Relation(shapes, tuple(operators))


def _ratio(text: str) -> Ratio | None:
    parts = split_top(text, (":",))
    if len(parts) < 2 or not all(parts):
        return None
    clock, padded = bool(_CLOCK.match(text)), bool(re.search(r":0\d", text))
    return Ratio(tuple(_value(part) for part in parts), clock, padded)


def _based(text: str) -> Based | None:
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    plain = " ".join(re.sub(r"[(){}]", " ", plain).split())
    match = _BASE.fullmatch(plain)
    if not match:
        return None
    base = match["base"] if match["base"].isdigit() else spelled_number(match["base"]) or "0"
    return Based(match["digits"].upper(), int(base)) if base.isdigit() and int(base) > 1 else None


def _is_text(text: str) -> bool:
    """Words rather than a product of letters: marked as text, or a run of four letters."""
    outside = re.sub(r"\\text\s*\{[^{}]*\}", "", text)
    if outside != text and not re.search(r"[A-Za-z\d\\<>=]", outside):
        inside = "".join(re.findall(r"\\text\s*\{([^{}]*)\}", text))
        return not re.fullmatch(r"[\s\d.,/%-]*|\s*(?:and|or)\s*", inside)
    if "\\" in text or not re.fullmatch(r"[A-Za-z][A-Za-z\d\s,.'-]*", text):
        return False
    if _CONNECTOR.search(text) and all(len(w) == 1 for w in _CONNECTOR.split(text)):
        return False
    found = re.findall(r"[A-Za-z]+", text)
    return any(len(word) >= 4 for word in found) or text.casefold() in _SHORT_WORDS


def _split_connectors(text: str) -> list[str]:
    parts, start, depth, place = [], 0, 0, 0
    while place < len(text):
        match = _CONNECTOR.match(text, place) if depth == 0 else None
        if match:
            parts.append(text[start:place])
            place = start = match.end()
            continue
        depth += _step(text, place)
        place += 2 if text[place] == "\\" and place + 1 < len(text) else 1
    if not parts:
        return [text]
    pieces: list[str] = []
    for part in [*parts, text[start:]]:
        pieces += split_commas(part.strip().strip(",").strip())
    return [piece for piece in pieces if piece]


def split_commas(text: str, grouped: bool = True) -> list[str]:
    """Parts between top-level commas; ``1,234`` stays whole unless ``grouped`` is False."""
    if grouped:
        groups = r"(?<![\d,.])(\d{1,3}(?:,\d{3})+)(?![\d,])"
        text = re.sub(groups, lambda match: match[0].replace(",", ""), text)
    return split_top(text, (",",))


def split_top(text: str, separators: tuple[str, ...]) -> list[str]:
    """Parts between separators that are inside no bracket, group or environment."""
    parts, start, depth, place = [], 0, 0, 0
    while place < len(text):
        depth += _step(text, place)
        found = next((s for s in separators if depth == 0 and text.startswith(s, place)), None)
        if found:
            parts.append(text[start:place].strip())
            place += len(found)
            start = place
        else:
            place += 2 if text[place] == "\\" and place + 1 < len(text) else 1
    parts.append(text[start:].strip())
    return parts


def _step(text: str, place: int) -> int:
    """Change of nesting at ``place``."""
    char = text[place]
    if char in "([{":
        return 1
    if char in ")]}":
        return -1
    if char == "\\":
        if text.startswith(("\\{", "\\begin"), place):
            return 1
        if text.startswith(("\\}", "\\end"), place):
            return -1
    return 0


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last character only."""
    depth, place = 0, 0
    while place < len(text) - 1:
        depth += _step(text, place)
        if depth == 0:
            return False
        place += 2 if text[place] == "\\" else 1
    return True
