"""Reward sets: one pure function each, from finished episodes to a reward for every sample.

Only scores, formats, verdicts and facts of the episode enter; no text is read here.
"""

import dataclasses
from collections.abc import Callable, Sequence

from sage_jax.methods.graph import Episode, Sample
from sage_jax.roles import critic_score

UNPARSED_SCORE = 0.5  # what the published rule gives a missing score


@dataclasses.dataclass(frozen=True)
class RewardSet:
    """A way to reward the four roles.

    give: fills in every sample's reward; takes the episodes and config.method.
    mean_score: what several Critic rows on one thing come to, in [0, 1]; None without any.
    grounded: whether the graphs hold audits, and Solver rows with and without every plan.
    """

    give: Callable[[Sequence[Episode], object], None]
    mean_score: Callable[[Sequence[Sample]], float | None]
    grounded: bool


def correct(sample: Sample) -> float:
    """s_gt: 1 for a correct verdict, else 0 (unparsable, time-out and crash included)."""
    return float(sample.verdict is not None and sample.verdict.verdict == "correct")


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def solve_rate(attempts: Sequence[Sample]) -> float | None:
    """Share of correct attempts, those lost to the machinery left out; None without any."""
    return mean([correct(s) for s in attempts if not s.masked])


def critic_mean(judgements: Sequence[Sample]) -> float | None:
    """Mean score in [0, 1] with unparsed ones at 0.5; None when nothing was judged."""
    scores = [critic_score(s.text) for s in judgements]
    return mean([UNPARSED_SCORE if s is None else s for s in scores])


def parsed_mean(judgements: Sequence[Sample]) -> float | None:
    """Mean of the scores that parse; None when none does, which closes the gate."""
    scores = [critic_score(s.text) for s in judgements]
    return mean([s for s in scores if s is not None])


def _give(sample: Sample, reward: float, **parts: float) -> None:
    sample.reward, sample.parts = reward, {**parts, "format": sample.format}


def _mask_unknown_difficulty(episode: Episode, sample: Sample) -> None:
    """Mask a proposal whose attempts were all lost to the machinery: its difficulty is unknown."""
    if "candidate" in episode.facts and solve_rate(episode.samples["attempt"]) is None:
        sample.masked = True


# ---- the published set -------------------------------------------------------------------------


def challenger_paper(s_q: float, r_d: float, r_f: float, valid: bool, alpha: float) -> float:
    """r_c of SAGE 3.3: three parts above the question gate, two below it or when invalid."""
    if valid and s_q >= alpha:
        return (s_q + r_d + r_f) / 3
    return (s_q + r_f) / 2


def planner_paper(s_p: float, r_f: float, weights: Sequence[float]) -> float:
    """r_p = lambda_plan s_p + lambda_f r_f."""
    return weights[0] * s_p + weights[1] * r_f


def solver_paper(s_p_gated: float, s_gt: float, r_f: float, weights: Sequence[float]) -> float:
    """r_s = w_p s~_p + w_c s_gt + w_f r_f, with s~_p = 0 unless the plan was gated in."""
    return weights[0] * s_p_gated + weights[1] * s_gt + weights[2] * r_f


def paper(episodes: Sequence[Episode], settings) -> None:
    """The published set. `settings`: config.method.

    A Critic that was never asked (the proposal was invalid, the plan unparsed) contributes 0: there
    was nothing to score. One that answered without a score contributes 0.5, as published.
    """
    for episode in episodes:
        for sample in episode.samples.get("challenge", ()):
            s_q = critic_mean(episode.samples["judge_question"]) or 0.0
            _mask_unknown_difficulty(episode, sample)
            rate = solve_rate(episode.samples["attempt"])
            r_d = 0.0 if rate is None else 1.0 - rate
            valid = "candidate" in episode.facts
            reward = challenger_paper(s_q, r_d, sample.format, valid, settings.alpha)
            _give(sample, reward, question_score=s_q, difficulty=r_d)
        for sample in episode.samples.get("plan", ()):
            s_p = critic_mean(episode.samples["judge_plan"]) or 0.0
            reward = planner_paper(s_p, sample.format, settings.planner_weights)
            _give(sample, reward, plan_score=s_p)
        for kind in ("attempt", "solve"):
            s_p = episode.facts.get("plan_score_gated", 0.0) if kind == "solve" else 0.0
            for sample in episode.samples.get(kind, ()):
                s_gt = correct(sample)
                reward = solver_paper(s_p, s_gt, sample.format, settings.solver_weights)
                _give(sample, reward, plan_score=s_p, correct=s_gt)
        for kind in ("judge_question", "judge_plan"):
            for sample in episode.samples.get(kind, ()):
                _give(sample, sample.format)


