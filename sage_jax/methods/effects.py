"""What each role is worth at fixed parameters: graphs that isolate a role, and their figures.

Rewards say what a role was paid; these say what it did. All rows are sampled at temperature 1, as
in training: greedy decoding would hide all habits but one.
"""

from collections.abc import Sequence

from sage_jax.methods.graph import Episode, Node
from sage_jax.methods.rewards import correct, mean, solve_rate
from sage_jax.methods.sage import Sage, mark_duplicates
from sage_jax.roles import critic_score
from sage_jax.tasks.pool import ADMITTED, Pool
from sage_jax.tasks.task import Task
from sage_jax.tasks.tiny_world import true_response
from sage_jax.verify import Job


def uplift_graph(method: Sage) -> tuple[Node, ...]:
    """Plan, then one answer that saw it and one that did not. No gate: it is the Critic's part."""
    plan = method.solve_graph(1, 1)[0]
    return (plan, *method.probe_graph("probe", 1), *method.bare_graph("bare", 1))


def planner_effect(episodes: Sequence[Episode]) -> float | None:
    """Accuracy with the plan minus accuracy without, over the same tasks; in [-1, 1]. A plan that
    does not parse adds nothing."""
    pairs = [(e.samples["probe"], e.samples["bare"]) for e in episodes]
    return mean([correct(a[0]) - correct(b[0]) if a else 0.0 for a, b in pairs if b])


def critic_effect(audits: Sequence[Episode]) -> float | None:
    """Area under the ROC curve of the scores of sound against broken questions."""
    scores = {
        label: [
            score
            for e in audits
            if e.facts["label"] == label
            for s in e.samples["audit"]
            if (score := critic_score(s.text)) is not None
        ]
        for label in (0.0, 1.0)
    }
    return roc_auc(scores[1.0], scores[0.0])


def roc_auc(high: Sequence[float], low: Sequence[float]) -> float | None:
    """Share of pairs in which the first is the larger, ties one half; None without pairs."""
    return mean([float(a > b) + 0.5 * (a == b) for a in high for b in low])


def proposals(method: Sage, references: Sequence[Task]) -> list[Episode]:
    """Challenge episodes that are measured and never admitted."""
    return [
        Episode(
            f"valid/new/{i}/{task.id}",
            task,
            method.challenge_graph,
            facts={"step": 0, "proposal": f"valid/new/{i}"},
        )
        for i, task in enumerate(references)
    ]


def challenger_effects(method: Sage, episodes: Sequence[Episode], pool: Pool) -> dict:
    """How many proposals are of use: the pool would take them (valid, new, scored alpha or more)
    and their solve rate lies strictly between 0 and 1. The pool is only read."""
    mark_duplicates(episodes, pool)
    admitted = [e for e in episodes if _would_enter(method, e, pool)]
    useful = [e for e in admitted if 0 < (solve_rate(e.samples["attempt"]) or 0) < 1]
    made = [e for e in episodes if e.samples["challenge"]]
    return {
        "effect/challenger": len(useful) / len(admitted) if admitted else None,
        "effect/challenger_yield": len(useful) / len(made) if made else None,
    }


def _would_enter(method: Sage, episode: Episode, pool: Pool) -> bool:
    return (
        "candidate" in episode.facts
        and not episode.facts["duplicate"]
        and method.passes_gate(episode)
        and pool.outcome(episode.facts["candidate"]) == ADMITTED
    )


def key_jobs(episodes: Sequence[Episode]) -> list[Job]:
    """The true answer to every valid proposal whose question the tiny world's grammar can read, put
    to the proposal's own verifier: it is judged correct where the key is true."""
    jobs = []
    for episode in episodes:
        candidate = episode.facts.get("candidate")
        answer = true_response(candidate.question) if candidate else None
        if candidate and answer:
            jobs.append(candidate.job(f"{candidate.id}/key", answer))
    return jobs
