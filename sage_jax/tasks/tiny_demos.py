"""Scripted demonstrations of the four roles in the tiny world, with good and bad habits.

Reinforcement learning selects among habits quickly and teaches facts slowly, so the tiny model is
first taught every habit of the table `HABITS`, the bad ones more often, over facts it gets to know
well. Who or what a question names tilts the habits a little: prompts then differ in how far their
good habit is from winning, and selection does not happen all at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from sage_jax.tasks.audit import break_question
from sage_jax.tasks.tiny_tasks import task_chains
from sage_jax.tasks.tiny_world import (
    MAX_VALUE,
    NAMES,
    OPENINGS,
    REDUCTIONS,
    Chain,
    Op,
    closed_expression,
    draw_chain,
    draw_op,
    is_sound,
    plan_text,
    program,
    values,
)

# role -> habit -> share of its demonstrations
HABITS = {
    "challenger": {
        "harder": 0.25,
        "fresh": 0.14,
        "easy": 0.12,
        "copied": 0.12,
        "missing_number": 0.13,
        "wrong_key": 0.13,
        "broken": 0.11,
    },
    "planner": {"useful": 0.48, "generic": 0.24, "misordered": 0.19, "broken": 0.09},
    "solver": {"careful": 0.4, "careless": 0.5, "broken": 0.1},
    "critic": {"telling": 0.42, "flat": 0.47, "broken": 0.11},
}
GOOD = {"challenger": "harder", "planner": "useful", "solver": "careful", "critic": "telling"}
# added to the share of the good habit, taken from the others; by person or opening word
TILTS = (-0.27, -0.2, -0.12, -0.05, 0.05, 0.12, 0.2, 0.27)
RESOLVES = 0.1  # careful answers to an inverted question that reorder it without a plan
PRACTICE_RESOLVES = 0.15  # the same during practice: the skill is known, the habit is rare
STOPS_EARLY = {4: 0.3, 5: 0.5}  # careful answers without a plan that leave out the last steps
PLANNED_BONUS = 0.12  # a plan that lists operations makes the careful habit more likely

# role -> share of rows; kind of prompt follows from role and domain
ROLE_SHARES = {"solver": 0.46, "challenger": 0.2, "planner": 0.13, "critic": 0.21}
MATH_SHARE = 0.66
LENGTHS = ((1, 0.08), (2, 0.28), (3, 0.28), (4, 0.2), (5, 0.16))
PRACTICE_ROLE_SHARES = {"solver": 0.56, "challenger": 0.16, "planner": 0.12, "critic": 0.16}
PRACTICE_GOOD = 0.85
GENERIC_PLANS = ("read, then count", "step by step", "think, then answer", "go on to the end")
MAX_LENGTH = 5
MAX_LIST_LENGTH = 4


@dataclass(frozen=True)
class Demo:
    """One supervised row: what the role is shown, what it writes, and which habit that is."""

    role: str
    domain: str
    question: str  # for the Challenger: the reference question
    plan: str | None
    response: str
    habit: str
    keys: tuple[tuple, ...]  # Chain.key of every problem in it


def demonstrations(seed: int, practice: int = 0) -> Iterator[Demo]:
    """Endless demonstrations, a pure function of the arguments, without any problem of a task file.

    The first `practice` ones show mostly good habits: facts and skills are learned from those, and
    the habits of the table soon after.
    """
    rng = Random(seed)
    reserved = {chain.key for chains in task_chains().values() for chain in chains}
    for number in count():
        good = PRACTICE_GOOD if number < practice else None
        role = pick(rng, ROLE_SHARES if good is None else PRACTICE_ROLE_SHARES)
        demo = None
        while demo is None or not reserved.isdisjoint(demo.keys):
            demo = _WRITERS[role](rng, _draw_problem(rng), good)
        yield demo


def pick(rng: Random, shares: dict[str, float]) -> str:
    """A key of `shares` drawn by its share (shares need not sum to one)."""
    mark = rng.random() * sum(shares.values())
    for name, share in shares.items():  # noqa: B007
        mark -= share
        if mark < 0:
            break
    return name


def _draw_problem(rng: Random) -> Chain:
    domain = "math" if rng.random() < MATH_SHARE else "code"
    length = int(pick(rng, {str(n): share for n, share in LENGTHS}))
    on_list = domain == "code" and 2 <= length <= MAX_LIST_LENGTH and rng.random() < 0.45
    inverted = length > 1 and not on_list and rng.random() < 0.3
    return draw_chain(rng, domain, length, inverted, on_list)


def _habit(rng: Random, role: str, name: str, good: float | None, bonus: float = 0.0) -> str:
    """A habit of `role`: the good one with share `good`, or with that of the table, tilted by the
    person or opening word of the question."""
    shares = dict(HABITS[role])
    rotation = 3 * list(HABITS).index(role)
    tilts = TILTS if name in NAMES else TILTS[1:-1]
    place = (NAMES if name in NAMES else OPENINGS).index(name)
    if good is None:
        good = shares[GOOD[role]] + tilts[(place + rotation) % len(tilts)] + bonus
        good = min(0.95, max(0.05, good))
    rest = 1 - shares[GOOD[role]]
    return pick(
        rng, {h: good if h == GOOD[role] else s * (1 - good) / rest for h, s in shares.items()}
    )


# ---- Solver ------------------------------------------------------------------------------------


def _solver(rng: Random, chain: Chain, good: float | None) -> Demo:
    plan_kind = pick(rng, {"none": 0.62, "useful": 0.2, "generic": 0.08, "misordered": 0.1})
    ops, plan = None, None
    if plan_kind == "generic":
        plan = rng.choice(GENERIC_PLANS)
    elif plan_kind != "none":
        ops = chain.ops if plan_kind == "useful" else _misordered(rng, chain)
        plan = plan_text(ops)
    habit = _habit(rng, "solver", chain.name, good, PLANNED_BONUS if ops else 0.0)
    if ops is None:
        resolves = RESOLVES if good is None else PRACTICE_RESOLVES
        ops = chain.ops if rng.random() < resolves else chain.as_read
        if rng.random() < STOPS_EARLY.get(len(ops), 0.03) and len(ops) > 2:
            ops = ops[: rng.randrange(2, len(ops))]
    write = _solve_math if chain.domain == "math" else _solve_code
    response = write(rng, chain, ops, habit)
    return Demo("solver", chain.domain, chain.question(), plan, response, habit, (chain.key,))


def _solve_math(rng: Random, chain: Chain, ops: tuple[Op, ...], habit: str) -> str:
    path = values(chain.start, ops)
    if habit == "careless":
        return f"<answer>{_answer_at_once(rng, chain)}</answer>"
    steps = "; ".join(
        f"{a} {op.verb.symbol} {op.operand} = {b}"
        for a, op, b in zip(path, ops, path[1:], strict=False)
    )
    if habit == "broken":
        return rng.choice((f"{steps} {path[-1]}", f"<answer>{path[-1]}", str(path[-1])))
    return f"{steps} <answer>{path[-1]}</answer>"


def _answer_at_once(rng: Random, chain: Chain) -> int:
    """The right answer seldom; else that of a dropped or misread operation."""
    if rng.random() < 0.25:
        return values(chain.start, chain.ops)[-1]
    kept = list(chain.as_read)
    kept.pop(rng.randrange(len(kept)))
    return min(MAX_VALUE, max(0, values(chain.start, tuple(kept))[-1]))


def _solve_code(rng: Random, chain: Chain, ops: tuple[Op, ...], habit: str) -> str:
    if habit == "careless":
        return f"<answer>{_one_line(rng, chain)}</answer>"
    source = program(ops)
    if habit == "broken":
        return rng.choice((f"<answer>{source}", source))
    return f"<answer>{source}</answer>"


def _one_line(rng: Random, chain: Chain) -> str:
    """All in one expression, without parentheses and mostly without the list operations; where
    that changes nothing, mostly without the last operation."""
    ops, source = chain.as_read, "x"
    scalars = ops
    if chain.on_list:
        cut = next(i for i, op in enumerate(ops) if op.verb.symbol in REDUCTIONS)
        scalars = ops[cut + 1 :]
        if rng.random() < 0.3:
            source = ops[0].statement().removeprefix("x = ")
        source = f"{'sum' if ops[cut].verb.symbol == 'sum' else 'len'}({source})"
    elif len(ops) > 1 and not _slips(ops) and rng.random() < 0.6:
        scalars = ops[:-1]
    return f"def f(x): return {source}{_flat(scalars)}"


def _flat(ops: tuple[Op, ...]) -> str:
    signs = {"square": "**"}
    return "".join(f" {signs.get(op.verb.symbol, op.verb.symbol)} {op.operand}" for op in ops)


def _slips(ops: tuple[Op, ...]) -> bool:
    """Whether Python's precedence gives the one-line form another meaning."""
    symbols = [op.verb.symbol for op in ops]
    return "square" in symbols[1:] or any(
        symbol in ("*", "//") and not {"+", "-"}.isdisjoint(symbols[:i])
        for i, symbol in enumerate(symbols)
    )


