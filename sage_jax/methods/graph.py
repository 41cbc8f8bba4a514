"""Row graphs: which rows a method samples, which wait for which, and what happens on failure.

A method states its graphs as data (`Node`); `play` runs many episodes of them inside one running
batch. A node opens when every row of its parents is done, verdict included.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from sage_jax import roles
from sage_jax.config import ConfigError
from sage_jax.core.rng import row_key
from sage_jax.core.tokens import Tokens
from sage_jax.rollout.engine import Completion, Row
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

    def row(self, sample: Sample, episode_id: str, index: int) -> Row:
        key = row_key(self.config.seed, self.step, episode_id, sample.kind, index)
        return Row(
            id=sample.id,
            prompt=sample.prompt,
            key=(int(key[0]), int(key[1])),
            max_new=self.config.rollout.max_new[sample.role],
            stop_ids=self.tokens.stop_ids,
            temperature=self.temperature,
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


class Cancelled(RuntimeError):
    """The run was asked to stop in the middle of a rollout."""


class _Run:
    """The bookkeeping of one `play`."""

    def __init__(self, verifier, player, stage):
        self.verifier, self.player, self.stage = verifier, player, stage
        self.rows: dict[str, tuple[Episode, Sample]] = {}
        self.jobs: dict[str, tuple[Episode, Sample]] = {}
        self.verdicts: dict[str, Verdict] = {}

    def open(self, episode: Episode) -> list[Row]:
        """Rows of the nodes of this episode that can start now."""
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
            row = self.player.row(sample, episode.id, index)
            self.rows[sample.id] = (episode, sample)
            rows.append(row)
        return rows

    def _settle(self, node: Node, episode: Episode) -> None:
        if node.settle and episode.done(node.kind):
            node.settle(episode)

    def finish(self, completion: Completion) -> None:
        """Read a finished row and ask the verifier about it."""
        episode, sample = self.rows.pop(completion.row.id)
        sample.completion = completion
        self.player.read(sample)
        job = episode.node(sample.kind).job(episode, sample)
        if job is None:
            self._close(episode, sample)
        else:
            self.jobs[job.id] = (episode, sample)
            self.verifier.submit(job)

    def _close(self, episode: Episode, sample: Sample) -> None:
        sample.done = True
        self._settle(episode.node(sample.kind), episode)

    def collect(self, wanted: set[str]) -> None:
        """Take in verdicts until none of `wanted` is open."""
        while True:
            open_ids = wanted & self.jobs.keys()
            missing = open_ids - self.verdicts.keys()
            if missing:
                self.stage("verify", sorted(missing))
            self.verdicts.update(self.verifier.poll(0.05 if missing else 0.0))
            if open_ids <= self.verdicts.keys():
                break
        # Verdicts are applied in the order of their ids, never of their arrival.
        for job_id in sorted(open_ids):
            episode, sample = self.jobs.pop(job_id)
            sample.verdict = self.verdicts.pop(job_id)
            sample.masked = sample.verdict.masked
            self._close(episode, sample)

    def gating_jobs(self) -> set[str]:
        """Open jobs whose verdict other rows of the episode wait for."""
        return {i for i, (episode, s) in self.jobs.items() if episode.gates(s.kind)}


def play(
    engine,
    verifier,
    episodes: Sequence[Episode],
    player: Player,
    *,
    stage: Callable[[str, list[str]], None] = lambda name, ids: None,
    stop: Callable[[], bool] = lambda: False,
) -> Clock:
    """Run every episode through the graph in one batch; fills in their samples.

    Verdicts that open other rows are awaited one decode chunk after they were asked for: the
    verifier works meanwhile, and the order of rows does not depend on how fast it was. Raises
    Cancelled when `stop()` turns true between two chunks.
    """
    run, clock = _Run(verifier, player, stage), Clock()
    while True:
        rows = [row for episode in episodes for row in run.open(episode)]
        engine.submit(rows)
        due = run.gating_jobs()
        if not engine.busy and not rows and not due:
            break
        if engine.busy:
            stage("rollout", list(run.rows))
            for completion in engine.step():
                run.finish(completion)
        if stop():
            raise Cancelled("stopped in the middle of a rollout")
        started = time.monotonic()
        run.collect(due)
        clock.verify += time.monotonic() - started
    started = time.monotonic()
    run.collect(set(run.jobs))
    clock.verify += time.monotonic() - started
    return clock
