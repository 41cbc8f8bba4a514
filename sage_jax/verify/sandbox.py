"""The trainer's side of the code sandbox: slots, their isolation level, one run at a time.

What happens inside is in the programs of ``box``: a zygote per slot forks, for every run, a judge
that owns the verdict and a solution that owns nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """One program against one judge plan; limits in seconds and MB."""

    plan: Mapping[str, Any]
    source: Mapping[str, Any]
    stdin: str
    cpu: int
    wall: float
    memory_mb: int
    seed: int = 0


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
        options = {
            "parent": os.getpid(),
            "without": list(without),
            "uid": 200_000 + 2 * random.SystemRandom().randrange(30_000),
        }
        arguments = ["-s", "-S", "-B", "-P", str(ZYGOTE), "{socket}", json.dumps(options)]
        super().__init__(arguments, environment(hash_seed=1 + seed))

    def start_run(self, run: Run) -> None:
        """Hand a run over; the reply is the zygote's account of it. Raises ChildDied."""
        texts = (
            json.dumps(run.plan),
            json.dumps(run.source),
            run.stdin.encode("utf-8", "surrogatepass"),
        )
        descriptors = [_sealed(text) for text in texts]
        limits = {"cpu": run.cpu, "wall": run.wall, "memory": run.memory_mb << 20}
        try:
            self.send({"script": run.source["mode"] == "script", "limits": limits}, descriptors)
        finally:
            for number in descriptors:
                os.close(number)
        self.runs += 1

    @property
    def worn(self) -> bool:
        return self.runs >= RUNS_PER_SLOT

    def kill(self) -> None:
        super().kill()
        base = (self.layers or {}).get("base")
        if base:
            shutil.rmtree(base, ignore_errors=True)


def _sealed(text: str | bytes) -> int:
    """A descriptor that reads as ``text``; bytes stay out of pipes and files of the disk."""
    data = text.encode() if isinstance(text, str) else text
    number = os.memfd_create("run")
    while data:
        data = data[os.write(number, data) :]
    os.lseek(number, 0, os.SEEK_SET)
    return number
