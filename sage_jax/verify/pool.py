"""The batch interface: jobs in, verdicts out as they finish, keyed by id.

One long-lived thread owns every worker process: the death signal of a worker follows the thread
that made it, and no other thread may wait for it. Callers only touch queues under a lock.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sage_jax.verify.code import Limits, code_job, reference_job
from sage_jax.verify.dispatch import Dispatcher, Task
from sage_jax.verify.math_client import check_payload
from sage_jax.verify.sandbox import LEVELS, NAMES, describe, isolation, require
from sage_jax.verify.verdict import Job, Verdict

POLICIES = ("eval", "reward")
CACHE_SIZE = 10_000
CACHE_TEXT = 64 << 20  # characters of output and values that cached verdicts may hold
START_TIMEOUT = 60.0


class Verifier:
    """Judges jobs in killable worker processes; usable from any thread.

    workers           maths workers, and code slots, of each kind at most
    policy            ``reward`` or ``eval`` (which may fall back to the last number)
    math_time_limit   CPU seconds for one maths job
    time_limit        wall seconds that end a sleeping program
    cpu_limit         CPU seconds of one program
    memory_mb         address space of one program
    max_waiting       jobs, and
    max_text          characters of their payloads, that may wait before ``submit`` blocks
    require_level     lowest sandbox level to accept, A to D, or ``none``
    code              False = maths only; the sandbox is then neither started nor checked
    without           layers to leave out, for trying a weaker level

    Raises IsolationError, naming what is missing, when the machine stays below
    ``require_level``, and ValueError for arguments out of range.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        policy: str = "reward",
        math_time_limit: float = 2.0,
        time_limit: float = 4.0,
        cpu_limit: int = 3,
        memory_mb: int = 512,
        max_waiting: int = 20_000,
        max_text: int = 256 << 20,
        require_level: str = "B",
        code: bool = True,
        without: Sequence[str] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        for name, bound in (("max_waiting", max_waiting), ("max_text", max_text)):
            if bound < 1:
                raise ValueError(f"{name} must be at least 1, got {bound}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be eval or reward, got {policy!r}")
        if require_level not in (*LEVELS, "none"):
            raise ValueError(f"require_level must be A, B, C, D or none, got {require_level!r}")
        self._policy = policy
        self._limits = Limits(time_limit, cpu_limit, memory_mb)
        self._changed = threading.Condition()
        self._ready: OrderedDict[str, Verdict] = OrderedDict()
        self._waiting: dict[str, float] = {}
        self._max_waiting, self._max_text = max_waiting, max_text
        self._text = self._cached_text = 0
        self._tasks: dict[str, Task] = {}
        self._cache: OrderedDict[str, Verdict] = OrderedDict()
        self._layers: dict | None = None
        self._closed = False
        self._dispatcher = Dispatcher(
            workers=workers,
            math_time_limit=math_time_limit,
            without=tuple(without),
            finished=self._finish,
        )
        atexit.register(self.close)
        if code:
            try:
                self._layers = self._dispatcher.start_sandbox(START_TIMEOUT)
                require(self._layers, require_level)
            except BaseException:
                self.close()
                raise

    # --- what it stands on ----------------------------------------------------------------

    @property
    def isolation(self) -> str:
        """Level of the code sandbox, such as "A namespaced"; "none" without one."""
        return NAMES[isolation(self._layers)[0]] if self._layers else "none"

    @property
    def isolation_report(self) -> str:
        """One line naming each layer, for the log and the run manifest."""
        return describe(self._layers) if self._layers else "sandbox=none"

    # --- jobs -----------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job and return at once, unless as much as may wait is waiting: then block until
        workers have finished some of it. Verdicts not yet polled do not count.

        Raises ValueError for a malformed payload (the message names the field), for an id still
        waiting, and RuntimeError after ``close``.
        """
        task = self._task(job)
        with self._changed:
            if self._closed:
                raise RuntimeError("the verifier is closed")
            if job.id in self._waiting or job.id in self._ready:
                raise ValueError(f"job id {job.id!r} is already waiting")
            known = self._cache.get(task.key)
            if known is not None:
                self._cache.move_to_end(task.key)
                self._ready[job.id] = known
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: self._closed or self._has_room(task))
            if self._closed:
                raise RuntimeError("the verifier is closed")
            self._waiting[job.id] = time.monotonic()
            running = self._tasks.get(task.key)
            if running is not None:
                running.ids.append(job.id)
                return
            self._tasks[task.key] = task
            self._text += task.size
        self._dispatcher.put(task)

    def _has_room(self, task: Task) -> bool:
        full = len(self._waiting) >= self._max_waiting or self._text + task.size > self._max_text
        return not full or not self._waiting

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Verdict]]:
        """Verdicts finished since the last call; waits up to ``timeout`` seconds for one."""
        with self._changed:
            if not self._ready and timeout > 0 and self._waiting:
                self._changed.wait_for(lambda: self._ready or self._closed, timeout)
            results = list(self._ready.items())
            self._ready.clear()
        return results

    def waiting(self) -> dict[str, float]:
        """Ids not yet judged and the seconds they have waited."""
        now = time.monotonic()
        with self._changed:
            return {name: now - since for name, since in self._waiting.items()}

    def run(self, jobs: Iterable[Job]) -> dict[str, Verdict]:
        """Judge ``jobs`` and return their verdicts in the same order; others stay for poll."""
        names = []
        for job in jobs:
            self.submit(job)
            names.append(job.id)
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or all(name in self._ready for name in names)
            )
            if self._closed:
                raise RuntimeError("the verifier was closed while jobs were waiting")
            return {name: self._ready.pop(name) for name in names}

    def close(self) -> None:
        """End all workers. Verdicts not yet given are lost."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._dispatcher.close()

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------

    def _task(self, job: Job) -> Task:
        if not isinstance(job.id, str):
            raise ValueError(f"job id must be text, got {type(job.id).__name__}")
        payload = dict(job.payload)
        limits: object = self._policy
        steps = None
        if job.kind in ("code", "code_reference"):
            if self._layers is None:
                raise ValueError("this verifier was made with code=False")
            make = code_job if job.kind == "code" else reference_job
            steps = make(payload, self._limits)
            limits = (self._limits.wall, self._limits.cpu, self._limits.memory_mb)
        else:
            payload = check_payload(job.kind, payload)
        text = json.dumps([job.kind, limits, payload], sort_keys=True, default=list)
        key = hashlib.sha256(text.encode()).hexdigest()
        payload["policy"] = self._policy
        return Task(key, job.kind, [job.id], payload, steps, len(text))

    def _finish(self, task: Task, verdict: Verdict) -> None:
        if task.steps is not None and self._layers is not None:
            level = isolation(self._layers)[0]
            verdict = Verdict(**{**verdict.__dict__, "isolation": level})
        with self._changed:
            self._tasks.pop(task.key, None)
            self._text -= task.size
            if not verdict.masked:
                self._remember(task.key, verdict)
            for name in task.ids:
                if self._waiting.pop(name, None) is not None:
                    self._ready[name] = verdict
            self._changed.notify_all()

    def _remember(self, key: str, verdict: Verdict) -> None:
        if (known := self._cache.pop(key, None)) is not None:
            self._cached_text -= _text_size(known)
        self._cache[key] = verdict
        self._cached_text += _text_size(verdict)
        while len(self._cache) > CACHE_SIZE or self._cached_text > CACHE_TEXT:
            self._cached_text -= _text_size(self._cache.popitem(last=False)[1])


def _text_size(verdict: Verdict) -> int:
    return len(verdict.output_tail or "") + sum(map(len, verdict.expected or ()))
