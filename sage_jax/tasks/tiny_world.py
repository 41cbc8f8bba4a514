"""The tiny world: chains of small operations, asked in a maths and in a code dialect.

    maths   ana has 7, doubles after finding 5, loses 3. how many?
    code    write f(x): add 3, double after subtracting 2

A chain has 2 to 5 operations. `B after A` is an inverted clause: A comes first although B is read
first. Everything here is a pure function of its arguments or of a `random.Random`.
"""

import re
from dataclasses import dataclass
from random import Random

MAX_VALUE = 99  # every value of a maths chain lies in 0..MAX_VALUE: few facts, learnable by heart
NAMES = ("ana", "ben", "cid", "dee", "eva", "fay", "gus", "hal")
OPENINGS = ("write", "make", "code", "build", "give", "define")


@dataclass(frozen=True)
class Verb:
    """How a dialect says one operation; `operand` None means that the clause names a digit."""

    word: str
    gerund: str
    symbol: str
    operand: int | None = None
    tail: str = ""


VERBS = {
    "math": (
        Verb("finds", "finding", "+"),
        Verb("gets", "getting", "+"),
        Verb("loses", "losing", "-"),
        Verb("gives", "giving", "-"),
        Verb("doubles", "doubling", "*", 2),
        Verb("triples", "tripling", "*", 3),
        Verb("quadruples", "quadrupling", "*", 4),
    ),
    "code": (
        Verb("add", "adding", "+"),
        Verb("subtract", "subtracting", "-"),
        Verb("double", "doubling", "*", 2),
        Verb("triple", "tripling", "*", 3),
        Verb("square", "squaring", "square", 2),
        Verb("halve", "halving", "//", 2),
        Verb("keep even", "", "even", 0),
        Verb("keep odd", "", "odd", 1),
        Verb("keep over", "", "over"),
        Verb("add", "", "each +", tail=" to each"),
        Verb("sum", "", "sum", 0),
        Verb("count", "", "count", 0),
    ),
}
LIST_SYMBOLS = ("even", "odd", "over", "each +")
REDUCTIONS = ("sum", "count")

# symbol -> (in a plan, as a statement on x)
FORMS = {
    "+": ("+ {k}", "x += {k}"),
    "-": ("- {k}", "x -= {k}"),
    "*": ("* {k}", "x *= {k}"),
    "//": ("halve", "x //= 2"),
    "square": ("square", "x *= x"),
    "even": ("even", "x = [a for a in x if a % 2 == 0]"),
    "odd": ("odd", "x = [a for a in x if a % 2 == 1]"),
    "over": ("over {k}", "x = [a for a in x if a > {k}]"),
    "each +": ("each + {k}", "x = [a + {k} for a in x]"),
    "sum": ("sum", "x = sum(x)"),
    "count": ("count", "x = len(x)"),
}
SCALAR_INPUTS = (0, 1, 4, 7, -3)
LIST_INPUTS = ([3, 1, 4, 1, 5, 9], [2, 8, 6, 7], [12, 3], [7, 10, 5, 6, 11])


@dataclass(frozen=True)
class Op:
    """One operation of a chain: a verb of the dialect and its operand."""

    verb: Verb
    operand: int

    def apply(self, x):
        """Value after this operation on `x` (an int, or a list of ints for list operations)."""
        k = self.operand
        match self.verb.symbol:
            case "+":
                return x + k
            case "-":
                return x - k
            case "*":
                return x * k
            case "//":
                return x // 2
            case "square":
                return x * x
            case "even" | "odd":
                return [a for a in x if a % 2 == k]
            case "over":
                return [a for a in x if a > k]
            case "each +":
                return [a + k for a in x]
            case "sum":
                return sum(x)
        return len(x)

    @property
    def key(self) -> tuple[str, int]:
        """What the operation does, without its wording."""
        return self.verb.symbol, self.operand

    def clause(self, gerund: bool = False) -> str:
        word = self.verb.gerund if gerund else self.verb.word
        digit = f" {self.operand}" if self.verb.operand is None else ""
        return f"{word}{digit}{self.verb.tail}"

    def plan(self) -> str:
        return FORMS[self.verb.symbol][0].format(k=self.operand)

    def statement(self) -> str:
        return FORMS[self.verb.symbol][1].format(k=self.operand)


