"""Reward sets: one pure function each, from finished episodes to a reward for every sample.

Only scores, formats and verdicts enter; no text is read here.
"""

from collections.abc import Sequence

from sage_jax.methods.graph import Episode, Sample
from sage_jax.roles import critic_score

UNPARSED_SCORE = 0.5  # what the published rule gives a missing score


def correct(sample: Sample) -> float:
    """s_gt: 1 for a correct verdict, else 0 (unparsable, time-out and crash included)."""
    return float(sample.verdict is not None and sample.verdict.verdict == "correct")


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def critic_mean(judgements: Sequence[Sample]) -> float | None:
    """Mean score in [0, 1] with unparsed ones at 0.5; None when nothing was judged."""
    scores = [critic_score(s.text) for s in judgements]
    return mean([UNPARSED_SCORE if s is None else s for s in scores])


def solve_rate(attempts: Sequence[Sample]) -> float | None:
    """Share of correct attempts, those lost to the machinery left out; None without any."""
    return mean([correct(s) for s in attempts if not s.masked])


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


def _give(sample: Sample, reward: float, **parts: float) -> None:
    sample.reward, sample.parts = reward, {**parts, "format": sample.format}


def paper(episodes: Sequence[Episode], settings) -> None:
    """The published set. `settings`: config.method.

    A Critic that was never asked (the proposal was invalid, the plan unparsed) contributes 0: there
    was nothing to score. One that answered without a score contributes 0.5, as published.
    """
    for episode in episodes:
        for sample in episode.samples.get("challenge", ()):
            _reward_challenge(episode, sample, settings)
        for sample in episode.samples.get("plan", ()):
            s_p = critic_mean(episode.samples["judge_plan"]) or 0.0
            _give(
                sample, planner_paper(s_p, sample.format, settings.planner_weights), plan_score=s_p
            )
        for kind in ("attempt", "solve"):
            s_p = episode.facts.get("plan_score_gated", 0.0) if kind == "solve" else 0.0
            for sample in episode.samples.get(kind, ()):
                s_gt = correct(sample)
                reward = solver_paper(s_p, s_gt, sample.format, settings.solver_weights)
                _give(sample, reward, plan_score=s_p, correct=s_gt)
        for kind in ("judge_question", "judge_plan"):
            for sample in episode.samples.get(kind, ()):
                _give(sample, sample.format)


def _reward_challenge(episode: Episode, sample: Sample, settings) -> None:
    valid = "candidate" in episode.facts
    s_q = critic_mean(episode.samples["judge_question"]) or 0.0
    rate = solve_rate(episode.samples["attempt"])
    if valid and rate is None:
        # Every attempt was lost to the machinery: the difficulty is unknown, not 1.
        sample.masked = True
    r_d = 0.0 if rate is None else 1.0 - rate
    reward = challenger_paper(s_q, r_d, sample.format, valid, settings.alpha)
    _give(sample, reward, question_score=s_q, difficulty=r_d)


REWARD_SETS = {"paper": paper}
