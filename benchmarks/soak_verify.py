"""Many verdicts in one Verifier: memory, processes and descriptors at ten points on the way.

    python benchmarks/soak_verify.py [--verdicts 50000] [--workers 2]

Half are maths; of the programs some are right, wrong, crash, exit, print or leave files, and one in
500 loops until its limit. Exits 1 if the most memory or descriptors of the second half are more
than 10 % above that of the first (which fills the cache of 10,000 verdicts), if a verdict is not
the expected one, or if a process is left at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sage_jax.verify import Job, Verifier  # noqa: E402

PROGRAMS = (
    ("def f(n):\n    return n + {k}\n", "correct"),
    ("def f(n):\n    return n - {k}\n", "wrong"),
    ("import os\ndef f(n):\n    os._exit({k} % 3)\n", "error"),
    ("import ctypes\ndef f(n):\n    ctypes.string_at({k} % 5)\n", "error"),
    ("print('x' * 5000)\ndef f(n):\n    return n + {k}\n", "correct"),
    ("def f(n):\n    open('left{k}', 'w').write('x' * 99999)\n    return n + {k}\n", "correct"),
)
LOOP = ("def f(n):\n    while {k}: pass\n", "timeout")


def job(number: int) -> tuple[Job, str]:
    k = number // 8 + 1
    if number % 2:
        other = k if number % 4 == 1 else k + 1
        payload = {"gold": f"\\frac{{{k}}}{{7}}", "prediction": f"\\boxed{{{other}/7}} ({number})"}
        return Job(str(number), "math", payload), "correct" if other == k else "wrong"
    text, expected = LOOP if number % 500 == 0 else PROGRAMS[number // 2 % len(PROGRAMS)]
    tests = {"public": [f"assert f({n}) == {n + k}" for n in range(3)]}
    solution = f"# {number}\n" + text.format(k=k)
    payload = {"solution": solution, "tests": tests, "entry_point": "f"}
    return Job(str(number), "code", payload), expected


def tree() -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return found


def memory_mb(pids: set[int]) -> float:
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--verdicts", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    before, expected, unexpected, points = tree(), {}, [], []
    began = time.monotonic()
    print("verdicts  seconds  trainer MB  all MB  processes  descriptors")
    with Verifier(workers=options.workers, cpu_limit=1, max_waiting=500) as verifier:
        done = 0

        def take(timeout: float) -> None:
            nonlocal done
            for name, verdict in verifier.poll(timeout):
                done += 1
                if verdict.verdict != expected.pop(name):
                    unexpected.append(f"{name}: {verdict.verdict} ({verdict.reason})")
                if done % max(1, options.verdicts // 10) == 0:
                    pids = tree()
                    row = (memory_mb({os.getpid()}), memory_mb(pids), len(pids),
                           len(os.listdir("/proc/self/fd")))  # fmt: skip
                    points.append(row)
                    print(f"{done:8}  {time.monotonic() - began:7.0f}  {row[0]:10.1f}  "
                          f"{row[1]:6.1f}  {row[2]:9}  {row[3]:11}", flush=True)  # fmt: skip

        for number in range(1, options.verdicts + 1):
            work, expected[str(number)] = job(number)
            verifier.submit(work)
            take(0.0)
        while expected:
            take(1.0)
    left = tree() - before
    # The most of each half: a worker that is just being replaced has fewer descriptors.
    middle = len(points) // 2
    first, second = ([max(column) for column in zip(*half, strict=True)]
                     for half in (points[:middle], points[middle:]))  # fmt: skip
    grown = [name for name, a, b in (("trainer MB", first[0], second[0]),
             ("descriptors", first[3], second[3])) if b > 1.1 * a]  # fmt: skip
    print(f"unexpected {len(unexpected)}, processes left {len(left)}, grown: {grown or 'nothing'}")
    print("\n".join(unexpected[:20]), end="\n" if unexpected else "")
    return int(bool(unexpected or left or grown))


if __name__ == "__main__":
    sys.exit(main())
