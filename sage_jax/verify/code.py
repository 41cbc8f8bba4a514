"""Code jobs: what is run for a row, and what the outcome means.

A job is a generator: it yields the runs it needs and returns the verdict, so everything here is
free of processes and can be tested without them. Program text is only ever passed on.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sage_jax.verify.sandbox import Run
from sage_jax.verify.verdict import Verdict

MAX_PROGRAM = 1 << 20
PYTHON_MARKS = ("python", "py", "python3")
MAX_INPUTS, MAX_INPUT_TEXT = 64, 4000
CPU_SLACK = 0.05
LARGEST = 1e300
MAX_GIVEN = 20_000
TESTS, MOST_TESTS = 8, 5  # the CPU limit is for so many tests; how often it may be multiplied
Steps = Generator[Run, dict[str, Any], Verdict]
SANDBOX_KEYS = frozenset(
    "verdict wall_hit cpu_hit output_hit late starved solution judge locked".split()
)


@dataclass(frozen=True)
class Limits:
    """Defaults for a row: CPU seconds decide, wall seconds end sleepers."""

    wall: float = 4.0
    cpu: int = 3
    memory_mb: int = 512


def extract_code(text: str) -> str:
    """The program in a Solver response, "" when there is none.

    The last ``<answer>…</answer>``, or without one the last fenced block marked as Python; a
    fence around the whole program inside the tag is removed.
    """
    # Searches from the end and splits, so that hostile text costs linear time in the trainer.
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    tagged = start >= 0
    inside = text[start + len("<answer>") : end] if tagged else text
    fences = [part.partition("\n") for part in inside.split("```")[1::2]]
    fences = [(mark.split()[:1], body) for mark, newline, body in fences if newline]
    python = [body for mark, body in fences if mark and mark[0].lower() in PYTHON_MARKS]
    if python:
        return python[-1].strip("\n")
    if not tagged:
        return ""
    return fences[-1][1].strip("\n") if fences else inside.strip("\n")


def reference_tests(inputs: Sequence[str], expected: Sequence[str]) -> dict[str, Any]:
    """The ``tests`` of a task whose reference was judged: its inputs and the values it gave."""
    return {
        "kind": "io",
        "args": list(inputs),
        "expected": list(expected),
        "args_form": "input",
        "compare": "eq",
        "atol": 0,
    }


# --- rows to plans ------------------------------------------------------------------------


def code_job(payload: Mapping[str, Any], limits: Limits) -> Steps:
    """Steps of a ``code`` job. Raises ValueError naming the field of a malformed payload."""
    limits = _row_limits(payload, limits)
    solution = payload.get("solution")
    if isinstance(solution, str) and len(solution) > MAX_PROGRAM:
        return _too_large()
    solution = _text(payload, "solution")
    tests = payload.get("tests")
    if isinstance(tests, Mapping) and tests.get("kind") == "stdio":
        return _stdio(solution, tests, limits)
    names = _entry_points(payload)
    plan = _plan(tests, names)
    plan["mutates"] = bool(payload.get("mutates_args", False))
    if plan["mode"] == "asserts":
        # Texts of the task that may define functions its tests call beside the entry point.
        texts = [payload.get(name) for name in ("question", "canonical_solution")]
        plan["given"] = [t for t in texts if isinstance(t, str) and len(t) <= MAX_GIVEN]
    source = {"mode": "function", "source": solution, "mutates": plan["mutates"]}
    stdin = payload.get("stdin") or ""
    if not isinstance(stdin, str):
        raise ValueError(f"stdin must be text, got {type(stdin).__name__}")
    # Large sets of tests get more in all, but no single test does.
    count = len(plan.get("args") or plan["chunks"])
    cpu = math.ceil(limits.cpu * min(MOST_TESTS, max(1.0, count / TESTS)))
    if payload.get("time_limit") is not None:
        cpu = limits.cpu
    run = Run(plan, source, stdin, cpu, limits.wall, limits.memory_mb, step=limits.cpu)
    probe = payload.get("determinism_probe")
    if probe is not None and not isinstance(probe, str):
        raise ValueError(f"determinism_probe must be an expression, got {type(probe).__name__}")
    return _function(run, probe)


def _too_large() -> Steps:
    """A program beyond all bounds is the response's own doing and no malformed row."""
    return Verdict("error", "program_too_large")
    yield  # never reached: makes this a job without runs


def _attempt(run: Run) -> Steps:
    """One run, twice where the host was too busy to tell."""
    outcome = yield run
    if _host_too_busy(outcome):
        outcome = yield replace(run, urgent=True)
    return interpret(outcome, run)


def _function(run: Run, probe: str | None) -> Steps:
    result = yield from _attempt(run)
    if probe is None:
        return result
    plan = {"mode": "probe", "expression": probe, "entry_points": run.plan["entry_points"]}
    seen: set[str] = set()
    for seed in (0, 1):
        again = Run(plan, run.source, run.stdin, run.cpu, run.wall, run.memory_mb, seed)
        outcome = yield again
        if not interpret(outcome, again).correct:
            seen.update(("failed", "to run"))
            break
        seen.update(map(str, _judge_reply(outcome).get("values", ())))
    return replace(result, deterministic=len(seen) == 1)


