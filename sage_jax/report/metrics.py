"""The one table of metrics: name, unit, meaning, healthy range. Nothing else may be logged.

`python -m sage_jax.report.metrics` prints the table as markdown (docs/metrics.md).
"""

import itertools
import json
import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_jax.report.jsonl import JsonlWriter, cut
from sage_jax.roles import ROLES
from sage_jax.tasks.task import DOMAINS
from sage_jax.verify.verdict import REFUSALS, VERDICTS

__all__ = ["METRICS", "SPLITS", "Metric", "MetricsWriter", "check", "cut", "markdown"]

# Kinds of rows within a role: Solver rows on new candidates, on drawn tasks with the plan shown
# and with none shown; Critic rows on questions, on plans and on audit questions.
SPLITS = {
    "challenger": DOMAINS,
    "planner": DOMAINS,
    "solver": (*DOMAINS, "candidates", "planned", "unplanned"),
    "critic": (*DOMAINS, "questions", "plans", "audits"),
}
EXPANSIONS = {
    "role": ROLES,
    "role/split": tuple(f"{role}/{split}" for role in ROLES for split in SPLITS[role]),
    "split": SPLITS["solver"],
    "domain": DOMAINS,
    "verdict": VERDICTS,
    "refusal": ("unparsed", *REFUSALS, "other"),
    "part": (
        "challenger/question_score",
        "challenger/difficulty",
        "challenger/format",
        "planner/plan_score",
        "planner/uplift",
        "planner/format",
        "solver/plan_score",
        "solver/correct",
        "solver/format",
        "critic/agreement",
        "critic/format",
    ),
    "stage": ("rollout", "verify", "update", "validate", "checkpoint", "total"),
    "variant": ("planned", "math", "code", "wellformed", "hard", "sampled"),
}


@dataclass(frozen=True)
class Metric:
    """`meaning` is the formula in words; a mean says over which rows. `healthy` may be ""."""

    unit: str
    meaning: str
    healthy: str = ""