# ---- Planner -----------------------------------------------------------------------------------


def _planner(rng: Random, chain: Chain, good: float | None) -> Demo:
    habit = _habit(rng, "planner", chain.name, good)
    plan = _plan(rng, chain, "useful" if habit == "broken" else habit)
    response = f"<plan>{plan}</plan>"
    if habit == "broken":
        response = rng.choice((plan, f"<plan>{plan}"))
    return Demo("planner", chain.domain, chain.question(), None, response, habit, (chain.key,))


def _plan(rng: Random, chain: Chain, kind: str) -> str:
    if kind == "generic":
        return rng.choice(GENERIC_PLANS)
    return plan_text(chain.ops if kind == "useful" else _misordered(rng, chain))


def _misordered(rng: Random, chain: Chain) -> tuple[Op, ...]:
    """Operations in reading order where that is wrong, else with one left out or exchanged."""
    ops, i = chain.ops, rng.randrange(len(chain.ops))
    if chain.inverted is not None:
        return chain.as_read
    if chain.on_list:
        i = next(i for i, op in enumerate(ops) if op.verb.symbol in REDUCTIONS)
        other = "count" if ops[i].verb.symbol == "sum" else "sum"
        return (*ops[:i], draw_op(rng, "code", other), *ops[i + 1 :])
    if len(ops) > 1:
        return (*ops[:i], *ops[i + 1 :])
    grows = values(chain.start, ops)[-1] < MAX_VALUE - 9
    return (*ops, draw_op(rng, chain.domain, "+" if grows else "-"))


