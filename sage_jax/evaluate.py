"""Held-out accuracy on the same engine, judged by the verifiers alone."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from sage_jax.methods.graph import Episode, Node, Player, play
from sage_jax.methods.measure import accuracy, all_samples
from sage_jax.methods.rewards import mean
from sage_jax.methods.sage import Sage
from sage_jax.roles import SOLVER
from sage_jax.tasks.task import DOMAINS, Task


def first_of_each_domain(tasks: Sequence[Task], limit: int) -> list[Task]:
    """The first `limit` tasks of each domain, in file order; all when limit is 0."""
    if not limit:
        return list(tasks)
    return [t for d in DOMAINS for t in [t for t in tasks if t.domain == d][:limit]]


def bare_graph(method: Sage, samples: int) -> tuple[Node, ...]:
    """Solver alone, without a plan."""
    return (
        Node(
            "answer",
            SOLVER,
            lambda e: method.prompts.messages("solver", e.task.public),
            fan_out=samples,
            job=lambda e, s: e.task.job(s.id, s.text),
        ),
    )


class Evaluator:
    """Measures a model; the engine must have been started on its weights."""

    def __init__(self, config, engine, verifier, tokens, method: Sage):
        self.config, self.engine, self.verifier = config, engine, verifier
        self.tokens, self.method = tokens, method

    def run(
        self,
        tasks: Sequence[Task],
        graph: tuple[Node, ...],
        temperature: float,
        stage: Callable = lambda name, ids: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Episode]:
        """Every task through the graph. The same noise every time: steps compare like with like."""
        episodes = [Episode(f"valid/{task.id}", task, graph) for task in tasks]
        player = Player(self.config, self.tokens, "valid", temperature)
        play(self.engine, self.verifier, episodes, player, stage=stage, stop=stop)
        return episodes

    def figures(self, tasks: Sequence[Task], **hooks: Callable) -> dict[str, float | None]:
        """valid/* of interfaces.md: greedy, by domain, well-formed, sampled and planned."""
        valid = self.config.valid
        samples = all_samples(self.run(tasks, bare_graph(self.method, 1), 0.0, **hooks))
        figures = {
            "valid/accuracy": accuracy(samples),
            "valid/accuracy_wellformed": accuracy([s for s in samples if s.parsed.ok]),
        }
        for domain in DOMAINS:
            figures[f"valid/accuracy_{domain}"] = accuracy(
                [s for s in samples if s.domain == domain]
            )
        if valid.samples:
            sampled = self.run(tasks, bare_graph(self.method, valid.samples), 1.0, **hooks)
            figures["valid/accuracy_sampled"] = accuracy(all_samples(sampled))
        if valid.planned:
            planned = self.run(tasks, self.method.solve_graph(1, 1), 0.0, **hooks)
            figures["valid/accuracy_planned"] = mean(
                [accuracy(e.samples["solve"]) or 0.0 for e in planned]
            )
        return figures


def write_answers(path: Path, episodes: Sequence[Episode]) -> None:
    """One line a sample: task id, response and verdict."""
    with path.open("w") as file:
        for episode in episodes:
            for sample in episode.samples["answer"]:
                row = {
                    "id": episode.task.id,
                    "domain": sample.domain,
                    "response": sample.text,
                    "finish": sample.completion.finish,
                    "verdict": sample.judged.verdict,
                    "reason": sample.judged.reason,
                }
                file.write(json.dumps(row) + "\n")
