"""Programs that try to be judged right without being so, and honest ones of every kind."""

import pytest

from sage_jax.verify import Job, Verifier

SQUARE = {
    "asserts": {"public": ["assert f(2) == 4"], "hidden": ["assert f(-5) == 25"]},
    "check": {"kind": "check", "code": "def check(c):\n    for x in (2, -5): assert c(x) == x * x"},
    "loop": {"public": ["for got, x in zip(map(f, [2, 3]), [2, 3]):\n    assert got == x * x"]},
    "io": {"kind": "io", "args": ["[2]", "[-5]"], "expected": ["4", "25"], "atol": 1e-6},
}  # fmt: skip
CHEATS = {
    "ends the loop": "def f(x): raise StopIteration",
    "ends the loop by a subclass": "class S(StopIteration): pass\ndef f(x): raise S",
    "exit": "def f(x): raise GeneratorExit",
    "equal float": """class F(float):
    def __eq__(s, o): return True
    def __sub__(s, o): return 0.0
    __rsub__, __hash__ = __sub__, float.__hash__
def f(x): return F(1.0)""",
    "equal object": """class F:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __sub__(s, o): return 0
    __rsub__ = __sub__
    def __hash__(s): return 4
def f(x): return F()""",
    "equal class": """class M(type):
    def __eq__(s, o): return True
    def __hash__(s): return 4
class F(metaclass=M): pass
def f(x): return F""",
    "claimed class": """class F:
    __class__ = int
    def __eq__(s, o): return True
def f(x): return F()""",
    "anything": "from unittest import mock\ndef f(x): return mock.ANY",
    "entry point is a class": """class f:
    def __init__(s, x): pass
    def __eq__(s, o): return True""",
    "cyclic": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "deep": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "huge": "def f(x): return 1 << (1 << 24)",
    "decimal without end": "from decimal import Decimal\ndef f(x): return Decimal('1e999999999')",
    "not a number": "def f(x): return float('nan')",
    "surrogate": "def f(x): return '\\ud800'",
    "forged frames": """import os, json, struct
m = json.dumps({"value": 4}).encode()
for fd in range(64):
    try: os.write(fd, struct.pack(">I", len(m)) + m)
    except OSError: pass
def f(x): return 0""",
    "patched codec": "import codec\ncodec.encode = lambda *a: 4\ndef f(x): return 0",
    "patched server": """import gc
for o in gc.get_objects():
    if type(o).__name__ == "Server": o._encode = lambda v: 4
def f(x): return 0""",
    "patched builtins": """import builtins
builtins.isinstance = builtins.all = builtins.any = lambda *a: True
builtins.zip = lambda *a, **k: []
def f(x): return 0""",
    "signals": """import os, signal
signal.signal(signal.SIGALRM, lambda *a: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.02)
def f(x):
    while True: pass""",
    "memory of an integer": """import ctypes
def f(x):
    ctypes.c_uint32.from_address(id(4) + 24).value = 0
    return 0""",
    "destructor": """import os
class D:
    def __del__(s): os._exit(0)
def f(x): D()""",
    "exception without text": """class E(Exception):
    def __str__(s): return 4
def f(x): raise E""",
    "coroutine": "async def f(x): return x * x",
}  # fmt: skip
HONEST = [
    ("from datetime import date, timedelta\ndef f(): return date(2020, 1, 2)\n"
     "def g(d): return d + timedelta(days=1)",
     "import datetime\nassert f() == datetime.date(2020, 1, 2)\nassert f().isoformat() == "
     "'2020-01-02'\nassert g(datetime.date(2020, 1, 31)) == datetime.date(2020, 2, 1)\n"
     "assert g(f()) - f() == datetime.timedelta(1)", ["f", "g"]),
    ("def f(n):\n    for k in range(n): yield k",
     "assert list(f(3)) == [0, 1, 2]\nassert next(f(0), 'end') == 'end'\nit = f(1)\nnext(it)\n"
     "try:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass", ["f"]),
    ("from collections import *\ndef c(): return Counter('aab')\ndef d(): return deque([1], 2)\n"
     "def o(): return OrderedDict(a=1)\ndef n(): return namedtuple('N', 'a b')(1, 2)",
     "assert c() == {'a': 2, 'b': 1}\nassert list(d()) == [1]\nassert o() == {'a': 1}\n"
     "assert n() == (1, 2)", ["c", "d", "o", "n"]),
    ("def f(): return 3+4j, b'x', {1}, frozenset([2]), bytearray(b'y'), range(3), 10**5000",
     "assert f() == (3+4j, b'x', {1}, frozenset([2]), bytearray(b'y'), range(3), 10**5000)", ["f"]),
    ("from fractions import Fraction\nfrom decimal import Decimal\n"
     "def f(): return [Fraction(1, 3), Decimal('0.1')]",
     "from fractions import Fraction\nfrom decimal import Decimal\n"
     "assert f() == [Fraction(1, 3), Decimal('0.1')]", ["f"]),
    ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(900) == 900", ["f"]),
    ("from enum import Enum\nclass C(Enum):\n    R = 1\ndef f(): return C.R",
     "assert f() == C.R and f().value == 1 and C(1) == C.R", ["f", "C"]),
]  # fmt: skip
STDIN = [
    "print(int(input()) ** 2)",
    "import sys\nprint(int(sys.stdin.read()) ** 2)",
    "import sys\nfor line in sys.stdin: print(int(line) ** 2)",
    "import sys\nprint(int(sys.stdin.buffer.readline()) ** 2)",
    "print(int(open(0).read()) ** 2)",
    "import fileinput\nfor line in fileinput.input(): print(int(line) ** 2)",
    "import os\nos.write(1, b'9\\n')",
]
MISPRINTS = ["print(' 9')", "print(9, 9)", "print('9.0')", "print(9)\n1 / 0", "print('\\n9')", ""]


