"""Many runs side by side: settings x seeds read from their folders, as means, intervals, tables.

A study is a folder SETTING/SEED of run folders. Nothing here runs anything (`launch/study.py`
does), so that the page of a study can be written again from its folders alone.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Rows = list[dict[str, float]]  # metrics.jsonl of one run, by step

BASELINE = "full"
ABSENT = "–"
MINUS = "−"
FIRST_UPDATES = 10
SMALLEST_GAIN = 0.05  # below it, the share of a gain is a share of noise

# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom. Above 30 the last one is
# used: the interval is then a little too wide.
T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


class Estimate(NamedTuple):
    """A mean over `n` seeds and the half-width of its 95 % t-interval (None with one seed)."""

    mean: float
    half: float | None
    n: int


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """mean +- t(n - 1) s / sqrt(n) of the values that are there; None when there is none."""
    present = [value for value in values if value is not None]
    n = len(present)
    if not n:
        return None
    half = (
        T95[min(n - 1, len(T95)) - 1] * statistics.stdev(present) / math.sqrt(n) if n > 1 else None
    )
    return Estimate(statistics.fmean(present), half, n)


def read_rows(path: Path, steps: int | None = None) -> Rows:
    """Rows of a metrics.jsonl up to step `steps`; a torn last line, of a live run, is left out.

    ValueError naming file and line when an earlier line is damaged.
    """
    rows = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            keep = steps is None or row["step"] <= steps
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a JSON row with a step") from error
        if keep:
            rows.append(row)
    return _on_last_items(rows)


def _on_last_items(rows: Rows) -> Rows:
    """The rows, less what was measured on other validation items than the last figures."""
    sets = [row.get("valid/set") for row in rows if "valid/accuracy" in row]
    return [
        row
        if "valid/accuracy" not in row or row.get("valid/set") == sets[-1]
        else {name: x for name, x in row.items() if not name.startswith(("valid/", "effect/"))}
        for row in rows
    ]


def curve(runs: Iterable[Rows], name: str) -> dict[int, list[float]]:
    """{step: values, one a run} over the steps at which every run has the metric."""
    columns = [{row["step"]: row[name] for row in rows if name in row} for rows in runs]
    common = set.intersection(*map(set, columns)) if columns else set()
    return {int(step): [column[step] for column in columns] for step in sorted(common)}


def gain(name: str) -> Callable[[Rows], float | None]:
    """Last row minus row 0."""

    def of(rows: Rows) -> float | None:
        first, last = rows[0].get(name), rows[-1].get(name)
        return None if first is None or last is None else last - first

    return of


def late(name: str) -> Callable[[Rows], float | None]:
    """Mean over the last third of the updates: one validation alone is noisy."""

    def of(rows: Rows) -> float | None:
        end = rows[-1]["step"]
        found = [row[name] for row in rows if row["step"] >= max(2 * end / 3, 1) and name in row]
        return statistics.fmean(found) if found else None

    return of


def early_share(rows: Rows) -> float | None:
    """Share of the accuracy gain made in the first updates; absent when the gain is small."""
    name = "valid/accuracy"
    early = next((row.get(name) for row in rows if row["step"] == FIRST_UPDATES), None)
    total = gain(name)(rows)
    if early is None or total is None or total < SMALLEST_GAIN:
        return None
    return (early - rows[0][name]) / total


def update_seconds(rows: Rows) -> float | None:
    """Median wall time of an update."""
    times = [row["time/total"] for row in rows if row["step"] > 0 and "time/total" in row]
    return statistics.median(times) if times else None


@dataclass(frozen=True)
class Column:
    """A figure of one run; shown as scale x value with so many digits."""

    title: str
    of: Callable[[Rows], float | None]
    scale: float = 100
    digits: int = 1
    signed: bool = False


ACCURACY = Column("accuracy, points", gain("valid/accuracy"), signed=True)
EFFECTS = {
    "effect/planner": Column("Planner effect, points", late("effect/planner"), signed=True),
    "effect/critic": Column("Critic effect, AUC", late("effect/critic"), scale=1, digits=2),
    "effect/challenger": Column("Challenger effect, %", late("effect/challenger")),
    "effect/challenger_yield": Column("Challenger yield, %", late("effect/challenger_yield")),
}
COLUMNS = (
    ACCURACY,
    Column("sampled, points", gain("valid/accuracy_sampled"), signed=True),
    Column("well-formed, points", gain("valid/accuracy_wellformed"), signed=True),
    Column("hard half, points", gain("valid/accuracy_hard"), signed=True),
    *EFFECTS.values(),
    Column("true keys, %", late("audit/key_true")),
    Column(f"gain by update {FIRST_UPDATES}, %", early_share, digits=0),
    Column("s an update", update_seconds, scale=1),
)
BEFORE = {
    "greedy accuracy": "valid/accuracy",
    "sampled": "valid/accuracy_sampled",
    "hard half": "valid/accuracy_hard",
    "Planner effect": "effect/planner",
    "Critic effect": "effect/critic",
    "Challenger effect": "effect/challenger",
    "Challenger yield": "effect/challenger_yield",
}
PAIRED = (ACCURACY, *EFFECTS.values())


@dataclass(frozen=True)
class Study:
    """Finished runs {setting: {seed: rows}}, the others in words, what seeds of one setting differ
    in beside the seed, and what all of them took."""

    steps: int
    runs: Mapping[str, Mapping[int, Rows]]
    unfinished: Sequence[str] = ()
    unlike: Sequence[str] = ()
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def seeds(self) -> list[int]:
        return sorted({seed for runs in self.runs.values() for seed in runs})

    def all_runs(self) -> list[Rows]:
        return [rows for runs in self.runs.values() for rows in runs.values()]


def read(workdir: Path, settings: Sequence[str], seeds: Sequence[int], steps: int | None) -> Study:
    """The study in `workdir`. A run counts when it reached `steps`, by default its own
    train.steps; longer runs are read up to there.

    ValueError when the runs disagree on train.steps, or nothing was run.
    """
    folders = {(name, seed): workdir / name / str(seed) for name in settings for seed in seeds}
    if steps is None:
        steps = _common_steps(folders.values(), workdir)
    runs: dict[str, dict[int, Rows]] = {}
    partial, missing = [], []
    for (name, seed), folder in folders.items():
        path = folder / "metrics.jsonl"
        rows = read_rows(path, steps) if path.exists() else []
        if not rows:
            missing.append(f"{name}/{seed}")
        elif rows[-1]["step"] < steps:
            partial.append(f"{name}/{seed} at {rows[-1]['step']} of {steps} updates")
        else:
            runs.setdefault(name, {})[seed] = rows
    unfinished = partial + [f"{', '.join(missing)} not started"] * bool(missing)
    costs = [cost(folder) for folder in folders.values()]
    wall, cpu = (sum(spent[key] for spent in costs) for key in ("wall_s", "cpu_s"))
    return Study(steps, runs, unfinished, wall_s=wall, cpu_s=cpu)


def _common_steps(folders: Iterable[Path], workdir: Path) -> int:
    found = {}
    for folder in folders:
        if (folder / "config.json").exists():
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            found.setdefault(config["train.steps"]["value"], folder)
    if not found:
        raise ValueError(f"{workdir}: holds no run of these settings and seeds")
    if len(found) > 1:
        told = ", ".join(f"{steps} in {folder}" for steps, folder in found.items())
        raise ValueError(f"runs of different train.steps ({told}): say which with --steps=N")
    return next(iter(found))


def cost(folder: Path) -> dict[str, float]:
    """Wall and CPU seconds that the run in `folder` has taken, over all its starts."""
    path = folder / "cost.json"
    return json.loads(path.read_text()) if path.exists() else {"wall_s": 0.0, "cpu_s": 0.0}


def summary(study: Study, setting: str, column: Column) -> Estimate | None:
    """The column's figure over the setting's seeds."""
    return estimate(column.of(rows) for rows in study.runs.get(setting, {}).values())


def paired(study: Study, setting: str, column: Column) -> Estimate | None:
    """Baseline minus setting, seed by seed, over the seeds that both have."""
    ours, theirs = study.runs.get(BASELINE, {}), study.runs.get(setting, {})
    differences = []
    for seed in ours.keys() & theirs.keys():
        a, b = column.of(ours[seed]), column.of(theirs[seed])
        if a is not None and b is not None:
            differences.append(a - b)
    return estimate(differences)


class Peak(NamedTuple):
    """The top of the mean accuracy curve, and what was left at twice its step (or at the end);
    no change where the peak is the end."""

    n: int
    step: int
    accuracy: float
    later_step: int
    later: float
    change: Estimate | None


def peak(study: Study, setting: str) -> Peak | None:
    """The first of the highest points; None without a curve. Change is taken seed by seed."""
    runs = study.runs.get(setting, {})
    points = curve(runs.values(), "valid/accuracy")
    if not points:
        return None
    means = {step: statistics.fmean(values) for step, values in points.items()}
    top = max(means, key=lambda step: means[step])
    limit = 2 * top or study.steps
    later = max(step for step in means if step <= limit)
    change = None
    if later > top:
        change = estimate(b - a for a, b in zip(points[top], points[later], strict=True))
    return Peak(len(runs), top, means[top], later, means[later], change)


def shown(value: Estimate | None, column: Column, n: int, bold: bool = False) -> str:
    """A cell: mean and half-width; n where it is not the row's; bold when 0 is outside."""
    if value is None:
        return ABSENT
    sign = "+" if column.signed else ""
    # z: what rounds to zero has no minus.
    text = f"{value.mean * column.scale:{sign}z.{column.digits}f}".replace("-", MINUS)
    if value.half is not None:
        text += f" ± {value.half * column.scale:.{column.digits}f}"
        if bold and abs(value.mean) > value.half:
            text = f"**{text}**"
    return text if value.n == n else f"{text} (n={value.n})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def main_table(study: Study) -> list[str]:
    """Settings x COLUMNS, as lines of markdown."""
    rows = []
    for setting, runs in study.runs.items():
        cells = [shown(summary(study, setting, column), column, len(runs)) for column in COLUMNS]
        rows.append([f"`{setting}`", str(len(runs)), *cells])
    return _table(["setting", "n", *(column.title for column in COLUMNS)], rows)


