"""Command line: ``python -m sage_jax.verify math|code --input F --output F``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from typing import Any, TextIO

from sage_jax.spelling import one_of
from sage_jax.verify.pool import POLICIES, Verifier
from sage_jax.verify.sandbox import LEVELS, IsolationError
from sage_jax.verify.verdict import Job, Verdict

WINDOW = 2000  # jobs in flight; the output is written in input order
CODE_FIELDS = ("cpu_ms", "output_tail", "isolation", "deterministic")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all rows judged, 1 some lines were bad, 2 usage or machine."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers={options.workers}: give at least 1")
    if os.path.exists(options.output) and os.path.exists(options.input):
        if os.path.samefile(options.input, options.output):
            parser.error(f"--output={options.output}: is the input; choose another file")
    with contextlib.ExitStack() as held:
        try:
            raw = held.enter_context(open(options.input, "rb"))
            raw.peek(1)  # what cannot be read should not cost what stood in --output
        except OSError as error:
            parser.error(f"--input={options.input}: {error.strerror}; give a file of JSON lines")
        try:
            verifier = Verifier(
                workers=options.workers,
                policy=options.policy,
                require_level=options.require_level,
                code=options.domain == "code",
            )
        except IsolationError as error:
            print(error, file=sys.stderr)
            return 2
        held.enter_context(verifier)
        try:
            os.makedirs(os.path.dirname(options.output) or ".", exist_ok=True)
            target = open(options.output, "w", encoding="utf-8")
        except OSError as error:
            parser.error(f"--output={options.output}: {error.strerror}; choose another file")
        source = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape")
        try:
            with target:  # what is held back is written at its end
                judged, bad = judge_file(verifier, options.domain, source, target)
        except OSError as error:
            parser.error(
                f"--output={options.output}: {error.strerror}, after some of the rows of "
                f"{options.input}; mend that and start again"
            )
    left_out = f"; bad lines left out: {bad}" if bad else ""
    # Not on stdout, which --output may be.
    print(f"judged {judged} rows into {options.output}{left_out}", file=sys.stderr)
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sage_jax.verify",
        description="Judge answers in a file of JSON lines: maths by their value, programs by "
        "running their tests in a sandbox. docs/verifiers.md lists the fields of a line.",
        epilog="Exit codes: 0 all rows judged, 1 some lines were bad (named on stderr), 2 usage, "
        "or the sandbox misses --require_level.",
    )
    parser.add_argument(
        "domain",
        type=one_of("math", "code"),
        metavar="math|code",
        help="what a line holds: math: id, gold, prediction; code: id, solution, tests, "
        "entry_points",
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON lines, one row a line")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="JSON lines of verdicts in input order"
    )
    parser.add_argument(
        "--workers", type=int, default=2, metavar="N", help="rows judged at one time (default 2)"
    )
    parser.add_argument(
        "--policy",
        type=one_of(*POLICIES),
        default="eval",
        metavar="|".join(POLICIES),
        help="where the answer may stand: eval (default) falls back to the last formula or number, "
        "reward, which training uses, does not",
    )
    parser.add_argument(
        "--require_level",
        type=one_of(*LEVELS, "none"),
        default="B",
        metavar="|".join((*LEVELS, "none")),
        help="weakest isolation accepted for code (default B, see docs/verifiers.md); none: any",
    )
    return parser


def judge_file(verifier: Verifier, domain: str, source: TextIO, target: TextIO) -> tuple[int, int]:
    """Judge all rows of ``source``; returns how many were judged, and how many lines were bad (each
    told on stderr)."""
    bad = 0
    seen: dict[Any, int] = {}  # ids and their lines
    order: list[tuple[str, Any]] = []  # job ids and row ids not yet written, in input order
    done: dict[str, Verdict] = {}

    def write(limit: int) -> None:
        while len(order) > limit:
            done.update(verifier.poll(0.0 if order[0][0] in done else 1.0))
            while order and order[0][0] in done:
                job_id, row_id = order.pop(0)
                json.dump(row(row_id, done.pop(job_id), domain), target)
                target.write("\n")

    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            payload = _payload(line, seen)
            job = Job(str(number), domain, payload)
            verifier.submit(job)
        except ValueError as error:
            bad += 1
            print(f"{source.name}: line {number}: {error}", file=sys.stderr)
            continue
        seen[payload["id"]] = number
        order.append((job.id, payload["id"]))
        write(WINDOW)
    write(0)
    return len(seen), bad


def _payload(line: str, seen: dict[Any, int]) -> dict[str, Any]:
    try:
        payload = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"a row must be an object, got {type(payload).__name__}")
    name = payload.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"id must be text or an integer, got {name!r}")
    if name in seen:
        raise ValueError(f"id {name!r} was used on line {seen[name]}; ids must be unique")
    return payload


def row(name: Any, verdict: Verdict, domain: str) -> dict[str, Any]:
    """The output row of one verdict."""
    out = {
        "id": name,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "ms": round(verdict.ms, 3),
    }
    if domain == "code":
        out |= {field: getattr(verdict, field) for field in CODE_FIELDS}
    return out


if __name__ == "__main__":
    sys.exit(main())
