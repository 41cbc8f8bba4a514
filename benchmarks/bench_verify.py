"""Cost of verdicts, as ratios within one run: ``python benchmarks/bench_verify.py [--cases F]``.

Code: CPU time of one judged program, all its processes and the trainer's side included, in groups
of samples of one task, against a bare interpreter that imports the modules the sandbox preloads.
Maths: verdicts per CPU second and per second against math-verify called in this process, on the
same pairs. The two sides of a ratio take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sage_jax.verify import Job, Verifier  # noqa: E402
from sage_jax.verify.sandbox import ZYGOTE  # noqa: E402

TICK = os.sysconf("SC_CLK_TCK")
PRELOAD = re.search(r"PRELOAD = \((.*?)\)", ZYGOTE.read_text(), re.S)
GOLDS = (
    "17", "48,250", r"\frac{3}{8}", "-2.5", r"3\sqrt{7}", r"\frac{\pi}{4}", "(2,7]", "x^2-9",
    r"\{4,9\}", "(-4,\\tfrac12)", r"2^{12}", r"\frac{2\sqrt5}{5}", "y=4x-1", r"40\%", "5:8",
    r"\begin{pmatrix}2&0\\1&5\end{pmatrix}",
)  # fmt: skip


def tree_cpu() -> float:
    """CPU seconds so far of this process and of everything below it, the ended included."""
    parent, used = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parent[int(folder.name)] = int(fields[1])
        used[int(folder.name)] = sum(map(int, fields[11:15])) / TICK
    found = {os.getpid()}
    while more := {pid for pid, above in parent.items() if above in found} - found:
        found |= more
    return time.process_time() + sum(used[pid] for pid in found - {os.getpid()})


def bare_cpu() -> float:
    assert PRELOAD is not None
    modules = ",".join(re.findall(r"\w+", PRELOAD[1].replace("split", "")))
    arguments = [sys.executable, "-I", "-S", "-c", f"import {modules}"]
    _, status, usage = os.wait4(os.posix_spawn(sys.executable, arguments, os.environ), 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime


def group(number: int, samples: int) -> list[Job]:
    """One task and its samples: eight asserts, programs that differ in their text."""
    tests = [f"assert f([{k}, 3]) == {[k + number, 3 + number]}" for k in range(8)]
    jobs = []
    for sample in range(samples):
        solution = (
            "import math\nfrom collections import Counter\n"
            f"def f(xs):  # sample {sample}\n    return [x + {number} for x in xs]\n"
        )
        payload = {"solution": solution, "tests": {"public": tests}, "entry_point": "f"}
        jobs.append(Job(f"{number}/{sample}", "code", payload))
    return jobs


def bench_code(rounds: int, groups: int, samples: int, workers: int) -> dict[str, float]:
    number, bare, judged, latency, wall = 1, [], [], [], 0.0
    with Verifier(workers=workers) as verifier:
        verifier.run([job for n in range(workers) for job in group(-1 - n, samples)])
        for _ in range(rounds):
            bare.append(statistics.mean(bare_cpu() for _ in range(8)))
            before, began = tree_cpu(), time.perf_counter()
            tasks = range(number, number + groups)
            verdicts = verifier.run(job for task in tasks for job in group(task, samples))
            number += groups
            assert all(verdict.correct for verdict in verdicts.values())
            latency += [verdict.ms for verdict in verdicts.values()]
            wall += time.perf_counter() - began
            judged.append((tree_cpu() - before) / (groups * samples))
        level = verifier.isolation
    ratios = [a / b for a, b in zip(bare, judged, strict=True)]
    print(f"code: level {level}, groups of {samples}, {workers} slot(s), {rounds} rounds")
    print(f"  bare interpreter with its imports  {1000 * statistics.median(bare):7.2f} ms CPU")
    print(f"  judged program                     {1000 * statistics.median(judged):7.2f} ms CPU")
    print(f"  ratio, median of rounds            {statistics.median(ratios):7.2f}")
    print(f"  programs per second                {len(latency) / wall:7.1f}")
    return {"ratio": statistics.median(ratios), "p99_ms": tell_latency(latency)}


def pairs(cases: str | None, count: int) -> list[tuple[str, str]]:
    """Golds with a right and a wrong answer each; from a JSONL with ``answer`` if one is named."""
    golds = list(GOLDS)
    if cases:
        golds = [json.loads(line)["answer"] for line in open(cases, encoding="utf-8")]
    found = []
    for k in range(count):
        gold, other = golds[k % len(golds)], golds[(k * 7 + 3) % len(golds)]
        found.append((gold, f"Step {k}: so the answer is \\boxed{{{other if k % 2 else gold}}}."))
    return found


def bench_maths(rounds: int, count: int, cases: str | None, workers: int) -> dict[str, float]:
    from math_verify import parse, verify

    def library(gold: str, text: str) -> bool:
        return bool(verify(parse(f"\\boxed{{{gold}}}"), parse(text)))

    work = pairs(cases, rounds * count)
    library(*work[0])
    ours, theirs, cpu_ratio, latency = [], [], [], []
    with Verifier(workers=workers, code=False) as verifier:
        verifier.run([Job(f"warm{k}", "math", {"gold": "1", "prediction": f"\\boxed{{{k}}}"})
                      for k in range(20)])  # fmt: skip
        for start in range(0, rounds * count, count):
            part = work[start : start + count]
            cpu, began = time.process_time(), time.perf_counter()
            for gold, text in part:
                library(gold, text)
            their_cpu = time.process_time() - cpu
            theirs.append(count / (time.perf_counter() - began))
            cpu, began = tree_cpu(), time.perf_counter()
            jobs = [Job(str(start + k), "math", {"gold": gold, "prediction": text})
                    for k, (gold, text) in enumerate(part)]  # fmt: skip
            latency += [verdict.ms for verdict in verifier.run(jobs).values()]
            ours.append(count / (time.perf_counter() - began))
            cpu_ratio.append(their_cpu / max(tree_cpu() - cpu, 1 / TICK))
    rate, library_rate = statistics.median(ours), statistics.median(theirs)
    print(f"maths: {workers} worker(s), {rounds} rounds of {count}")
    print(f"  verdicts per second                {rate:7.1f}")
    print(f"  math-verify called directly        {library_rate:7.1f}")
    print(f"  ratio of verdicts per second       {rate / library_rate:7.2f}")
    print(f"  ratio of verdicts per CPU second   {statistics.median(cpu_ratio):7.2f}")
    return {"ratio": rate / library_rate, "p99_ms": tell_latency(latency)}


def tell_latency(latency: list[float]) -> float:
    points = statistics.quantiles(latency, n=100)
    print(f"  latency p50 / p99                  {points[49]:7.1f} / {points[98]:.1f} ms")
    return points[98]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=12, help="code tasks a round")
    parser.add_argument("--samples", type=int, default=8, help="programs a task")
    parser.add_argument("--pairs", type=int, default=300, help="maths pairs a round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cases", help="JSONL with an `answer` a line, for the maths part")
    options = parser.parse_args()
    bench_code(options.rounds, options.groups, options.samples, options.workers)
    bench_maths(options.rounds, options.pairs, options.cases, options.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
