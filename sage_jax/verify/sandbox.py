"""The trainer's side of the code sandbox: slots, their isolation level, one run at a time.

What happens inside is in the programs of ``box``: a zygote per slot forks, for every run, a judge
that owns the verdict and a solution that owns nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sage_jax.verify.child import Child, environment

ZYGOTE = Path(__file__).parent / "box" / "zygote.py"
LEVELS = ("A", "B", "C", "D")
NAMES = {"A": "A namespaced", "B": "B filtered", "C": "C system calls only", "D": "D limits only"}
# Open doors a level without file isolation is known to have.
FILE_DOORS = {"read /etc/passwd", "read /proc", "write /tmp", "write /dev/shm"}
RUNS_PER_SLOT = 5000
LAYERS = ("namespaces", "landlock", "seccomp", "setuid")
FIXES = {
    "namespaces": "run as root or allow user namespaces (Ubuntu 24.04: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; docker: --cap-add SYS_ADMIN or a seccomp "
    "profile with unshare)",
    "landlock": "a kernel of 5.13 or newer with Landlock enabled",
    "seccomp": "Linux on x86-64 or aarch64 with seccomp filters",
}


class IsolationError(RuntimeError):
    """The machine cannot isolate programs as far as required."""


@dataclass(frozen=True)
class Run:
    """One program against one judge plan; limits in seconds and MB.

    ``cpu`` is for all its tests and ``step``, if given, between one test passed and the next.
    ``urgent`` lets it go before other work of the machine, where that is allowed.
    """

    plan: Mapping[str, Any]
    source: Mapping[str, Any]
    stdin: str
    cpu: int
    wall: float
    memory_mb: int
    seed: int = 0
    case: int = 0
    step: float | None = None
    urgent: bool = False

    @cached_property
    def plan_text(self) -> str:
        return json.dumps(self.plan)

    @cached_property
    def judge_key(self) -> str:
        """Runs with the same key may be served by the same judge."""
        return hashlib.sha256(f"{self.cpu} {self.plan_text}".encode()).hexdigest()


def isolation(layers: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Level letter and what is missing for the next better ones, from a slot's own report."""
    doors = set(layers["probe"]) - {"closed"}
    files = bool(layers["namespaces"]) or layers["landlock"] > 0
    missing = []
    for name in ("namespaces", "landlock", "seccomp"):
        if not layers[name]:
            why = layers.get(f"missing_{name}", "not available")
            missing.append(f"{name} ({why}); remedy: {FIXES[name]}")
    missing += [f"a locked program can still: {door}" for door in sorted(doors)]
    if layers["seccomp"] and files and not doors:
        return ("A" if layers["namespaces"] and layers["landlock"] else "B"), missing
    if layers["seccomp"] and doors <= FILE_DOORS and layers["user"] != 0:
        return "C", missing
    return "D", missing


def describe(layers: Mapping[str, Any]) -> str:
    """One line for logs and run manifests."""
    level, _ = isolation(layers)
    inside = "mntns+" if layers["namespaces"] else ""
    files = f"{inside}landlock{layers['landlock']}" if layers["landlock"] else inside or "none"
    network = "+".join(
        name for name, on in (("netns", layers["namespaces"]), ("seccomp", layers["seccomp"])) if on
    )
    process = ("pidns+" if layers["namespaces"] else "") + (
        "nofork" if layers["seccomp"] else "rlimit"
    )
    return (
        f"sandbox={level} fs={files.rstrip('+')} net={network or 'none'} proc={process} "
        f"user={layers['user']} mem=rlimit cgroup=none"
    )


def require(layers: Mapping[str, Any], level: str) -> None:
    """Raises IsolationError naming what is missing and the flag that lowers the requirement."""
    if level == "none":
        return
    if level not in LEVELS:
        raise ValueError(f"require_level must be A, B, C, D or none, got {level!r}")
    reached, missing = isolation(layers)
    if reached > level:
        lines = "\n  - ".join(missing) or "nothing named"
        raise IsolationError(
            f"the code sandbox reaches level {NAMES[reached]}, below the required {level}.\n"
            f"Missing:\n  - {lines}\n"
            f"To run anyway: --config.sandbox.require_level={reached} (training) or "
            f"--require_level {reached} (python -m sage_jax.verify); 'none' accepts anything."
        )


class Slot(Child):
    """One zygote. ``layers`` is None until its report has arrived."""

    def __init__(self, seed: int = 0, without: Sequence[str] = ()) -> None:
        unknown = set(without) - set(LAYERS)
        if unknown:
            raise ValueError(f"without: unknown layers {sorted(unknown)}; known: {LAYERS}")
        self.seed = seed
        self.layers: dict[str, Any] | None = None
        self.runs = 0
        self.judge_key = ""  # of the last run: its judge may still be there
        self.group_runs = 0  # with that key in a row
        self._plan, self._empty = -1, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        options = {
            "parent": os.getpid(),
            "without": list(without),
            "uid": 200_000 + 2 * random.SystemRandom().randrange(30_000),
        }
        arguments = ["-s", "-S", "-B", "-P", str(ZYGOTE), "{socket}", json.dumps(options)]
        super().__init__(arguments, environment(hash_seed=1 + seed))

    def start_run(self, run: Run) -> None:
        """Hand a run over; the reply is the zygote's account of it. Raises ChildDied."""
        if self.judge_key != run.judge_key:
            self._close_plan()
            self._plan, self.judge_key = _readable(run.plan_text.encode()), run.judge_key
            self.group_runs = 0
        self.group_runs += 1
        os.lseek(self._plan, 0, os.SEEK_SET)
        source = _readable(run.source["source"].encode("utf-8", "surrogatepass"))
        stdin = self._empty
        if run.stdin:
            stdin = _readable(run.stdin.encode("utf-8", "surrogatepass"))
        request = {
            "script": run.source["mode"] == "script",
            "limits": {
                "cpu": run.cpu,
                "step": run.step or run.cpu,
                "wall": run.wall,
                "memory": run.memory_mb << 20,
            },
            "key": run.judge_key,
            "case": run.case,
            "urgent": run.urgent,
            "mutates": bool(run.source.get("mutates")),
        }
        try:
            self.send(request, (self._plan, source, stdin))
        finally:
            os.close(source)
            if run.stdin:
                os.close(stdin)
        self.runs += 1

    def _close_plan(self) -> None:
        if self._plan >= 0:
            os.close(self._plan)
            self._plan = -1

    @property
    def worn(self) -> bool:
        return self.runs >= RUNS_PER_SLOT

    def kill(self) -> None:
        super().kill()
        self._close_plan()
        if self._empty >= 0:
            os.close(self._empty)
            self._empty = -1
        base = (self.layers or {}).get("base")
        if base:
            shutil.rmtree(base, ignore_errors=True)


def _readable(data: bytes) -> int:
    """A descriptor that reads as ``data``, which stays out of pipes and files of the disk."""
    number = os.memfd_create("run")
    while data:
        data = data[os.write(number, data) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number
