"""SAGE (arXiv 2603.15255): Challenger, Planner, Solver and Critic on one backbone.

A step runs its graphs inside one batch. Challenge: a proposal, the Critic's view of its question,
the Solver's attempts on it. Solve: a plan for a drawn task, the Critic's view of the plan, the
Solver's answers with the plan where it passes the gate. A grounded reward set adds the Solver's
answers with the plan and without it, whatever its score, and audits: the Critic's view of seeds,
whole and broken.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from sage_jax.methods.graph import Episode, Node, Sample
from sage_jax.methods.rewards import REWARD_SETS, RewardSet
from sage_jax.roles import CHALLENGER, CRITIC, PLANNER, SOLVER, PromptSet
from sage_jax.tasks.audit import audit_questions
from sage_jax.tasks.pool import Pool, Questions
from sage_jax.tasks.task import Task, proposed_code, proposed_math
from sage_jax.verify import Job


@dataclasses.dataclass(frozen=True)
class Sage:
    """The method as data: its graphs, its episodes of a step, its rewards and its pool rule."""

    config: Any
    prompts: PromptSet

    @property
    def reward_set(self) -> RewardSet:
        return REWARD_SETS[self.config.method.rewards]

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

    def solve_graph(
        self, critics: int, solutions: int, probes: int = 0, bare: int = 0
    ) -> tuple[Node, ...]:
        """Plan -> Critic x m -> gate -> Solver x G; with no plan through the gate it goes bare.

        Whatever the score, `probes` more Solver rows see the plan and `bare` do not: what a plan is
        worth is measured on both, and a closed gate hides no plan from the measurement.
        """
        return (
            Node("plan", PLANNER, lambda e: self.prompts.messages("planner", e.task.public)),
            Node(
                "judge_plan",
                CRITIC,
                lambda e: self.prompts.messages("critic_plan", e.task.public, plan_of(e)),
                parents=("plan",),
                fan_out=critics,
                when=lambda e: bool(plan_of(e)),
            ),
            Node(
                "solve",
                SOLVER,
                self._ask_solver,
                parents=("plan", "judge_plan"),
                fan_out=solutions,
                job=lambda e, s: e.task.job(s.id, s.text),
            ),
            *self.probe_graph("probe", probes),
            *self.bare_graph("bare", bare),
        )

    def probe_graph(self, kind: str, samples: int) -> tuple[Node, ...]:
        """Solver with the plan, whatever the Critic thinks of it."""
        node = Node(
            kind,
            SOLVER,
            lambda e: self.prompts.messages("solver", e.task.public, plan_of(e)),
            parents=("plan",),
            fan_out=samples,
            when=lambda e: bool(plan_of(e)),
            job=lambda e, s: e.task.job(s.id, s.text),
        )
        return (node,) if samples else ()

    def bare_graph(self, kind: str, samples: int) -> tuple[Node, ...]:
        """Solver alone, without a plan."""
        node = Node(
            kind,
            SOLVER,
            lambda e: self.prompts.messages("solver", e.task.public),
            fan_out=samples,
            job=lambda e, s: e.task.job(s.id, s.text),
        )
        return (node,) if samples else ()

    @property
    def audit_graph(self) -> tuple[Node, ...]:
        """Critic on facts["question"], whose worth is known: facts["label"]."""

        def ask(episode: Episode) -> list[dict[str, str]]:
            public = dataclasses.replace(episode.task.public, question=episode.facts["question"])
            return self.prompts.messages("critic_question", public)

        return (Node("audit", CRITIC, ask),)

    def episodes(self, pool: Pool, step: int) -> list[Episode]:
        """The episodes of one step, drawn from the pool."""
        c, m = self.config, self.config.method
        share, seed = c.tasks.math_share, c.seed
        grounded = self.reward_set.grounded
        challenge = self.challenge_graph
        measured = (m.probes, m.bare) if grounded else (0, 0)
        solve = self.solve_graph(m.critics, m.solutions, *measured)
        references = pool.references(step, m.candidates, math_share=share, seed=seed)
        drawn = pool.draw(step, m.drawn, math_share=share, seed=seed)
        # A proposal is not named after its reference, or names would grow with every generation.
        challenges = [
            Episode(
                f"{step}/new/{i}/{task.id}",
                task,
                challenge,
                facts={"step": step, "proposal": f"{step}/new/{i}"},
            )
            for i, task in enumerate(references)
        ]
        solves = [
            Episode(f"{step}/task/{i}/{task.id}", task, solve, facts={"step": step})
            for i, task in enumerate(drawn)
        ]
        audited = pool.draw_seeds(step, m.audits // 2, share, seed) if grounded else []
        return challenges + solves + self.audits(audited, str(step))

    def audits(self, tasks: Sequence[Task], name: str) -> list[Episode]:
        """Two audit episodes a task: as it stands (label 1) and broken (label 0). Tasks without a
        number cannot be broken and give none."""
        graph = self.audit_graph
        return [
            Episode(
                f"{name}/audit/{i}{'ab'[side]}/{task.id}",
                task,
                graph,
                facts={"question": question, "label": 1.0 - side},
            )
            for i, task in enumerate(tasks)
            for side, question in enumerate(audit_questions(task.question, f"{name}/{task.id}"))
        ]

    def rows_per_step(self) -> dict[str, int]:
        """The static maximum of rows of each role in one step."""
        m, grounded = self.config.method, self.reward_set.grounded
        solutions = m.solutions + (m.probes + m.bare if grounded else 0)
        audits = 2 * (m.audits // 2) if grounded else 0
        return {
            CHALLENGER: m.candidates,
            PLANNER: m.drawn,
            SOLVER: m.candidates * m.attempts + m.drawn * solutions,
            CRITIC: m.critics * (m.candidates + m.drawn) + audits,
        }

    def reward(self, episodes: list[Episode], pool: Pool) -> None:
        """Fill in every sample's reward with the configured set. The pool is only read."""
        mark_duplicates(episodes, pool)
        self.reward_set.give(episodes, self.config.method)

    def admit(self, pool: Pool, episodes: list[Episode]) -> dict[str, int]:
        """Put proposals that pass the question gate into the pool; counts of each outcome."""
        outcomes: dict[str, int] = {}
        for episode in episodes:
            if not episode.samples.get("challenge"):
                continue
            candidate = episode.facts.get("candidate")
            if candidate is None:
                outcome = "invalid"
            elif not self.passes_gate(episode):
                outcome = "gated_out"
            else:
                outcome = pool.admit(candidate)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        return outcomes

    def passes_gate(self, episode: Episode) -> bool:
        """Whether the Critic's mean score of the proposed question reaches alpha."""
        score = self.reward_set.mean_score(episode.samples["judge_question"])
        return score is not None and score >= self.config.method.alpha

    def _ask_challenger(self, episode: Episode) -> list[dict[str, str]]:
        return self.prompts.messages("challenger", episode.task.public)

    def _ask_solver(self, episode: Episode) -> list[dict[str, str]]:
        """Plan gating: the plan is shown only when its mean score reaches beta."""
        score = self.reward_set.mean_score(episode.samples["judge_plan"])
        gated_in = score is not None and score >= self.config.method.beta
        episode.facts["plan_score_gated"] = score if gated_in else 0.0
        episode.facts["plan_gated_in"] = gated_in
        plan = plan_of(episode) if gated_in else ""
        return self.prompts.messages("solver", episode.task.public, plan)


def plan_of(episode: Episode) -> str:
    """The plan's text, empty when it did not parse."""
    plans = [s.parsed.fields["plan"] for s in episode.samples["plan"] if s.parsed.ok]
    return plans[0] if plans else ""


def mark_duplicates(episodes: Sequence[Episode], pool: Pool) -> None:
    """facts["duplicate"] of every valid proposal: it nearly repeats a task of the pool, or a valid
    proposal before it in this step."""
    earlier = Questions(pool.settings["dedup_threshold"])
    for episode in episodes:
        candidate = episode.facts.get("candidate")
        if candidate is not None:
            question = candidate.question
            twin = pool.twin(question) or earlier.find(question)
            episode.facts["duplicate"] = twin is not None
            earlier.add(candidate.id, question)


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
