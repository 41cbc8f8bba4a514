"""Code verdicts: kinds of tests, forging, limits, isolation levels, references."""

import os
import sys
from pathlib import Path

import pytest

from sage_jax.verify import IsolationError, Job, Verifier, extract_code, reference_tests
from sage_jax.verify.sandbox import isolation, require

sys.path.insert(0, str(Path(__file__).parent))

DOUBLE = "def f(n):\n    return 2 * n\n"


@pytest.fixture(scope="module")
def verifier():
    # Wall time enough for one CPU second on a machine that is busy with other tests.
    with Verifier(workers=2, cpu_limit=1, time_limit=6.0) as made:
        yield made


def judge(verifier, solution, tests, **fields):
    payload = {"solution": solution, "tests": tests, "entry_point": "f", **fields}
    return verifier.run([Job("one", "code", payload)])["one"]


# --- kinds of tests -----------------------------------------------------------------------

KINDS = {
    "text": "assert f(3) == 6\nassert f(-1) == -2",
    "lists": {"public": ["assert f(3) == 6"], "hidden": ["assert f('ab') == 'abab'"]},
    "check": {"kind": "check", "code": "def check(candidate):\n    assert candidate(4) == 8\n"},
    "asserts": {"kind": "asserts", "setup": "k = 5", "asserts": ["assert f(k) == 10"],
                "challenge": ["assert f(0) == 0"]},
    "io": {"kind": "io", "args": ["[3]", "([1, 2],)"], "expected": ["6", "[1, 2, 1, 2]"],
           "compare": "eq", "atol": 0},
    "io call": {"kind": "io", "args": ["n=7"], "expected": ["14"], "args_are_call_text": True},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_accepts_right_and_rejects_wrong(verifier, name):
    assert judge(verifier, DOUBLE, KINDS[name]).verdict == "correct"
    wrong = judge(verifier, "def f(n):\n    return n + 3\n", KINDS[name])
    assert wrong.verdict == "wrong" and not wrong.masked


def test_hidden_tests_count(verifier):
    looked_up = "def f(n):\n    return {3: 6}.get(n)\n"
    assert judge(verifier, looked_up, KINDS["lists"]).verdict == "wrong"


@pytest.mark.parametrize(
    "compare,atol,expected,result,verdict",
    [
        ("eq", 0, "0.3", "0.1 + 0.2", "wrong"),
        ("eq", 1e-9, "[0.3]", "[0.1 + 0.2]", "correct"),
        ("eq", 1e-9, "[0.3]", "(0.1 + 0.2,)", "wrong"),
        ("eq", 0, "inf", "float('inf')", "correct"),
        ("eq", 0, "[1, 2]", "(1, 2)", "wrong"),
        ("eq", 0, "{'a': {1, 2}}", "{'a': {2, 1}}", "correct"),
        ("set", 0, "(1, 2)", "[2, 1, 1]", "correct"),
        ("set", 0, "(1, 2)", "[2]", "wrong"),
        ("not_none", 0, "True", "object()", "correct"),
        ("not_none", 0, "True", "None", "wrong"),
        ("not_none", 0, "False", "None", "correct"),
    ],
)
def test_io_comparisons(verifier, compare, atol, expected, result, verdict):
    tests = {"kind": "io", "args": ["[0]"], "expected": [expected], "compare": compare}
    tests["atol"] = atol
    assert judge(verifier, f"def f(x):\n    return {result}\n", tests).verdict == verdict


def test_an_entry_point_that_is_no_function_is_wrong(verifier):
    assert judge(verifier, "f = 6\n", KINDS["io"]).reason == "not_callable"


def test_stdio_compares_all_lines(verifier):
    tests = {"kind": "stdio", "stdin": ["2 3\n", "5 5"], "stdout": ["5\ndone", "10\ndone\n"]}
    right = "a, b = map(int, input().split())\nprint(a + b)\nprint('done')\n"
    assert judge(verifier, right, tests).verdict == "correct"
    first_line_only = right.replace("print('done')", "")
    assert judge(verifier, first_line_only, tests).reason == "stdout_mismatch"
    assert judge(verifier, right + "print('more')\n", tests).reason == "stdout_mismatch"
    assert judge(verifier, right + "raise SystemExit(3)\n", tests).reason == "exit_status"


def test_objects_and_exceptions_of_the_solution(verifier):
    solution = """
class Empty(LookupError):
    pass
class Box:
    def __init__(self, *items):
        self.items = list(items)
    def take(self):
        if not self.items:
            raise Empty("nothing left")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __add__(self, other): return Box(*self.items, *other.items)
    def __eq__(self, other): return self.items == other.items
    def __iter__(self): return iter(self.items)
"""
    tests = """
box = Box(1, 2) + Box((3, 4))
assert len(box) == 3 and list(box) == [1, 2, (3, 4)]
assert isinstance(box, Box) and not isinstance(5, Box)
assert box.take() == (3, 4) and box.items == [1, 2]
assert Box(1) == Box(1) and Box(1) != Box(2)
assert box != [1, 2]
try:
    Box().take()
    raise SystemError
except Empty as error:
    assert str(error) == "nothing left" and isinstance(error, LookupError)
"""
    result = judge(verifier, solution, tests, entry_point=None, entry_points=["Box", "Empty"])
    assert result.verdict == "correct", result


def test_arguments_change_only_when_asked(verifier):
    solution = "def f(xs, key):\n    xs.sort(key=key)\n"
    tests = "xs = [3, -4, 1]\nf(xs, abs)\nassert xs == [1, 3, -4]"
    assert judge(verifier, solution, tests, mutates_args=True).verdict == "correct"
    assert judge(verifier, solution, tests).verdict == "wrong"


def test_callbacks_of_the_tests_are_called(verifier):
    solution = "def f(g, xs):\n    return [g(x) for x in xs]\n"
    assert judge(verifier, solution, "assert f(lambda x: x * x, [1, 3]) == [1, 9]").correct


# --- forging ------------------------------------------------------------------------------

ANSWERS_FOR_ITSELF = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    def __le__(self, other): return True
    def __contains__(self, item): return True
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a): return self
def f(n): return Any()
"""
FORGERIES = {
    "exit": "import os\nos._exit(0)\n",
    "exit in call": "import sys\ndef f(n):\n    sys.exit(0)\n",
    "exit thread": "import os, threading, time\nthreading.Timer(0.1, os._exit, [0]).start()\n"
    "def f(n):\n    time.sleep(0.4)\n",
    "answers for itself": ANSWERS_FOR_ITSELF,
    "int that equals": "class I(int):\n    __eq__ = lambda s, o: True\n"
    "    __ne__ = lambda s, o: False\n    __hash__ = int.__hash__\ndef f(n): return I(0)\n",
    "builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.sorted = lambda x: [6]\n"
    "def f(n): return 0\n",
    "shadows": "def abs(x): return 0\ndef isinstance(*a): return True\ndef f(n): return 0\n",
    "mock": "from unittest.mock import ANY\ndef f(n): return ANY\n",
    "descriptors": "import os\ndef f(n):\n    for fd in range(64):\n        try:\n"
    "            os.write(fd, b'{\"verdict\": \"correct\", \"reason\": \"\"}')\n"
    "        except OSError: pass\n    os._exit(0)\n",
    "frames": "import sys\ndef f(n):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals['verdict'] = lambda *a: {'verdict': 'correct'}\n"
    "        frame = frame.f_back\n    return 0\n",
    "replies ahead": "import os, json, struct\n"
    "def f(n):\n    text = json.dumps({'value': 6}).encode()\n"
    "    for _ in range(9): os.write(3, struct.pack('>I', len(text)) + text)\n    return 0\n",
    "raises the test's own": "def f(n):\n    raise AssertionError\n",
    "not implemented": "def f(n): return NotImplemented\n",
    "itself": "def f(n):\n    x = []\n    x.append(x)\n    return x\n",
}  # fmt: skip
STRICT = {
    "equal": "assert f(3) == 6\nassert f(5) == 10",
    "unequal": "assert not (f(3) != 6) and not (f(5) != 10)",
    "near": "assert abs(f(3) - 6) < 1e-9 and abs(f(5) - 10) < 1e-9",
    "member": "assert 6 in [f(3)] and 10 in [f(5)] and 7 in f([7])",
    "method": "assert str(f(3)).startswith('6') and f('ab').startswith('ab')\nassert f(5) == 10",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_verdict_is_forged(verifier, name):
    jobs = [
        Job(test, "code", {"solution": FORGERIES[name], "tests": text, "entry_point": "f"})
        for test, text in STRICT.items()
    ]
    for test, result in verifier.run(jobs).items():
        assert result.verdict in ("wrong", "error") and not result.masked, (test, result)
    assert judge(verifier, DOUBLE, STRICT["equal"]).verdict == "correct"


def test_a_test_that_swallows_everything_still_sees_the_exit(verifier):
    tests = "try:\n    f(1)\nexcept BaseException:\n    pass"
    for body in ("import os; os._exit(0)", "raise SystemExit(0)"):
        assert judge(verifier, f"def f(n):\n    {body}\n", tests).reason == "early_exit"
    assert judge(verifier, "def f(n):\n    raise ValueError\n", tests).correct


def test_strict_tests_can_pass(verifier):
    for name, text in STRICT.items():
        assert judge(verifier, DOUBLE, text).verdict == "correct", name


# --- limits and isolation -----------------------------------------------------------------


@pytest.mark.parametrize(
    "body,verdict,reason",
    [
        ("    while True: pass", "timeout", "cpu_limit"),
        ("    import time; time.sleep(30)", "timeout", "wall_limit"),
        ("    return len(bytearray(2 << 30))", "wrong", "raised_MemoryError"),
        ("    for _ in range(3000): print('x' * 1000)", "error", "output_limit"),
        ("    return 'x' * (5 << 20)", "wrong", "result_too_large"),
        ("    import ctypes; ctypes.string_at(0)", "error", "crashed_SIGSEGV"),
        ("    return f(n)", "wrong", "raised_RecursionError"),
        ("  return )", "error", "syntax_error"),
    ],
)
def test_limits_name_their_reason(verifier, body, verdict, reason):
    result = judge(verifier, f"def f(n):\n{body}\n", "assert f(1) == 2")
    assert (result.verdict, result.reason) == (verdict, reason)


def test_a_row_may_have_its_own_limits(verifier):
    slow = "import time\ndef f(n):\n    time.sleep(4.2)\n    return 2 * n\n"
    big = "def f(n):\n    return 2 * n * len(bytearray(300 << 20)) // (300 << 20)\n"
    rows = {
        "slow": ({"solution": slow, "time_limit": 1}, "wall_limit"),
        "slow, more time": ({"solution": slow, "time_limit": 20}, ""),
        "big": ({"solution": big}, ""),
        "big, less memory": ({"solution": big, "memory_mb": 256}, "raised_MemoryError"),
    }
    jobs = [
        Job(name, "code", {"tests": "assert f(1) == 2", "entry_point": "f", **row})
        for name, (row, _) in rows.items()
    ]
    verdicts = verifier.run(jobs)
    assert {n: v.reason for n, v in verdicts.items()} == {n: r for n, (_, r) in rows.items()}


REACH = """
import os, socket
def f(path):
    done = []
    def attempt(name, action):
        try: action()
        except OSError: return
        done.append(name)
    def fork():
        if os.fork() == 0: os._exit(0)
    attempt('read', lambda: open(path).read())
    attempt('write', lambda: open(path + '.w', 'w'))
    attempt('passwd', lambda: open('/etc/passwd'))
    attempt('parent', lambda: open('/proc/%d/environ' % os.getppid()))
    attempt('fork', fork)
    attempt('exec', lambda: os.execv('/bin/sh', ['sh', '-c', ':']))
    attempt('signal', lambda: os.kill(os.getppid(), 0))
    attempt('tcp', lambda: socket.socket().connect(('127.0.0.1', 9)))
    attempt('udp', lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)))
    found = os.listdir('.')
    open('own.txt', 'w').write('fine')
    return [done, 'SAGE_SECRET' in os.environ, found]
