"""Watching one run from outside: its pipes, its clocks, its end."""

import os
import select
import time

from wire import frame_size

OUTPUT_CAP, TAIL = 1 << 20, 2048
VERDICT_CAP = 4 << 20
STARVED = 20  # times the wall limit, after which even an endless loop is given up
LATE = 1.95  # times the wall limit, after which a program that still works is late
BUSY_SHARE = 0.1
PROGRESS = b"."
URGENT = -10  # niceness


class Watch:
    """Reads one run's pipes until the judge has spoken or time is up.

    ``clocks`` are those of the run's processes. The wall limit counts only the time in which
    neither of them ran nor waited for a processor: it ends sleepers, and a busy host does not
    bring it closer. A test that came to its end ``late`` all the same says as much of the host as
    of the program.
    """

    def __init__(self, verdict, output, limits, clocks):
        self._verdict_fd, self._output_fd, self._clocks = verdict, output, clocks
        self._began, self._wall, self._step = time.monotonic(), limits["wall"], limits["step"]
        # When the judge last told of progress: CPU seconds of the program, and the time.
        self._marked, self._marked_at = 0.0, self._began
        self.late = False
        self.verdict, self.output_bytes = b"", 0
        self._head, self._last = b"", b""
        self.wall_hit = self.cpu_hit = self.output_hit = self.starved = False
        os.set_blocking(output, False)

    def until_verdict(self):
        poller = select.poll()
        poller.register(self._verdict_fd, select.POLLIN)
        poller.register(self._output_fd, select.POLLIN)
        look = self._began + min(self._wall, self._step)  # when to read the clocks next
        while True:
            for number, _ in poller.poll(max(0.0, 1000 * (look - time.monotonic())) + 1):
                if number == self._output_fd:
                    if not self._read_output():
                        poller.unregister(number)
                    continue
                part = os.read(self._verdict_fd, 1 << 16)
                self._take(part)
                if not part or len(self.verdict) == frame_size(self.verdict):
                    self._mark()
                    return
            if self.output_bytes > OUTPUT_CAP or len(self.verdict) > VERDICT_CAP:
                self.output_hit = True
                return
            if time.monotonic() >= look:
                left = self._time_left()
                if left <= 0:
                    return
                look = time.monotonic() + max(left, 0.05)

    def _take(self, part):
        """Add to the verdict; dots ahead of it are progress."""
        if not self.verdict and part.startswith(PROGRESS):
            part = part.lstrip(PROGRESS)
            self._mark()
        self.verdict += part

    def _mark(self):
        now = time.monotonic()
        self.late = self.late or now - self._marked_at > LATE * self._wall
        self._marked, self._marked_at = self._clocks[0].used(), now

    def _time_left(self):
        """Seconds for which no limit can be met; at 0 one is, and its flag is set."""
        elapsed = time.monotonic() - self._began
        step_left = self._step - (self._clocks[0].used() - self._marked)
        wall_left = self._wall - elapsed
        if wall_left <= 0:
            wall_left = self._wall - self._slept(elapsed)
        self.cpu_hit = step_left <= 0
        self.wall_hit = not self.cpu_hit and wall_left <= 0
        self.starved = time.monotonic() - self._marked_at > STARVED * self._wall
        return 0.0 if self.starved else min(step_left, wall_left)

    def _slept(self, elapsed):
        """Seconds so far in which nobody ran or wanted to."""
        used = sum(clock.used() for clock in self._clocks)
        waits = [clock.delayed() for clock in self._clocks]
        if None in waits:  # cannot be told: who gets some CPU is taken to be working, for a while
            working = used > BUSY_SHARE * elapsed and elapsed < LATE * self._wall
            return 0.0 if working else elapsed
        return elapsed - used - sum(waits)

    def _read_output(self):
        try:
            part = os.read(self._output_fd, 1 << 16)
        except BlockingIOError:
            return True
        self.output_bytes += len(part)
        self._head += part[: TAIL - len(self._head)] if len(self._head) < TAIL else b""
        self._last = (self._last + part)[-TAIL:]
        return bool(part)

    def drain(self):
        """What is left in the pipe after its writers are gone."""
        while self.output_bytes <= OUTPUT_CAP and self._read_output():
            pass
        os.close(self._output_fd)

    def answer(self):
        """The judge's JSON text, "" when it gave none."""
        whole = len(self.verdict) == frame_size(self.verdict)
        return self.verdict[5:].decode("utf-8", "replace") if whole else ""

    @property
    def reusable(self):
        """Whether the judge answered and can serve another program (the mark before its text)."""
        return len(self.verdict) == frame_size(self.verdict) and self.verdict[4:5] == b"+"

    def tail(self):
        if self.output_bytes <= TAIL:
            return self._head
        if self.output_bytes <= 2 * TAIL:
            return self._head + self._last[2 * TAIL - self.output_bytes :]
        return self._head + b"\n...\n" + self._last


