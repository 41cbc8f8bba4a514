"""Harness for hostile programs: canaries, listeners and watchers around a Verifier.

As a script: ``python tests/verify_hostile.py CASES.jsonl [--without namespaces,...]`` prints each
broken promise and exits 1 if there is one. The case format is that of ../shared/cases.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sage_jax.verify.pool import Verifier  # noqa: E402
from sage_jax.verify.verdict import Job  # noqa: E402

CANARY, ESCAPE, PORT = Path("/tmp/sbx-canary"), Path("/tmp/sbx-escape"), 47651
AS_CASE = {"correct": "pass", "wrong": "fail", "unparsable": "fail"}
NEXT = {
    "solution": "def f(n):\n    open('next.txt', 'w').write('x' * n)\n"
    "    return len(open('next.txt').read())\n",
    "entry_point": "f",
}


class Surroundings:
    """What a program must not reach: a secret in the environment and a file, three listeners."""

    def __enter__(self):
        os.environ["SBX_CANARY_SECRET"] = "CANARY-ENV-7f3a"
        CANARY.mkdir(exist_ok=True)
        (CANARY / "secret.txt").write_text("CANARY-FILE-7f3a\n")
        ESCAPE.mkdir(exist_ok=True)
        ESCAPE.chmod(0o777)
        self.heard = 0
        self._open = True
        tcp = socket.create_server(("127.0.0.1", PORT))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", PORT))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0sbx-canary")
        unix.listen()
        self._sockets = [tcp, udp, unix]
        for sock in self._sockets:
            sock.settimeout(0.1)
            threading.Thread(target=self._listen, args=(sock,), daemon=True).start()
        return self

    def _listen(self, sock):
        while self._open:
            try:
                sock.recv(1) if sock.type == socket.SOCK_DGRAM else sock.accept()
                self.heard += 1
            except TimeoutError:
                continue
            except OSError:
                return

    def __exit__(self, *exception):
        self._open = False
        for sock in self._sockets:
            sock.close()
        os.environ.pop("SBX_CANARY_SECRET", None)


class Watcher:
    """Peak memory and threads of the processes below this one, sampled."""

    def __init__(self):
        self.reset()
        self._stop = threading.Event()
        threading.Thread(target=self._loop, daemon=True).start()

    def reset(self):
        self.peak_mb = self.threads = 0

    def _loop(self):
        while not self._stop.wait(0.05):
            for pid in descendants():
                fields = status(pid)
                self.peak_mb = max(self.peak_mb, int(fields.get("VmHWM", "0 kB").split()[0]) >> 10)
                self.threads = max(self.threads, int(fields.get("Threads", "0")))

    def close(self):
        self._stop.set()


def status(pid):
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def descendants():
    parents = {
        int(p.name): int(status(p.name).get("PPid", 0)) for p in Path("/proc").glob("[0-9]*")
    }
    found, grown = {os.getpid()}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return found - {os.getpid()}


def marked():
    """Processes the cases mark as their own, wherever they hang."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text()
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if name.startswith("sbxmark") or (b"SBXMARK" in line and b"verify_hostile" not in line):
            found.append(folder.name)
    return found


def settles(at_rest):
    """Whether within 2 seconds nothing marked is left, and no more processes than at rest."""
    deadline = time.monotonic() + 2
    while marked() or len(descendants()) > at_rest:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def check(case, verifier, around, watcher, weaker, at_rest):
    """Names of the promises ``case`` broke."""
    for marker in case.get("markers", ()):
        Path(marker).unlink(missing_ok=True)
    around.heard = 0
    watcher.reset()
    payload = {
        name: case[name]
        for name in ("solution", "tests", "entry_points", "stdin", "mutates_args",
                     "determinism_probe")
        if case.get(name) is not None
    }  # fmt: skip
    began = time.monotonic()
    verdict = verifier.run([Job(case["id"], "code", payload)])[case["id"]]
    wall = time.monotonic() - began
    if "determinism_probe" in payload:
        wall = verdict.ms / 1000
    shown = AS_CASE.get(verdict.verdict, verdict.verdict)
    allowed = {case["expected"], *case.get("acceptable", ())}
    for exception in weaker:
        allowed |= set((case.get("level_exceptions") or {}).get(exception, ()))
    broken = []
    if shown not in allowed:
        broken.append(f"verdict {shown} ({verdict.reason})")
    again = {**NEXT, "tests": f"assert f({len(case['id'])}) == {len(case['id'])}"}
    name = case["id"] + "+next"
    follow = verifier.run([Job(name, "code", again)])[name]
    told = {**{k: True for k in case["must_hold"]}}
    for promise in told:
        what, _, number = promise.partition(":")
        kept = {
            "verdict_not_pass": lambda: shown != "pass" or shown in allowed - {case["expected"]},
            "verdict_pass": lambda: shown == "pass",
            "parent_alive": lambda: True,
            "next_program_ok": lambda follow=follow: follow.correct,
            "no_process_left_2s": lambda: settles(at_rest),
            "no_file_outside": lambda: not any(Path(m).exists() for m in case["markers"]),
            "no_secret_in_output": lambda: "CANARY-" not in repr(verdict),
            "no_tcp_connection": lambda: around.heard == 0,
            "captured_output_under_mb": lambda n=number: (
                len(verdict.output_tail or "") < float(n) * 2**20
            ),
            "host_mem_under_mb": lambda n=number: watcher.peak_mb < float(n),
            "threads_under": lambda n=number: watcher.threads < float(n),
            "wall_under_s": lambda n=number, wall=wall: wall < float(n),
            "flagged_nondeterministic": lambda: verdict.deterministic is False,
        }[what]
        if not kept():
            broken.append(promise)
    return broken, f"{shown} ({verdict.reason}) {wall:.1f}s"


def run_cases(cases, without=(), require_level="B", show=None):
    """Broken promises by case id; nothing else may start processes meanwhile."""
    weaker = ["no_mount_ns"] if "namespaces" in without else []
    broken = {}
    before = descendants()
    with Surroundings() as around:
        with Verifier(workers=1, without=without, require_level=require_level) as verifier:
            if not verifier.isolation.startswith("A"):
                weaker = ["no_mount_ns"]
            verifier.run([Job("warm", "code", {**NEXT, "tests": "assert f(1) == 1",
                                               "determinism_probe": "f(1)"})])  # fmt: skip
            time.sleep(1)
            at_rest = len(descendants())
            watcher = Watcher()
            for case in cases:
                problems, told = check(case, verifier, around, watcher, weaker, at_rest)
                if problems:
                    broken[case["id"]] = problems + [told]
                if show:
                    show(f"{case['id']:26} {told} {problems or ''}")
            watcher.close()
        time.sleep(0.2)
        left = descendants() - before
        if marked() or left:
            broken["after close"] = [f"left: {marked()} {left}"]
    return broken


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases")
    parser.add_argument("--without", default="")
    parser.add_argument("--require_level", default="B")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    cases = [json.loads(line) for line in open(options.cases, encoding="utf-8")]
    cases = [case for case in cases if options.only in case["id"]]
    without = tuple(name for name in options.without.split(",") if name)
    broken = run_cases(cases, without, options.require_level, show=print)
    print(json.dumps(broken, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
