"""Verdicts of a run of several processes: each job is judged in one of them, and all learn it."""

import dataclasses
import json
import time
import zlib

from sage_jax.core import hosts
from sage_jax.verify import Job, Verdict, Verifier

KNOWN_PAYLOADS = 100_000  # whose judge is remembered, so that the same question goes to one cache


class SharedVerifier:
    """A Verifier of each process behind the interface of one.

    Jobs are submitted alike in every process and judged in turn by one of them; a payload that came
    before goes to the one that has judged it. `poll` is the point at which verdicts are gathered:
    all processes call it equally often, and get the same verdicts in the same order, that of
    submission. So a slow verifier on one host delays all, and none takes another way.
    """

    def __init__(self, verifier: Verifier):
        self._own = verifier
        self._judges: dict[int, int] = {}
        self._open: dict[str, float] = {}  # all jobs, by submission, and when that was
        self._mine: set[str] = set()
        reports = hosts.gather([verifier.isolation, verifier.isolation_report])
        # Levels sort by their letter, "none" behind them.
        weakest = max(range(len(reports)), key=lambda i: reports[i][0])
        self.isolation, self.isolation_report = reports[weakest]
        if any(level != self.isolation for level, _ in reports):
            self.isolation_report += f" (process {weakest}, the weakest of {len(reports)})"

    def submit(self, job: Job) -> None:
        """Queue a job in the process that is to judge it; see `Verifier.submit`."""
        if job.id in self._open:
            raise ValueError(f"job id {job.id!r} is already waiting")
        text = json.dumps([job.kind, dict(job.payload)], sort_keys=True, default=list)
        payload = zlib.crc32(text.encode())
        if len(self._judges) >= KNOWN_PAYLOADS:
            self._judges.clear()
        judge = self._judges.setdefault(payload, len(self._judges) % hosts.count())
        self._open[job.id] = time.monotonic()
        if judge == hosts.index():
            self._mine.add(job.id)
            self._own.submit(job)

    def poll(self, timeout: float = 0.0) -> list[tuple[str, Verdict]]:
        """Verdicts finished since the last call, the same in every process. Each waits up to
        `timeout` seconds for one of its own jobs before it joins the others."""
        if not self._open:  # known to all alike: nothing to gather
            return []
        own = self._own.poll(timeout if self._mine else 0.0)
        self._mine -= {name for name, _ in own}
        rows = [[name, dataclasses.asdict(verdict)] for name, verdict in own]
        everyone = hosts.gather(rows or "")
        found = {name: Verdict(**fields) for rows in everyone for name, fields in rows}
        done = [name for name in self._open if name in found]
        for name in done:
            del self._open[name]
        return [(name, found[name]) for name in done]

    def waiting(self) -> dict[str, float]:
        """Ids not yet judged, in any process, and the seconds they have waited."""
        now = time.monotonic()
        return {name: now - since for name, since in self._open.items()}

    def close(self) -> None:
        """End the workers of this process."""
        self._own.close()

    def __enter__(self) -> "SharedVerifier":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
