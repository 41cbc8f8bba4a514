"""SAGE (arXiv 2603.15255): Challenger, Planner, Solver and Critic on one backbone.

A step runs two graphs inside one batch. Challenge: a proposal, the Critic's view of its question,
the Solver's attempts on it. Solve: a plan for a drawn task, the Critic's view of the plan, the
Solver's answers with the plan where it passes the gate.
"""

import dataclasses
from typing import Any

from sage_jax.methods.graph import Episode, Node, Sample
from sage_jax.methods.rewards import REWARD_SETS, critic_mean
from sage_jax.roles import CHALLENGER, CRITIC, PLANNER, SOLVER, PromptSet
from sage_jax.tasks.pool import Pool
from sage_jax.tasks.task import Task, proposed_code, proposed_math
from sage_jax.verify import Job


@dataclasses.dataclass(frozen=True)
class Sage:
    """The method as data: its graphs, its episodes of a step, its rewards and its pool rule."""

    config: Any
    prompts: PromptSet

    @property
    def challenge_graph(self) -> tuple[Node, ...]:
        """Proposal -> (Critic x m, Solver x K); an unparsed or invalid proposal has no children."""
        method = self.config.method
        return (
            Node(
                "challenge", CHALLENGER, self._ask_challenger, job=_check_proposal, settle=_accept
            ),
            Node(
                "judge_question",
                CRITIC,
                lambda e: self.prompts.messages("critic_question", e.facts["candidate"].public),
                parents=("challenge",),
                fan_out=method.critics,
                when=_valid,
            ),
            Node(
                "attempt",
                SOLVER,
                lambda e: self.prompts.messages("solver", e.facts["candidate"].public),
                parents=("challenge",),
                fan_out=method.attempts,
                when=_valid,
                job=lambda e, s: e.facts["candidate"].job(s.id, s.text),
            ),
        )

    def solve_graph(self, critics: int, solutions: int) -> tuple[Node, ...]:
        """Plan -> Critic x m -> gate -> Solver x G; with no plan through the gate it goes bare."""
        return (
            Node("plan", PLANNER, lambda e: self.prompts.messages("planner", e.task.public)),
            Node(
                "judge_plan",
                CRITIC,
                lambda e: self.prompts.messages("critic_plan", e.task.public, _plan(e)),
                parents=("plan",),
                fan_out=critics,
                when=lambda e: bool(_plan(e)),
            ),
            Node(
                "solve",
                SOLVER,
                self._ask_solver,
                parents=("plan", "judge_plan"),
                fan_out=solutions,
                job=lambda e, s: e.task.job(s.id, s.text),
            ),
        )

    def episodes(self, pool: Pool, step: int) -> list[Episode]:
        """Both graphs' episodes of one step, drawn from the pool."""
        c = self.config
        share, seed = c.tasks.math_share, c.seed
        challenge = self.challenge_graph
        solve = self.solve_graph(c.method.critics, c.method.solutions)
        references = pool.references(step, c.method.candidates, math_share=share, seed=seed)
        drawn = pool.draw(step, c.method.drawn, math_share=share, seed=seed)
        # A proposal is not named after its reference, or names would grow with every generation.
        return [
            Episode(
                f"{step}/new/{i}/{task.id}",
                task,
                challenge,
                facts={"step": step, "proposal": f"{step}/new/{i}"},
            )
            for i, task in enumerate(references)
        ] + [
            Episode(f"{step}/task/{i}/{task.id}", task, solve, facts={"step": step})
            for i, task in enumerate(drawn)
        ]

    def rows_per_step(self) -> dict[str, int]:
        """The static maximum of rows of each role in one step."""
        m = self.config.method
        return {
            CHALLENGER: m.candidates,
            PLANNER: m.drawn,
            SOLVER: m.candidates * m.attempts + m.drawn * m.solutions,
            CRITIC: m.critics * (m.candidates + m.drawn),
        }

    def reward(self, episodes: list[Episode]) -> None:
        """Fill in every sample's reward with the configured set."""
        REWARD_SETS[self.config.method.rewards](episodes, self.config.method)

    def admit(self, pool: Pool, episodes: list[Episode]) -> dict[str, int]:
        """Put proposals that pass the question gate into the pool; counts of each outcome."""
        outcomes: dict[str, int] = {}
        for episode in episodes:
            if not episode.samples.get("challenge"):
                continue
            candidate = episode.facts.get("candidate")
            if candidate is None:
                outcome = "invalid"
            elif (critic_mean(episode.samples["judge_question"]) or 0.0) < self.config.method.alpha:
                outcome = "gated_out"
            else:
                outcome = pool.admit(candidate)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        return outcomes

    def _ask_challenger(self, episode: Episode) -> list[dict[str, str]]:
        return self.prompts.messages("challenger", episode.task.public)

    def _ask_solver(self, episode: Episode) -> list[dict[str, str]]:
        """Plan gating: the plan is shown only when its mean score reaches beta."""
        score = critic_mean(episode.samples["judge_plan"])
        gated_in = score is not None and score >= self.config.method.beta
        episode.facts["plan_score_gated"] = score if gated_in else 0.0
        episode.facts["plan_gated_in"] = gated_in
        plan = _plan(episode) if gated_in else ""
        return self.prompts.messages("solver", episode.task.public, plan)


def _plan(episode: Episode) -> str:
    """The plan's text, empty when it did not parse."""
    plans = [s.parsed.fields["plan"] for s in episode.samples["plan"] if s.parsed.ok]
    return plans[0] if plans else ""


def _valid(episode: Episode) -> bool:
    return "candidate" in episode.facts


def _check_proposal(episode: Episode, sample: Sample) -> Job | None:
    """What decides whether the proposal's verifier is valid: the key parses, the reference runs."""
    if not sample.parsed.ok:
        return None
    fields = sample.parsed.fields
    if sample.domain == "math":
        return Job(sample.id, "math_key", {"answer": fields["answer"]})
    payload = {name: fields[name] for name in ("solution", "entry_point", "inputs")}
    return Job(sample.id, "code_reference", payload)


def _accept(episode: Episode) -> None:
    """Make the proposal a task once its verifier is known to be valid."""
    for sample in episode.samples["challenge"]:
        if sample.parsed.ok and sample.judged.correct:
            episode.facts["candidate"] = _proposed_task(episode, sample)


def _proposed_task(episode: Episode, sample: Sample) -> Task:
    fields, name = sample.parsed.fields, episode.facts["proposal"]
    origin = {"step": episode.facts["step"], "parent": episode.task.id}
    if sample.domain == "math":
        return proposed_math(name, fields["question"], fields["answer"], **origin)
    return proposed_code(
        name,
        fields["question"],
        entry_point=fields["entry_point"],
        solution=fields["solution"],
        inputs=fields["inputs"],
        expected=sample.judged.expected or [],
        **origin,
    )
