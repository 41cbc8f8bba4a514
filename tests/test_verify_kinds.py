"""Maths verdicts by kind of mistake: each list is one way in which a grader is fooled or misled."""

import pytest

from sage_jax.verify.math import judge
from sage_jax.verify.spelled import number

KINDS = {
    "words that change a number are no unit": (
        [("60", r"5\text{ dozen}"), (r"5\text{ dozen}", "60"), ("7", r"7\text{ students}")],
        [
            *(("5", rf"5\text{{ {word}}}") for word in
              "dozen thousand million halves tenths hundredths squared factorial".split()),
            ("5", r"5\text{ and a half}"), ("5", r"5\text{ or so}"), ("2", r"2\text{ pi}"),
            ("5", "5 halves"), ("5", r"5\text{; import os}"),
        ],
    ),
    "units that only look alike": (
        [
            (r"8\text{ hours}", r"8\text{ hrs}"), (r"\$0.75", r"75\text{ cents}"),
            (r"60^\circ\text{C}", "60"), (r"5\text{ euros}", "\u20ac5"),
            (r"10\text{ m/s}", r"10\,\frac{\text{m}}{\text{s}}"),
        ],
        [
            (r"60^\circ\text{C}", r"60^\circ\text{F}"), ("\u00a35", "\u20ac5"),
            (r"5\text{ MHz}", r"5\text{ mHz}"), (r"5\text{ Mb}", r"5\text{ MB}"),
            (r"3\text{ degrees above}", r"3\text{ degrees below}"),
        ],
    ),
    "angles": (
        [(r"60^\circ", r"\frac{\pi}{3}"), (r"\frac{\pi}{3}", r"60^\circ"),
         (r"180^\circ", r"\pi\text{ radians}"), (r"\angle ABC = 40^\circ", "40")],
        [(r"60^\circ", r"\frac{\pi}{6}"), (r"\frac{\pi}{3}", "60"),
         (r"90^\circ", r"90\text{ radians}")],
    ),
    "a difference that only many digits show": (
        [(r"\frac13", "0." + 200 * "3"), ("0", r"\sin\pi"), (r"\pi", "3.14159265358979323846")],
        [
            ("x", "x+10^{-50}"), ("x+10^{-60}", "x"), (r"\frac13", "0." + 200 * "3" + "4"),
            ("1", r"\cos(10^{-30})"), ("0", "e^{-1000}"), (r"\sin 1", r"\sin(1+2\pi+10^{-59})"),
            (r"\pi", "3.1415926535897932384626433832795028841971693993752"),
            ("x^2", r"x^2+\sin(\pi\cdot10^9x)"),
        ],
    ),
    "fragments": (
        [(r"\text{5}", "5"), ("x", r"\text{x}"), (r"\frac12", r"{1\over 2}")],
        [("5", text) for text in
         ("5(", "(5", "5)", "=5=", r"\neg 5", "5'", "`5`", r"5\text{ (}", "5 5")]
        + [("55", "5 5"), ("1 1/2", "11/2"), (r"\frac{1}{23}", r"\frac123")],
    ),
    "sides of a relation": (
        [("(x,y)=(1,2)", "(1,2)"), ("x=1,y=2", "(x,y)=(1,2)"), ("x=1,x=2", r"x\in\{1,2\}"),
         ("11", "x+y=11")],
        [("2", r"x=5\text{ when }y=2"), ("(x,y)=(1,2)", "(2,1)"), ("x=1,y=2", "(x,y)=(2,1)"),
         ("4", r"x=5\text{ and }y=4")],
    ),
    "and, or": (
        [(r"1\le x<3", r"x\ge1\text{ and }x<3"), ("x<1\\text{ or }x>3", "x>3\\text{ or }x<1")],
        [("x<1\\text{ or }x>3", "x<1\\text{ and }x>3"), (r"1\le x<3", r"x\ge1\text{ or }x<3"),
         ("x>3", r"x>3\text{ and }x>4")],
    ),
    "brackets": (
        [("(0,1)", "]0,1["), ("(0,1]", "]0,1]"), (r"\langle1,2\rangle", "(1,2)"),
         (r"\begin{pmatrix}1/3\\2/3\end{pmatrix}", r"\frac13\begin{pmatrix}1\\2\end{pmatrix}"),
         (r"\begin{pmatrix}x&1\end{pmatrix}", r"\left(\begin{array}{cc}x&1\end{array}\right)")],
        [("[0,1]", "]0,1["), (r"\{\{1\},\{2\}\}", r"\{1,2\}"),
         (r"\begin{pmatrix}1\\2\end{pmatrix}", r"2\begin{pmatrix}1\\2\end{pmatrix}")],
    ),
    "two letters of a choice": (
        [("A", r"\textbf{(A)}\ 12"), ("A", "A. A triangle"), ("B", "(B) x+1")],
        [("A", text) for text in
         ("A. or B.", "A: no, B", r"\text{(A) or (B)}", r"(A)\quad (B)", "A) B)", "A.B")],
    ),
    "ratios and times of day": (
        [("2:3", "4:6"), ("2:3", r"\frac23"), (r"\frac23", "2:3"), ("2:3", r"2\text{ to }3"),
         ("3:45", "3:45 p.m."), (r"3:45\text{ p.m.}", r"3:45\text{ PM}")],
        [("2:30", "1:15"), ("12:45", "4:15"), ("7:05", "7:5"), ("7:05", "7:50"), ("2:3", "3:2"),
         ("8:00", "8")],
    ),
    "numbers in words": (
        [("21", r"\text{twenty-one}"), ("100", r"\text{one hundred}"),
         ("-3", r"\text{negative three}")],
        [("3", r"\text{minus three}"), ("3", r"\text{one two}"), ("12", r"\text{one or two}")],
    ),
    "bases": (
        [("1011_2", text) for text in
         (r"(1011)_2", r"1011_{\text{two}}", r"1011_{(2)}", r"1011\text{ (base 2)}")],
        [("1011_2", "1011"), ("1011_2", r"1011\text{ (base 3)}"), ("23", "23_5")],
    ),
    "infinity is no number": (
        [(r"+\infty", r"\infty")],
        [("0", r"\frac{1}{\infty}"), (r"\infty", r"\infty-\infty"), ("0", r"\infty-\infty")],
    ),
    "names and order": (
        [("a=1,b=2", "1,2"), ("x=1,x=2", "2,1"), ("HTH", r"\text{HTH}")],
        [("a=1,b=2", "2,1"), ("f(g(x))", "g(f(x))"), (r"\angle ABC", r"\angle ACB"),
         (r"\Delta", r"\delta"), (r"\log 2", r"\ln 2"), ("12", r"12\text{13}")],
    ),
    "other spellings": (
        [(r"2\sqrt3", "2*sqrt(3)"), (r"\frac{\pi}{4}", "pi/4"), (r"\binom52", r"{5\choose 2}"),
         (r"\frac12", r"\nicefrac{1}{2}"), ("f'(x)", r"f^{\prime}(x)"), ("5", "**5**"),
         (r"0.\dot{3}", r"\frac13"), (r"\mathbb{R}", r"\R"), (r"\angle A", "\u2220A")],
        [("2", "sqrt(2)"), ("f'(x)", "f(x)"), ("3", "5!!"), ("120", "3!!")],
    ),
}  # fmt: skip
FLAT = [(k, g, a, right) for k, lists in KINDS.items() for right, pairs in
        zip((True, False), lists, strict=True) for g, a in pairs]  # fmt: skip


