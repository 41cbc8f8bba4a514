"""Reference solutions and mutants of them against a plain run of the same tests:

    python benchmarks/verify_references.py DATA.jsonl ... [--mutants 2] [--every 1] [--seed 0]

Each row's reference must be judged correct, and each mutant as a bare interpreter judges it that
runs the program and its tests in one process. Rows of kind io only are mutated. Exits 1 if a
verdict differs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sage_jax.verify import Job, Verifier  # noqa: E402

LIMIT = 5  # CPU seconds of a plain run
SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
PLAIN = """
import json, math, sys
row = json.load(sys.stdin)
scope = {"inf": math.inf, "nan": math.nan}
def near(got, want, atol):
    if isinstance(got, (list, tuple)) and type(got) is type(want):
        return len(got) == len(want) and all(near(a, b, atol) for a, b in zip(got, want))
    if isinstance(got, dict) and isinstance(want, dict):
        return got.keys() == want.keys() and all(near(got[k], want[k], atol) for k in want)
    if isinstance(got, (int, float)) and isinstance(want, (int, float)):
        return got == want or (got != got and want != want) or (
            bool(atol) and abs(got - want) <= atol + 1e-7 * abs(want))
    return got == want
def same(got, want):
    if row["compare"] == "set":
        return set(got) == set(want)
    if row["compare"] == "not_none":
        return got == want if isinstance(got, bool) else (got is not None) == want
    return near(got, want, row["atol"])
names = {"__name__": "solution"}
exec(compile(row["program"], "solution.py", "exec"), names)
function = names[row["entry"]]
call = "f({})" if row["call_text"] else "f(*({}))"
good = all(same(eval(call.format(a), {**scope, "f": function}), eval(e, scope))
           for a, e in zip(row["args"], row["expected"]))
print("\\x01pass" if good else "\\x01fail")
"""


def mutants(source: str, count: int, rng: random.Random) -> list[str]:
    """``count`` programs at most that differ from ``source`` in one operator or constant."""
    tree = ast.parse(source)
    places = [(n, node) for n, node in enumerate(ast.walk(tree)) if changeable(node)]
    made = []
    for place, _ in rng.sample(places, min(count, len(places))):
        changed = copy.deepcopy(tree)
        change(list(ast.walk(changed))[place])
        made.append(ast.unparse(changed))
    return made


def changeable(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, bool)
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in SWAPS
    return isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS


def change(node: Any) -> None:
    if isinstance(node, ast.Constant):
        value: Any = node.value
        node.value = not value if isinstance(value, bool) else value + 1
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    else:
        node.op = SWAPS[type(node.op)]()


def plain(row: dict[str, Any], program: str) -> bool:
    """Whether a bare interpreter passes the tests, within the limits of the sandbox."""
    tests = row["tests"]
    request = {
        "program": program, "entry": row["entry_point"], "args": tests["args"],
        "expected": tests["expected"], "compare": tests.get("compare", "eq"),
        "atol": tests.get("atol", 0), "call_text": bool(tests.get("args_are_call_text")),
    }  # fmt: skip

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
        resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PLAIN], input=json.dumps(request), text=True,
        capture_output=True, preexec_fn=limit,
    )  # fmt: skip
    return done.returncode == 0 and done.stdout.endswith("\x01pass\n")


def compare(rows: list[dict[str, Any]], count: int, seed: int, verifier: Verifier) -> list[str]:
    """What differs, a line each: references not judged correct, mutants judged otherwise."""
    rng = random.Random(seed)
    jobs, programs = [], {}
    for row in rows:
        wanted = ["canonical_solution", "tests", "entry_point", "question"]
        fields = {name: row[name] for name in wanted if name in row}
        payload = {**fields, "solution": row["canonical_solution"]}
        jobs.append(Job(row["id"], "code", payload))
        if row["tests"].get("kind") != "io":
            continue
        for number, text in enumerate(mutants(row["canonical_solution"], count, rng)):
            name = f"{row['id']}#{number}"
            programs[name] = (row, text)
            jobs.append(Job(name, "code", {**payload, "solution": text}))
    differ = []
    for name, verdict in verifier.run(jobs).items():
        if name not in programs:
            right = verdict.correct
        elif verdict.verdict == "timeout" and not plain(*programs[name]):
            right = True
        else:
            right = verdict.correct == plain(*programs[name])
        if not right:
            differ.append(f"{name}: {verdict.verdict} ({verdict.reason})")
    print(f"{len(rows)} references, {len(programs)} mutants, {len(differ)} differ")
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", nargs="+")
    parser.add_argument("--mutants", type=int, default=2, help="of each reference")
    parser.add_argument("--every", type=int, default=1, help="take every n-th row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    failed = False
    with Verifier(workers=options.workers) as verifier:
        for name in options.data:
            rows = [json.loads(line) for line in open(name, encoding="utf-8")]
            print(name, end=": ", flush=True)
            differ = compare(rows[:: options.every], options.mutants, options.seed, verifier)
            print("\n".join(f"  {line}" for line in differ), end="\n" if differ else "")
            failed = failed or bool(differ)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