# ---- the set without its holes -----------------------------------------------------------------


def earned_difficulty(s_q: float | None, rate: float | None, alpha: float) -> float:
    """d = 1 - p above the question gate; 0 below it, unscored, or when no attempt succeeded."""
    if s_q is None or s_q < alpha or not rate:
        return 0.0
    return 1.0 - rate


def challenger_robust(s_q: float, difficulty: float, r_f: float, usable: bool) -> float:
    """r_c with one divisor: a third each for question score, difficulty and format.

    Not `usable` (the verifier payload is invalid, or the task is a duplicate): r_f / 3 - 1/3, below
    everything that is.
    """
    if not usable:
        return r_f / 3 - 1 / 3
    return (s_q + difficulty + r_f) / 3


def planner_robust(s_p: float, r_f: float, uplift: float) -> float:
    """r_p = 0.25 s_p + 0.25 r_f + 0.25 (1 + u), u in [-1, 1] what the plan adds to the solve rate.

    It tops out at 1: a perfect score and format, and a problem solved with the plan only.
    """
    return 0.25 * s_p + 0.25 * r_f + 0.25 * (1.0 + uplift)


def solver_robust(s_gt: float, r_f: float) -> float:
    """r_s = 0.8 s_gt + 0.2 r_f: no credit for a plan which it did not write."""
    return 0.8 * s_gt + 0.2 * r_f


def agreement(score: float | None, label: float) -> float:
    """1 - |s - label|; 0 without a score."""
    return 0.0 if score is None else 1.0 - abs(score - label)


def critic_robust(r_f: float, agreed: float) -> float:
    """r_cr where a label is known = 0.5 r_f + 0.5 (1 - |s - label|)."""
    return 0.5 * r_f + 0.5 * agreed


def robust(episodes: Sequence[Episode], settings) -> None:
    """Rewards tied to verdicts and known labels. `settings`: config.method.

    Reads facts["duplicate"] (proposals) and facts["label"] (audit episodes).
    """
    for episode in episodes:
        for sample in episode.samples.get("challenge", ()):
            _reward_proposal(episode, sample, settings.alpha)
        for sample in episode.samples.get("plan", ()):
            s_p = parsed_mean(episode.samples["judge_plan"]) or 0.0
            u = plan_uplift(episode) or 0.0
            _give(sample, planner_robust(s_p, sample.format, u), plan_score=s_p, uplift=u)
        for kind in ("attempt", "solve", "probe", "bare"):
            for sample in episode.samples.get(kind, ()):
                s_gt = correct(sample)
                _give(sample, solver_robust(s_gt, sample.format), correct=s_gt)
        for sample in episode.samples.get("judge_question", ()):
            _give(sample, sample.format)
        for sample in episode.samples.get("audit", ()):
            _reward_judgement(sample, episode.facts["label"])
        for sample in episode.samples.get("judge_plan", ()):
            _reward_judgement(sample, solve_rates_by_plan(episode)[0])


def _reward_proposal(episode: Episode, sample: Sample, alpha: float) -> None:
    s_q = parsed_mean(episode.samples["judge_question"])
    usable = "candidate" in episode.facts and not episode.facts["duplicate"]
    _mask_unknown_difficulty(episode, sample)
    difficulty = earned_difficulty(s_q, solve_rate(episode.samples["attempt"]), alpha)
    reward = challenger_robust(s_q or 0.0, difficulty, sample.format, usable)
    _give(sample, reward, question_score=s_q or 0.0, difficulty=difficulty if usable else 0.0)


def _reward_judgement(sample: Sample, label: float | None) -> None:
    """A Critic row against what is known to be true; masked where that was lost."""
    if label is None:
        sample.masked = True
        _give(sample, sample.format)
        return
    agreed = agreement(critic_score(sample.text), label)
    _give(sample, critic_robust(sample.format, agreed), agreement=agreed)


def solve_rates_by_plan(episode: Episode) -> tuple[float | None, float | None]:
    """Solve rates of the answers that saw the plan and of those that did not."""
    gated = episode.samples["solve"]
    shown, bare = episode.samples.get("probe", []), episode.samples.get("bare", [])
    if episode.facts["plan_gated_in"]:
        return solve_rate([*shown, *gated]), solve_rate(bare)
    return solve_rate(shown), solve_rate([*bare, *gated])


def plan_uplift(episode: Episode) -> float | None:
    """u: solve rate with the plan minus without; None where either is unknown."""
    shown, bare = solve_rates_by_plan(episode)
    return None if shown is None or bare is None else shown - bare


REWARD_SETS = {
    "paper": RewardSet(paper, critic_mean, grounded=False),
    "robust": RewardSet(robust, parsed_mean, grounded=True),
}
