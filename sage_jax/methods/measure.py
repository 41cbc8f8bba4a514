"""Figures of one rollout, computed from its samples; names as in report/metrics.py."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sage_jax.methods.graph import Episode, Sample
from sage_jax.methods.rewards import REWARD_SETS, correct, mean, solve_rate
from sage_jax.roles import ROLES
from sage_jax.verify.verdict import refusal

# A Solver row on a drawn task counts as planned or unplanned by what it was shown.
KINDS = {
    "attempt": "candidates",
    "probe": "planned",
    "bare": "unplanned",
    "judge_question": "questions",
    "judge_plan": "plans",
    "audit": "audits",
}


def split_of(episode: Episode, sample: Sample) -> str | None:
    """The kind a sample is reported under, None where its role has one kind only."""
    if sample.kind == "solve":
        return "planned" if episode.facts["plan_gated_in"] else "unplanned"
    return KINDS.get(sample.kind)


def all_samples(episodes: Iterable[Episode]) -> list[Sample]:
    """Every sample of a rollout in a fixed order."""
    return [s for e in episodes for samples in e.samples.values() for s in samples]


def rollout_figures(episodes: Sequence[Episode], settings) -> dict[str, float | None]:
    """Rewards, verdicts, gates, parse failures and lengths; None where nothing was counted.

    `settings`: config.method.
    """
    samples = all_samples(episodes)
    figures: dict[str, float | None] = {
        "masked": mean([float(s.masked) for s in samples]),
        "tokens/generated": sum(len(s.completion.tokens) for s in samples),
    }
    groups = {role: [s for s in samples if s.role == role] for role in ROLES}
    for episode in episodes:
        for some in episode.samples.values():
            for sample in some:
                groups.setdefault(f"{sample.role}/{sample.domain}", []).append(sample)
                if kind := split_of(episode, sample):
                    groups.setdefault(f"{sample.role}/{kind}", []).append(sample)
    for name, group in groups.items():
        figures[f"reward/{name}"] = _mean_of(group, lambda s: None if s.masked else s.reward)
        figures[f"parse_fail/{name}"] = _mean_of(group, lambda s: float(not s.parsed.ok))
        figures[f"length/{name}"] = _mean_of(group, lambda s: len(s.completion.tokens))
        if name.startswith("solver"):
            figures[f"solve_rate{name.removeprefix('solver')}"] = solve_rate(group)
    for role in ROLES:
        logps = [s.completion.logps for s in groups[role] if len(s.completion.logps)]
        figures[f"entropy/{role}"] = float(-np.concatenate(logps).mean()) if logps else None
        figures[f"truncated/{role}"] = _mean_of(
            groups[role], lambda s: float(s.completion.finish == "length")
        )
        for part in sorted({part for s in groups[role] for part in s.parts}):
            figures[f"reward_part/{role}/{part}"] = _mean_of(
                groups[role], lambda s, part=part: s.parts.get(part)
            )
    verdicts = [s.verdict.verdict for s in samples if s.verdict]
    for name in ("correct", "wrong", "unparsable", "timeout", "error"):
        figures[f"verdict/{name}"] = mean([float(v == name) for v in verdicts])
    return figures | _refusals(episodes) | _gate_figures(episodes, settings)


def _refusals(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Why proposals have no usable verifier; only reasons that occurred."""
    made = [s for e in episodes for s in e.samples.get("challenge", ())]
    reasons = [
        refusal(s.judged.reason) if s.parsed.ok else "unparsed"
        for s in made
        if not s.parsed.ok or not (s.judged.correct or s.masked)
    ]
    return {f"refused/{name}": reasons.count(name) / len(made) for name in sorted(set(reasons))}


def _gate_figures(episodes: Sequence[Episode], settings) -> dict[str, float | None]:
    candidates = [e for e in episodes if "candidate" in e.facts]
    plans = [e for e in episodes if e.samples.get("plan")]
    rates = [solve_rate(e.samples["attempt"]) for e in candidates]
    mean_score = REWARD_SETS[settings.rewards].mean_score
    judged = [mean_score(e.samples["judge_question"]) for e in candidates]
    scores = {
        kind: [
            s.parsed.fields["score"]
            for e in episodes
            for s in e.samples.get(kind, ())
            if s.parsed.ok
        ]
        for kind in ("judge_question", "judge_plan")
    }
    return {
        "difficulty": mean([1.0 - rate for rate in rates if rate is not None]),
        "gate/question_pass": mean(
            [float(score is not None and score >= settings.alpha) for score in judged]
        ),
        "gate/plan_pass": mean([float(e.facts["plan_gated_in"]) for e in plans]),
        "critic/score_question": mean(scores["judge_question"]),
        "critic/score_plan": mean(scores["judge_plan"]),
    }


def _mean_of(group: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    return mean([v for v in map(value, group) if v is not None])


def error_share(samples: Sequence[Sample]) -> float:
    """Share of verdicts lost to the machinery rather than to the response."""
    return mean([float(s.verdict.masked) for s in samples if s.verdict]) or 0.0


def accuracy(samples: Sequence[Sample]) -> float | None:
    """Share judged correct; verdicts lost to the machinery count as not correct."""
    return mean([correct(s) for s in samples])


def episode_row(step: int, sample: Sample, prompt: str) -> dict:
    """One line of episodes.jsonl; `prompt` is what the row's prompt tokens say."""
    verdict = sample.verdict
    return {
        "step": step,
        "id": sample.id,
        "parents": list(sample.parents),
        "role": sample.role,
        "kind": sample.kind,
        "domain": sample.domain,
        "prompt": prompt,
        "response": sample.text,
        "finish": sample.completion.finish,
        "tokens": len(sample.completion.tokens),
        "parsed": sample.parsed.ok,
        "reason": sample.parsed.reason or None,
        "verdict": verdict.verdict if verdict else None,
        "verdict_reason": verdict.reason if verdict else None,
        "masked": sample.masked,
        "reward": sample.reward,
        "reward_parts": sample.parts,
        "advantage": sample.advantage,
    }
