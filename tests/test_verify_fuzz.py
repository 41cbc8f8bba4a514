"""Parsers and extraction against generated text: nothing escapes, nothing takes long."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sage_jax.verify.code import extract_code
from sage_jax.verify.extract import extract
from sage_jax.verify.math import judge, judge_key
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


@pytest.fixture(autouse=True)
def no_library(monkeypatch):
    """The last rung is another project's parser, and its time is the worker's to bound."""
    monkeypatch.setattr("sage_jax.verify.math.library_equal", lambda *a: False)


@bounded
@given(TEXT, TEXT, st.sampled_from(("reward", "eval")))
def test_a_verdict_is_given_whatever_gold_and_answer(gold, answer, policy):
    began = time.process_time()
    for prediction in (answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>"):
        verdict, reason = judge(gold, prediction, policy=policy, question=gold + answer)
        assert verdict in VERDICTS and isinstance(reason, str)
    assert judge_key(answer)[0] in VERDICTS
    assert time.process_time() - began < 4 * LIMIT


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


@bounded
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6), TEXT)
def test_text_before_the_box_never_makes_a_wrong_number_right(gold, other, noise):
    if gold == other or "\\boxed" in noise or "\\fbox" in noise:
        return
    verdict, _ = judge(str(gold), f"{noise}\nSo it is \\boxed{{{other}}}")
    if "answer>" not in noise and "think" not in noise:
        assert verdict != "correct"
