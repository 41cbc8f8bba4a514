"""The root of one sandbox slot: sets up the isolation once, then forks judge and solution.

Started by exec from the trainer with one control socket. It is blind: see
``runner`` for what it does per program.
"""

import _socket
import importlib
import json
import os
import select
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine  # noqa: E402
import seccomp  # noqa: E402
from doors import probe_doors  # noqa: E402
from runner import Confinement, Runner, remove  # noqa: E402
from watch import open_proc, run_delay_known  # noqa: E402
from wire import receive, send  # noqa: E402

sys.path.pop(0)

# What programs import most; each costs every fork the copying of its page tables.
PRELOAD = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools "
    "math operator random re statistics string threading typing"
).split()

IDLE = 0.5  # seconds without work, after which no process is kept for more of it


def main():
    control = _socket.socket(fileno=int(sys.argv[1]))
    options = json.loads(sys.argv[2])
    confine.die_with_parent(options["parent"])
    for name in PRELOAD:
        importlib.import_module(name)
    Zygote(control, options).serve()


class Zygote:
    def __init__(self, control, options):
        self._control, self._options = control, options
        self._without = set(options["without"])
        self._base = ""
        self._uid = options["uid"] if os.geteuid() == 0 else None
        self._roots = confine.readable_roots()
        self._layers = {}
        self._keep_reading = False
        self._landlock = 0 if "landlock" in self._without else confine.landlock_abi()
        self._proc = open_proc()  # the private root has none
        self._enter_namespaces()
        if not self._layers["namespaces"]:
            self._make_base()
        if self._uid is not None and not self._layers["namespaces"]:
            self._keep_reachable()
        if "setuid" in self._without:
            self._uid = None
        self._layers["user"] = os.geteuid() if self._uid is None else self._uid
        filtered = None
        if "seccomp" not in self._without:
            try:
                filtered = seccomp.Filter()
            except ValueError as error:
                self._layers["missing_seccomp"] = str(error)
        self._layers["landlock"] = self._landlock
        self._layers["seccomp"] = filtered is not None
        how = Confinement(
            self._layers["namespaces"], self._uid, self._keep_reading, self._landlock, filtered,
            self._roots, self._base, self._proc,
        )  # fmt: skip
        self._layers["clock"] = "schedstat" if run_delay_known(self._proc) else "cpu"
        self._runner = Runner(how)

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
        place = next(path for path in ("/tmp", "/var/tmp", "/dev/shm") if os.access(path, os.W_OK))
        name = f"sage-sandbox-{os.getpid()}-{os.urandom(8).hex()}"
        self._base = self._layers["base"] = os.path.join(place, name)
        os.mkdir(self._base, 0o700)
        os.chmod(self._base, 0o711)

        def leave(*_):
            remove(self._base)
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

    # --- serving --------------------------------------------------------------------------

    def serve(self):
        self._layers["probe"] = self._probe()
        send(self._control, self._layers)
        while True:
            if not select.select([self._control], [], [], IDLE)[0]:
                self._runner.rest()
            request, descriptors = receive(self._control)
            if request is None:
                if self._base:
                    remove(self._base)
                os._exit(0)
            reply = self._runner.serve_run(request, *descriptors)
            for number in descriptors:
                os.close(number)
            send(self._control, reply)

    def _probe(self):
        """What a locked child can still do, found by trying: names of the open doors."""
        reader, writer = os.pipe()
        limits = {"cpu": 2, "memory": 1 << 30}
        child, ready = self._runner.fork([None, writer, writer], limits, False, probe_doors)
        os.close(writer)
        with os.fdopen(reader, "rb") as handle:
            text = handle.read().decode()
        os.close(ready)
        os.waitpid(child, 0)
        return text.strip().splitlines() or ["no answer"]


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


if __name__ == "__main__":
    main()
