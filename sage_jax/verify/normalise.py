"""One spelling per answer: unicode to LaTeX, macros to one of their names, wrappers removed."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_CHARS, MAX_NESTING, MAX_DIGITS = 2000, 50, 1000

_SYMBOLS = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\u2012\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00b7\u22c5\u2219\u2022", r"\cdot "),
    **dict.fromkeys("\u00b0\u00ba\u02da", r"^\circ "),
    **dict.fromkeys("\u2264\u2a7d\u2266", r"\leq "),
    **dict.fromkeys("\u2265\u2a7e\u2267", r"\geq "),
    "\u00d7": r"\times ", "\u00f7": "/", "\u2044": "/", "\u2215": "/", "\u221e": r"\infty ",
    "\u2260": r"\neq ", "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u222a": r"\cup ",
    "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u2032": "'",
    "\u2248": r"\approx ", "\u20ac": r"\euro ", "\u00a3": r"\pounds ", "\u2220": r"\angle ",
    "\u25b3": r"\triangle ", "\u3002": ".",
    "\u3001": ",", "\u2308": r"\lceil ", "\u2309": r"\rceil ", "\u230a": r"\lfloor ",
    "\u230b": r"\rfloor ", "\u221d": r"\propto ", "\u2026": r"\dots ",
}  # fmt: skip
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
    "varsigma sigma tau upsilon phi chi psi omega"
).split()
_SYMBOLS |= {chr(0x3B1 + n): f"\\{name} " for n, name in enumerate(_GREEK)}
_SYMBOLS |= {"\u0394": r"\Delta ", "\u03a9": r"\Omega ", "\u03a3": r"\Sigma "}
_SUPER = dict(
    zip(
        "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f\u2071",
        "0123456789+-ni",
        strict=True,
    )
)
_SUB = {chr(0x2080 + digit): str(digit) for digit in range(10)}

_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "lbrace": "{", "rbrace": "}", "ge": "geq", "geqslant": "geq", "le": "leq", "leqslant": "leq",
    "ne": "neq", "varnothing": "emptyset", "infin": "infty", "operatorname": "text",
    "mathrm": "text", "textbf": "text", "textit": "text", "textrm": "text", "mbox": "text",
    "textnormal": "text", "texttt": "text", "textsf": "text", "mathop": "text",
    "nicefrac": "frac", "sfrac": "frac", "lnot": "neg", "overrightarrow": "vec",
    "varphi": "phi", "vartheta": "theta", "varepsilon": "epsilon", "colon": ":",
}  # fmt: skip
_REPLACED = {
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lbrack": "[", "rbrack": "]",
    "lt": "<", "gt": ">", "div": "/", "ast": "*", "degree": r"^\circ ", "lor": r"\text{or}",
    "langle": "(", "rangle": ")", "R": r"\mathbb{R}", "land": r"\text{and}",
    "vee": r"\text{or}", "wedge": r"\text{and}",
}  # fmt: skip
_DROPPED = set(
    "displaystyle textstyle scriptstyle limits nolimits rm bf it left right big Big bigg Bigg bigl "
    "bigr Bigl Bigr biggl biggr Biggl Biggr mathbf boldsymbol bm mathit mathsf underline uline "
    "boxed fbox mathcal mathscr middle normalsize large Large cal".split()
)
_SPACES = set("quad qquad thinspace enspace space hfill hfil".split())
_PRIME = re.compile(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))")
_UNIT_FRACTION = re.compile(
    r"\\frac\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}"
)
_INFIX = re.compile(r"\{([^{}]*)\\(over|choose|atop)(?![a-zA-Z])([^{}]*)\}")
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(?:((?:sqrt|sin|cos|tan|ln|log|exp)(?=\s*\()|sqrt(?=\d))|(pi)(?![A-Za-z]))"
)
_ARRAY = re.compile(r"\\begin\s*\{array\}\s*\{[lcr|\s]*\}(.*?)\\end\s*\{array\}", re.DOTALL)
_MACRO = re.compile(r"\\(left|right)\s*\.|\\([a-zA-Z]+)")


class GuardError(ValueError):
    """A text beyond the limits set before any parsing; ``str`` is a reason code."""


def guard(text: str) -> None:
    """Size limits on an extracted answer; raises GuardError."""
    if len(text) > MAX_CHARS:
        raise GuardError("answer_too_long")
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", text):
        raise GuardError("too_many_digits")
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth > MAX_NESTING:
            raise GuardError("nested_too_deep")


def clean(text: str) -> str:
    """The normal spelling of an answer. Total: never raises, linear passes only."""
    text = _from_unicode(text)
    text = re.sub(r"^\s*(\*\*|__|_)(.+)\1\s*$", r"\2", text)
    text = text.replace("{,}", ",").replace(r"\!", "").replace("~", " ")
    text = re.sub(r"(?<!\\)\\[,;: ]", " ", text)
    text = re.sub(r"\\(?:color|hspace|phantom|vspace)\s*\{[^{}]*\}", "", text)
    text = re.sub(r"\\textcolor\s*\{[^{}]*\}", "", text)
    text = _MACRO.sub(_macro, text)
    text = _PRIME.sub("'", text)
    text = re.sub(r"\\(euro|pounds)\s*([\d.,]+)", r"\2\\text{ \1}", text)
    text = re.sub(r"\b(?:USD|US\\?\$)\s*(?=\d)", r"\\$", text)
    text = re.sub(r"\\?\$\s*(\d[\d.,]*\d|\d)(?!\$)", _dollars, text)
    text = re.sub(r"\\?\$|(?<!\\)\\[()\[\]]", " ", text)
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}", r"^\\circ ", text)
    text = re.sub(r"\\\{\s*\\\}", r"\\emptyset ", text)
    text = _plain_spellings(text)
    text = re.sub(r"(\d*)\.(\d*)\\(?:overline|dot|bar)\s*\{(\d+)\}", _repeating, text)
    text = text.replace("**", "^")
    text = re.sub(r"\s+", " ", text).strip()
    while (shorter := _strip_ends(text)) != text:
        text = shorter
    return re.sub(r"(?<![\d,.])(\d{1,3})((?: \d{3})+)(?![\d,])", _spaced_group, text)


def _plain_spellings(text: str) -> str:
    """LaTeX for what is often written without it: ``sqrt(2)``, ``2 to 3``, ``5 \\over 2``."""
    text = _UNIT_FRACTION.sub(r"\\text{ \1/\2}", text)
    text = _INFIX.sub(
        lambda m: (r"\frac" if m[2] == "over" else r"\binom") + f"{{{m[1]}}}{{{m[3]}}}", text
    )
    text = _FUNCTION.sub(lambda m: "\\" + (m[1] or m[2] + " "), text)
    text = _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)
    text = re.sub(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":", text)
    return re.sub(r"(?<=\d)\s*\b([apAP])\.?[mM]\.?$", lambda m: rf"\text{{ {m[1].lower()}m}}", text)


def _macro(match: re.Match[str]) -> str:
    name = match.group(2)
    if name is None or name in _DROPPED:
        return ""
    if name in _SPACES:
        return " "
    if name in _REPLACED:
        return _REPLACED[name]
    return "\\" + _RENAMED.get(name, name)


def _dollars(match: re.Match[str]) -> str:
    escaped = match.group().startswith("\\")
    return match.group(1) + (r"\text{ dollars}" if escaped else "")


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = (match.group(n) or "" for n in (1, 2, 3))
    if len(fixed) + len(period) > 50:
        return match.group()
    scale = 10 ** len(fixed)
    nines = 10 ** len(period) - 1
    value = int((whole or "0") + fixed) + Fraction(int(period), nines)
    value /= scale
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _spaced_group(match: re.Match[str]) -> str:
    return match.group(1) + match.group(2).replace(" ", "")


def _strip_ends(text: str) -> str:
    text = text.strip(" \n\t")
    text = re.sub(r"(?:\\\\|(?<!\\)[.,;:]|\\)\s*$", "", text)
    text = text.lstrip(" .;:,") if re.match(r"[ ;:,]|\.(?!\d)", text) else text
    if text.startswith("{") and _closing(text, 0) == len(text) - 1:
        return text[1:-1]
    if text.startswith("*") and text.endswith("*") and len(text) > 2:
        return text.strip("*")
    return text


def _closing(text: str, start: int) -> int:
    """Index of the brace that closes the one at ``start``, -1 without."""
    depth = 0
    place = start
    while place < len(text):
        if text[place] == "\\":
            place += 2
            continue
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
        place += 1
    return -1


def _from_unicode(text: str) -> str:
    if text.isascii():
        return text
    for mark, table in (("^", _SUPER), ("_", _SUB)):
        text = re.sub(
            "[" + "".join(table) + "]+",
            lambda m, mark=mark, table=table: (
                mark + "{" + "".join(table[char] for char in m[0]) + "}"
            ),
            text,
        )
    for sign, macro in (("\u221a", r"\sqrt"), ("\u221b", r"\sqrt[3]")):
        text = re.sub(
            sign + r"\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[a-zA-Z]))",
            lambda m, macro=macro: macro + "{" + (m[1] or m[2] or "") + "}",
            text,
        )
    out = []
    for char in text:
        if char.isascii():
            out.append(char)
        elif char in _SYMBOLS:
            out.append(_SYMBOLS[char])
        elif unicodedata.category(char) in ("Cf", "Mn"):
            continue
        elif unicodedata.decimal(char, None) is not None:
            out.append(str(unicodedata.decimal(char)))
        else:
            plain = unicodedata.normalize("NFKC", char)
            if "\u2044" in plain:
                above, below = plain.split("\u2044", 1)
                plain = rf"\frac{{{above}}}{{{below}}}"
            out.append(plain)
    return "".join(out)


def squeeze(text: str) -> str:
    """The text without blanks and without braces around single characters."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"([\^_]|\\frac|\\sqrt|\\frac\{[^{}]*\})\{(\w)\}", r"\1\2", text)


def words(text: str) -> str:
    """Lower-case words of a text answer, without macros, articles and punctuation."""
    text = re.sub(r"\\text\s*", "", text)
    text = re.sub(r"[{}()\[\]*\"'`.]", " ", text)
    found = re.sub(r"\s+", " ", text).strip().casefold()
    return re.sub(r"^(?:a|an|the) (?=\w)", "", found)