def _stdio(solution: str, tests: Mapping[str, Any], limits: Limits) -> Steps:
    inputs, outputs = _texts(tests, "stdin"), _texts(tests, "stdout")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"tests.stdin and tests.stdout must pair up, got {len(inputs)} and {len(outputs)}"
        )
    source = {"mode": "script", "source": solution}
    atol = _number(tests, "atol", 0)

    def steps() -> Steps:
        total = Verdict("correct")
        plan = {"mode": "stdout", "expected": list(outputs), "atol": atol}
        for case, text in enumerate(inputs):
            run = Run(plan, source, text, limits.cpu, limits.wall, limits.memory_mb, case=case)
            result = yield from _attempt(run)
            total = replace(
                result,
                ms=total.ms + result.ms,
                cpu_ms=(total.cpu_ms or 0.0) + (result.cpu_ms or 0.0),
            )
            if not total.correct:
                break
        return total

    return steps()


def reference_job(payload: Mapping[str, Any], limits: Limits) -> Steps:
    """Steps of a ``code_reference`` job: the reference runs under two hash seeds.

    The verdict is correct, with the returned values as literals in ``expected``, when both agree
    and no constant, identity or empty stand-in would pass the resulting tests.
    """
    limits = _row_limits(payload, limits)
    solution = payload.get("solution")
    if isinstance(solution, str) and len(solution) > MAX_PROGRAM:
        return _too_large()
    solution = _text(payload, "solution")
    name = _text(payload, "entry_point")
    inputs = list(_texts(payload, "inputs"))
    plan = {"mode": "reference", "inputs": inputs, "entry_points": [name]}
    source = {"mode": "function", "source": solution}

    def steps() -> Steps:
        if not inputs:
            return Verdict("wrong", "no_inputs")
        if len(inputs) > MAX_INPUTS or any(len(text) > MAX_INPUT_TEXT for text in inputs):
            return Verdict("wrong", "inputs_too_large")
        if not name.isidentifier():
            return Verdict("error", "missing_entry_point")
        replies, result = [], Verdict("error", "verifier_error")
        for seed in (0, 1):
            run = Run(plan, source, "", limits.cpu, limits.wall, limits.memory_mb, seed)
            outcome = yield run
            result = interpret(outcome, run)
            if not result.correct:
                changed = {"deterministic": False} if result.reason == "nondeterministic" else {}
                return replace(result, **changed)
            replies.append(_judge_reply(outcome))
        if replies[0].get("values") != replies[1].get("values"):
            return replace(result, verdict="wrong", reason="nondeterministic", deterministic=False)
        return replace(result, deterministic=True, expected=list(replies[0]["literals"]))

    return steps()


def _plan(tests: Any, names: list[str]) -> dict[str, Any]:
    if isinstance(tests, str):
        return {"mode": "asserts", "chunks": [tests], "entry_points": names}
    if not isinstance(tests, Mapping):
        raise ValueError(f"tests must be text or an object, got {type(tests).__name__}")
    kind = tests.get("kind")
    if kind is None:
        if not {"public", "hidden"} & set(tests):
            raise ValueError("tests needs a kind, or the lists public and hidden")
        chunks = [*_texts(tests, "public", ()), *_texts(tests, "hidden", ())]
        if not chunks:
            raise ValueError("tests.public and tests.hidden are both empty")
        return {"mode": "asserts", "chunks": chunks, "entry_points": names}
    if kind == "check":
        code = _text(tests, "code")
        return {"mode": "asserts", "chunks": [code], "check": names[0], "entry_points": names}
    if kind == "asserts":
        lines = [*_texts(tests, "asserts"), *_texts(tests, "challenge", ())]
        if not lines:
            raise ValueError("tests.asserts is empty")
        chunks = [_text(tests, "setup") if tests.get("setup") else "", *lines]
        return {"mode": "asserts", "chunks": chunks, "entry_points": names}
    if kind == "io":
        return _io_plan(tests, names)
    raise ValueError(f"tests.kind must be check, asserts, io or stdio, got {kind!r}")


def _io_plan(tests: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    arguments, expected = list(_texts(tests, "args")), list(_texts(tests, "expected"))
    if len(arguments) != len(expected) or not expected:
        raise ValueError(
            f"tests.args and tests.expected must pair up, got {len(arguments)} and {len(expected)}"
        )
    compare = tests.get("compare", "eq")
    if compare not in ("eq", "set", "not_none"):
        raise ValueError(f"tests.compare must be eq, set or not_none, got {compare!r}")
    form = "call" if tests.get("args_are_call_text") else tests.get("args_form", "sequence")
    if form not in ("sequence", "input", "call"):
        raise ValueError(f"tests.args_form must be sequence, input or call, got {form!r}")
    return {
        "mode": "io",
        "args": arguments,
        "expected": expected,
        "compare": compare,
        "atol": _number(tests, "atol", 0),
        "args_form": form,
        "entry_points": names[:1],
    }


def _entry_points(payload: Mapping[str, Any]) -> list[str]:
    names = list(_texts(payload, "entry_points", ()))
    single = payload.get("entry_point")
    if single is not None:
        names = [single] + [name for name in names if name != single]
    if not names:
        raise ValueError("entry_points (a list) or entry_point is missing")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"entry point {name!r} is not a Python name")
    return names


