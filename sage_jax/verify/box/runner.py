"""What a slot does for every program: fork a locked solution, give it a judge, watch, clean up.

A judge serves one program after another, each over a socket of its own, and reads the tests of
each that comes with other tests than the one before; what could let one of them touch the verdict
on a later one ends it (see ``serve_run`` and ``checks.shareable``). The slot itself is blind:
programs and tests pass through it as descriptors that are never read here, so nothing of them stays
in memory for a later program.
"""

import _socket
import gc
import os
import random
import signal
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

import confine
import judge
import solution
from watch import Clock, Watch, hurry, wait
from wire import send

JUDGE_MEMORY = 1 << 30
JUDGE_EXTRA_CPU = 2  # seconds a judge may use beyond its program's limit
JUDGE_RUNS, JUDGE_CPU = 64, 1.0  # a judge retires after so many programs or seconds
FILE_SIZE = 8 << 20
CHILD_NUMBERS = 16


@dataclass
class Confinement:
    """What the slot found to work, and locks its children with."""

    namespaces: str | bool = False
    uid: int | None = None
    keep_reading: bool = False
    landlock: int = 0
    filter: object = None
    roots: Sequence[str] = ()
    base: str = ""  # folder of the scratches where there is no private root
    proc: int | None = None  # a descriptor of /proc, for the clocks


class Judge:
    """A live judge process: the tests it holds, its CPU limit, its socket, its clock."""

    def __init__(self, limit, child, ready, link, proc):
        self.key, self.limit, self.child, self.link = "", limit, child, link
        self.locked = os.read(ready, 1) == b"1"
        os.close(ready)
        self.clock = Clock(child, proc)
        self.runs, self.cpu = 0, 0.0

    def alive(self):
        """Whether it still waits for work; one that does not is left for ``end`` to collect."""
        return os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def end(self):
        """Kill it, wait, and return its usage in the run it ended in."""
        os.kill(self.child, signal.SIGKILL)
        usage = wait(self.child)
        usage["cpu"] = self.clock.used_of(usage["cpu"])
        self.clock.close()
        self.link.close()
        return usage


def remove(folder):
    """Remove a folder and all in it. Imports here: the libraries behind shutil would be mapped
    into every child.
    """
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