_TABLE = {
    "step": Metric("count", "updates done; row 0 is validation before training"),
    "reward/<role>": Metric("-1/3..1", "mean reward of the role's unmasked rows, as in the loss"),
    "reward/<role/split>": Metric("-1/3..1", "the same, over rows of one domain or kind"),
    "reward_part/<part>": Metric("-1..1", "mean of one part of the reward before its weight"),
    "solve_rate": Metric("0..1", "correct over judged Solver rows", "0.2 to 0.8"),
    "solve_rate/<split>": Metric("0..1", "the same, over rows of one domain or kind"),
    "difficulty": Metric(
        "0..1",
        "mean over valid candidates of 1 - share of attempts correct",
        "0.2 to 0.8; near 0 the Challenger repeats easy ones, near 1 it writes unsolvable ones",
    ),
    "critic/score_question": Metric("0..1", "mean parsed Critic score (s - 1)/9 of questions"),
    "critic/score_plan": Metric("0..1", "mean parsed Critic score (s - 1)/9 of plans"),
    "gate/question_pass": Metric(
        "0..1", "share of parsed candidates with score >= alpha", "0.2 to 0.9; 1 = no selection"
    ),
    "gate/plan_pass": Metric("0..1", "share of plans with score >= beta", "0.3 to 1"),
    "verdict/<verdict>": Metric("0..1", "share of this verdict among all verdicts of the step"),
    "refused/<refusal>": Metric(
        "0..1",
        "share of proposals without a usable verifier for this reason (docs/verifiers.md); "
        "unparsed: the tags do not parse; absent when there was none",
    ),
    "masked": Metric("0..1", "share of rows left out of the loss by a fault not theirs", "< 0.01"),
    "parse_fail/<role>": Metric("0..1", "share of rows whose tags do not parse", "< 0.3"),
    "parse_fail/<role/split>": Metric("0..1", "the same, over rows of one domain or kind"),
    "truncated/<role>": Metric("0..1", "share of rows cut at the token budget", "< 0.2"),
    "shortened": Metric(
        "0..1", "share of prompts cut to tokens.max_prompt, validation's included", "0"
    ),
    "length/<role>": Metric("tokens", "mean response length, stop token included"),
    "length/<role/split>": Metric("tokens", "the same, over rows of one domain or kind"),
    "entropy/<role>": Metric(
        "nats",
        "mean of -log p over the response tokens sampled: an estimate of the tempered policy's "
        "entropy; top_k, top_p and min_p lower it",
        "slow fall; > 0.05",
    ),
    "adv/<role>_mean": Metric("1", "mean advantage over trained tokens of the role"),
    "adv/<role>_std": Metric("1", "standard deviation of the same", "near 1; 0 = no signal"),
    "zero_spread/<role>": Metric(
        "0..1", "share of the role's advantage groups whose rewards are all equal", "< 0.9"
    ),
    "loss": Metric("1", "policy loss summed over roles with their weights, plus entropy and KL"),
    "lr_factor": Metric(
        "1", "factor on the learning rate after a validation: halved at each roll-back", "1"
    ),
    "grad_norm": Metric("1", "global L2 norm of the gradient before clipping", "> 0, no spikes"),
    "ratio/max": Metric("1", "largest policy ratio of a trained token", "1 with one update"),
    "clip_share": Metric("0..1", "share of trained tokens whose ratio was clipped", "< 0.2"),
    "dual_clip_share": Metric("0..1", "share of trained tokens at the dual clip", "< 0.01"),
    "importance/mean": Metric("1", "mean sampler/learner weight, only when they are on", "near 1"),
    "kl": Metric("nats", "mean k3 estimate of KL to the starting model, only when it is on"),
    "logp_gap/mean": Metric(
        "nats", "mean |learner - sampler log-probability| over the rows taught", "< 0.01"
    ),
    "logp_gap/max": Metric(
        "nats", "largest |learner - sampler log-probability| in the rows taught", "< 0.1"
    ),
    "skipped_updates": Metric("count", "updates skipped for a non-finite gradient so far", "0"),
    "tokens/generated": Metric("tokens", "response tokens sampled in this step"),
    "tokens/trained": Metric("tokens", "response tokens over which this step's loss is a mean"),
    "rows/taught": Metric(
        "rows",
        "rows in the update: those of trained roles that are not masked and, without entropy bonus "
        "and KL, have an advantage",
    ),
    "padding/update": Metric("0..1", "share of padded positions in the update's batches", "< 0.1"),
    "live_slots": Metric("0..1", "share of decode slots and steps with a live row", "> 0.5"),
    "pool/size": Metric("tasks", "seeds and admitted tasks in the pool after the step"),
    "pool/size_<domain>": Metric("tasks", "the same, of one domain"),
    "pool/admitted": Metric("tasks", "candidates admitted in this step"),
    "pool/duplicates": Metric("tasks", "candidates refused as near-duplicates in this step"),
    "pool/contaminated": Metric("tasks", "candidates refused for meeting a validation item", "0"),
    "pool/invalid": Metric("tasks", "candidates whose key or reference solution is unusable"),
    "pool/evicted": Metric("tasks", "admitted tasks dropped for capacity so far"),
    "pool/age": Metric("steps", "mean age of the admitted tasks in the pool"),
    "valid/accuracy": Metric("0..1", "Solver alone, greedy: share of validation items correct"),
    "valid/accuracy_<variant>": Metric(
        "0..1",
        "planned: Planner, gate, Solver; math, code: one domain; wellformed: among answers that "
        "parse; hard: items of a level above every seed's; sampled: mean of 4 samples at "
        "temperature 1",
    ),
    "valid/items": Metric("tasks", "validation items"),
    "valid/set": Metric(
        "CRC-32", "digest of those items: valid/* and effect/* compare only where it is the same"
    ),
    "effect/planner": Metric(
        "-1..1",
        "on held-out tasks at temperature 1: accuracy of answers that saw the plan, whatever its "
        "score, minus that of answers without",
        "> 0",
    ),
    "effect/critic": Metric(
        "0..1",
        "area under the ROC curve of Critic scores: held-out questions as they stand against the "
        "same with a number removed or contradicted",
        "> 0.5; 0.5 = blind",
    ),
    "effect/challenger": Metric(
        "0..1",
        "of proposals on fixed references that the pool would admit: share whose solve rate lies "
        "strictly between 0 and 1",
    ),
    "effect/challenger_yield": Metric("0..1", "the same, as a share of all proposals"),
    "audit/key_true": Metric(
        "0..1",
        "of valid proposals on those references whose question the tiny world's grammar reads: "
        "share whose key is the true one",
        "near 1",
    ),
    "memory/rss_gib": Metric("GiB", "peak resident memory of this process", "flat after warm-up"),
    "compiles": Metric("count", "programs compiled so far", "flat after warm-up"),
    "time/<stage>": Metric("s", "wall time of one stage of the step; total covers all"),
    "rates/tokens_per_s": Metric("tokens/s", "tokens generated over rollout time"),
}