def _row_limits(payload: Mapping[str, Any], limits: Limits) -> Limits:
    wall, cpu = limits.wall, limits.cpu
    if payload.get("time_limit") is not None:
        seconds = _number(payload, "time_limit", 0)
        if not 0 < seconds <= 600:
            raise ValueError(f"time_limit must be in (0, 600] seconds, got {seconds}")
        cpu, wall = math.ceil(seconds), seconds + 1
    memory = payload.get("memory_mb")
    memory = limits.memory_mb if memory is None else int(_number(payload, "memory_mb", 0))
    if not 64 <= memory <= 65536:
        raise ValueError(f"memory_mb must be in 64..65536, got {memory}")
    return Limits(wall, cpu, memory)


def _text(payload: Mapping[str, Any], name: str) -> str:
    value = payload.get(name)
    if not isinstance(value, str):
        got = "nothing" if value is None else type(value).__name__
        raise ValueError(f"{name} must be text, got {got}")
    if len(value) > MAX_PROGRAM:
        raise ValueError(f"{name} is longer than {MAX_PROGRAM} characters")
    return value


def _texts(
    payload: Mapping[str, Any], name: str, default: Sequence[str] | None = None
) -> Sequence[str]:
    value = payload.get(name, default)
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} must be a list of texts, got {value!r:.80}")
    return value


def _number(payload: Mapping[str, Any], name: str, default: float) -> float:
    value = payload.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError(f"{name} must be a finite number, got {value!r:.80}")
    return value


# --- outcomes to verdicts -----------------------------------------------------------------


def interpret(outcome: Mapping[str, Any], run: Run) -> Verdict:
    """The verdict of one run from the zygote's account of it."""
    unusable = not SANDBOX_KEYS.issubset(outcome)
    if unusable or not outcome["locked"] or _host_too_busy(outcome):
        return Verdict("error", "sandbox_error")
    solution, judge = outcome["solution"], outcome["judge"]
    reply = _judge_reply(outcome)
    verdict, reason = reply.get("verdict"), str(reply.get("reason", ""))
    out_of_cpu = _out_of_cpu(solution, run.cpu)
    if outcome["output_hit"]:
        verdict, reason = "error", "output_limit"
    elif outcome["cpu_hit"]:
        verdict, reason = "timeout", "cpu_limit"
    elif outcome["wall_hit"]:
        verdict, reason = "timeout", "wall_limit"
    elif verdict is None or reason == "lost":
        if out_of_cpu:
            verdict, reason = "timeout", "cpu_limit"
        elif _out_of_cpu(judge, run.cpu + 2):
            verdict, reason = "timeout", "tests_cpu_limit"
        elif verdict is None:
            verdict, reason = "error", "judge_died"
        elif solution["signal"] not in (0, signal.SIGKILL):
            verdict, reason = "error", f"crashed_{_signal_name(solution['signal'])}"
        else:
            verdict, reason = "error", "early_exit"
    elif run.source["mode"] == "script":
        if out_of_cpu:
            verdict, reason = "timeout", "cpu_limit"
        elif solution["code"] > 0:
            verdict, reason = "error", "exit_status"
    return Verdict(
        verdict,
        reason,
        ms=round(outcome.get("ms", 0.0), 3),
        cpu_ms=round(1000 * solution["cpu"], 3),
        output_tail=printable(outcome.get("output", "")),
    )


def _host_too_busy(outcome: Mapping[str, Any]) -> bool:
    """A program that is right, but took far longer than it may on a host that kept it waiting:
    it may have been saved by the clock, so this is nobody's verdict.
    """
    late = outcome.get("late") and _judge_reply(outcome).get("verdict") == "correct"
    return bool(late or outcome.get("starved"))


def _judge_reply(outcome: Mapping[str, Any]) -> dict[str, Any]:
    try:
        reply = json.loads(outcome["verdict"])
    except (ValueError, RecursionError):
        return {}
    known = isinstance(reply, dict) and reply.get("verdict") in ("correct", "wrong", "error")
    return reply if known else {}


def _out_of_cpu(usage: Mapping[str, Any], limit: int) -> bool:
    ended = usage["signal"] in (signal.SIGXCPU, signal.SIGPROF)
    return ended or usage["cpu"] >= limit - CPU_SLACK


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def printable(text: str) -> str:
    """Output of a program with every control character spelled out, safe for logs."""
    text = text.encode("latin-1", "replace").decode("utf-8", "replace")
    return "".join(c if c == "\n" or c.isprintable() else f"\\u{ord(c):04x}" for c in text)
