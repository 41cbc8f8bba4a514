"""The trainer's side of the maths verifier: checks of a payload and the worker process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_jax.verify.child import Child, environment

WORKER = Path(__file__).parent / "math_worker.py"
MAX_TEXT = 200_000
JOBS_PER_WORKER = 1000


def check_payload(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a maths job, cut to size. Raises ValueError naming a bad field."""
    names = ("answer",) if kind == "math_key" else ("gold", "prediction")
    checked: dict[str, Any] = {}
    for name in (*names, "question"):
        value = payload.get(name)
        if name == "question" and value is None:
            continue
        if not isinstance(value, str):
            got = "nothing" if value is None else type(value).__name__
            raise ValueError(f"{name} must be text, got {got}")
        checked[name] = value[-MAX_TEXT:]
    tolerance = payload.get("tolerance")
    if tolerance is not None:
        good = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
        if not good or not 0 <= tolerance <= sys.float_info.max:
            raise ValueError(f"tolerance must be a number >= 0, got {tolerance!r}")
        checked["tolerance"] = tolerance
    return checked


class MathWorker(Child):
    """One persistent process that judges maths jobs in turn.

    ``stage`` is what it last said it was doing: start, gold, prediction, loading, idle.
    """

    def __init__(self) -> None:
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        env = environment() | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # With gmpy2 a single huge product cannot be interrupted.
            "SYMPY_GROUND_TYPES": "python",
            "MPMATH_NOGMPY": "1",
        }
        arguments = ["-B", "-P", str(WORKER), "{socket}", str(os.getpid())]
        super().__init__(arguments, env)
        self.stage = "start"
        self.jobs = 0

    def start_job(self, kind: str, payload: Mapping[str, Any]) -> None:
        self.jobs += 1
        self.send({"kind": kind, **payload})

    @property
    def worn(self) -> bool:
        return self.jobs >= JOBS_PER_WORKER