@pytest.mark.parametrize("kind,gold,answer,right", FLAT)
def test_answer(kind, gold, answer, right):
    verdict, reason = judge(gold, f"So \\boxed{{{answer}}}.")
    assert (verdict == "correct") == right, (kind, verdict, reason)
    assert reason != "gold_unparsable"


QUESTION = "Simplify $(-k+4)+(-2+3k)$, and find $2\\times 3$ and 10/2."


@pytest.mark.parametrize(
    "gold,answer",
    [
        *(
            ("2k+2", text)
            for text in (
                "((-k+4)+(-2+3k))", "1((-k+4)+(-2+3k))", "(-k+4)+(-2+3k)+0", "(3k-2)+(4-k)",
                "x=(-k+4)+(-2+3k)", "(-k+4)+(-2+3k)\\text{ units}", "((-k+4)+(-2+3k))^1",
            )
        ),
        *(("5", text) for text in (r"\frac{10}{2}", "(10/2)", "10/2.0", "|10/2|", "[10/2]")),
        *(("6", text) for text in (r"2\cdot3", "3*2", "2\u00b73")),
    ],
)  # fmt: skip
def test_a_restated_question_in_another_spelling_is_wrong(gold, answer):
    assert judge(gold, f"\\boxed{{{answer}}}")[0] == "correct"
    verdict = judge(gold, f"\\boxed{{{answer}}}", question=QUESTION)
    assert verdict == ("wrong", "restates_question")


@pytest.mark.parametrize(
    "gold,answer,question",
    [
        ("2k+2", "2(k+1)", QUESTION),
        ("2", "x=2", r"Solve $\sec x = 2 \cos x$."),
        (r"\frac{24}{5}", "24/5", "Find it. [asy]draw((24/5,0));[/asy]"),
        ("6", "3+3", QUESTION),
    ],
)
def test_work_of_ones_own_restates_nothing(gold, answer, question):
    assert judge(gold, f"\\boxed{{{answer}}}", question=question)[0] == "correct"


@pytest.mark.parametrize(
    "words,value",
    [
        ("one hundred and five", "105"),
        ("two thousand five", "2005"),
        ("ten five", None),
        ("five twenty", None),
        ("hundred", None),
        ("negative", None),
        ("two thirds", r"\frac{2}{3}"),
    ],
)
def test_numbers_in_words(words, value):
    assert number(words) == value
