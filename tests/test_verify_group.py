"""Programs of one task share a judge: what that must not change, and when it must not happen."""

import os
import sys
from pathlib import Path

import pytest

from sage_jax.verify import Job, Verifier
from sage_jax.verify.code import interpret
from sage_jax.verify.sandbox import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "sage_jax" / "verify" / "box"))

import checks  # noqa: E402
import watch  # noqa: E402

RIGHT = "def f(n):\n    return 2 * n\n"
WRONG = "def f(n):\n    return n + 1\n"
TESTS = {"public": ["assert f(3) == 6", "assert f([1]) == [1, 1]"]}


@pytest.fixture(scope="module")
def verifier():
    with Verifier(workers=1, cpu_limit=1, time_limit=6.0) as made:
        yield made


@pytest.fixture
def judges(verifier, monkeypatch):
    """Judge CPU and counts as the slot reports them: -1 is the exit code of a judge kept."""
    seen = []

    def look(outcome, run):
        seen.append(outcome["judge"]["code"] == -1 and outcome["judge"]["signal"] == 0)
        return interpret(outcome, run)

    monkeypatch.setattr("sage_jax.verify.code.interpret", look)
    return seen


def run(verifier, programs, tests=TESTS, **fields):
    jobs = [
        Job(str(n), "code", {"solution": text, "tests": tests, "entry_point": "f", **fields})
        for n, text in enumerate(programs)
    ]
    return list(verifier.run(jobs).values())


# What one program does to its judge, or tries to; the next must find a judge like any other.
NEIGHBOURS = {
    "exits": "import os\nos._exit(0)\n",
    "floods the socket": "import os\ndef f(n):\n    while True: os.write(3, b'x' * 65536)\n",
    "junk frames": "import os\ndef f(n):\n    os.write(3, b'\\0\\0\\0\\2{}' * 99)\n    return 6\n",
    "huge value": "def f(n):\n    return [[0] * 1000] * 1000\n",
    "deep value": "def f(n):\n    x = []\n    for _ in range(5000): x = [x]\n    return x\n",
    "spins": "def f(n):\n    while True: pass\n",
    "keeps its end": "import threading, time, os\n"
    "def spam():\n    while True:\n        try: os.write(3, b'\\0\\0\\0\\1' + b'6')\n"
    "        except OSError: time.sleep(0.01)\n"
    "threading.Thread(target=spam, daemon=True).start()\ndef f(n): return n + 1\n",
    "other exceptions": "class E(Exception):\n    def __str__(self): raise KeyboardInterrupt\n"
    "def f(n): raise E\n",
    "answers for itself": "class A:\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
    "def f(n): return A()\n",
}


def test_no_program_moves_the_verdict_of_the_next(verifier):
    programs = []
    for number, text in enumerate(NEIGHBOURS.values()):
        programs += [text, f"{RIGHT}# {number}\n", f"{WRONG}# {number}\n"]
    verdicts = run(verifier, programs)
    for place, name in enumerate(NEIGHBOURS):
        bad, right, wrong = verdicts[3 * place : 3 * place + 3]
        assert not bad.correct and not bad.masked, (name, bad)
        assert right.correct, (name, right)
        assert (wrong.verdict, wrong.reason) == ("wrong", "assertion_failed"), (name, wrong)


def test_a_group_is_served_by_one_judge(verifier, judges):
    verdicts = run(verifier, [f"{RIGHT}# kept {n}\n" for n in range(6)])
    assert all(verdict.correct for verdict in verdicts)
    assert judges == [True] * 6


def test_a_judge_goes_on_to_other_tests(verifier, judges):
    for k in range(3):  # had it kept the tests of the program before, the second were wrong
        tests = {"public": [f"assert f(3) == {6 + k}", f"assert f(0) == {k}"]}
        right, wrong = f"def f(n): return 2 * n + {k}\n", RIGHT if k else WRONG
        verdicts = run(verifier, [right, wrong], tests)
        assert [verdict.verdict for verdict in verdicts] == ["correct", "wrong"]
    assert judges == [True] * 6


def test_a_judge_whose_tests_may_leave_traces_serves_one_program(verifier, judges):
    # With a shared judge the second program met the changed generator, and then the patched module.
    for tests in (
        "import random\nassert f(int(random.random() * 1e6)) == 2 * 844421",
        "import math\nassert not hasattr(math, 'seen')\nmath.seen = f(1)\nassert f(3) == 6",
    ):
        verdicts = run(verifier, [f"{RIGHT}# traces {n}\n" for n in range(3)], tests)
        assert all(verdict.correct for verdict in verdicts), verdicts
    assert judges == [False] * 6


@pytest.mark.parametrize(
    "text,shared",
    [
        ("assert f(1) == 2", True),
        ("import math\nfor k in range(3):\n    assert math.isclose(f(k), 2 * k)", True),
        ("def check(candidate):\n    assert candidate(1) == 2", True),
        ("import sys\nassert f(1) == 2", False),
        ("from random import randint\nassert f(1) == 2", False),
        ("import collections\ncollections.deque = list", False),
        ("assert getattr(f, 'x')", False),
        ("assert f.__globals__", False),
        ("setattr(f, 'x', 1)", False),
        ("assert random.random() < f(1)", False),
        ("assert (", False),
    ],
)
def test_which_tests_let_a_judge_go_on(text, shared):
    plan = {"mode": "asserts", "chunks": [text], "entry_points": ["f"]}
    assert checks.Tests(plan).shareable is shared