@pytest.fixture(scope="module")
def verifier():
    with Verifier(workers=2, cpu_limit=1, time_limit=6.0) as made:
        yield made


def test_no_cheat_passes_any_kind_of_tests(verifier):
    jobs = [
        Job(f"{kind}: {name}", "code", {"solution": code, "tests": tests, "entry_point": "f"})
        for kind, tests in SQUARE.items()
        for name, code in CHEATS.items()
    ]
    verdicts = verifier.run(jobs)
    assert {name: v.reason for name, v in verdicts.items() if v.correct or v.masked} == {}


def test_honest_programs_pass(verifier):
    jobs = [
        Job(str(number), "code", {"solution": code, "tests": tests, "entry_points": names})
        for number, (code, tests, names) in enumerate(HONEST)
    ]
    jobs += [
        Job(
            kind, "code", {"solution": "def f(x): return x * x", "tests": tests, "entry_point": "f"}
        )
        for kind, tests in SQUARE.items()
    ]
    verdicts = verifier.run(jobs)
    assert {name: v.reason for name, v in verdicts.items() if not v.correct} == {}


def test_input_is_read_in_every_way_and_output_must_match(verifier):
    tests = {"kind": "stdio", "stdin": ["3\n"], "stdout": ["9\n"]}
    verdicts = verifier.run(
        Job(code, "code", {"solution": code, "tests": tests, "entry_point": "main"})
        for code in STDIN + MISPRINTS
    )
    assert [code for code, v in verdicts.items() if v.correct] == STDIN


@pytest.mark.parametrize(
    "body,reason",
    [
        ("pass", "trivial_empty"),
        ("return -0.0 if n == 1 else 0.0", "trivial_constant"),
        ("return True if n == 1 else 1", "trivial_constant"),
        ("return float(n)", "trivial_identity"),
        ("return 10 ** (5000 + n)", "result_too_large"),
    ],
)
def test_references_whose_tests_say_nothing_are_refused(verifier, body, reason):
    payload = {"solution": f"def f(n):\n    {body}", "entry_point": "f", "inputs": ["1", "2"]}
    verdict = verifier.run([Job("r", "code_reference", payload)])["r"]
    assert not verdict.correct and verdict.reason == reason
