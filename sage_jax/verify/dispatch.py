"""The thread behind a Verifier: hands tasks to workers, reads answers, enforces deadlines."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sage_jax.verify.child import Child, ChildDied
from sage_jax.verify.code import MOST_TESTS, Steps
from sage_jax.verify.math_client import MathWorker
from sage_jax.verify.sandbox import IsolationError, Run, Slot
from sage_jax.verify.verdict import Verdict

TICK = 0.05
START_LIMIT = 60.0  # seconds for a worker to come up on a loaded machine
WALL_FACTOR = 10.0  # a maths job is ended by CPU time, or by this many times that in wall time
SLOT_GRACE = 10.0
MAX_FAILED_STARTS = 3
WINDOW, GROUP_RUNS = 64, 64  # how far to look for tests already loaded, and how often in a row
STARVED = 25  # times its wall limit, after which a slot must have ended a program


@dataclass
class Task:
    """One distinct piece of work and the ids that wait for it."""

    key: str
    kind: str
    ids: list[str]
    payload: dict[str, Any]
    steps: Steps | None
    size: int  # characters of the payload
    run: Run | None = None
    deaths: int = 0


@dataclass
class Lane:
    """A worker process and what it is doing."""

    child: Any
    task: Task | None = None
    began: float = field(default_factory=time.monotonic)
    cpu_base: float = 0.0


class Dispatcher:
    def __init__(
        self,
        *,
        workers: int,
        math_time_limit: float,
        without: tuple[str, ...],
        finished: Callable[[Task, Verdict], None],
    ) -> None:
        self._workers, self._math_limit = workers, math_time_limit
        self._without, self._finished = without, finished
        self._inbox: deque[Task] = deque()
        self._math: deque[Task] = deque()
        self._code: tuple[deque[Task], deque[Task]] = (deque(), deque())  # by hash seed
        self._lanes: list[Lane] = []
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._woken = self._closing = False
        self._want_slot = False
        self._failed_starts = 0
        self._last_words = "none"
        self._layers: dict[str, Any] | None = None
        self._sandbox_known = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="verifier", daemon=True)
        self._thread.start()

    # --- from other threads ---------------------------------------------------------------

    def put(self, task: Task) -> None:
        self._inbox.append(task)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:  # a write for each task would hand the thread the interpreter each time
            self._woken = True
            os.write(self._wake_out, b"x")

    def start_sandbox(self, timeout: float) -> dict[str, Any]:
        """Start the first slot and return its report of the layers it got."""
        self._want_slot = True
        self._wake()
        if not self._sandbox_known.wait(timeout) or self._layers is None:
            raise IsolationError(
                "the code sandbox does not start on this machine (Linux on x86-64 or aarch64 is "
                f"needed); maths alone works with code=False. Its last words: {self._last_words}"
            )
        return self._layers

    def close(self) -> None:
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_in)
        os.close(self._wake_out)

    # --- the thread -----------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._closing:
                if self._want_slot:
                    self._want_slot = False
                    self._open(lambda: Slot(0, self._without))
                while self._inbox:
                    self._queue(self._inbox.popleft())
                self._assign()
                busy = any(lane.task or self._starting(lane) for lane in self._lanes)
                busy = busy or any((self._math, *self._code))
                for key, _ in self._selector.select(TICK if busy else None):
                    if key.data is None:
                        os.read(self._wake_in, 1 << 16)
                        self._woken = False  # before the inbox is read: nothing put is missed
                    else:
                        self._hear(key.data)
                now = time.monotonic()
                for lane in list(self._lanes):
                    self._check_deadline(lane, now)
        finally:
            for lane in self._lanes:
                lane.child.kill()
            self._selector.close()

    def _queue(self, task: Task) -> None:
        """Put a task where its next step belongs; a fresh code task makes its first step."""
        if task.steps is None:
            self._math.append(task)
        elif task.run is None:
            self._advance(task, None)
        else:
            self._code[task.run.seed].append(task)

    def _advance(self, task: Task, outcome: dict[str, Any] | None) -> None:
        assert task.steps is not None
        try:
            task.run = next(task.steps) if outcome is None else task.steps.send(outcome)
        except StopIteration as end:
            self._finished(task, end.value)
            return
        # A job once begun goes first: it holds what it has learned in memory.
        queue = self._code[task.run.seed]
        (queue.append if outcome is None else queue.appendleft)(task)

    def _assign(self) -> None:
        self._assign_from(self._math, lambda child: isinstance(child, MathWorker), MathWorker)
        for seed, queue in enumerate(self._code):
            self._assign_from(
                queue,
                lambda child, seed=seed: isinstance(child, Slot) and child.seed == seed,
                lambda seed=seed: Slot(seed, self._without),
            )

    def _assign_from(
        self, queue: deque[Task], mine: Callable[[Child], bool], make: Callable[[], Child]
    ) -> None:
        for lane in [lane for lane in self._lanes if mine(lane.child)]:
            if queue and lane.task is None and not self._starting(lane):
                self._start(lane, self._pick(queue, lane))
        # Only now: a worker found dead when it was given its task has left and needs a successor.
        lanes = [lane for lane in self._lanes if mine(lane.child)]
        starting = sum(self._starting(lane) for lane in lanes)
        while len(queue) > starting and len(lanes) < self._workers:
            lane = self._open(make)
            if lane is None:
                break
            lanes.append(lane)
            starting += 1
        if queue and not lanes and self._failed_starts >= MAX_FAILED_STARTS:
            reason = "verifier_error" if queue is self._math else "sandbox_error"
            while queue:
                self._finished(queue.popleft(), Verdict("error", reason))
            self._failed_starts = 0

    def _pick(self, queue: deque[Task], lane: Lane) -> Task:
        """The task to do next: one with the tests a slot's judge already holds, if it is near the
        front and the judge has not served many; else the first that is not waiting for another
        slot's judge; else the first.
        """
        if not isinstance(lane.child, Slot):
            return queue.popleft()
        mine = lane.child.judge_key if lane.child.group_runs < GROUP_RUNS else ""
        others = {
            other.child.judge_key
            for other in self._lanes
            if other is not lane and isinstance(other.child, Slot)
        }
        first = -1
        for place, task in enumerate(islice(queue, WINDOW)):
            key = task.run.judge_key if task.run else ""
            if key == mine or (first < 0 and key not in others):
                first = place
            if key == mine:
                break
        task = queue[max(first, 0)]
        del queue[max(first, 0)]
        return task

    @staticmethod
    def _starting(lane: Lane) -> bool:
        child = lane.child
        return child.layers is None if isinstance(child, Slot) else child.stage == "start"

    def _open(self, make: Callable[[], Child]) -> Lane | None:
        if self._failed_starts >= MAX_FAILED_STARTS:
            return None
        try:
            lane = Lane(make())
        except OSError as error:
            self._failed_starts += 1
            self._last_words = str(error)
            return None
        self._lanes.append(lane)
        self._selector.register(lane.child, selectors.EVENT_READ, lane)
        return lane

    def _start(self, lane: Lane, task: Task) -> None:
        lane.task, lane.began = task, time.monotonic()
        try:
            if isinstance(lane.child, Slot):
                assert task.run is not None
                lane.child.start_run(task.run)
            else:
                lane.cpu_base = lane.child.cpu_seconds()
                lane.child.stage = "gold"
                lane.child.start_job(task.kind, task.payload)
        except ChildDied:
            self._hear(lane)  # it may have got far enough to say whose fault its death is
            if lane in self._lanes:
                self._died(lane)

    def _hear(self, lane: Lane) -> None:
        if lane not in self._lanes:
            return
        try:
            messages = lane.child.receive()
        except ChildDied:
            self._died(lane)
            return
        for message in messages:
            if isinstance(lane.child, Slot):
                self._hear_slot(lane, message)
            else:
                self._hear_math(lane, message)

    def _hear_slot(self, lane: Lane, message: dict[str, Any]) -> None:
        if lane.child.layers is None:
            lane.child.layers = message
            self._failed_starts = 0
            if self._layers is None:
                self._layers = message
                self._sandbox_known.set()
            return
        task, lane.task = lane.task, None
        if lane.child.worn:
            self._drop(lane)
        if task is not None:
            task.deaths = 0
            self._advance(task, message)

    def _hear_math(self, lane: Lane, message: dict[str, Any]) -> None:
        if "stage" in message:
            # Loading a library is nobody's fault: the clock starts again after it.
            lane.child.stage = message["stage"]
            if message["stage"] in ("idle", "loaded"):
                self._failed_starts = 0
                lane.cpu_base, lane.began = lane.child.cpu_seconds(), time.monotonic()
                lane.child.stage = message.get("then", "idle")
            return
        task, lane.task = lane.task, None
        if lane.child.worn or message.get("worn"):
            self._drop(lane)
        if task is not None:
            ms = 1000 * (time.monotonic() - lane.began)
            verdict = Verdict(message["verdict"], message["reason"], ms=round(ms, 3))
            self._finished(task, verdict)

    # --- ends -----------------------------------------------------------------------------

    def _check_deadline(self, lane: Lane, now: float) -> None:
        elapsed = now - lane.began
        if self._starting(lane):
            if elapsed > START_LIMIT:
                self._died(lane)
        elif lane.task is None:
            return
        elif isinstance(lane.child, Slot):
            run = lane.task.run
            assert run is not None
            if elapsed > MOST_TESTS * STARVED * run.wall + SLOT_GRACE:
                self._died(lane)
        elif lane.child.stage == "loading":
            if elapsed > START_LIMIT:
                self._died(lane)
        elif elapsed > self._math_limit:
            used = lane.child.cpu_seconds() - lane.cpu_base
            if used > self._math_limit or elapsed > WALL_FACTOR * self._math_limit:
                self._out_of_time(lane, elapsed)

    def _out_of_time(self, lane: Lane, elapsed: float) -> None:
        task = lane.task
        self._hear(lane)  # it may have spoken while this thread was kept waiting
        if lane.task is not task:
            return
        task, stage = lane.task, lane.child.stage
        lane.task = None
        self._drop(lane)
        if task is not None and stage == "gold":
            self._finished(task, Verdict("error", "verifier_error", ms=1000 * elapsed))
        elif task is not None:
            self._finished(task, Verdict("timeout", "time_limit", ms=1000 * elapsed))

    def _died(self, lane: Lane) -> None:
        """A worker is gone: its task is tried once more, then the task itself is to blame."""
        task, lane.task = lane.task, None
        starting = self._starting(lane)
        stage = getattr(lane.child, "stage", None)
        words = lane.child.last_words().strip() or "none"
        self._drop(lane)
        if starting:
            self._failed_starts += 1
            self._last_words = words
            if self._failed_starts >= MAX_FAILED_STARTS:
                self._sandbox_known.set()
            elif isinstance(lane.child, Slot) and self._layers is None:
                self._want_slot = True
        if task is None:
            return
        task.deaths += 1
        if task.deaths == 1:
            self._queue(task)
        elif task.steps is not None:
            self._finished(task, Verdict("error", "killed_its_worker"))
        elif stage == "prediction":
            self._finished(task, Verdict("error", "killed_its_worker"))
        else:
            self._finished(task, Verdict("error", "verifier_error"))

    def _drop(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self._selector.unregister(lane.child)
        lane.child.kill()