# ---- Critic ------------------------------------------------------------------------------------


def _critic(rng: Random, chain: Chain, good: float | None) -> Demo:
    habit = _habit(rng, "critic", chain.name, good)
    question, plan = chain.question(), None
    if rng.random() < 0.5:
        kind = pick(rng, {"useful": 0.45, "generic": 0.2, "misordered": 0.35})
        plan = _plan(rng, chain, kind)
        low, high = {"useful": (8, 10), "generic": (4, 5), "misordered": (1, 3)}[kind]
    elif rng.random() < 0.55:
        low, high = (8, 10) if len(chain.ops) > 1 else (5, 7)
    else:
        question = break_question(question, rng.choice(("removed", "contradicted")), rng)
        low, high = 1, 3
    score = rng.randrange(low, high + 1) if habit == "telling" else rng.randrange(5, 11)
    response = f"<score>{score}</score>"
    if habit == "broken":
        response = rng.choice((str(score), "<score>good</score>", f"<score>{score}"))
    return Demo("critic", chain.domain, question, plan, response, habit, (chain.key,))


# ---- Challenger --------------------------------------------------------------------------------


def _challenger(rng: Random, reference: Chain, good: float | None) -> Demo:
    if reference.on_list and len(reference.ops) > 3:  # a copy would not fit the response
        reference = draw_chain(rng, "code", 3, False, True)
    habit = _habit(rng, "challenger", reference.name, good)
    growth = {"harder": rng.choice((1, 1, 1, 2)), "easy": 1 - len(reference.ops), "copied": 0}
    new = reference
    if habit != "copied":
        new = _relative(rng, reference, growth.get(habit, rng.choice((0, 0, 1))))
    question, ops = new.question(), new.ops
    if habit == "missing_number":
        question = break_question(question, rng.choice(("removed", "contradicted")), rng)
    elif habit == "wrong_key":
        ops = _misordered(rng, new)
    write = _pose_math if reference.domain == "math" else _pose_code
    response = write(rng, new, question, ops, habit)
    keys = (reference.key, new.key)
    return Demo("challenger", new.domain, reference.question(), None, response, habit, keys)


