"""The shape of an answer: text, number with unit, list, tuple or interval, matrix, relation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sage_jax.verify import units
from sage_jax.verify.grammar import Node, ParseError, choose_sign, has_sign_pair, parse
from sage_jax.verify.normalise import words

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
_MATRIX = re.compile(r"^\\begin\s*\{([pb]matrix|matrix)\}(.*)\\end\s*\{\1\}$", re.DOTALL)
_GROUPED = re.compile(r"^-?\d{1,3}(?:,\d{3})+(?:\.\d+)?$")
_NUMERALS = {
    word: number
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty".split()
    )
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_SPELLED = {"one half": r"\frac{1}{2}", "half": r"\frac{1}{2}", "one third": r"\frac{1}{3}",
            "two thirds": r"\frac{2}{3}", "one fourth": r"\frac{1}{4}",
            "one quarter": r"\frac{1}{4}", "three fourths": r"\frac{3}{4}",
            "three quarters": r"\frac{3}{4}", "infinity": r"\infty",
            "negative infinity": r"-\infty"}  # fmt: skip
_REALS = {"all real numbers", "all reals", "real numbers", "all real values"}
_SHORT_WORDS = set("yes no odd even all none one two six ten sun mon tue wed thu fri sat".split())


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
    spelled = _spelled(words(text))
    if spelled is not None:
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
        return _listing(connected)
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
        rows = re.split(r"\\\\(?:\[[^\]]*\])?", match.group(2).strip().removesuffix("\\\\"))
        return Matrix(tuple(tuple(_shape(cell) for cell in row.split("&")) for row in rows))
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
        return relation
    return _ratio(text) or _based(text) or _value(text)


def _value(text: str):
    percent = re.match(r"^(.*?)\s*(?:\\%|%|\\text\s*\{\s*percent\s*\}|percent)$", text, re.DOTALL)
    body, unit = units.split(percent.group(1) if percent else text)
    scaled = re.match(r"^([\d.,]+)\s+(million|billion|thousand|hundred)$", f"{body} {unit}".strip())
    try:
        if scaled:
            number = scaled.group(1).replace(",", "")
            return Value(("mul", parse(number), ("num", _SCALES[scaled.group(2)])))
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
    if any(mark in text for mark in ("<", ">", ",", ";", "\\leq", "\\geq", "\\cup")):
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
    shapes = tuple(_shape(term) if term else Raw("") for term in terms)
    return Relation(shapes, tuple(operators))


def _ratio(text: str) -> Ratio | None:
    parts = split_top(text, (":",))
    if len(parts) < 2 or not all(parts):
        return None
    return Ratio(tuple(_value(part) for part in parts))


def _based(text: str) -> Based | None:
    plain = re.sub(r"\\text\s*\{([0-9A-Fa-f]+)\}", r"\1", text)
    match = re.match(r"^(?=[0-9A-F]*\d|[A-F]+_)([0-9A-Fa-f]+)\s*_\s*\{?\s*(\d{1,2})\s*\}?$", plain)
    return Based(match.group(1).upper(), int(match.group(2))) if match else None


def _spelled(found: str) -> str | None:
    if found in _SPELLED:
        return _SPELLED[found]
    return str(_NUMERALS[found]) if found in _NUMERALS else None


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
