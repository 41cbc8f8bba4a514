"""Tasks: the schema, the public hint, and the key that nobody but the verifier reads."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.roles import KINDS, load_prompts
from sage_jax.tasks.task import (
    PublicTask,
    Task,
    argument_tuple,
    first_example,
    proposed_code,
    proposed_math,
)

SHARED = Path(__file__).parents[1].parent / "shared"
PROMPTS = {name: load_prompts(name) for name in ("v1", "short")}
KEY = "KEY-7f3a"  # in every private field below, in no public one


def math_row(**changes):
    return {"id": "m", "domain": "math", "question": "What is 2 + 3?", "answer": "5", **changes}


def code_row(tests=None, **changes):
    row = {"id": "c", "domain": "code", "question": "Write f.", "entry_point": "f"}
    return {**row, "tests": tests or "assert f(1) == 2\nassert f(2) == 3", **changes}


def asserts(*lines):
    return {"kind": "asserts", "setup": "", "asserts": list(lines), "challenge": []}


def io(args, expected, **changes):
    return {"kind": "io", "compare": "eq", "atol": 0, "args": args, "expected": expected, **changes}


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="../shared absent")
@pytest.mark.parametrize("path", sorted((SHARED / "data").glob("*.jsonl")), ids=lambda p: p.stem)
def test_every_row_of_the_data_files_survives_a_round_trip(path):
    for line in path.read_text(encoding="utf-8").splitlines():
        task = Task.from_json(json.loads(line))
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
        if task.domain == "code":
            assert task.job("1", "").payload["tests"] == json.loads(line)["tests"]


KEYS = st.sampled_from(
    [
        math_row(answer=KEY, tolerance=0.1, solution=f"so {KEY}"),
        math_row(answer=KEY, unit=KEY, answer_type=KEY),
        code_row(asserts("assert f(1) == 2", f"assert f(2) == '{KEY}'"), canonical_solution=KEY),
        code_row({"kind": "check", "code": f"def check(c):\n    assert c(1) == '{KEY}'"}),
        code_row(f"assert f(1) == '{KEY}'"),
        code_row(asserts(f"assert f(1) == '{KEY}'")),
        code_row({"public": [], "hidden": [f"assert f(1) == '{KEY}'"]}),
        code_row({"public": ["assert f(1) == 2"], "hidden": [f"assert f(2) == '{KEY}'"]}),
        code_row(io(["[1]", "[2]"], ["2", f"'{KEY}'"]), stdin=KEY),
        code_row(io(["[1]"], [f"'{KEY}'"])),
        code_row({"kind": "stdio", "stdin": ["1", "2"], "stdout": ["2", KEY]}),
    ]
)


@settings(deadline=None)
@given(KEYS, st.text(min_size=1).filter(str.strip), st.text(), st.sampled_from(sorted(PROMPTS)))
def test_no_prompt_of_any_role_holds_the_key(row, question, plan, prompts):
    question = question.encode(errors="ignore").decode() or "?"
    task = Task.from_json({**row, "question": question + "?"})
    for kind in KINDS:
        for message in PROMPTS[prompts].messages(kind, task.public, plan=plan):
            assert KEY not in message["content"]
    assert KEY not in repr(task.public) and KEY not in repr(task)


def test_the_public_part_holds_text_only():
    """So there is no object to follow back to the key."""
    public = Task.from_json(code_row()).public
    assert all(type(value) is str for value in vars(public).values())
    assert [*vars(public)] == ["id", "domain", "question", "entry_point", "hint"]


@pytest.mark.parametrize(
    "tests, hint",
    [
        ("assert f(1) == 2\nassert f(2) == 3", "assert f(1) == 2"),
        ("assert f(1) == 2", ""),  # the only test is the whole key
        (asserts("assert f(1) == 2", "assert f(2) == 3"), "assert f(1) == 2"),
        (asserts("assert f(1) == 2"), ""),
        (asserts("assert f(" + "1" * 400 + ")", "assert f(2) == 3"), "assert f(2) == 3"),
        ({"public": ["assert f(1) == 2"], "hidden": ["assert f(3)"]}, "assert f(1) == 2"),
        ({"hidden": ["assert f(1) == 2", "assert f(2) == 3"]}, ""),
        (io(["[1, (2, 3)]", "[2]"], ["2", "3"]), "assert f(1, (2, 3)) == 2"),
        (io(["([1],)", "([2],)"], ["2", "3"]), "assert f([1]) == 2"),
        (io(["3, [1]", "4"], ["2", "3"], args_are_call_text=True), "assert f(3, [1]) == 2"),
        (io(["[1]", "[2]"], ["2", "3"], compare="set"), "assert set(f(1)) == set(2)"),
        (io(["[1]"], ["2"]), ""),
        ({"kind": "check", "code": "def check(c): assert c(1)"}, ""),
        ({"kind": "stdio", "stdin": ["1\n", "2"], "stdout": ["2", "3"]}, r"input '1\n' prints '2'"),
    ],
)
def test_the_hint_is_the_first_short_public_example(tests, hint):
    assert first_example(tests, "f") == hint
    assert Task.from_json(code_row(tests)).public.hint == hint


def test_a_given_hint_wins_even_when_empty():
    row = code_row(hint_assert="assert f(9)")
    assert Task.from_json(row).public.hint == "assert f(9)"
    task = Task.from_json({**row, "hint": ""})
    assert task.public.hint == ""
    assert Task.from_json(task.to_json()).public.hint == ""


def test_a_maths_job_hands_the_raw_response_to_the_verifier():
    task = Task.from_json(math_row(answer=5, tolerance="1e-1"))
    job = task.job("row7", "I say <answer>5</answer>")
    assert (job.id, job.kind) == ("row7", "math")
    assert job.payload == {
        "gold": "5",
        "prediction": "I say <answer>5</answer>",
        "question": "What is 2 + 3?",
        "tolerance": 0.1,
    }
    assert "tolerance" not in Task.from_json(math_row(tolerance=None)).job("1", "").payload


def test_a_code_job_carries_the_program_the_tests_and_the_limits():
    task = Task.from_json(code_row(time_limit=2.0, canonical_solution="def f(): pass"))
    job = task.job("row8", "Sure.\n<answer>\n```python\ndef f(x):\n    return x\n```\n</answer>")
    assert (job.id, job.kind) == ("row8", "code")
    assert job.payload == {
        "solution": "def f(x):\n    return x",
        "tests": "assert f(1) == 2\nassert f(2) == 3",
        "entry_points": ["f"],
        "time_limit": 2.0,
        # Where the tests' own helpers may be defined.
        "question": "Write f.",
        "canonical_solution": "def f(): pass",
    }


@pytest.mark.parametrize(
    "row, said",
    [
        ([], "write one JSON object"),
        ({**math_row(), "id": " "}, "field 'id'"),
        ({**math_row(), "id": 3}, "field 'id' is 3"),
        (math_row(question=None), "field 'question' is missing"),
        (math_row(question="\ud800"), "surrogate"),
        (code_row(hint="\ud800"), "field 'hint' is '\\ud800': half of a surrogate pair"),
        (code_row("assert f(1) == '\ud800'\nassert f(2) == 3"), "field 'tests'"),
        (math_row(domain="maths"), "field 'domain' is 'maths': use 'math' or 'code'"),
        (math_row(answer=None), "field 'answer' is missing"),
        (math_row(answer=True), "field 'answer' is True"),
        (math_row(answer=float("nan")), "field 'answer'"),
        (math_row(answer=["5"]), "field 'answer'"),
        (math_row(tolerance=0), "field 'tolerance' is 0"),
        (math_row(tolerance="wide"), "field 'tolerance'"),
        (math_row(stats={"attempts": -1}), "field 'stats'"),
        (math_row(stats={"tries": 1}), "field 'stats'"),
        (code_row(entry_point=None), "field 'entry_point' is missing"),
        (code_row(entry_point="f()"), "field 'entry_point'"),
        (code_row(tests=" "), "field 'tests'"),
        (code_row(tests=["assert f(1)"]), "field 'tests'"),
        (code_row(tests={"hidden": []}), "public and hidden"),
        (code_row(tests={"kind": "unit"}), "field 'tests.kind' is 'unit'"),
        (code_row(tests={"kind": "check", "code": "x"}), "check(candidate)"),
        (code_row(tests=asserts()), "asserts"),
        (code_row(tests=io(["[1]", "[2]"], ["1"])), "equal length"),
        (code_row(canonical_solution=3), "field 'canonical_solution'"),
        (math_row(tolerance=10**400), "field 'tolerance'"),
        (math_row(stats=""), "field 'stats'"),
        (code_row(tests={"kind": ["io"]}), "field 'tests.kind'"),
        # What the verifier refuses would otherwise end a run at the first answer to the task.
        (code_row(entry_point="Solution.solve"), "entry point 'Solution.solve'"),
        (code_row(time_limit="5"), "field time_limit"),
        (code_row(time_limit=10**400), "field time_limit"),
        (code_row(memory_mb=1), "field memory_mb"),
        (code_row(stdin=["1"]), "field stdin"),
        (code_row(determinism_probe=1), "field determinism_probe"),
        (code_row(tests={**asserts("assert f(1)"), "setup": 5}), "field setup"),
        (code_row(tests={**io(["[1]"], ["1"]), "compare": []}), "field tests.compare"),
        (code_row(tests={**io(["[1]"], ["1"]), "atol": "x"}), "field atol"),
    ],
)
def test_bad_rows_name_field_value_and_remedy(row, said):
    with pytest.raises(ValueError) as caught:
        Task.from_json(row)
    assert said in str(caught.value)


def test_a_row_lists_all_its_problems_at_once():
    with pytest.raises(ValueError) as caught:
        Task.from_json({"domain": "math", "tolerance": -1})
    assert all(name in str(caught.value) for name in ("id", "question", "answer", "tolerance"))


@pytest.mark.parametrize(
    "line, args",
    [
        ("5", "(5,)"),
        ("3, [1, 2]", "(3, [1, 2],)"),
        ("(3, [1, 2])", "(3, [1, 2])"),
        ("(5)", "((5),)"),
        ("(1, 2), 3", "((1, 2), 3,)"),
        ("(1, 2), (3, 4)", "((1, 2), (3, 4),)"),
        ("((1, 2),)", "((1, 2),)"),
        ("()", "()"),
        ("( )", "( )"),
        ("'a,b'", "('a,b',)"),
        ("('a)', 2)", "('a)', 2)"),
        (r"('a\'),b', 2)", r"('a\'),b', 2)"),
        ("'(', ')'", "('(', ')',)"),
        ("1, 2,", "(1, 2,)"),
        ("(", "((,)"),
    ],
)
def test_a_line_of_arguments_becomes_one_tuple(line, args):
    assert argument_tuple(line) == args


def test_proposals_are_tasks_like_any_other():
    maths = proposed_math("s3/c0", "What is 2 + 2?", "4", step=3, parent="m")
    code = proposed_code(
        "s3/c1",
        "Write g.",
        entry_point="g",
        solution="def g(x): return x + 1",
        inputs=["1", "(2)"],
        expected=["2", "3"],
        step=3,
        parent="c",
    )
    for task in (maths, code):
        assert task.stats.born_step == 3 and task.provenance["source"] == "challenger"
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert code.job("1", "x").payload["tests"]["expected"] == ["2", "3"]
    assert code.public.hint == "assert g(1) == 2"
    assert maths.public == PublicTask("s3/c0", "math", "What is 2 + 2?")
    with pytest.raises(ValueError, match="equal length"):
        proposed_code(
            "x", "q", entry_point="g", solution="", inputs=["(1,)"], expected=[], step=0, parent=""
        )
