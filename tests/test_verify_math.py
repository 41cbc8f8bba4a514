"""Maths verdicts: extraction, guards, the ladder, keys. The cases here are this project's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sage_jax.verify import Job, Verifier
from sage_jax.verify.extract import extract
from sage_jax.verify.math import judge, judge_key
from sage_jax.verify.normalise import clean

SHARED = Path(__file__).parents[1].parent / "shared"

EQUAL = [
    ("48,250", "48250"),
    ("48250", r"48\,250"),
    ("48250", "48 250"),
    (r"\frac{3}{8}", "0.375"),
    (r"\frac{9}{-4}", r"-2\frac14"),
    ("7.0", "7"),
    (r"40\%", "0.4"),
    (r"40\%", "40"),
    ("40", r"40\%"),
    (r"6\text{ kg}", "6"),
    ("6", r"6\text{ kilograms}"),
    (r"3\text{ km}", r"3000\text{ m}"),
    (r"75^\circ", "75"),
    (r"\$12.30", "12.3"),
    (r"\text{Thursday}", r"\mathrm{thursday}"),
    (r"\text{trapezoid}", r"\text{a trapezoid}"),
    ("(y-3)(y+3)", "y^2-9"),
    (r"\frac{2}{\sqrt5}", r"\frac{2\sqrt{5}}{5}"),
    (r"\cos 2t", r"1-2\sin^2 t"),
    (r"\log_5 7", r"\frac{\ln 7}{\ln 5}"),
    ("2-3i", "-3i+2"),
    (r"\frac{1}{1+i}", r"\frac{1-i}{2}"),
    (r"\{4,9\}", r"\{9, 4\}"),
    ("4, 9", r"9\text{ and }4"),
    (r"3\pm\sqrt7", r"3-\sqrt{7},\ 3+\sqrt{7}"),
    (r"(-4,\tfrac12)", r"\left(-4, 0.5\right)"),
    ("(2,7]", r"2<x\le 7"),
    (r"(-\infty,1)\cup(6,\infty)", r"x<1\text{ or }x>6"),
    ("y=4x-1", "4x-y=1"),
    ("t=11", "11"),
    ("11", "t=11"),
    (r"\begin{pmatrix}2&0\\1&5\end{pmatrix}", r"\begin{bmatrix} 2 & 0 \\ 1 & 5 \end{bmatrix}"),
    ("5:8", "10:16"),
    ("321_7", "321_{7}"),
    ("D", r"\textbf{(D)}\ 19"),
    (r"\emptyset", r"\varnothing"),
    ("-9", "\u22129"),
    (r"\sqrt{11}", "\u221a11"),
    ("z^3", "z\u00b3"),
    (r"\frac{5}{6}", "0.8333"),
    (r"3\pi", "9.425"),
    ("9.425", r"3\pi"),
    ("6!", "720"),
    (r"0.\overline{45}", r"\frac{5}{11}"),
    (r"2^{12}", "4096"),
    ("14", r"\text{fourteen}"),
]
DIFFERENT = [
    ("4825", "48,25"),
    (r"\frac{3}{8}", r"\frac{8}{3}"),
    ("40", "0.4"),
    (r"6\text{ kg}", r"6\text{ g}"),
    (r"7\text{ days}", r"7\text{ weeks}"),
    (r"4\text{ a.m.}", r"4\text{ p.m.}"),
    ("3k", "3"),
    ("8m", "8"),
    ("y^2-9", "(y-3)^2"),
    ("3^{n+2}", "3^n+2"),
    (r"\sin 3x", r"3\sin x"),
    ("4, 9", "4"),
    ("4", "4, 9"),
    ("7, 7", "7"),
    ("(4,9)", "(9,4)"),
    ("(2,7]", "2<x<7"),
    ("x>2", "y>2"),
    ("t=11", "s=11"),
    ("321_7", "321_8"),
    ("321_7", "162"),
    ("D", "B"),
    ("E", "2.718"),
    (r"\frac{5}{6}", "0.83"),
    (r"\pi", r"\frac{355}{113}"),
    ("1000", "1000.1"),
    (r"10^{-30}", r"2\times 10^{-30}"),
    (r"\frac{1}{300!}", r"\frac{1}{301!}"),
    ("0", "e^{-90}"),
    ("15", r"\sum_{k=1}^{5} k"),
    ("15", r"\int_0^{15} dx"),
    ("0", r"\text{None}"),
    (r"\text{north}", r"\text{thorn}"),
    (r"\emptyset", "0"),
    ("6", "3!!!!"),
]


@pytest.mark.parametrize("gold,other", EQUAL)
def test_equal_answers_are_correct(gold, other):
    assert judge(gold, f"So \\boxed{{{other}}}.")[0] == "correct"


@pytest.mark.parametrize("gold,other", DIFFERENT)
def test_different_answers_are_not_correct(gold, other):
    assert judge(gold, f"So \\boxed{{{other}}}.")[0] != "correct"


@pytest.mark.parametrize(
    "text,reward,evaluation",
    [
        ("<think>\\boxed{1}</think> It is \\boxed{2}.", "2", "2"),
        ("<think>\\boxed{1}", None, None),
        ("<answer> 3/4 </answer> The answer is 9", "3/4", "3/4"),
        ("<answer>\\boxed{5}</answer>", "5", "5"),
        ("\\boxed{3} and \\boxed{8}", "3, 8", "3, 8"),
        ("a = \\boxed{3}, which we square and then halve to get \\boxed{8}", "8", "8"),
        ("\\boxed{8", None, None),
        ("\\boxed{}, so 8", None, None),
        ("12 + 5 = 17\n#### 17", "17", "17"),
        ("The answer is $\\frac{1}{2}$.", "\\frac{1}{2}", "\\frac{1}{2}"),
        ("**Final Answer:** 12", "12", "12"),
        ("There are 31 of them.", None, "31"),
        ("We get $x + 4 = 9$.", None, "x + 4 = 9"),
        ("nothing here", None, None),
    ],
)
def test_extraction_order(text, reward, evaluation):
    assert extract(text, "reward") == reward
    assert extract(text, "eval") == evaluation


def test_boxes_that_never_close_take_linear_time():
    assert judge("5", "\\boxed{" * 20_000 + "6")[0] == "unparsable"
    for opening in ("\\(", "<answer>", "answer: ", "\\text{", "$1"):
        assert judge("5", opening * 20_000, policy="eval")[0] != "correct"
    assert judge("5", "\\boxed{" * 3000 + "6" + "}" * 3000)[0] != "correct"


@pytest.mark.parametrize(
    "text,reason",
    [
        ("x" * 2001, "answer_too_long"),
        ("1" * 1001, "too_many_digits"),
        ("(" * 60 + "5" + ")" * 60, "nested_too_deep"),
        ("\\frac" * 390, "not_understood"),
        ("2^" + "-" * 900 + "1", "not_understood"),
    ],
)
def test_guards_stop_before_any_parser(text, reason):
    assert judge("5", f"\\boxed{{{text}}}") in (("wrong", reason), ("unparsable", reason))


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "((10^9)!)!",
        "\\binom{10^8}{10^7}",
        "10^{10^{10}}",
        "(a+b+c)^{300}-(a+b+c)^{300}+4",
    ],
)
def test_numbers_that_run_away_are_bounded(text):
    assert judge("5", f"\\boxed{{{text}}}")[0] in ("wrong", "unparsable")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {marker}')",
        "open('{marker}','w')#\\pi",
        "[open('{marker}','w'),2]",
        "exec(compile(\"open('{marker}','w')\",'x','exec'))",
    ],
)
def test_text_is_never_run(tmp_path, text):
    marker = tmp_path / "ran"
    for gold in ("5", "\\pi", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"):
        for policy in ("reward", "eval"):
            prediction = text.replace("{marker}", str(marker))
            assert judge(gold, prediction, policy=policy)[0] != "correct"
            assert judge(gold, f"\\boxed{{{prediction}}}", policy=policy)[0] != "correct"
    assert not marker.exists()


def test_restating_the_question_is_wrong_unless_it_is_the_gold():
    question = "Simplify $\\sqrt{75}+2^3$, where $n=4$."
    assert judge("5\\sqrt3+8", "\\boxed{\\sqrt{75}+2^3}")[0] == "correct"
    assert judge("5\\sqrt3+8", "\\boxed{\\sqrt{75}+2^3}", question=question) == (
        "wrong",
        "restates_question",
    )
    literal = judge("\\sqrt{75}+2^3", "\\boxed{\\sqrt{75} + 2^{3}}", question=question)
    assert literal == ("correct", "same_text")
    assert judge("4", "\\boxed{4}", question=question)[0] == "correct"


def test_tolerance_is_absolute_and_per_task():
    assert judge("3.30", "\\boxed{3.34}", tolerance=0.05)[0] == "correct"
    assert judge("3.30", "\\boxed{3.36}", tolerance=0.05)[0] == "wrong"
    assert judge("3.30", "\\boxed{3.34}")[0] == "wrong"


def test_gold_without_a_value_masks_the_row():
    for gold in ("", "\\frac{1}{0}", "10^{10^{10}}"):
        assert judge(gold, "\\boxed{5}") == ("error", "gold_unparsable")


@pytest.mark.parametrize(
    "answer,verdict,reason",
    [
        ("3*17+2", "correct", ""),
        ("\\frac{\\sqrt{2}}{7}", "correct", ""),
        ("(1, -2)", "correct", ""),
        ("x=4", "correct", ""),
        ("x+1", "unparsable", "not_definite"),
        ("5/0", "unparsable", "undefined"),
        ("9^{9^{9^9}}", "unparsable", "undefined"),
        ("\\sum_{k=1}^4 k", "unparsable", "unevaluated"),
        ("a prime", "unparsable", "no_value"),
        ("", "unparsable", "empty"),
    ],
)
def test_keys_must_be_definite(answer, verdict, reason):
    assert judge_key(answer) == (verdict, reason)


def test_cleaning_is_idempotent():
    for gold, other in EQUAL + DIFFERENT:
        for text in (gold, other):
            assert clean(clean(text)) == clean(text)


def test_no_jax_is_imported():
    code = "import sys, sage_jax.verify, sage_jax.verify.math; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


@pytest.mark.skipif(not SHARED.exists(), reason="../shared is absent")
def test_shared_cases():
    rows = [json.loads(line) for line in open(SHARED / "cases" / "math_equiv_public.jsonl")]
    canary = Path("/tmp/sagecanary")
    canary.unlink(missing_ok=True)
    jobs = [
        Job(row["id"], "math", {"gold": row["gold"], "prediction": row["prediction"]})
        for row in rows
    ]
    with Verifier(policy="eval", code=False) as verifier:
        verdicts = verifier.run(jobs)
    wrong = [row for row in rows if verdicts[row["id"]].correct != row["expected"]]
    count = {
        tier: sum(row["tier"] == tier for row in wrong) for tier in ("plain", "policy", "hard")
    }
    assert count["plain"] <= 3 and count["policy"] <= 1 and count["hard"] <= 13, count
    strict = ("malicious", "empty_garbage", "very_long", "units", "base_notation")
    forged = [row["id"] for row in wrong if not row["expected"] and row["category"] in strict]
    assert forged == []
    assert not canary.exists()


@pytest.mark.skipif(not SHARED.exists(), reason="../shared is absent")
@pytest.mark.parametrize("name", ["math500", "olympiadbench", "gsm8k_test", "amc23"])
def test_golds_equal_themselves(name):
    rows = [json.loads(line) for line in open(SHARED / "data" / f"{name}.jsonl")][::4]
    assert rows
    for row in rows:
        assert judge(row["answer"], f"It is \\boxed{{ {row['answer']} }}.")[0] == "correct", row