def test_an_idle_judge_does_not_stay(verifier):
    run(verifier, [f"{RIGHT}# idle\n"])
    (lane,) = verifier._dispatcher._lanes
    deadline = 100
    while len(family(lane.child.pid)) > 2 and deadline:
        watch.time.sleep(0.05)
        deadline -= 1
    assert len(family(lane.child.pid)) <= 2


def family(root):
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found = {root}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return found


# --- limits -------------------------------------------------------------------------------

SLOW = "import time\ndef f(n):\n    end = time.process_time() + 0.4\n"
SLOW += "    while time.process_time() < end: pass\n    return n\n"


def test_many_tests_have_more_time_together_but_none_alone(verifier):
    tests = {"kind": "io", "args": [f"[{n}]" for n in range(24)],
             "expected": [str(n) for n in range(24)]}  # fmt: skip
    some = "def f(n):\n    return n if n > 2 else slow(n)\n" + SLOW.replace("f(n)", "slow(n)")
    stuck = "def f(n):\n    while n == 5: pass\n    return n\n"
    verdicts = run(verifier, [some, stuck], tests)
    assert verdicts[0].correct and verdicts[0].cpu_ms > 1100
    assert verdicts[1].reason == "cpu_limit" and verdicts[1].cpu_ms < 2000
    few = {name: values[:4] if isinstance(values, list) else values
           for name, values in tests.items()}  # fmt: skip
    assert run(verifier, [some], few)[0].reason == "cpu_limit"


class StoppedClock:
    def __init__(self, used, delayed):
        self.used, self.delayed = lambda: used, lambda: delayed


@pytest.mark.parametrize(
    "used,delayed,ended",
    [
        (0.0, 0.0, "wall_hit"),  # a sleeper
        (0.1, 9.0, None),  # ready all the time, on a host that lets others go first
        (1.5, 0.0, "cpu_hit"),
        (0.7, None, None),  # nothing known about waiting: some CPU counts as work
    ],
)
def test_the_wall_limit_is_for_those_who_sleep(used, delayed, ended):
    reader, writer = os.pipe()
    limits = {"wall": 4.0, "step": 1.0}
    clocks = (StoppedClock(used, delayed), StoppedClock(0.0, 0.0))
    seen = watch.Watch(reader, reader, limits, clocks)
    seen._began -= 5.0
    seen._marked_at -= 5.0
    left = seen._time_left()
    os.close(reader)
    os.close(writer)
    assert (left <= 0) == (ended is not None)
    flags = [name for name in ("wall_hit", "cpu_hit") if getattr(seen, name)]
    assert flags == ([ended] if ended else [])


def test_a_right_answer_that_came_late_is_nobodys():
    outcome = {
        "verdict": '{"verdict": "correct", "reason": ""}', "locked": True, "wall_hit": False,
        "cpu_hit": False, "output_hit": False, "starved": False, "late": True,
        "solution": {"signal": 9, "code": -1, "cpu": 0.1}, "judge": {"signal": 0, "cpu": 0.1},
    }  # fmt: skip
    task = Run({"mode": "asserts"}, {"mode": "function"}, "", 1, 4.0, 64)
    assert interpret(outcome, task).reason == "sandbox_error"
    assert interpret({**outcome, "late": False}, task).correct
    wrong = {**outcome, "verdict": '{"verdict": "wrong", "reason": "assertion_failed"}'}
    assert interpret(wrong, task).verdict == "wrong"


# --- helpers of tests ---------------------------------------------------------------------

ROUND_TRIP = "def check(candidate):\n    assert candidate(pack('ab')) == 'ab'\n"
PACK = "import re\ndef pack(s):\n    return re.sub('^', '<', s)\n"


@pytest.mark.parametrize("field", ["question", "canonical_solution"])
def test_functions_that_tests_call_come_from_the_task(verifier, field):
    tests = {"kind": "check", "code": ROUND_TRIP}
    given = {field: PACK + "def f(s):\n    '''Undo pack.'''\n"}
    right = PACK + "def f(s):\n    return s[1:]\n"
    cheat = "def pack(s):\n    return s\ndef f(s):\n    return s\n"
    verdicts = run(verifier, [right, cheat], tests, **given)
    assert [verdict.verdict for verdict in verdicts] == ["correct", "wrong"]
    assert run(verifier, [cheat], tests)[0].masked


NODES = """
a = Node(1)
a.next = Node(2)
a.next.next = Node(3)
assert f(a) == 6
"""


def test_objects_that_tests_build_have_no_say(verifier):
    node = "class Node:\n    next = None\n    def __init__(self, n): self.n = n\n"
    right = node + "def f(a):\n    return a.n + (f(a.next) if a.next else 0)\n"
    assert run(verifier, [right], NODES)[0].correct
    forged = "class Node:\n    def __new__(cls, n): return {}\ndef f(a): return 6\n"
    plain = "class Node:\n    def __new__(cls, n): return {!r}\ndef f(a): return 0\n"
    speaks = (
        "class Node:\n    def __init__(self, n): pass\n    __eq__ = lambda s, o: True\n"
        "    __float__ = lambda s: 0.0\n    __hash__ = None\ndef f(a): return 0\n"
    )
    for text, tests in (
        (forged, NODES),
        (plain.format(0.0), "assert abs(Node(3)) < 1e-4"),
        (speaks, "assert Node(3) == f(3) and Node(1) == 1"),
        (speaks, "import math\nassert math.fabs(Node(3)) < 1e-4"),
        (speaks, "assert Node(3) in [1, 2]"),
    ):
        verdict = run(verifier, [text], tests)[0]
        assert verdict.verdict in ("wrong", "error") and not verdict.masked, (tests, verdict)