def _expand(name: str) -> list[str]:
    fields = re.findall(r"<([^>]+)>", name)
    names = []
    for values in itertools.product(*(EXPANSIONS[field] for field in fields)):
        expanded = name
        for field, value in zip(fields, values, strict=True):
            expanded = expanded.replace(f"<{field}>", value, 1)
        names.append(expanded)
    return names


METRICS: Mapping[str, Metric] = {
    name: metric for template, metric in _TABLE.items() for name in _expand(template)
}


def check(row: Mapping[str, Any]) -> None:
    """Raises ValueError naming every metric that is unknown, no number, or not finite."""
    problems = []
    for name, value in row.items():
        if name not in METRICS:
            problems.append(f"unknown metric {name!r}: add it to the table in report/metrics.py")
        elif not isinstance(value, numbers.Real):
            problems.append(f"metric {name!r} is {value!r}: log a number")
        elif not math.isfinite(value):
            problems.append(f"metric {name!r} is {value!r}: leave a missing figure out")
    if problems:
        raise ValueError("; ".join(problems))


class MetricsWriter(JsonlWriter):
    """metrics.jsonl: one row a step, steps strictly rising, absent instead of None or NaN."""

    def __init__(self, path: str | Path, mute: bool = False):
        """Continues a file that is there; call `cut` first where a run may have been killed."""
        super().__init__(path, mute)
        rows = [] if mute else self.path.read_bytes().splitlines()
        self._last_step = json.loads(rows[-1])["step"] if rows else -1

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row of plain, numpy or one-element array numbers.

        Raises ValueError for a name not in the table, a missing step, or a step already written.
        """
        plain = {name: _plain(value) for name, value in row.items() if value is not None}
        plain = {
            name: value
            for name, value in plain.items()
            if not (isinstance(value, float) and not math.isfinite(value))
        }
        check(plain)
        if plain.get("step", -1) <= self._last_step:
            raise ValueError(
                f"step {plain.get('step')} after step {self._last_step}: write each step once, "
                "rising; cut the file before a resumed run"
            )
        super().write(plain)
        self._last_step = plain["step"]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def markdown() -> str:
    """The table as the page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m sage_jax.report.metrics > docs/metrics.md`; do not edit.",
        "A figure that does not exist for a step is absent from its row of `metrics.jsonl`.",
        "",
        "| name | unit | meaning | healthy |",
        "|---|---|---|---|",
    ]
    for name, metric in _TABLE.items():
        cells = (f"`{name}`", metric.unit, metric.meaning, metric.healthy)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Expansions", "", "| field | values |", "|---|---|"]
    for field, values in EXPANSIONS.items():
        lines.append(f"| `<{field}>` | {', '.join(f'`{value}`' for value in values)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
