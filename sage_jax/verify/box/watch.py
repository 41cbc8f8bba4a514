"""Watching one run from outside: its two pipes, its clock, its end."""

import os
import select
import time

OUTPUT_CAP, TAIL = 1 << 20, 2048
BUSY_SHARE, WALL_STRETCH = 0.1, 1.95


class Watch:
    """Reads one run's pipes until the judge has spoken or time is up."""

    def __init__(self, verdict, output, wall, children):
        self._verdict_fd, self._output_fd, self._children = verdict, output, children
        self._began, self._wall = time.monotonic(), wall
        self.verdict, self.output_bytes = b"", 0
        self._head, self._last = b"", b""
        self.wall_hit = self.output_hit = False
        os.set_blocking(output, False)

    def until_verdict(self):
        poller = select.poll()
        poller.register(self._verdict_fd, select.POLLIN)
        poller.register(self._output_fd, select.POLLIN)
        while True:
            left = self._began + self._wall - time.monotonic()
            if left <= 0 and not self._still_working():
                self.wall_hit = True
                return
            for number, _ in poller.poll(max(left, 0.1) * 1000):
                if number == self._output_fd:
                    if not self._read_output():
                        poller.unregister(number)
                    continue
                part = os.read(self._verdict_fd, 1 << 16)
                self.verdict += part
                if not part:
                    return
            if self.output_bytes > OUTPUT_CAP or len(self.verdict) > 4 * OUTPUT_CAP:
                self.output_hit = True
                return

    def _still_working(self):
        """The wall limit ends sleepers; who gets CPU on a busy host is left to the CPU limit."""
        elapsed = time.monotonic() - self._began
        used = sum(cpu_clock(child) for child in self._children)
        return used > BUSY_SHARE * elapsed and elapsed < WALL_STRETCH * self._wall

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
        """What is left in the pipe after the writers are gone."""
        while self.output_bytes <= OUTPUT_CAP and self._read_output():
            pass
        os.close(self._output_fd)
        os.close(self._verdict_fd)

    def tail(self):
        if self.output_bytes <= TAIL:
            return self._head
        if self.output_bytes <= 2 * TAIL:
            return self._head + self._last[2 * TAIL - self.output_bytes :]
        return self._head + b"\n...\n" + self._last


def cpu_clock(child):
    """CPU seconds of a live child, by the process clock encoded in its pid."""
    try:
        return time.clock_gettime(((~child) << 3) | 2)
    except OSError:
        return 0.0


def wait(child):
    _, status, usage = os.wait4(child, 0)
    return {
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
        "cpu": usage.ru_utime + usage.ru_stime,
        "rss_kb": usage.ru_maxrss,
    }
