"""Held-out accuracy on the same engine, judged by the verifiers alone."""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from sage_jax.methods import effects
from sage_jax.methods.graph import Episode, Node, Player, judge, play
from sage_jax.methods.measure import accuracy, all_samples
from sage_jax.methods.rewards import mean
from sage_jax.methods.sage import Sage
from sage_jax.tasks.pool import Pool
from sage_jax.tasks.task import DOMAINS, Task


def first_of_each_domain(tasks: Sequence[Task], limit: int) -> list[Task]:
    """The first `limit` tasks of each domain, in file order; all when limit is 0."""
    if not limit:
        return list(tasks)
    return [t for d in DOMAINS for t in [t for t in tasks if t.domain == d][:limit]]


def set_of(tasks: Sequence[Task]) -> dict[str, int]:
    """Count and digest of validation items, in any order, as the metrics that tell them apart."""
    rows = sorted(json.dumps(task.to_json(), sort_keys=True) for task in tasks)
    return {"valid/items": len(rows), "valid/set": zlib.crc32("\n".join(rows).encode())}


def harder_than_seeds(tasks: Sequence[Task], pool: Pool) -> list[Task]:
    """Tasks whose `level` is above every seed's: what only a curriculum can reach."""
    levels = [_level(seed) for seed in pool.seeds.values()]
    return [t for t in tasks if levels and _level(t) > max(levels)]


def _level(task: Task) -> float:
    level = task.provenance.get("level")
    return level if isinstance(level, (int, float)) else 0.0


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """At most `count` tasks at even distances, in file order."""
    count = min(count, len(tasks))
    return [tasks[i * len(tasks) // count] for i in range(count)]


class Evaluator:
    """Measures a model; the engine must have been started on its weights."""

    def __init__(self, config, engine, verifier, tokens, method: Sage):
        self.config, self.engine, self.verifier = config, engine, verifier
        self.tokens, self.method = tokens, method

    def run(
        self, tasks: Sequence[Task], graph: tuple[Node, ...], temperature: float, **hooks: Callable
    ) -> list[Episode]:
        """Every task through the graph; see `play`."""
        episodes = [Episode(f"valid/{task.id}", task, graph) for task in tasks]
        return self.play(episodes, temperature, **hooks)

    def play(self, episodes: list[Episode], temperature: float, **hooks: Callable) -> list[Episode]:
        """The episodes, played. The same noise every time: steps compare like with like.

        `hooks`: stage and stop of `graph.play`.
        """
        player = Player(self.config, self.tokens, "valid", temperature)
        play(self.engine, self.verifier, episodes, player, **hooks)
        return episodes

    def figures(
        self, tasks: Sequence[Task], pool: Pool, **hooks: Callable
    ) -> dict[str, float | None]:
        """valid/* of interfaces.md: greedy, by domain, well-formed, hard, sampled and planned; and
        effect/*. The pool is only read."""
        valid, method = self.config.valid, self.method
        answers = self.run(tasks, method.bare_graph("answer", 1), 0.0, **hooks)
        samples = all_samples(answers)
        figures = {
            "valid/accuracy": accuracy(samples),
            "valid/accuracy_wellformed": accuracy([s for s in samples if s.parsed.ok]),
        }
        for domain in DOMAINS:
            figures[f"valid/accuracy_{domain}"] = accuracy(
                [s for s in samples if s.domain == domain]
            )
        hard = {task.id for task in harder_than_seeds(tasks, pool)}
        figures["valid/accuracy_hard"] = accuracy(
            all_samples(e for e in answers if e.task.id in hard)
        )
        if valid.samples:
            sampled = self.run(tasks, method.bare_graph("answer", valid.samples), 1.0, **hooks)
            figures["valid/accuracy_sampled"] = accuracy(all_samples(sampled))
        if valid.planned:
            planned = self.run(tasks, method.solve_graph(1, 1), 0.0, **hooks)
            figures["valid/accuracy_planned"] = mean(
                [accuracy(e.samples["solve"]) or 0.0 for e in planned]
            )
        if valid.effects:
            figures |= self._effects(tasks, pool, **hooks)
        return figures

    def _effects(self, tasks, pool: Pool, **hooks: Callable) -> dict[str, float | None]:
        """effect/* and audit/*: what each role is worth at the present weights."""
        method, count = self.method, self.config.valid.effects
        some = spread(tasks, count)
        plans = self.run(some, effects.uplift_graph(method), 1.0, **hooks)
        audits = self.play(method.audits(some, "valid"), 1.0, **hooks)
        references = spread(list(pool.seeds.values()), (count + 1) // 2)
        asked = self.play(effects.proposals(method, references), 1.0, **hooks)
        keys = judge(self.verifier, effects.key_jobs(asked), **hooks)
        return {
            "effect/planner": effects.planner_effect(plans),
            "effect/critic": effects.critic_effect(audits),
            "audit/key_true": mean([float(v.verdict == "correct") for v in keys.values()]),
            **effects.challenger_effects(method, asked, pool),
        }


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
