"""Time until the verdicts of one small training step are there, by part, and the CPU they cost:

    python benchmarks/verify_latency.py [--steps 40] [--workers 2]

A step is what the tiny demo asks for: 16 proposals (10 maths keys, 6 code references), then the
answers to them (24 maths; 6 programs to each of 4 tasks). Each part is submitted at once and
waited for; the first step, in which workers start, is shown apart. CPU time is that of all
processes, the mean over the steps: it says what a busy machine would hide.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_verify import tree_cpu  # noqa: E402

from sage_jax.verify import Job, Verifier  # noqa: E402

SOLUTION = "def f(x):\n    x += {a}\n    x -= {b}\n    return x  # {n}\n"


def parts(step: int) -> Iterator[tuple[str, list[Job]]]:
    """The jobs of one step, no two alike over all steps."""
    keys = [Job(f"k{n}", "math_key", {"answer": f"{step} * {n} + 7"}) for n in range(10)]
    yield "one maths key", [Job("k", "math_key", {"answer": f"{step} + 1"})]
    yield "10 maths keys", keys
    inputs = ["0", "1", "4", "7", "-3"]
    references = [
        Job(f"r{n}", "code_reference", {"solution": SOLUTION.format(a=step, b=n, n=n),
                                        "entry_point": "f", "inputs": inputs})
        for n in range(7)
    ]  # fmt: skip
    yield "one code reference", references[:1]
    yield "6 code references", references[1:]
    answers = []
    for n in range(24):
        payload = {"gold": str(step + n), "prediction": f"<answer>{step + n + n % 2}</answer>"}
        answers.append(Job(f"a{n}", "math", payload))
    yield "24 maths answers", answers
    programs = []
    for task in range(4):
        asserts = [f"assert f({x}) == {int(x) + step - task}" for x in inputs]
        tests = {"kind": "asserts", "setup": "", "asserts": asserts, "challenge": []}
        for n in range(6):
            solution = SOLUTION.format(a=step, b=task + n % 2, n=n)
            payload = {"solution": solution, "tests": tests, "entry_point": "f"}
            programs.append(Job(f"p{task}/{n}", "code", payload))
    yield (
        "one program",
        [Job("p", "code", {**programs[0].payload, "solution": f"f = abs  # {step}"})],
    )
    yield "24 programs, 4 tasks", programs
    for n, job in enumerate(mixed := [*keys, *references, *answers, *programs]):
        fresh = {key: f"{value} " if isinstance(value, str) and key in ("answer", "solution",
                 "prediction") else value for key, value in job.payload.items()}  # fmt: skip
        mixed[n] = Job(f"m{n}", job.kind, fresh)
    yield "all of them at once", mixed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two steps")
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    with Verifier(workers=options.workers) as verifier:
        for step in range(options.steps + 1):
            time.sleep(options.pause)  # training goes on meanwhile, and idle workers go to rest
            for name, jobs in parts(1000 + 50 * step):
                before, began = tree_cpu(), time.perf_counter()
                verdicts = verifier.run(jobs)
                times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
                if step:
                    cpu[name] = cpu.get(name, 0.0) + 1000 * (tree_cpu() - before)
                assert not any(verdict.masked for verdict in verdicts.values())
    print("ms                        first  median     p90     CPU")
    for name, found in times.items():
        ordered = sorted(found[1:])
        slow = ordered[int(0.9 * len(ordered))]
        print(f"{name:24}{found[0]:7.1f}{statistics.median(ordered):8.1f}{slow:8.1f}", end="")
        print(f"{cpu[name] / options.steps:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
