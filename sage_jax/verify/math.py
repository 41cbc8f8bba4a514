"""Maths verdicts: the ladder from equal spelling to equal value. Runs inside a worker process.

Sources for the last rung only: math-verify (Apache-2.0), for shapes the own grammar does not
know. No text of a model is ever given to eval, sympify or parse_expr from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sage_jax.verify.answers import choice, constants, equal
from sage_jax.verify.equivalence import GoldUndefined
from sage_jax.verify.evaluate import Undefined, numeric
from sage_jax.verify.extract import extract
from sage_jax.verify.normalise import GuardError, clean, guard, squeeze
from sage_jax.verify.restate import restates
from sage_jax.verify.structure import Raw, Text, read, understood

# Never worth a value: what restates a problem, and what only another parser would misread.
UNEVALUATED = re.compile(
    r"\\(?:sum|prod|int|iint|oint|lim|det|begin\{vmatrix\}|max|min|sup|inf)(?![a-zA-Z])"
)
_SUSPECT = re.compile(r"__|[\"`;@#]|lambda|import|eval|exec|open|\\text|[A-Za-z]{4,}|[A-Z]{2}|_|:")
_MACRO_NAME = re.compile(r"\\[a-zA-Z]+")


def judge(
    gold: str,
    prediction: str,
    *,
    question: str | None = None,
    tolerance: float | None = None,
    policy: str = "reward",
    enter: Callable[[str], None] = lambda stage: None,
    loading: Callable[[bool], None] = lambda begin: None,
) -> tuple[str, str]:
    """Verdict and reason for one prediction against one gold.

    ``enter`` is told when the work turns from the gold to the prediction, ``loading`` when a
    library is imported; both let the parent keep a fair clock.
    """
    try:
        gold_text = clean(_unwrapped(gold))
        guard(gold_text)
    except GuardError:
        return "error", "gold_unparsable"
    if not gold_text:
        return "error", "gold_unparsable"
    gold_shapes = read(gold_text)
    enter("prediction")
    answer = extract(prediction, policy)
    if answer is None:
        return "unparsable", "no_answer"
    try:
        guard(answer)
        text = clean(answer)
        guard(text)
    except GuardError as error:
        return "wrong", str(error)
    if not text:
        return "unparsable", "no_answer"
    if squeeze(text) == squeeze(gold_text):
        return "correct", "same_text"
    if question is not None and restates(text, gold_text, question):
        return "wrong", "restates_question"
    chosen = choice(gold_text, text)
    if chosen and question is not None and text.islower():
        # A small letter of the question is one of its variables, not a choice.
        chosen = not re.search(rf"(?<![A-Za-z\\]){re.escape(text)}(?![A-Za-z])", question)
    if chosen is not None:
        return ("correct", "choice") if chosen else ("wrong", "choice")
    return _by_value(gold_text, gold_shapes, text, tolerance, loading)


def _by_value(gold_text, gold_shapes, text, tolerance, loading) -> tuple[str, str]:
    shapes = read(text)
    undefined_gold = False
    unknown = False
    for gold_shape in gold_shapes:
        for shape in shapes:
            try:
                verdict = equal(gold_shape, shape, tolerance)
            except GoldUndefined:
                undefined_gold = True
                continue
            if verdict:
                return "correct", "same_value"
            unknown = unknown or verdict is None
    if undefined_gold:
        return "error", "gold_unparsable"
    if _untexted(gold_text) == _untexted(text):
        return "correct", "same_words"
    if not unknown:
        return "wrong", "different"
    # Against a value it would find one in almost any fragment.
    unknown = not understood(gold_shapes[0])
    if unknown and _suits_library(gold_text) and _suits_library(text):
        if library_equal(gold_text, text, loading):
            return "correct", "library"
        return "wrong", "different"
    return ("unparsable", "not_understood") if _raw(shapes[0]) else ("wrong", "different")


def judge_key(answer: str) -> tuple[str, str]:
    """``correct`` if a proposed key stands for one definite value, else why it does not."""
    try:
        guard(answer)
        text = clean(_unwrapped(answer))
        guard(text)
    except GuardError as error:
        return "unparsable", str(error)
    if not text:
        return "unparsable", "empty"
    if UNEVALUATED.search(text):
        return "unparsable", "unevaluated"
    shape = read(text)[0]
    if isinstance(shape, Text | Raw):
        return "unparsable", "no_value"
    nodes = constants(shape)
    if nodes is None:
        return "unparsable", "not_definite"
    try:
        for node in nodes:
            numeric(node)
    except Undefined:
        return "unparsable", "undefined"
    return "correct", ""


def _unwrapped(gold: str) -> str:
    """A gold may come boxed or in dollars; nothing is searched for in it."""
    return gold if "\\boxed" not in gold else (extract(gold, "reward") or "")


def _untexted(text: str) -> str:
    """The text without the marks that say that a part of it is words."""
    return squeeze(re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text))


def _raw(shape) -> bool:
    return isinstance(shape, Raw)


def _suits_library(text: str) -> bool:
    """Whether a text may be shown to math-verify: no words, no code, nothing unevaluated."""
    if len(text) > 300 or UNEVALUATED.search(text):
        return False
    if re.search(r"\d{30}|!\s*\)?\s*!|\^\s*\{?[^{}]*\^|\^\s*\{?\s*\d{4}", text):
        return False
    if not _balanced(text) or "%" in text or "&" in text:
        return False  # it makes a value of almost any fragment
    return not _SUSPECT.search(_MACRO_NAME.sub("", text))


def _balanced(text: str) -> bool:
    """Every bracket closed by its own kind; an interval may mix round and square ones."""
    kinds = {")": "([", "]": "([", "}": "{"}
    stack: list[str] = []
    for char in text:
        if char in "([{":
            stack.append(char)
        elif char in kinds and (not stack or stack.pop() not in kinds[char]):
            return False
    return not stack


def library_equal(gold: str, text: str, loading: Callable[[bool], None]) -> bool:
    """The verdict of math-verify, for shapes unknown here; its limits are ours, not alarms."""
    loading(True)
    from math_verify import parse, verify

    loading(False)
    try:
        parsed = [
            parse(f"\\boxed{{{part}}}", parsing_timeout=0, raise_on_error=True)
            for part in (gold, text)
        ]
        if not all(parsed):
            return False
        return bool(verify(parsed[0], parsed[1], timeout_seconds=0, raise_on_error=True))
    except Exception:  # a parser and a computer algebra system can raise anything at all
        return False