def paired_table(study: Study) -> list[str]:
    """Baseline minus each other setting x PAIRED; empty when there is nothing to compare."""
    rows = []
    for setting, runs in study.runs.items():
        n = len(study.runs.get(BASELINE, {}).keys() & runs.keys())
        if n and setting != BASELINE:
            columns = [Column(c.title, c.of, c.scale, c.digits, signed=True) for c in PAIRED]
            cells = [shown(paired(study, setting, c), c, n, bold=True) for c in columns]
            rows.append([f"`{BASELINE}` − `{setting}`", str(n), *cells])
    head = ["difference", "n", *(column.title for column in PAIRED)]
    return _table(head, rows) if rows else []


def peak_table(study: Study) -> list[str]:
    """Peak of the mean accuracy curve and accuracy at twice its step, a line a setting."""
    rows = []
    for setting in study.runs:
        if found := peak(study, setting):
            change = shown(found.change, ACCURACY, found.n, bold=True)
            top, later = f"{100 * found.accuracy:.1f}", f"{100 * found.later:.1f}"
            steps = str(found.step), str(found.later_step)
            rows.append([f"`{setting}`", str(found.n), top, steps[0], later, steps[1], change])
    head = ["setting", "n", "peak, %", "at update", "later, %", "at update", "change, points"]
    return _table(head, rows)


