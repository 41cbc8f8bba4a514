"""An own parser for formulas: normal spelling to a small tree. Nothing is ever evaluated by eval.

Nodes are tuples: ("num", Fraction), ("dec", Fraction, places, significant digits),
("var", name), ("const", "pi"|"e"|"i"|"inf"), ("add", a, b), ("mul", a, b), ("div", a, b),
("neg", a), ("pow", a, b), ("root", a, n), ("call", name, ...), ("pm", a), ("mp", a).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]
MAX_NODES, MAX_DEPTH = 600, 80

_TOKEN = re.compile(
    r"\s*(?:(?P<sci>\d+(?:\.\d+)?[eE][+-]?\d{1,4}(?![\d.]))|(?P<num>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<macro>\\[a-zA-Z]+|\\.)|(?P<sym>.))",
    re.DOTALL,
)
TRIG = "sin cos tan cot sec csc sinh cosh tanh".split()
FUNCTIONS = {*TRIG, *(f"arc{name}" for name in TRIG[:6])}
FUNCTIONS |= set("ln log lg exp arsinh arcosh artanh".split())
GREEK = set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell "
    "hbar".split()
)
NAMED = {"overline", "vec", "hat", "bar", "overrightarrow", "widehat", "tilde", "mathbb"}
MULTIPLY = ("*", "\\cdot", "\\times")
FUNCTION_WORDS = {"gcd", "lcm", "max", "min"}


class ParseError(ValueError):
    """The text is not a formula this grammar knows."""


def parse(text: str) -> Node:
    """The tree of one formula. Raises ParseError."""
    parser = _Parser(text)
    node = parser.expression()
    if parser.peek() is not None:
        raise ParseError(f"unexpected {parser.peek()!r}")
    return node


def variables(node: Node) -> set[str]:
    """Names of the variables in a tree."""
    if node[0] == "var":
        return {node[1]}
    return set().union(*(variables(part) for part in node[1:] if isinstance(part, tuple)), set())


def uses(node: Node, name: str) -> bool:
    """Whether a constant or function of this name is in the tree."""
    if node[0] in ("call", "const") and node[1] == name:
        return True
    return any(uses(part, name) for part in node[1:] if isinstance(part, tuple))


def has_sign_pair(node: Node) -> bool:
    """Whether the tree holds a plus-minus sign."""
    if node[0] in ("pm", "mp"):
        return True
    return any(has_sign_pair(part) for part in node[1:] if isinstance(part, tuple))


def choose_sign(node: Node, upper: bool) -> Node:
    """The tree with every plus-minus sign read as its upper or lower sign."""
    if node[0] in ("pm", "mp"):
        inner = choose_sign(node[1], upper)
        return inner if (node[0] == "pm") == upper else ("neg", inner)
    return tuple(choose_sign(p, upper) if isinstance(p, tuple) else p for p in node)


def decimal(text: str) -> Node:
    """Node of a numeral: exact value, decimal places and significant digits."""
    if "." not in text:
        return ("num", Fraction(int(text)))
    whole, part = text.split(".")
    digits = (whole + part).lstrip("0")
    return ("dec", Fraction(int((whole or "0") + part), 10 ** len(part)), len(part), len(digits))


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        for match in _TOKEN.finditer(text.strip()):
            if match.lastgroup and not match.group(match.lastgroup).isspace():
                self._tokens.append((match.lastgroup, match.group(match.lastgroup)))
        self._at = 0
        self._nodes = 0
        self._depth = 0
        self._bars = 0

    # --- tokens ---------------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        return self._tokens[at][1] if at < len(self._tokens) else None

    def _kind(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        return self._tokens[at][0] if at < len(self._tokens) else None

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise ParseError("the formula ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, text: str) -> None:
        if self._next()[1] != text:
            raise ParseError(f"{text!r} is missing")

    def _node(self, *parts: Any) -> Node:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ParseError("the formula is too large")
        return parts

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ParseError("the formula is nested too deep")
        yield
        self._depth -= 1

    # --- levels ---------------------------------------------------------------------------

    def expression(self) -> Node:
        with self._deeper():
            return self._sum()

    def _sum(self) -> Node:
        left = self._term()
        while (sign := self.peek()) in ("+", "-", "\\pm", "\\mp"):
            self._next()
            right = self._term()
            wrapped = {"+": right, "-": ("neg", right), "\\pm": ("pm", right)}
            left = self._node("add", left, wrapped.get(sign or "", ("mp", right)))
        return left

    def _term(self) -> Node:
        left = self._signed()
        while True:
            token = self.peek()
            if token in MULTIPLY:
                self._next()
                left = self._node("mul", left, self._signed())
            elif token == "/":
                self._next()
                left = self._node("div", left, self._signed())
            elif self._starts_factor():
                if self._kind() in ("num", "sci"):
                    raise ParseError("a number follows a factor")
                left = self._node("mul", left, self._factor())
            else:
                return left

    def _signed(self) -> Node:
        signs = 0
        pair = None
        while (token := self.peek()) in ("+", "-", "\\pm", "\\mp"):
            self._next()
            signs += token == "-"
            if token in ("\\pm", "\\mp"):
                pair = token[1:]
        node = self._factor()
        node = self._node("neg", node) if signs % 2 else node
        return self._node(pair, node) if pair else node

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        if self._kind() in ("num", "sci") or token in ("(", "{", "[") or token.isalpha():
            return True
        if token == "|":
            return self._bars == 0
        name = token[1:]
        return token.startswith("\\") and (
            name in FUNCTIONS or name in GREEK or name in NAMED or name in _MACROS
        )

    def _factor(self) -> Node:
        node = self._primary()
        while True:
            token = self.peek()
            if token == "!":
                self._next()
                if self.peek() == "!":  # n!! is not (n!)!
                    raise ParseError("a double factorial")
                node = self._node("call", "factorial", node)
            elif token == "^":
                self._next()
                if self.peek() == "\\circ":
                    self._next()
                    node = self._node("call", "degrees", node)
                else:
                    node = self._node("pow", node, self._exponent())
            else:
                return node

    def _exponent(self) -> Node:
        if self.peek() == "{":
            return self._group("{", "}")
        if self.peek() in ("-", "+"):
            sign = self._next()[1]
            with self._deeper():
                node = self._exponent()
            return self._node("neg", node) if sign == "-" else node
        if self._kind() == "num":
            return self._node(*decimal(self._next()[1]))
        return self._primary()

    def _group(self, opening: str, closing: str) -> Node:
        self._expect(opening)
        bars, self._bars = self._bars, 0
        node = self.expression()
        self._bars = bars
        self._expect(closing)
        return node

    def _argument(self) -> Node:
        """Of a macro such as frac: a group, or one digit or letter (``\\frac12``)."""
        if self.peek() == "{":
            return self._group("{", "}")
        kind, text = self._next()
        if kind == "num" and "." not in text and len(text) > 1:
            # \frac12 : take one digit, leave the rest
            self._at -= 1
            self._tokens[self._at] = ("num", text[1:])
            return decimal(text[0])
        self._at -= 1
        with self._deeper():
            return self._primary()

    # --- leaves ---------------------------------------------------------------------------

    def _primary(self) -> Node:
        kind, token = self._next()
        if kind == "sci":
            mantissa, exponent = re.split("[eE]", token)
            return self._node("num", decimal(mantissa)[1] * Fraction(10) ** int(exponent))
        if kind == "num":
            return self._mixed(self._node(*decimal(token)))
        if token in ("(", "{", "["):
            self._at -= 1
            return self._group(token, {"(": ")", "{": "}", "[": "]"}[token])
        if token == "|":
            self._bars += 1
            node = self.expression()
            self._bars -= 1
            self._expect("|")
            return self._node("call", "abs", node)
        if token.isalpha() and len(token) == 1:
            return self._letter(token)
        if token.startswith("\\"):
            with self._deeper():
                return self._macro(token[1:])
        raise ParseError(f"unexpected {token!r}")

    def _mixed(self, whole: Node) -> Node:
        """``1\\frac{1}{2}`` and ``1 1/2`` are sums; anything else is left alone."""
        if whole[0] != "num":
            return whole
        start = self._at
        if self.peek() == "\\frac":
            self._next()
            above, below = self._argument(), self._argument()
        elif self._kind() == "num" and self.peek(1) == "/" and self._kind(2) == "num":
            above = decimal(self._next()[1])
            self._next()
            below = decimal(self._next()[1])
        else:
            return whole
        if above[0] == below[0] == "num" and 0 < above[1] < below[1]:
            return self._node("num", whole[1] + above[1] / below[1])
        self._at = start
        return whole

    def _letter(self, name: str) -> Node:
        name += self._subscript()
        while self.peek() == "'":
            name += self._next()[1]
        if name in ("e", "i"):
            return self._node("const", name)
        return self._node("var", name)

    def _subscript(self) -> str:
        if self.peek() != "_":
            return ""
        self._next()
        if self.peek() != "{":
            return "_" + self._next()[1]
        return "_" + self._raw_group()

    def _raw_group(self) -> str:
        self._expect("{")
        parts, depth = [], 1
        while True:
            token = self._next()[1]
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return "".join(parts)
            parts.append(token)

    def _macro(self, name: str) -> Node:
        if name in FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return self._node("var", "\\" + name + self._subscript())
        if name in NAMED:
            return self._node("var", f"\\{name} {self._raw_group()}")
        action = _MACROS.get(name)
        if action is None:
            raise ParseError(f"unknown macro {name}")
        return action(self)

    def _function(self, name: str) -> Node:
        power, base = None, None
        while self.peek() in ("^", "_"):
            if self._next()[1] == "^":
                power = self._exponent()
            elif self.peek() == "{":
                base = self._group("{", "}")
            else:
                base = self._argument()
        argument = self._function_argument()
        if name == "exp":
            node = self._node("pow", ("const", "e"), argument)
        elif name in ("log", "lg"):
            ten = ("num", Fraction(10)) if name == "lg" else None  # log alone: see evaluate
            known = base if base is not None else ten
            node = self._node("call", "log", argument, *([known] if known is not None else []))
        else:
            inverse = power in (("neg", ("num", Fraction(1))), ("num", Fraction(-1)))
            if inverse and name in TRIG:
                name, power = "arc" + name, None
            node = self._node("call", name, argument)
        return self._node("pow", node, power) if power is not None else node

    def _function_argument(self) -> Node:
        """A group, or the product that follows up to a sign, operator or next function."""
        if self.peek() in ("(", "["):
            return self._group(str(self.peek()), ")" if self.peek() == "(" else "]")
        if self.peek() in ("-", "+"):
            return self._signed()
        node = self._factor()
        while self._starts_factor() and str(self.peek())[1:] not in FUNCTIONS:
            if self._kind() in ("num", "sci"):
                raise ParseError("a number follows a factor")
            node = self._node("mul", node, self._factor())
        return node

    def _fraction(self) -> Node:
        above = self._argument()
        return self._node("div", above, self._argument())

    def _binomial(self) -> Node:
        above = self._argument()
        return self._node("call", "binomial", above, self._argument())

    def _root(self) -> Node:
        index: Node = ("num", Fraction(2))
        if self.peek() == "[":
            index = self._group("[", "]")
        if self.peek() == "(":
            return self._node("root", self._group("(", ")"), index)
        return self._node("root", self._argument(), index)

    def _between(self, name: str, closing: str) -> Node:
        node = self.expression()
        self._expect(closing)
        return self._node("call", name, node)

    def _text(self) -> Node:
        word = self._raw_group()
        if word in FUNCTIONS:
            return self._function(word)
        if word in FUNCTION_WORDS and self.peek() == "(":
            self._next()
            arguments = [self.expression()]
            while self.peek() == ",":
                self._next()
                arguments.append(self.expression())
            self._expect(")")
            return self._node("call", word, *arguments)
        if len(word) == 1 and word.isalpha():
            return self._letter(word)
        raise ParseError("words in a formula")


_MACROS = {
    "frac": _Parser._fraction,
    "binom": _Parser._binomial,
    "sqrt": _Parser._root,
    "text": _Parser._text,
    "pi": lambda parser: parser._node("const", "pi"),
    "infty": lambda parser: parser._node("const", "inf"),
    "lfloor": lambda parser: parser._between("floor", "\\rfloor"),
    "lceil": lambda parser: parser._between("ceil", "\\rceil"),
}
