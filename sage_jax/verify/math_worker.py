"""Child program: judges maths jobs one after another until its socket closes."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from sage_jax.verify.box import confine, seccomp
from sage_jax.verify.math import judge, judge_key

MEMORY = 2 << 30
WORN_KB = 500 << 10


def main() -> None:
    if sys.platform == "linux":
        confine.die_with_parent(int(sys.argv[2]))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(3000)
    link = socket.socket(fileno=int(sys.argv[1]))

    def say(message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        link.sendall(struct.pack(">I", len(text)) + text)

    # Opened now: once locked down, the worker reaches no path of the system.
    statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None
    lock_down()
    say({"stage": "idle"})
    while (request := _read(link)) is not None:
        verdict, reason = answer(request, say)
        worn = statm is not None and resident_kb(statm) > WORN_KB
        say({"verdict": verdict, "reason": reason, "worn": worn})


def resident_kb(statm: int) -> int:
    """Memory this process holds now, by its open /proc/self/statm.

    Not ru_maxrss: it survives exec, so that a worker would count the trainer's peak as its own.
    """
    return int(os.pread(statm, 100, 0).split()[1]) * (resource.getpagesize() >> 10)


def lock_down() -> None:
    """No writing, no network, no processes, where the kernel can: a second line, since nothing
    here evaluates text.
    """
    try:
        confine.no_new_privileges()
        confine.dumpable(False)
        if abi := confine.landlock_abi():
            paths = [p for p in [*sys.path, sys.prefix] if os.path.isdir(p)]
            roots = [*confine.readable_roots(), *paths]
            confine.landlock_enter(confine.landlock_rules(abi, roots, None, []))
        seccomp.Filter().install(confine.libc)
    except (OSError, ValueError, AttributeError) as error:
        print(f"maths worker without confinement: {error}", file=sys.stderr)


def answer(request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> tuple[str, str]:
    """Verdict and reason; a bug of ours in the gold part is never the response's fault."""
    stage = "gold"

    def enter(name: str) -> None:
        nonlocal stage
        stage = name
        say({"stage": name})

    def loading(begin: bool) -> None:
        say({"stage": "loading"} if begin else {"stage": "loaded", "then": stage})

    try:
        if request["kind"] == "math_key":
            enter("prediction")
            return judge_key(request["answer"])
        return judge(
            request["gold"],
            request["prediction"],
            question=request.get("question"),
            tolerance=request.get("tolerance"),
            policy=request["policy"],
            enter=enter,
            loading=loading,
        )
    except (MemoryError, RecursionError):
        return ("error", "verifier_error") if stage == "gold" else ("wrong", "too_large")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return "error", "verifier_error"


def _read(link: socket.socket) -> dict[str, Any] | None:
    def exactly(size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = link.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return parts

    try:
        (size,) = struct.unpack(">I", exactly(4))
        return json.loads(exactly(size))
    except EOFError:
        return None


if __name__ == "__main__":
    main()