class Runner:
    def __init__(self, confinement):
        self._how = confinement
        self._devnull = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        # Numbers a child wants for itself stay taken, so that none of ours is among them.
        while self._devnull < CHILD_NUMBERS:
            self._devnull = os.dup(self._devnull)
        self._judge = None
        self._ruleset = self._devnull
        self._scratch, self._number = "", 0
        self._tasks = 64 if os.geteuid() != 0 or confinement.uid is not None else None
        # What every child needs and the slot can bear is set once, and inherited.
        confine.set_common_limits(FILE_SIZE)
        confine.no_new_privileges()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if confinement.uid is not None:
            os.setgroups([])
        random.seed(os.environ.get("PYTHONHASHSEED", "0"))
        self._new_scratch()
        gc.disable()
        gc.collect()
        gc.freeze()

    # --- scratch --------------------------------------------------------------------------

    def _new_scratch(self):
        if self._how.namespaces:
            self._scratch = "/w"
        else:
            self._number += 1
            self._scratch = os.path.join(self._how.base, str(self._number))
            os.mkdir(self._scratch, 0o700)
            if self._how.uid is not None:
                os.chown(self._scratch, self._how.uid, self._how.uid)
        os.environ["TMPDIR"] = os.environ["HOME"] = self._scratch
        os.chdir(self._scratch)
        if self._how.landlock:
            # A rule holds for an inode, so a new scratch needs a new rule.
            if self._ruleset != self._devnull:
                os.close(self._ruleset)
            devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
            self._ruleset = confine.landlock_rules(
                self._how.landlock, self._how.roots, self._scratch, devices
            )

    def _clean_scratch(self):
        if not os.listdir(self._scratch):
            return
        if self._how.namespaces:
            confine.mount_scratch("/w")
        else:
            # A program may leave folders nobody can enter: open them top down, then remove.
            for folder, names, _ in os.walk(self._scratch):
                for name in names:
                    path = os.path.join(folder, name)
                    if not os.path.islink(path):
                        os.chmod(path, stat.S_IRWXU)
            remove(self._scratch)
        self._new_scratch()

    # --- children -------------------------------------------------------------------------

    def lock_down(self, limits, as_judge, ruleset):
        """Give up everything, in the order of the design; the caller is a fresh child."""
        how = self._how
        parent = os.getppid()
        confine.set_limits(limits["cpu"], limits["memory"], 64, self._tasks)
        if how.uid is not None:
            confine.drop_user(how.uid + (1 if as_judge else 0), how.keep_reading)
        elif os.geteuid() == 0 or how.namespaces:
            confine.drop_capabilities()
        confine.dumpable(False)
        confine.die_with_parent(parent)
        if as_judge:
            os.chdir("/")
        if how.landlock:
            confine.landlock_enter(ruleset)
        if how.filter is not None:
            how.filter.install(confine.libc)

    def fork(self, descriptors, limits, as_judge, body):
        """Fork a locked child with ``descriptors`` as 0, 1, 2, ... and nothing else open.

        Returns its pid and a pipe that holds one byte if it could be locked: a program that
        fails cannot pass for a machine that does.
        """
        ready_in, ready_out = os.pipe()
        child = confine.fork()
        if child:
            os.close(ready_out)
            return child, ready_in
        try:
            os.setsid()
            ready = len(descriptors) + 1
            for target, number in enumerate([*descriptors, self._ruleset, ready_out]):
                os.dup2(self._devnull if number is None else number, target)
            os.closerange(ready + 1, 4096)
            if self._how.base:  # only there has the slot a handler of its own
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.lock_down(limits, as_judge, ready - 1)
            os.write(ready, b"1")
            os.closerange(ready - 1, ready + 1)
            gc.enable()
            body()
        except BaseException as error:
            if not as_judge:
                os.write(2, f"sandbox: {type(error).__name__}\n".encode())
        finally:
            os._exit(70)

    def _judge_for(self, cpu):
        if self._judge is not None and self._judge.limit == cpu and self._judge.alive():
            self._judge.clock.restart()
            return self._judge
        self.rest()
        ours, theirs = _socket.socketpair()
        # Its own timer ends a run; the limit is for one whose tests disarm that.
        limits = {"cpu": cpu + 2 * JUDGE_EXTRA_CPU, "memory": JUDGE_MEMORY}
        child, ready = self.fork(
            [None, None, None, theirs.fileno()],
            limits,
            True,
            lambda: judge.main(_socket.socket(fileno=3)),
        )
        theirs.close()
        self._judge = Judge(cpu, child, ready, ours, self._how.proc)
        return self._judge

    def rest(self):
        """End the judge, if there is one, and return its usage in its last run."""
        usage = None
        if self._judge is not None:
            usage, self._judge = self._judge.end(), None
            self._reap_strays()
        return usage

    def _reap_strays(self):
        """Second line behind the fork ban: nothing but this process stays."""
        if self._how.namespaces and os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
        while True:
            try:
                if os.waitpid(-1, 0 if os.getpid() == 1 else os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return

    # --- one run --------------------------------------------------------------------------

    def serve_run(self, request, plan, source, stdin):
        """Run one program to its verdict; returns the account of it."""
        began = time.monotonic()
        script, limits = request["script"], request["limits"]
        keeper = self._judge_for(limits["cpu"])
        ours, theirs = _socket.socketpair()
        output_in, output_out = os.pipe()
        stdout_in, stdout_out = os.pipe() if script else (None, None)
        child, ready = self.fork(
            [stdin, stdout_out if script else output_out, output_out, theirs.fileno(), source],
            limits,
            False,
            lambda: solution.main(4, 3, script, request["mutates"]),
        )
        handed = [ours.fileno()] + ([stdout_in] if script else [])
        new = keeper.key != request["key"]
        handed += [plan] if new else []
        keeper.key = request["key"]
        try:
            cpu = limits["cpu"] + JUDGE_EXTRA_CPU
            message = {"cpu": cpu, "case": request["case"], "new_tests": new}
            send(keeper.link, message, handed)
        except OSError:
            pass  # a judge that died meanwhile is found out below
        ours.close()
        theirs.close()
        for number in (output_out, stdout_in, stdout_out):
            if number is not None:
                os.close(number)
        clock = Clock(child, self._how.proc)
        if request["urgent"]:
            for number in (child, keeper.child):
                hurry(number, self._how.proc)
        watch = Watch(keeper.link.fileno(), output_in, limits, (clock, keeper.clock))
        watch.until_verdict()
        os.kill(child, signal.SIGKILL)
        ended = wait(child)
        clock.close()
        locked = keeper.locked and os.read(ready, 1) == b"1"
        os.close(ready)
        watch.drain()
        usage = self._judge_usage(keeper, watch.reusable and not request["urgent"])
        self._clean_scratch()
        return {
            "verdict": watch.answer(),
            "locked": locked,
            "wall_hit": watch.wall_hit,
            "cpu_hit": watch.cpu_hit,
            "output_hit": watch.output_hit,
            "late": watch.late,
            "starved": watch.starved,
            "output": watch.tail().decode("latin-1"),
            "output_bytes": watch.output_bytes,
            "ms": 1000 * (time.monotonic() - began),
            "solution": ended,
            "judge": usage,
        }

    def _judge_usage(self, keeper, reusable):
        """What the judge used for this run. It goes on only after a run like any other: one that
        ended in its answer, cost little, and left it in a state it calls reusable.
        """
        cpu = keeper.clock.used()
        keeper.runs += 1
        keeper.cpu += cpu
        young = keeper.runs < JUDGE_RUNS and keeper.cpu < JUDGE_CPU
        # Without the fork ban a program may leave processes, which end with the judge's.
        if reusable and young and self._how.filter is not None:
            return {"signal": 0, "code": -1, "cpu": cpu, "rss_kb": 0}
        return self.rest()
