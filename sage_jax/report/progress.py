"""What a person sees while training runs: one line a step, and a heartbeat when nothing moves."""

import logging
import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

from sage_jax.report.study import read_rows

PENDING_SHOWN = 3
RATE_STEPS = 20  # steps whose mean duration gives the ETA

logger = logging.getLogger("sage_jax")


def setup_logging(stream: TextIO | None = None, quiet: bool = False) -> logging.Logger:
    """The project's own logger: one handler, nothing passed on to the root logger.

    Quiet keeps warnings and errors. Other libraries' loggers are left as they are.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    return logger


class Progress:
    """Progress of `total` steps, of which `done` were finished by earlier runs. Every `validates`
    steps (0: at none but the last) a validation takes time of its own.

    On a terminal the status is one line, rewritten in place; elsewhere a plain line a step.
    `heartbeat` is the number of seconds without news after which a background thread says which
    stage runs, for how long, and what it waits for; 0 switches it off. Quiet prints nothing.
    A context manager.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        validates: int = 0,
        stream: TextIO | None = None,
        quiet: bool = False,
        heartbeat: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._done, self._validates = total, done, validates
        self._updates = 0  # of this process
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._clock = clock
        # Seconds without validation, of steps without compiling; and of the last validation.
        self._clean: deque[float] = deque(maxlen=RATE_STEPS)
        self._validation = 0.0
        self._shortest = math.inf
        self._width = 0
        self._status = ""
        self._lock = threading.Lock()
        now = clock()
        self._step_start = self._stage_start = self._news = now
        self._stage = "starting"
        self._pending: Callable[[], Iterable[str]] = tuple
        self._heartbeat = heartbeat
        self._stop = threading.Event()
        self._thread = None
        if heartbeat > 0 and not quiet:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="heartbeat")
            self._thread.start()

    def stage(self, name: str, pending: Callable[[], Iterable[str]] = tuple) -> None:
        """Enters a stage, or goes on with it; `pending` gives the ids it waits for (a mapping's
        keys will do). Only what is printed counts as news to the heartbeat."""
        with self._lock:
            self._pending = pending
            if name != self._stage:
                self._stage, self._stage_start = name, self._clock()

    def step(
        self,
        step: int,
        shown: Mapping[str, float],
        *,
        compiled: bool = False,
        validation: float = 0.0,
    ) -> None:
        """Reports a finished step with the figures to show beside it; `validation` seconds of it
        were one. Steps in which programs were `compiled`, and the first of this process in any
        case, say nothing about the pace."""
        now = self._clock()
        with self._lock:
            seconds = now - self._step_start
            self._step_start = self._news = now
            self._validation = validation or self._validation
            pace = (
                self._pace(seconds, validation, compiled, step)
                if step > self._done
                else duration(seconds)
            )
            self._done = step
            figures = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
            self._status = f"step {step}/{self._total}  {figures}  {pace}"
            self._show(self._status)

    def _pace(self, seconds: float, validation: float, compiled: bool, step: int) -> str:
        self._updates += 1
        if self._updates > 1:
            self._shortest = min(self._shortest, seconds - validation)
            if not compiled:
                self._clean.append(seconds - validation)
        left = self._total - step
        pace = f"{seconds:.1f} s/step"
        if left <= 0:
            return pace
        if self._updates == 1:
            return f"{pace}, compiling included  ETA after the next step"
        mean = sum(self._clean) / len(self._clean) if self._clean else self._shortest
        return f"{pace}  ETA {duration(mean * left + self._validation * self._validations(step))}"

    def _validations(self, step: int) -> int:
        """How many are still to come after `step`."""
        if not self._validates:
            return 1
        return -(-self._total // self._validates) - step // self._validates

    def _beat(self) -> None:
        while not self._stop.wait(min(1.0, self._heartbeat / 4)):
            self.beat()

    def beat(self) -> None:
        """Prints the heartbeat if it is due; the background thread calls this."""
        with self._lock:
            now = self._clock()
            if now - self._news < self._heartbeat:
                return
            self._news = now
            line = f"{self._stage}: {duration(now - self._stage_start)}{self._waiting()}"
            self._show(f"{self._status}  | {line}" if self._terminal and self._status else line)

    def _waiting(self) -> str:
        try:
            ids = list(self._pending())
        except RuntimeError:  # the main thread is changing the mapping
            return ""
        if not ids:
            return ""
        more = ", ..." if len(ids) > PENDING_SHOWN else ""
        return f", waiting for {len(ids)}: {', '.join(ids[:PENDING_SHOWN])}{more}"

    def _show(self, line: str, quiet: bool | None = None) -> None:
        if self._quiet if quiet is None else quiet:
            return
        if self._terminal:
            # A line that wraps cannot be rewritten. Blanks wipe what a longer one left: no escape
            # codes, which some consoles print.
            line = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line + " " * (self._width - len(line)))
            self._stream.flush()
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
            self._stream.flush()

    def note(self, text: str, *, quiet: bool | None = None) -> None:
        """Prints a line that stays, above the status line where there is one. `quiet` False
        prints it in quiet runs too."""
        with self._lock:
            self._news = self._clock()
            self._show(text, quiet)
            if self._terminal and not self._quiet:
                self._stream.write("\n")
                self._width = 0
                self._show(self._status)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._terminal and self._width:
            self._stream.write("\n")
            self._width = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def duration(seconds: float) -> str:
    """Seconds as text: "40 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def accuracy_summary(path: Path) -> str:
    """What became of valid/accuracy over a run, from its metrics.jsonl, in one line: on the
    validation items that were measured last."""
    rows = [row for row in read_rows(path) if "valid/accuracy" in row]
    measured = [(int(row["step"]), row["valid/accuracy"]) for row in rows]
    if not measured:
        return "accuracy: not measured in this run"
    (_, first), (last_step, last) = measured[0], measured[-1]
    if len(measured) == 1:
        return f"accuracy {last:.4f} after {last_step} updates, measured once on these items"
    best_step, best = max(measured, key=lambda pair: (pair[1], -pair[0]))
    return (
        f"accuracy {first:.4f} -> {last:.4f} after {last_step} updates "
        f"(best {best:.4f} at step {best_step})"
    )