class Clock:
    """CPU seconds of a live process, and seconds its first thread was ready to run but another
    ran instead, both since ``restart``. ``proc`` is a descriptor of /proc as the outside sees it.
    """

    def __init__(self, child, proc):
        self._child, self._proc = child, proc
        self._statistics = None  # opened when it is first needed: few runs reach their wall limit
        self._used = self._delayed = 0.0

    def restart(self):
        self._used, self._delayed = cpu_clock(self._child), self._run_delay() or 0.0

    def used(self):
        return max(0.0, cpu_clock(self._child) - self._used)

    def used_of(self, total):
        """``used`` of a process that has ended with ``total`` CPU seconds."""
        return max(0.0, total - self._used)

    def delayed(self):
        """None where the kernel does not tell."""
        total = self._run_delay()
        return None if total is None else max(0.0, total - self._delayed)

    def _run_delay(self):
        try:
            if self._statistics is None:
                self._statistics = os.open(
                    f"{outer_pid(self._child, self._proc)}/schedstat",
                    os.O_RDONLY | os.O_CLOEXEC,
                    dir_fd=self._proc,
                )
            return int(os.pread(self._statistics, 100, 0).split()[1]) / 1e9
        except (OSError, TypeError, IndexError, ValueError):
            return None

    def close(self):
        if self._statistics is not None:
            os.close(self._statistics)
            self._statistics = None


def cpu_clock(child):
    """CPU seconds of a live child, by the process clock encoded in its pid."""
    try:
        return time.clock_gettime(((~child) << 3) | 2)
    except OSError:
        return 0.0


def outer_pid(child, proc):
    """The number ``proc`` knows a child by: a pidfd tells it, whatever namespace we are in."""
    handle = os.pidfd_open(child)
    try:
        for line in read_at(proc, f"self/fdinfo/{handle}").splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
    finally:
        os.close(handle)
    raise ValueError("no pid")


def hurry(child, proc):
    """Let a child go before others, where we may: as a task and as the session it has made."""
    try:
        os.setpriority(os.PRIO_PROCESS, child, URGENT)
        place = f"{outer_pid(child, proc)}/autogroup"
        handle = os.open(place, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(handle, b"%d" % URGENT)
        finally:
            os.close(handle)
    except (OSError, TypeError, ValueError):
        pass


def open_proc():
    """A descriptor of /proc for the clocks, None without one. No child inherits it."""
    try:
        return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None


def run_delay_known(proc):
    clock = Clock(os.getpid(), proc)
    known = clock.delayed() is not None
    clock.close()
    return known


def read_at(folder, path):
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)) as handle:
        return handle.read()


def wait(child):
    _, status, usage = os.wait4(child, 0)
    return {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
        "cpu": usage.ru_utime + usage.ru_stime,
        "rss_kb": usage.ru_maxrss,
    }
