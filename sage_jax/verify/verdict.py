"""The two plain records of the verifiers: a job that goes in, a verdict that comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERDICTS = ("correct", "wrong", "unparsable", "timeout", "error")
KINDS = ("math", "code", "math_key", "code_reference")
# Caused by the gold or by the machinery, never by the response: such rows carry no gradient.
MASKED_REASONS = frozenset({"gold_unparsable", "verifier_error", "sandbox_error"})

# Why a proposed key or reference is refused; raised and crashed stand for raised_* and crashed_*.
REFUSALS = (
    *("empty", "no_value", "not_definite", "undefined", "unevaluated"),
    *("answer_too_long", "nested_too_deep", "too_many_digits"),
    *("program_too_large", "syntax_error", "import_failed", "missing_entry_point", "not_callable"),
    *("raised", "early_exit", "crashed", "cpu_limit", "wall_limit", "output_limit"),
    *("no_inputs", "bad_input", "inputs_too_large"),
    *("not_plain", "too_deep", "result_too_large", "nondeterministic"),
    *("trivial_constant", "trivial_identity", "trivial_empty"),
)


def refusal(reason: str) -> str:
    """The member of REFUSALS that a verdict's reason belongs to, else "other"."""
    name = reason.split("_")[0] if reason.startswith(("raised_", "crashed_")) else reason
    return name if name in REFUSALS else "other"


@dataclass(frozen=True)
class Verdict:
    """Outcome of one job.

    ``verdict`` is one of VERDICTS, ``reason`` a short code ("" when there is nothing to add),
    ``ms`` the wall time in milliseconds. The other fields belong to code jobs: CPU milliseconds
    of the solution, the escaped start and end of its output, the isolation level (a letter),
    whether two processes with different hash seeds agreed (None = not asked), and for
    ``code_reference`` the values returned, as Python literals.
    """

    verdict: str
    reason: str = ""
    ms: float = 0.0
    cpu_ms: float | None = None
    output_tail: str | None = None
    isolation: str | None = None
    deterministic: bool | None = None
    expected: list[str] | None = None

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(VERDICTS)}, got {self.verdict!r}")

    @property
    def correct(self) -> bool:
        return self.verdict == "correct"

    @property
    def masked(self) -> bool:
        """True when the row must be left out of training rather than scored 0."""
        return self.reason in MASKED_REASONS


@dataclass(frozen=True)
class Job:
    """One thing to judge: ``id`` is returned with the verdict, ``payload`` depends on ``kind``.

    math            gold, prediction, optional question, tolerance
    code            solution, tests, entry_points or entry_point, optional stdin, mutates_args,
                    determinism_probe, time_limit (s), memory_mb
    math_key        answer
    code_reference  solution, entry_point, inputs (text of one argument tuple each)
    """

    id: str
    kind: str
    payload: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"job kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