@dataclass(frozen=True)
class Chain:
    """One problem. `ops` are in true order; clause i+1 is read before clause i when i == inverted.

    `name` is the person (maths) or the opening word (code); `start` is 0 for code.
    """

    domain: str
    name: str
    start: int
    ops: tuple[Op, ...]
    inverted: int | None = None

    @property
    def key(self) -> tuple:
        """(domain, operands and operations): equal for problems that differ only in wording."""
        return self.domain, self.start, tuple(op.key for op in self.ops)

    @property
    def on_list(self) -> bool:
        return any(op.verb.symbol in REDUCTIONS for op in self.ops)

    @property
    def as_read(self) -> tuple[Op, ...]:
        """Operations in the order of the words, which is wrong for an inverted chain."""
        if self.inverted is None:
            return self.ops
        i, ops = self.inverted, self.ops
        return (*ops[:i], ops[i + 1], ops[i], *ops[i + 2 :])

    def question(self) -> str:
        clauses = [op.clause() for op in self.ops]
        if (i := self.inverted) is not None:
            clauses[i : i + 2] = [f"{clauses[i + 1]} after {self.ops[i].clause(gerund=True)}"]
        if self.domain == "math":
            return f"{self.name} has {self.start}, {', '.join(clauses)}. how many?"
        return f"{self.name} f({'list' if self.on_list else 'x'}): {', '.join(clauses)}"

    def inputs(self) -> tuple:
        return LIST_INPUTS if self.on_list else SCALAR_INPUTS


def values(start, ops: tuple[Op, ...]) -> list:
    """Every value of the chain from `start` on: len(ops) + 1 entries."""
    seen = [start]
    for op in ops:
        seen.append(op.apply(seen[-1]))
    return seen


def program(ops: tuple[Op, ...]) -> str:
    """Python source of `f`, one statement an operation."""
    body = "".join(f"\n    {op.statement()}" for op in ops)
    return f"def f(x):{body}\n    return x"


def plan_text(ops: tuple[Op, ...]) -> str:
    """The plan that lists `ops`, such as `+ 5; * 2`."""
    return "; ".join(op.plan() for op in ops)


def closed_expression(start: int, ops: tuple[Op, ...]) -> str:
    """The chain as one arithmetic expression, such as `((7 + 5) * 2) - 3` (maths symbols only)."""
    text = "(" * (len(ops) - 1) + str(start)
    steps = [f" {op.verb.symbol} {op.operand}" for op in ops]
    return text + ")".join(steps)


# ---- reading -----------------------------------------------------------------------------------


def parse_question(text: str) -> Chain | None:
    """The chain that `text` asks for, or None where it is not a sound question of a dialect."""
    names, openings = "|".join(NAMES), "|".join(OPENINGS)
    if m := re.fullmatch(rf"({names}) has (\d{{1,2}}), (.+)\. how many\?", text.strip()):
        domain, name, start, body = "math", m[1], int(m[2]), m[3]
    elif m := re.fullmatch(rf"({openings}) f\((?:x|list)\): (.+)", text.strip()):
        domain, name, start, body = "code", m[1], 0, m[2]
    else:
        return None
    ops: list[Op] = []
    inverted = None
    for clause in body.split(", "):
        later, after, first = clause.partition(" after ")
        parts = [(first, True), (later, False)] if after else [(later, False)]
        parsed = [_parse_clause(domain, part, gerund) for part, gerund in parts]
        found = [op for op in parsed if op is not None]
        if len(found) < len(parts) or (after and inverted is not None):
            return None
        inverted = len(ops) if after else inverted
        ops += found
    chain = Chain(domain, name, start, tuple(ops), inverted)
    return chain if chain.question() == text.strip() and _well_typed(chain) else None


def _parse_clause(domain: str, clause: str, gerund: bool) -> Op | None:
    for verb in VERBS[domain]:
        word = verb.gerund if gerund else verb.word
        if verb.operand is not None and word == clause:
            return Op(verb, verb.operand)
        match = re.fullmatch(rf"{word} (\d){verb.tail}", clause) if word else None
        if verb.operand is None and match:
            return Op(verb, int(match[1]))
    return None