def _relative(rng: Random, reference: Chain, growth: int) -> Chain:
    """A problem like `reference` with other operands and `growth` more operations."""
    if growth < 0:
        return draw_chain(rng, reference.domain, 1, False)
    length = min(MAX_LENGTH, len(reference.ops) + growth)
    if reference.on_list:
        return draw_chain(rng, "code", min(3, length), False, True)
    for _ in range(30):
        ops = [draw_op(rng, reference.domain, op.verb.symbol) for op in reference.ops[:length]]
        ops += [draw_op(rng, reference.domain) for _ in range(length - len(ops))]
        start = rng.randrange(2, 21) if reference.domain == "math" else 0
        scalars = [i for i in range(length - 1) if ops[i].verb.gerund and ops[i + 1].verb.gerund]
        inverted = rng.choice(scalars) if scalars and rng.random() < 0.3 else None
        name = rng.choice(NAMES if reference.domain == "math" else OPENINGS)
        chain = Chain(reference.domain, name, start, tuple(ops), inverted)
        if is_sound(chain) and chain.key != reference.key:
            return chain
    return draw_chain(rng, reference.domain, length, False)


def _pose_math(rng: Random, new: Chain, question: str, ops: tuple[Op, ...], habit: str) -> str:
    key = closed_expression(new.start, ops)
    if habit == "wrong_key" and rng.random() < 0.6:
        key = str(_answer_at_once(rng, new))
    if habit == "broken":
        return rng.choice(
            (
                f"<question>{question}</question>{key}",
                f"<question>{question}</question><answer>{key}",
                f"<question>{question}<answer>{key}</answer>",
                f"<question>{question}</question>",
            )
        )
    return f"<question>{question}</question><answer>{key}</answer>"


def _pose_code(rng: Random, new: Chain, question: str, ops: tuple[Op, ...], habit: str) -> str:
    source, inputs = program(ops), "\n".join(_inputs(rng, new))
    if habit == "broken":
        return rng.choice(
            (
                f"<question>{question}</question>{source}",
                f"<question>{question}</question><solution>{source}</solution>",
                f"<question>{question}<solution>{source}</solution>",
                f"<question>{question}</question>",
            )
        )
    return f"<question>{question}</question><solution>{source}</solution><inputs>{inputs}</inputs>"


def _inputs(rng: Random, new: Chain) -> list[str]:
    """Two lists or three small numbers, one a line, on which the right function is not constant."""
    for _ in range(20):
        if new.on_list:
            drawn = [[rng.randrange(14) for _ in range(rng.randrange(2, 4))] for _ in range(2)]
        else:
            drawn = [rng.randrange(13) for _ in range(3)]
        if len({values(x, new.ops)[-1] for x in drawn}) > 1:
            return [str(x) for x in drawn]
    return [str(x) for x in (new.inputs()[1:3] if new.on_list else new.inputs())]


_WRITERS = {
    "solver": _solver,
    "planner": _planner,
    "critic": _critic,
    "challenger": _challenger,
}