def before(study: Study) -> str:
    """What validation found before training, in one line; "" without runs."""
    parts = []
    for title, name in BEFORE.items():
        if value := estimate(rows[0].get(name) for rows in study.all_runs()):
            critic = name == "effect/critic"  # an area, not a share
            text = f"{value.mean:.2f}" if critic else f"{100 * value.mean:.1f} %"
            parts.append(f"{title} {text.replace('-', MINUS)}")
    return ", ".join(parts)


def page(
    study: Study,
    meanings: Mapping[str, str],
    command: str,
    figure: str = "",
    peaks: bool = False,
) -> str:
    """The page of a study in markdown; `figure` is the link to its picture."""
    seeds = ", ".join(map(str, study.seeds())) or "none"
    lines = ["# Study", "", "Written by `launch/study.py` from run folders; do not edit.", ""]
    lines += [f"- `{name}`: {meanings[name]}" for name in study.runs]
    lines += [
        "",
        f"Figures after update {study.steps}: mean over seeds ± half-width of the 95 % t-interval "
        "over n seeds. Points gained are the last validation minus the one before training; "
        "effects and true keys are means over the last third of the updates; "
        f"{ABSENT} is absent (the share of a gain below {100 * SMALLEST_GAIN:.0f} points too).",
        "",
        *main_table(study),
        "",
    ]
    if start := before(study):
        lines += [f"Before training: {start}.", ""]
    if figure:
        lines += [f"![Accuracy by setting, and what each role is worth]({figure})", ""]
    if table := paired_table(study):
        lines += [
            f"Differences from `{BASELINE}`, seed by seed (bold: the interval leaves out 0):",
            "",
            *table,
            "",
        ]
    if peaks:
        lines += [
            "Peak of the mean accuracy, and accuracy at twice that update or, where the run is "
            "shorter, at its end. A peak is picked for being high, so some fall is chance.",
            "",
            *peak_table(study),
            "",
        ]
    if study.unlike:
        lines += [f"Seeds of one setting that are not alike: {'; '.join(study.unlike)}.", ""]
    if study.unfinished:
        lines += [f"Not counted: {'; '.join(study.unfinished)}.", ""]
    lines += [
        f"Runs: {len(study.all_runs())}; seeds: {seeds}; updates of each: {study.steps}; "
        f"{study.wall_s / 3600:.2f} h of run time, {study.cpu_s / 3600:.2f} h of CPU:",
        "",
        f"    {command}",
    ]
    return "\n".join(lines) + "\n"