def _well_typed(chain: Chain) -> bool:
    """List operations, then one reduction, then scalars; a chain without lists is all scalars."""
    shape = "".join(
        "l" if op.verb.symbol in LIST_SYMBOLS else "r" if op.verb.symbol in REDUCTIONS else "s"
        for op in chain.ops
    )
    return re.fullmatch(r"l*rs*|s+", shape) is not None


def truth(question: str) -> int | None:
    """The right answer to a maths question of the dialect; None for any other text."""
    chain = parse_question(question)
    if chain is None or chain.domain != "math":
        return None
    return values(chain.start, chain.ops)[-1]


def true_response(question: str) -> str | None:
    """A right Solver response to a sound question of either dialect; None for any other text."""
    chain = parse_question(question)
    if chain is None:
        return None
    answer = truth(question) if chain.domain == "math" else program(chain.ops)
    return f"<answer>{answer}</answer>"


# ---- drawing -----------------------------------------------------------------------------------

_WEIGHTS = {
    "math": (("+", 0.38), ("-", 0.3), ("*", 0.32)),
    "code": (("+", 0.3), ("-", 0.22), ("*", 0.24), ("square", 0.12), ("//", 0.12)),
}


def draw_op(rng: Random, domain: str, symbol: str | None = None) -> Op:
    """A random operation; list symbols only when named."""
    if symbol is None:
        mark = rng.random()
        for symbol, weight in _WEIGHTS[domain]:  # noqa: B007
            mark -= weight
            if mark < 0:
                break
    verbs = [v for v in VERBS[domain] if v.symbol == symbol]
    # small factors more often, so that a chain drawn blindly mostly stays in range
    verb = verbs[min(rng.randrange(len(verbs)), rng.randrange(len(verbs)))]
    if symbol in ("+", "-"):
        verb = rng.choice(verbs)
    operand = verb.operand if verb.operand is not None else rng.randrange(1, 10)
    return Op(verb, operand)


def draw_chain(rng: Random, domain: str, length: int, inverted: bool, on_list=False) -> Chain:
    """A sound chain of `length` operations, one clause pair inverted when asked.

    The two orders of an inverted chain give different results, and both stay in range.
    """
    while True:
        name = rng.choice(NAMES if domain == "math" else OPENINGS)
        start = 0
        if domain == "math":
            start = rng.randrange(2, 21) if rng.random() < 0.7 else rng.randrange(20, 80)
        ops = _draw_ops(rng, domain, length, on_list)
        scalars = [i for i in range(length - 1) if ops[i].verb.gerund and ops[i + 1].verb.gerund]
        if inverted and not scalars:
            continue
        chain = Chain(domain, name, start, ops, rng.choice(scalars) if inverted else None)
        if is_sound(chain):
            return chain


def _draw_ops(rng: Random, domain: str, length: int, on_list: bool) -> tuple[Op, ...]:
    if not on_list:
        return tuple(draw_op(rng, domain) for _ in range(length))
    lists = 1 if length < 4 or rng.random() < 0.5 else 2
    symbols = [rng.choice(LIST_SYMBOLS) for _ in range(lists)] + [rng.choice(REDUCTIONS)]
    ops = [draw_op(rng, domain, symbol) for symbol in symbols]
    return tuple(ops + [draw_op(rng, domain) for _ in range(length - len(ops))])


def is_sound(chain: Chain) -> bool:
    """Whether the chain makes a good problem: values in range, order and inputs matter."""
    true, read = chain.ops, chain.as_read
    if not re.search(r"\d", chain.question()):
        return False  # a question without a number cannot be broken by removing one
    if chain.domain == "math":
        both = values(chain.start, true), values(chain.start, read)
        in_range = all(0 <= v <= MAX_VALUE for path in both for v in path)
        return in_range and (chain.inverted is None or both[0][-1] != both[1][-1])
    symbols = [op.verb.symbol for op in true]
    if symbols.count("square") > 1 or len(set(symbols[:2])) < min(2, len(set(symbols))):
        return False
    results = [values(x, true)[-1] for x in chain.inputs()]
    if len(set(results)) == 1:
        return False  # constant on the test inputs
    return chain.inverted is None or results != [values(x, read)[-1] for x in chain.inputs()]
