"""Row graphs: which rows a method samples, which wait for which, and what happens on failure.

A method states its graphs as data (`Node`); `play` runs many episodes of them inside one running
batch. A node opens when every row of its parents is done, verdict included.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sage_jax import roles
from sage_jax.config import ConfigError
from sage_jax.core import hosts
from sage_jax.core.rng import row_key
from sage_jax.core.tokens import Tokens
from sage_jax.rollout.row import Completion, Row
from sage_jax.tasks.task import Task
from sage_jax.verify import Job, Verdict


@dataclasses.dataclass
class Sample:
    """One row: what was asked, what came back, what it earned.

    `masked` rows take no part in advantages or loss (the machinery failed, not the response).
    """

    id: str
    parents: tuple[str, ...]
    kind: str
    role: str
    domain: str
    messages: list[dict[str, str]]
    prompt: tuple[int, ...]
    temperature: float
    group: tuple = ()
    completion: Completion = dataclasses.field(init=False, repr=False)  # set when it finishes
    parsed: roles.Parsed = dataclasses.field(init=False)
    text: str = ""
    format: float = 0.0
    verdict: Verdict | None = None
    done: bool = False
    masked: bool = False
    reward: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    advantage: float = 0.0

    @property
    def judged(self) -> Verdict:
        """The verdict, for rows of a node that always asks for one."""
        if self.verdict is None:
            raise RuntimeError(f"row {self.id} has no verdict: its node did not ask for one")
        return self.verdict


def _always(episode: "Episode") -> bool:
    return True


def _no_job(episode: "Episode", sample: Sample) -> Job | None:
    return None


@dataclasses.dataclass(frozen=True)
class Node:
    """One kind of row.

    kind: name, unique in the graph. role: who writes it. parents: kinds that must be done first.
    fan_out: rows an episode. when: the failure rule; where it is false the node stays empty.
    messages: the prompt. job: what the verifier is asked about a finished row, None for nothing.
    settle: called once all rows of the node are done.
    """

    kind: str
    role: str
    messages: Callable[["Episode"], list[dict[str, str]]]
    parents: tuple[str, ...] = ()
    fan_out: int = 1
    when: Callable[["Episode"], bool] = _always
    job: Callable[["Episode", Sample], Job | None] = _no_job
    settle: Callable[["Episode"], None] | None = None


@dataclasses.dataclass
class Episode:
    """One run of a graph on one task. `nodes`: parents before children; `facts`: what the method
    learns on the way."""

    id: str
    task: Task
    nodes: Sequence[Node]
    samples: dict[str, list[Sample]] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def node(self, kind: str) -> Node:
        return next(node for node in self.nodes if node.kind == kind)

    def done(self, kind: str) -> bool:
        return kind in self.samples and all(s.done for s in self.samples[kind])

    def gates(self, kind: str) -> bool:
        return any(kind in node.parents for node in self.nodes)

    def chain(self, node: Node) -> int:
        """The most rows and verdicts that come one after another from this node on, its own too."""
        own = 1 + (node.job is not _no_job)
        return own + max((self.chain(n) for n in self.nodes if node.kind in n.parents), default=0)


class Player:
    """Turns prompts into rows and completions into parsed samples.

    `step` names the stream of randomness: a row's key is f(seed, step, episode, kind, index).
    `temperature` holds for every row.
    """

    def __init__(self, config, tokens: Tokens, step: object, temperature: float):
        self.config, self.tokens = config, tokens
        self.step, self.temperature = step, temperature

    def encode(self, messages: list[dict[str, str]]) -> tuple[int, ...] | None:
        """Prompt tokens; None when the prompt is over-long and the policy is to skip it.

        ConfigError when it cannot be made to fit, or the policy is to stop.
        """
        settings = self.config.tokens
        try:
            ids = self.tokens.chat_fit(messages, settings.max_prompt, settings.overlong)
        except ValueError as error:
            raise ConfigError(
                f"tokens.max_prompt={settings.max_prompt}, tokens.overlong={settings.overlong}: "
                f"{error}"
            ) from error
        return None if ids is None else tuple(ids)

    def row(self, sample: Sample, episode_id: str, index: int, rank: int) -> Row:
        key = row_key(self.config.seed, self.step, episode_id, sample.kind, index)
        return Row(
            id=sample.id,
            prompt=sample.prompt,
            key=(int(key[0]), int(key[1])),
            max_new=self.config.rollout.max_new[sample.role],
            stop_ids=self.tokens.stop_ids,
            temperature=self.temperature,
            rank=rank,
        )

    def read(self, sample: Sample) -> None:
        """Text, parsed fields and format score of a finished sample."""
        sample.text = self.tokens.decode(sample.completion.tokens)
        sample.parsed = roles.parse(sample.role, sample.domain, sample.text)
        sample.format = roles.format_reward(sample.role, sample.domain, sample.text)


@dataclasses.dataclass
class Clock:
    """Seconds the host spent waiting for verdicts while no row was running."""

    verify: float = 0.0

    def wait(self, run: "_Run", wanted: set[str], stage: "Stage", stop: "Stop") -> None:
        started = time.monotonic()
        run.collect(wanted, stage, stop)
        self.verify += time.monotonic() - started


class Cancelled(RuntimeError):
    """The run was asked to stop in the middle of a rollout."""


# Decode chunks that a verdict may take before the batch is held up for it.
PATIENCE = 3
# Seconds without any verdict after which the verifier counts as broken: its own limits are far
# below. A broken one must mask rows, not stop the run.
SILENCE = 300.0

Stage = Callable[[str, Callable[[], Iterable[str]]], None]
Stop = Callable[[], bool]


class _Run:
    """The bookkeeping of one `play`."""

    def __init__(self, verifier, player: Player, episodes: Sequence[Episode]):
        self.verifier, self.player = verifier, player
        self.rows: dict[str, tuple[Episode, Sample]] = {}
        self.jobs: dict[str, tuple[Episode, Sample]] = {}
        self.asked: dict[str, int] = {}  # job -> the chunk it was asked in
        self.verdicts: dict[str, Verdict] = {}
        self.moved = {episode.id: episode for episode in episodes}
        self.ended: list[Completion] = []
        self.chunks = 0

    def open(self) -> list[Row]:
        """Rows that can start now, of the episodes in which something was done."""
        moved, self.moved = self.moved, {}
        return [row for episode in moved.values() for row in self._open(episode)]

    def _open(self, episode: Episode) -> list[Row]:
        rows = []
        for node in episode.nodes:
            if node.kind in episode.samples or not all(map(episode.done, node.parents)):
                continue
            episode.samples[node.kind] = []
            if node.when(episode):
                rows += self._spawn(node, episode)
            if not episode.samples[node.kind]:
                self._settle(node, episode)
        return rows

    def _spawn(self, node: Node, episode: Episode) -> list[Row]:
        messages = node.messages(episode)
        prompt = self.player.encode(messages)
        if prompt is None:
            return []
        parents = tuple(s.id for kind in node.parents for s in episode.samples[kind])
        # The longest chains first, and among equals programs, which take longest to judge: what is
        # left for the end is short and waits for nothing.
        rank = 2 * episode.chain(node) + (episode.task.public.domain == "code")
        rows = []
        for index in range(node.fan_out):
            sample = Sample(
                id=f"{episode.id}/{node.kind}/{index}",
                parents=parents,
                kind=node.kind,
                role=node.role,
                domain=episode.task.public.domain,
                messages=messages,
                prompt=prompt,
                temperature=self.player.temperature,
                group=(episode.id, node.kind),
            )
            episode.samples[node.kind].append(sample)
            row = self.player.row(sample, episode.id, index, rank)
            self.rows[sample.id] = (episode, sample)
            rows.append(row)
        return rows

    def _settle(self, node: Node, episode: Episode) -> None:
        if node.settle and episode.done(node.kind):
            node.settle(episode)

    def proceed(self, engine) -> None:
        """Read what has ended, and queue the rows that can start now."""
        for completion in self.ended:
            self._finish(completion)
        self.ended = []
        engine.submit(self.open())

    def _finish(self, completion: Completion) -> None:
        """Read a finished row and ask the verifier about it."""
        episode, sample = self.rows.pop(completion.row.id)
        sample.completion = completion
        self.player.read(sample)
        job = episode.node(sample.kind).job(episode, sample)
        if job is None:
            self._close(episode, sample)
        else:
            self.jobs[job.id] = (episode, sample)
            self.asked[job.id] = self.chunks
            self.verifier.submit(job)

    def _close(self, episode: Episode, sample: Sample) -> None:
        sample.done = True
        self.moved[episode.id] = episode
        self._settle(episode.node(sample.kind), episode)

    def due(self, engine) -> set[str]:
        """Jobs whose verdicts open other rows, and that the batch has to wait for now.

        None while all slots are taken or about to be; then those asked for some chunks ago; all
        when nothing else is left to run. How fast the verifier is has no say in it, so the rows
        start in the same order in every run and on every process.
        """
        if not engine.hungry:
            return set()
        latest = self.chunks - (PATIENCE if engine.busy else 0)
        return {
            job_id
            for job_id, (episode, sample) in self.jobs.items()
            if self.asked[job_id] <= latest and episode.gates(sample.kind)
        }

    def collect(self, wanted: set[str], stage: Stage, stop: Stop) -> None:
        """Take in the verdicts of `wanted`, and wait for them."""
        _hear(self.verifier, wanted, self.verdicts, stage, stop)
        # Verdicts are applied in the order of their ids, never of their arrival.
        for job_id in sorted(wanted):
            episode, sample = self.jobs.pop(job_id)
            sample.verdict = self.verdicts.pop(job_id)
            sample.masked = sample.verdict.masked
            self._close(episode, sample)


def _hear(
    verifier, wanted: set[str], verdicts: dict[str, Verdict], stage: Stage, stop: Stop
) -> None:
    """Wait until `verdicts` holds those of `wanted`; Cancelled when `stop()` turns true before."""
    heard = time.monotonic()
    while missing := wanted - verdicts.keys():
        if stop():
            raise Cancelled("stopped while verdicts were awaited")
        stage("verify", lambda missing=missing: _waits(verifier, missing))
        if news := verifier.poll(0.05):
            heard = time.monotonic()
            verdicts.update(news)
        elif hosts.any_of(time.monotonic() - heard > SILENCE):  # clocks differ
            lost = Verdict("error", "verifier_error", 1000 * SILENCE)
            verdicts.update(dict.fromkeys(missing, lost))


def _waits(verifier, missing: set[str]) -> list[str]:
    """For people: what is waited for and how long, the longest first."""
    waiting = verifier.waiting()
    rows = sorted((-waiting.get(job_id, 0.0), job_id) for job_id in missing)
    return [f"{job_id} ({-seconds:.0f} s)" for seconds, job_id in rows]


def judge(
    verifier,
    jobs: Sequence[Job],
    *,
    stage: Stage = lambda name, pending: None,
    stop: Stop = lambda: False,
) -> dict[str, Verdict]:
    """Verdicts of jobs that belong to no row, by id; `stage`, `stop` and Cancelled as in `play`."""
    for job in jobs:
        verifier.submit(job)
    verdicts: dict[str, Verdict] = {}
    _hear(verifier, {job.id for job in jobs}, verdicts, stage, stop)
    return {job.id: verdicts[job.id] for job in jobs}


def play(
    engine,
    verifier,
    episodes: Sequence[Episode],
    player: Player,
    *,
    stage: Stage = lambda name, pending: None,
    stop: Stop = lambda: False,
) -> Clock:
    """Run every episode through the graph in one batch; fills in their samples.

    While rows enough wait for their slots, the host reads what has ended during the next chunk; the
    verifier works while the batch decodes, see `_Run.due`. `stage` is told what runs, with a
    function that names the rows in question. Raises Cancelled when `stop()` turns true between two
    chunks, or while the host waits for verdicts.
    """
    run, clock = _Run(verifier, player, episodes), Clock()
    while True:
        if engine.hungry:
            run.proceed(engine)
        if stop():
            raise Cancelled("stopped in the middle of a rollout")
        if due := run.due(engine):
            clock.wait(run, due, stage, stop)
        elif engine.busy:
            stage("rollout", engine.running)
            run.ended = engine.step(lambda: run.proceed(engine))
            run.chunks += 1
        else:
            break
    clock.wait(run, set(run.jobs), stage, stop)
    return clock
