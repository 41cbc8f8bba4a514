"""The root of one sandbox slot: sets up the isolation once, then forks judge and solution.

Started by exec from the trainer with one control socket. It is blind: it passes descriptors on
and never reads a program or a test, so nothing of them stays in memory for a later program.
"""

import array
import fcntl
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine  # noqa: E402
import judge  # noqa: E402
import seccomp  # noqa: E402
import solution  # noqa: E402
from doors import probe_doors  # noqa: E402
from watch import Watch, wait  # noqa: E402

sys.path.pop(0)

PRELOAD = (
    "bisect calendar cmath copy ctypes dataclasses datetime decimal enum fractions functools heapq "
    "inspect itertools linecache math numbers operator queue random re statistics string "
    "tempfile textwrap threading traceback typing unittest.mock"
).split()
JUDGE_MEMORY = 1 << 30
FILE_SIZE = 8 << 20


def main():
    control = socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    confine.die_with_parent(options["parent"])
    for name in PRELOAD:
        importlib.import_module(name)
    Zygote(control, options).serve()


class Zygote:
    def __init__(self, control, options):
        self._control, self._options = control, options
        self._without = set(options["without"])
        self._base = self._scratch = ""
        self._uid = options["uid"] if os.geteuid() == 0 else None
        self._roots = confine.readable_roots()
        self._layers = {}
        self._scratch_number = 0
        self._keep_reading = False
        self._landlock = 0 if "landlock" in self._without else confine.landlock_abi()
        self._enter_namespaces()
        if self._layers["namespaces"]:
            self._scratch = "/w"
        else:
            self._make_base()
        self._devnull = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        if self._uid is not None and not self._layers["namespaces"]:
            self._keep_reachable()
        if "setuid" in self._without:
            self._uid = None
        self._layers["user"] = os.geteuid() if self._uid is None else self._uid
        self._filter = None
        if "seccomp" not in self._without:
            try:
                self._filter = seccomp.Filter()
            except ValueError as error:
                self._layers["missing_seccomp"] = str(error)
        self._layers["landlock"] = self._landlock
        self._layers["seccomp"] = self._filter is not None
        gc.disable()
        gc.freeze()

    # --- set-up ---------------------------------------------------------------------------

    def _enter_namespaces(self):
        """Namespaces and private root, after a throw-away child has shown that they work."""
        self._layers["namespaces"] = False
        if "namespaces" in self._without:
            self._layers["missing_namespaces"] = "left out on request"
            return
        ways = ("root", "dropped", "user") if os.geteuid() == 0 else ("user",)
        problems = []
        for way in ways:
            problem = in_child(lambda way=way: self._isolate(way))
            if problem is None:
                self._isolate(way)
                self._layers["namespaces"] = way
                if way != "root":
                    self._uid = None  # a user namespace maps only the user who made it
                self._become_first()
                return
            problems.append(f"{way}: {problem}")
        self._layers["missing_namespaces"] = "; ".join(problems)

    def _isolate(self, way):
        if way == "dropped":  # root without the right to unshare: another user may have it
            confine.drop_user(self._options["uid"])
            confine.dumpable(True)  # or the map of the namespace could not be written
        confine.unshare(user=way != "root")
        # Any folder will do as the place of the new root: only this mount namespace sees it.
        place = next(path for path in ("/tmp", "/mnt", "/var") if os.path.isdir(path))
        confine.enter_private_root(place, self._roots)

    def _become_first(self):
        """Go on in a child, which is process 1 of the new pid namespace."""
        parent = os.getpid()
        child = os.fork()
        if child:
            self._control.close()
            os.waitpid(child, 0)
            os._exit(0)
        confine.death_signal(signal.SIGKILL)
        if os.getppid() not in (0, parent):
            os._exit(1)

    def _make_base(self):
        """Without a private root: a folder for scratches, removed when the trainer ends."""
        self._base = self._layers["base"] = tempfile.mkdtemp(prefix="sage-sandbox-")
        tempfile.tempdir = None  # forget the choice: a program has its own
        os.chmod(self._base, 0o711)

        def leave(*_):
            shutil.rmtree(self._base, ignore_errors=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)
        confine.death_signal(signal.SIGTERM)

    def _keep_reachable(self):
        """Where another user could not read the interpreter's own files, leave it that one right
        if Landlock bounds it, else stay on this user.
        """

        def look():
            confine.drop_user(self._options["uid"], keep_reading=self._keep_reading)
            os.chdir(self._base)
            with open(os.__file__, "rb"):
                pass

        if in_child(look) is not None:
            self._keep_reading = self._landlock > 0
            if not self._keep_reading or in_child(look) is not None:
                self._uid, self._keep_reading = None, False

    def _new_scratch(self):
        if self._layers["namespaces"]:
            return
        self._scratch_number += 1
        self._scratch = os.path.join(self._base, str(self._scratch_number))
        os.mkdir(self._scratch, 0o700)
        if self._uid is not None:
            os.chown(self._scratch, self._uid, self._uid)

    def _clean_scratch(self):
        if self._layers["namespaces"]:
            if os.listdir("/w"):
                confine.mount_scratch("/w")
            return
        # A program may leave folders nobody can enter: open them top down, then remove.
        for folder, names, _ in os.walk(self._scratch):
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    os.chmod(path, stat.S_IRWXU)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._new_scratch()

    # --- children -------------------------------------------------------------------------

    def lock_down(self, limits, scratch, as_judge):
        """Give up everything, in the order of the design; the caller is a fresh child."""
        tasks = 64 if os.geteuid() != 0 or self._uid is not None else None
        parent = os.getppid()
        confine.set_limits(limits["cpu"], limits["memory"], FILE_SIZE, 64, tasks)
        if self._uid is not None:
            confine.drop_user(self._uid + (1 if as_judge else 0), self._keep_reading)
        elif os.geteuid() == 0 or self._layers["namespaces"]:
            confine.drop_capabilities()
        confine.no_new_privileges()
        confine.dumpable(False)
        confine.die_with_parent(parent)
        os.chdir(scratch or "/")
        if self._landlock:
            devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
            confine.landlock(self._landlock, self._roots, scratch, devices)
        if self._filter is not None:
            self._filter.install(confine.libc)

    def _fork(self, descriptors, limits, as_judge, body):
        """Fork a locked child with ``descriptors`` as 0, 1, 2, ... and nothing else open.

        Returns its pid and a pipe that holds one byte if it could be locked: a program that
        fails cannot pass for a machine that does.
        """
        ready_in, ready_out = os.pipe()
        child = os.fork()
        if child:
            os.close(ready_out)
            return child, ready_in
        try:
            os.setsid()
            high = [
                move_up(number) if number is not None else move_up(self._devnull)
                for number in descriptors
            ]
            ready = move_up(ready_out)
            for target, number in enumerate(high):
                os.dup2(number, target, inheritable=True)
            os.closerange(len(high), ready)
            os.closerange(ready + 1, 4096)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.lock_down(limits, None if as_judge else self._scratch, as_judge)
            os.write(ready, b"1")
            os.close(ready)
            gc.enable()
            body()
        except BaseException as error:
            if not as_judge:
                os.write(2, f"sandbox: {type(error).__name__}\n".encode())
        finally:
            os._exit(70)

    # --- serving --------------------------------------------------------------------------

    def serve(self):
        self._new_scratch()
        self._layers["probe"] = self._probe()
        send(self._control, self._layers)
        while True:
            request, descriptors = receive(self._control)
            if request is None:
                if self._base:
                    shutil.rmtree(self._base, ignore_errors=True)
                os._exit(0)
            reply = self._run(request, *descriptors)
            for number in descriptors:
                os.close(number)
            send(self._control, reply)

    def _probe(self):
        """What a locked child can still do, found by trying: names of the open doors."""
        reader, writer = os.pipe()
        limits = {"cpu": 2, "memory": 1 << 30}
        child, ready = self._fork([None, writer, writer], limits, False, probe_doors)
        os.close(writer)
        with os.fdopen(reader, "rb") as handle:
            text = handle.read().decode()
        os.close(ready)
        os.waitpid(child, 0)
        return text.strip().splitlines() or ["no answer"]

    def _run(self, request, plan, source, stdin):
        began = time.monotonic()
        script = request["script"]
        limits = request["limits"]
        ours, theirs = socket.socketpair()
        verdict_in, verdict_out = os.pipe()
        output_in, output_out = os.pipe()
        stdout_in, stdout_out = os.pipe() if script else (None, None)
        ours_fd, theirs_fd = ours.detach(), theirs.detach()
        judge_limits = {"cpu": limits["cpu"] + 2, "memory": JUDGE_MEMORY}
        judge_pid, judge_ready = self._fork(
            [plan, None, None, ours_fd, verdict_out, stdout_in],
            judge_limits,
            True,
            lambda: judge.main(0, socket.socket(fileno=3), 4, 5),
        )
        solution_pid, solution_ready = self._fork(
            [stdin, stdout_out if script else output_out, output_out, theirs_fd, source],
            limits,
            False,
            lambda: solution.main(4, socket.socket(fileno=3)),
        )
        for number in (ours_fd, theirs_fd, verdict_out, output_out, stdout_in, stdout_out):
            if number is not None:
                os.close(number)
        watch = Watch(verdict_in, output_in, limits["wall"], (solution_pid, judge_pid))
        watch.until_verdict()
        for child in (solution_pid, judge_pid):
            os.kill(child, signal.SIGKILL)
        ended = {"solution": wait(solution_pid), "judge": wait(judge_pid)}
        self._reap_strays()
        locked = os.read(judge_ready, 1) + os.read(solution_ready, 1)
        os.close(judge_ready)
        os.close(solution_ready)
        watch.drain()
        self._clean_scratch()
        return {
            "verdict": watch.verdict.decode("utf-8", "replace"),
            "locked": locked == b"11",
            "wall_hit": watch.wall_hit,
            "output_hit": watch.output_hit,
            "output": watch.tail().decode("latin-1"),
            "output_bytes": watch.output_bytes,
            "ms": 1000 * (time.monotonic() - began),
            **ended,
        }

    def _reap_strays(self):
        """Second line behind the fork ban: nothing but this process stays."""
        if self._layers["namespaces"] and os.getpid() == 1:
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


def in_child(action):
    """None if ``action`` works in a throw-away child, else what went wrong."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
        except OSError as error:
            os.write(writer, str(error).encode())
        except BaseException as error:
            os.write(writer, type(error).__name__.encode())
        else:
            os.write(writer, b"works")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as handle:
        text = handle.read().decode()
    os.waitpid(child, 0)
    return None if text == "works" else text or "the child died"


def move_up(number):
    """A copy above all numbers handed out so far, so that none is overwritten by another."""
    return fcntl.fcntl(number, fcntl.F_DUPFD, 200)


def send(sock, message):
    text = json.dumps(message).encode()
    sock.sendall(struct.pack(">I", len(text)) + text)


def receive(sock):
    """One request and its descriptors; (None, ()) when the trainer is gone."""
    descriptors = array.array("i")
    text = b""
    while len(text) < 4 or len(text) < 4 + struct.unpack(">I", text[:4])[0]:
        part, ancillary, _, _ = sock.recvmsg(1 << 16, socket.CMSG_SPACE(8 * 4))
        if not part:
            return None, ()
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % 4])
        text += part
    return json.loads(text[4:]), list(descriptors)


if __name__ == "__main__":
    main()