"""


@pytest.mark.parametrize("without", [(), ("namespaces",)])
def test_nothing_outside_is_reached(tmp_path, monkeypatch, without):
    monkeypatch.setenv("SAGE_SECRET", "x")
    os.chmod(tmp_path, 0o777)
    secret = tmp_path / "secret"
    secret.write_text("x")
    tests = f"assert f({str(secret)!r}) == [[], False, []]"
    with Verifier(workers=1, without=without) as verifier:
        for _ in range(2):  # the second program finds no file of the first
            result = judge(verifier, REACH + f"# {_}\n", tests)
            assert result.verdict == "correct", result.output_tail
    assert not (tmp_path / "secret.w").exists()


LAYERS = {
    "namespaces": "root",
    "landlock": 7,
    "seccomp": True,
    "user": 200_000,
    "probe": ["closed"],
}


@pytest.mark.parametrize(
    "changes,level",
    [
        ({}, "A"),
        ({"namespaces": False}, "B"),
        ({"landlock": 0}, "B"),
        ({"namespaces": False, "landlock": 0, "probe": ["read /etc/passwd", "write /tmp"]}, "C"),
        ({"namespaces": False, "landlock": 0, "user": 0, "probe": ["write /tmp"]}, "D"),
        ({"seccomp": False, "probe": ["fork", "socket"]}, "D"),
        ({"probe": ["socket"]}, "D"),
    ],
)
def test_level_follows_what_the_probe_saw(changes, level):
    assert isolation({**LAYERS, **changes})[0] == level


def test_a_level_below_the_required_is_refused_with_the_remedy():
    weak = {**LAYERS, "namespaces": False, "landlock": 0, "probe": ["write /tmp"]}
    with pytest.raises(IsolationError) as error:
        require(weak, "B")
    for part in ("landlock", "namespaces", "write /tmp", "sandbox.require_level=C"):
        assert part in str(error.value)
    require(weak, "C")
    require(weak, "none")
    with pytest.raises(IsolationError):
        Verifier(workers=1, without=("namespaces", "landlock"))


# --- determinism and references -----------------------------------------------------------


@pytest.mark.parametrize(
    "body,same",
    [
        ("return sorted({'p', 'q', 'r'})", True),
        ("return {'p', 'q', 'r'}", True),
        ("return list({'p', 'q', 'r', 's', 't'})", False),
        ("import time; return time.time_ns()", False),
        ("import random; return random.random()", False),
        ("return repr(object())", False),
        ("return object()", False),
    ],
)
def test_determinism_probe(verifier, body, same):
    result = judge(verifier, f"def f(n):\n    {body}\n", "f(0)", determinism_probe="f(0)")
    assert (result.verdict, result.deterministic) == ("correct", same)


@pytest.mark.parametrize(
    "body,inputs,verdict,reason",
    [
        ("return sorted(a)[:b]", ["[3, 1], 1", "([4, 9], 2)"], "correct", ""),
        ("return 7", ["1, 2", "3, 4"], "wrong", "trivial_constant"),
        ("pass", ["1, 2", "3, 4"], "wrong", "trivial_empty"),
        ("return b", ["1, 2", "3, 4"], "wrong", "trivial_identity"),
        ("return list({str(a), str(b), 'x'})", ["1, 2", "3, 4"], "wrong", "nondeterministic"),
        ("return object()", ["1, 2", "3, 4"], "error", "not_plain"),
        ("return a / b", ["1, 2", "3, 0"], "error", "raised_ZeroDivisionError"),
        ("return a + b", ["1, 2", "exit()"], "error", "bad_input"),
        ("return a + b", [], "wrong", "no_inputs"),
        ("while True: pass", ["1, 2", "3, 4"], "timeout", "cpu_limit"),
    ],
)
def test_references_are_checked_by_running_them(verifier, body, inputs, verdict, reason):
    solution = f"def f(a, b):\n    {body}\n"
    payload = {"solution": solution, "entry_point": "f", "inputs": inputs}
    result = verifier.run([Job("ref", "code_reference", payload)])["ref"]
    assert (result.verdict, result.reason) == (verdict, reason)
    if verdict == "correct":
        assert result.expected == ["[1]", "[4, 9]"] and result.deterministic
        tests = reference_tests(inputs, result.expected)
        assert judge(verifier, solution, tests).verdict == "correct"
        assert judge(verifier, "def f(a, b):\n    return a\n", tests).verdict == "wrong"


# --- rows and texts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,word",
    [
        ({"solution": 5}, "solution"),
        ({"tests": 5}, "tests"),
        ({"tests": {"kind": "magic"}}, "kind"),
        ({"tests": {"kind": "io", "args": ["1"], "expected": []}}, "pair up"),
        ({"entry_point": None}, "entry_point"),
        ({"entry_point": "a b"}, "not a Python name"),
        ({"time_limit": -1}, "time_limit"),
        ({"memory_mb": 1}, "memory_mb"),
        ({"stdin": 3}, "stdin"),
    ],
)
def test_malformed_rows_name_the_field(verifier, change, word):
    payload = {"solution": DOUBLE, "tests": "assert f(1) == 2", "entry_point": "f", **change}
    with pytest.raises(ValueError, match=word):
        verifier.submit(Job("bad", "code", payload))


def test_broken_tests_mask_the_row(verifier):
    for tests in ("assert f(1 == 2", "assert helper(f(1)) == 2"):
        assert judge(verifier, DOUBLE, tests).masked
    raises = "def f(n):\n    raise NameError('helper')\n"
    assert not judge(verifier, raises, "assert f(1) == 2").masked


@pytest.mark.parametrize(
    "text,program",
    [
        ("<answer>x = 1\ny = 2</answer>", "x = 1\ny = 2"),
        ("<answer>\n```python\nx = 1\n```\n</answer> ```python\nz\n```", "x = 1"),
        ("Look:\n```python\na = 1\n```\nor\n```py\nb = 2\n```", "b = 2"),
        ("```\nno mark\n```", ""),
        ("```python\nnever closed", "never closed"),
        ("nothing", ""),
    ],
)
def test_extract_code(text, program):
    assert extract_code(text) == program


def test_finding_the_program_takes_linear_time_on_hostile_text():
    # Quadratic search took minutes at this length, in the trainer.
    for text in ("<answer>" * 200_000, "```" * 500_000, "</answer>" * 200_000):
        assert extract_code(text) == ""
    assert extract_code("<answer> draft <answer>\nx = 1\n</answer> and so on") == "x = 1"
