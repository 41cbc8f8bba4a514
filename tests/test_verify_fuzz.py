"""Parsers and extraction against generated text: nothing escapes, nothing takes long."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sage_jax.verify import Job, Verifier
from sage_jax.verify.code import extract_code
from sage_jax.verify.extract import extract
from sage_jax.verify.math import judge, judge_key, library_equal
from sage_jax.verify.normalise import GuardError, clean, guard
from sage_jax.verify.structure import read
from sage_jax.verify.verdict import VERDICTS

PIECES = st.sampled_from(
    r"""\frac \dfrac {1}{2} { } ( ) [ ] \{ \} ^ _ ^{ _{ \sqrt \sqrt[3]{ \pi e i x y n \infty \cup
    \in \le < > = \ne \pm + - * / \cdot \times ! !! % \% ° ^\circ \text{ cm km hours \mathrm{ , ; :
    . .. 0 1 2 10 007 1.5 .5 1e9 999999999999 \log \ln \sin \cos \tan^{-1} \binom{ & \\
    \begin{pmatrix}
    \end{pmatrix} \begin{cases} \end{cases} \left( \right) \left[ \right. \boxed{ \fbox{ \overline{
    \$ $ $$ # #### </think> <think> <answer> </answer> answer is Answer: The and or x=1 A (B) ½ √ ²
    ∞ − 　 ​ ３ \u202e ''' \" \x00 __import__ lambda eval \sum_{k=1}^ \int_0^1 \lim \det |x| ||
    \forall
    """.split()  # fmt: skip
)
TEXT = st.one_of(
    st.lists(PIECES, max_size=25).map("".join),
    st.lists(PIECES, max_size=25).map(" ".join),
    st.text(max_size=60),
    st.builds(lambda piece, n: piece * n, PIECES, st.integers(1, 600)),
)
bounded = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
LIMIT = 2.0  # CPU seconds, what a worker has for one verdict


LIBRARY = st.lists(
    st.sampled_from(
        r"""\frac{ \sqrt{ } ( ) \{ \} [ ] | ^ ^{ _ + - * / = < \le \in \cup \cap \setminus \times
        \cdot \pm \infty \mathbb{R} \mathbb{Z} \gcd \bmod \pmod{ \equiv \neg \to \Rightarrow \ldots
        \hat{ \vec{
        \left( \right) \binom{ \log_ \ln \sin x y n i e \pi 0 1 2 7 10 99 , ; : \\ & \mid
        \forall \circ
        """.split()  # fmt: skip
    ),
    min_size=1,
    max_size=12,
).map(" ".join)


@pytest.fixture
def no_library(monkeypatch):
    """The last rung is another project's parser, and its time is the worker's to bound."""
    monkeypatch.setattr("sage_jax.verify.math.library_equal", lambda *a: False)


@pytest.mark.usefixtures("no_library")
@bounded
@given(TEXT, TEXT, st.sampled_from(("reward", "eval")))
def test_a_verdict_is_given_whatever_gold_and_answer(gold, answer, policy):
    began = time.process_time()
    for prediction in (answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>"):
        verdict, reason = judge(gold, prediction, policy=policy, question=gold + answer)
        assert verdict in VERDICTS and isinstance(reason, str)
    assert judge_key(answer)[0] in VERDICTS
    assert time.process_time() - began < 4 * LIMIT


@pytest.mark.usefixtures("no_library")
@bounded
@given(TEXT)
def test_what_is_extracted_stands_in_the_text_and_reading_is_total(text):
    for policy in ("reward", "eval"):
        found = extract(text, policy)
        assert found is None or isinstance(found, str)
    assert extract_code(text) == "" or extract_code(text).strip("\n") in text
    try:
        guard(text)
        cleaned = clean(text)
        guard(cleaned)
    except GuardError:
        return
    assert read(cleaned)


@pytest.mark.usefixtures("no_library")
@bounded
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), TEXT)
def test_text_before_the_box_never_makes_a_wrong_number_right(gold, other, noise):
    if gold == other or "\\boxed" in noise or "\\fbox" in noise:
        return
    verdict, _ = judge(str(gold), f"{noise}\nSo it is \\boxed{{{other}}}")
    if "answer>" not in noise and "think" not in noise:
        assert verdict != "correct"


@pytest.fixture(scope="module")
def verifier():
    with Verifier(workers=1, code=False, math_time_limit=LIMIT) as made:
        yield made


@settings(bounded, max_examples=150)
@given(LIBRARY, LIBRARY)
def test_the_library_answers_or_is_ended_within_the_limit(verifier, gold, other):
    """``\\diamond`` is unknown here, so that both go to the library if they may at all."""
    gold = f"{gold} \\diamond"
    jobs = [
        Job(answer, "math", {"gold": gold, "prediction": f"\\boxed{{{answer}}}"})
        for answer in {other, f"{other} \\diamond", "1"}
    ]
    for verdict in verifier.run(jobs).values():
        assert verdict.verdict in VERDICTS
        assert verdict.reason != "verifier_error"
        if verdict.verdict == "timeout":
            assert verdict.ms >= 1000 * LIMIT  # never sooner, and never not at all


@pytest.mark.parametrize("error", [RecursionError, ZeroDivisionError, NotImplementedError])
def test_what_the_library_raises_is_no_verdict(monkeypatch, error):
    def broken(*arguments, **keywords):
        raise error

    assert library_equal("x", "x", lambda begin: None)
    monkeypatch.setattr("math_verify.verify", broken)
    assert not library_equal("x", "x", lambda begin: None)
