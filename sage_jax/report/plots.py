"""Figures of runs and studies, drawn from metrics.jsonl with matplotlib (the `plots` extra).

python -m sage_jax.report.plots RUN_DIR... --output=FILE.svg|png
"""

import argparse
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_jax.core.places import unusable
from sage_jax.report import study as studies
from sage_jax.report.settings import Group, Run, group, read_config
from sage_jax.report.study import BASELINE, EFFECTS, Rows, Study, curve, read_rows, summary

if TYPE_CHECKING:  # an extra: imported where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
SMOOTHED = 5  # updates in the moving mean of figures that every update has

# Okabe and Ito's palette, safe for colour-blind readers; grey stands for its yellow, which is too
# faint for lines.
BLACK, ORANGE, SKY, GREEN = "#000000", "#e69f00", "#56b4e9", "#009e73"
BLUE, RED, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#888888"
OTHERS = (ORANGE, GREEN, BLUE, RED, PURPLE, SKY, GREY)
DASHES = ("-", "--", "-.", ":")

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "svg.hashsalt": "sage_jax",  # the same figures give the same file
}

# Panels of a run's figure: (title, unit, {label: (metric, colour)}, scale, moving mean).
ACCURACIES = {
    "greedy": ("valid/accuracy", BLACK),
    "sampled": ("valid/accuracy_sampled", BLUE),
    "planned": ("valid/accuracy_planned", ORANGE),
    "hard half": ("valid/accuracy_hard", RED),
}
TASKS = {"difficulty": ("difficulty", RED), "solve rate": ("solve_rate", BLUE)}
# Effects with a panel in a study's figure: one a role.
PANELS = ("effect/planner", "effect/critic", "effect/challenger_yield")
# Panels in which settings are compared: title: (metric, unit, scale, moving mean).
COMPARED = {
    "Solver alone, greedy": ("valid/accuracy", "correct (%)", 100, 1),
    "Planner, gate and Solver": ("valid/accuracy_planned", "correct (%)", 100, 1),
    "Difficulty of proposals": ("difficulty", "share (%)", 100, SMOOTHED),
    "Task pool": ("pool/size", "tasks in the pool", 1, 1),
}
GATES = {"questions": ("gate/question_pass", PURPLE), "plans": ("gate/plan_pass", GREEN)}


def check_output(path: Path) -> None:
    """ValueError, naming the remedy, when no figure can be drawn into this file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r}: a figure ends in {' or '.join(SUFFIXES)}")
    if reason := unusable(path, folder=False):
        raise ValueError(f"{str(path)!r}: {reason}; choose another file")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('figures need matplotlib: pip install "sage_jax[plots]"')


def run_figure(workdirs: Sequence[Path], output: Path) -> list[str]:
    """Accuracy, difficulty, pool and gates over the updates of one run, or of runs that differ in
    their seed; runs of different settings are compared in fewer figures, a colour a setting.

    Returns what was drawn, in lines. ValueError for an unusable output or a folder without metrics.
    """
    check_output(output)
    if lacking := [str(folder) for folder in workdirs if not (folder / "metrics.jsonl").is_file()]:
        raise ValueError(f"{', '.join(lacking)}: no metrics.jsonl there; give the folder of a run")
    places = [folder.resolve() for folder in workdirs]
    if twice := [str(f) for f, p in zip(workdirs, places, strict=True) if places.count(p) > 1]:
        raise ValueError(f"{', '.join(twice)}: the same run; give each once")
    found = [Run(f, read_rows(f / "metrics.jsonl"), read_config(f)) for f in workdirs]
    begun = [run for run in found if run.rows]
    if not begun:
        raise ValueError(f"{', '.join(map(str, workdirs))}: no step is finished yet")
    groups = group(begun)
    if len(groups) == 1:
        _seeds_figure(groups[0], output)
    else:
        _compared_figure(groups, output)
    told = [f"{one.settings or 'drawn'}: {_listed(one.runs)}, {one.count}" for one in groups]
    told += [f"not drawn, no step is finished yet: {run.folder}" for run in found if not run.rows]
    return [*told, f"wrote {output}"]


def _listed(runs: Sequence[Run]) -> str:
    return ", ".join(f"{run.folder} ({int(run.rows[-1]['step'])} updates)" for run in runs)


def _as_far(runs: Sequence[Rows]) -> str:
    """How far a mean over the runs goes, where some go on after it."""
    ends = sorted(int(rows[-1]["step"]) for rows in runs)
    return f" up to update {ends[0]}, which all have reached" if ends[0] < ends[-1] else ""


def _seeds_figure(alike: Group, output: Path) -> None:
    """Runs of the same settings: every accuracy, the curriculum, the pool and the gates."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = [run.rows for run in alike.runs]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.4), layout="constrained")
        (accuracy, tasks), (pool, gates) = figure.subplots(2, 2)
        labels = [
            _panel(accuracy, runs, ACCURACIES, "Held-out accuracy", "correct (%)", smooth=1),
            _panel(tasks, runs, TASKS, "Curriculum", "share (%)", smooth=SMOOTHED),
            _panel(gates, runs, GATES, "Critic's gates", "let through (%)", smooth=SMOOTHED),
        ]
        _pool_panel(pool, runs)
        for axes in (pool, gates):
            axes.set_xlabel("updates")
        means = f"mean of {alike.count}{_as_far(runs)}" if len(runs) > 1 else "the run"
        figure.supxlabel(
            f"thick: {means}, right column over {SMOOTHED} updates; thin: "
            + (f"each {alike.count.split()[1][:-1]}" if len(runs) > 1 else "every update"),
            fontsize=8,
            color="#555555",
        )
        figure.draw_without_rendering()
        for axes, ends in zip((accuracy, tasks, gates), labels, strict=True):
            _label_ends(axes, ends)
        _save(figure, output)


def _panel(
    axes: "Axes",
    runs: Sequence[Rows],
    lines: Mapping[str, tuple[str, str]],
    title: str,
    unit: str,
    smooth: int,
) -> dict[str, tuple[float, str]]:
    """Shares of 0 to 100 %; returns {label: (height of its end, colour)}."""
    ends = {}
    for label, (name, colour) in lines.items():
        points = {step: _scaled(values) for step, values in curve(runs, name).items()}
        if not points:
            continue
        steps = list(points)
        if len(runs) > 1 or smooth > 1:
            _thin(axes, runs, name, colour, 100)
        means = _moving([statistics.fmean(values) for values in points.values()], smooth)
        marker = "o" if smooth == 1 else None
        axes.plot(
            steps, means, color=colour, linewidth=2, marker=marker, markersize=3.5, clip_on=False
        )
        ends[label] = (means[-1], colour)
    axes.set(title=title, ylabel=unit, ylim=(0, 100))
    return ends


def _thin(axes: "Axes", runs: Sequence[Rows], name: str, colour: str, scale: float) -> None:
    """Each run by itself, to its own end."""
    for rows in runs:
        points = {row["step"]: scale * row[name] for row in rows if name in row}
        axes.plot(list(points), list(points.values()), color=colour, linewidth=0.6, alpha=0.35)


def _compared_figure(groups: Sequence[Group], output: Path) -> None:
    """Runs of different settings: the same figures of each, in its colour and dashes."""
    import matplotlib
    from matplotlib.figure import Figure

    looks = list(itertools.product(DASHES, (BLACK, *OTHERS)))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.4 + 0.2 * len(groups)), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, (title, (name, unit, scale, smooth)) in zip(
            panels, COMPARED.items(), strict=True
        ):
            for number, one in enumerate(groups):
                dashes, colour = looks[number % len(looks)]
                runs = [run.rows for run in one.runs]
                points = curve(runs, name)
                values = [scale * statistics.fmean(of_all) for of_all in points.values()]
                if len(runs) > 1 or smooth > 1:
                    _thin(axes, runs, name, colour, scale)
                label = f"{one.label} ({one.count}{_as_far(runs)})"
                look = {"color": colour, "linestyle": dashes, "linewidth": 1.8, "label": label}
                axes.plot(list(points), _moving(values, smooth), **look)
            axes.set(title=title, ylabel=unit, xlabel="updates")
            axes.set_ylim(bottom=0)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False)
        figure.suptitle("thick: mean of a setting; thin: each run to its end", fontsize=8)
        _save(figure, output)


def _pool_panel(axes: "Axes", runs: Sequence[Rows]) -> None:
    """Pool size as a line; tasks admitted in each update as bars on an axis of their own."""
    admitted = {step: statistics.fmean(v) for step, v in curve(runs, "pool/admitted").items()}
    if admitted:
        bars = axes.twinx()
        bars.bar(list(admitted), list(admitted.values()), width=0.8, color=SKY, alpha=0.6)
        most = max(*admitted.values(), 1)
        bars.set_ylim(0, 3 * most)  # the lower third: the line stays clear
        bars.set_yticks(range(0, int(most) + 1, max(int(most) // 2, 1)))
        bars.grid(False)
        bars.set_ylabel("admitted an update", color=BLUE, loc="bottom")
        bars.tick_params(axis="y", colors=BLUE)
        axes.set_zorder(bars.get_zorder() + 1)
        axes.patch.set_visible(False)
    sizes = curve(runs, "pool/size")
    _thin(axes, runs, "pool/size", BLACK, 1)
    axes.plot(list(sizes), [statistics.fmean(v) for v in sizes.values()], color=BLACK, linewidth=2)
    axes.grid(False)
    axes.set(title="Task pool", ylabel="tasks in the pool")
    axes.set_ylim(bottom=0)


def study_figure(study: Study, output: Path) -> None:
    """Accuracy over updates and the three effects, by setting. ValueError for a bad output."""
    check_output(output)
    import matplotlib
    from matplotlib.figure import Figure

    looks = _looks(study)
    effects = [name for name in PANELS if any(summary(study, s, EFFECTS[name]) for s in study.runs)]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 6.2 if effects else 3.6), layout="constrained")
        ratios = (3, 2) if effects else (1,)
        parts = figure.subfigures(len(ratios), 1, squeeze=False, height_ratios=ratios)[:, 0]
        curves = parts[0].subplots()
        ends = _study_curves(curves, study, looks)
        if effects:
            panels = parts[1].subplots(1, len(effects), sharey=True, squeeze=False)[0]
            for axes, name in zip(panels, effects, strict=True):
                _effect_panel(axes, study, name, looks)
        figure.draw_without_rendering()
        _label_ends(curves, ends)
        _save(figure, output)


def _looks(study: Study) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each setting; the baseline is black, and colours never repeat with the
    same dashes."""
    looks, used = {}, 0
    for setting in study.runs:
        if setting == BASELINE:
            looks[setting] = (BLACK, "-")
        else:
            round_, place = divmod(used, len(OTHERS))
            looks[setting] = (OTHERS[place], DASHES[round_ % len(DASHES)])
            used += 1
    return looks


def _study_curves(
    axes: "Axes", study: Study, looks: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[float, str]]:
    ends = {}
    for setting, (colour, dashes) in reversed(list(looks.items())):  # the first is drawn on top
        points = curve(study.runs[setting].values(), "valid/accuracy")
        if not points:
            continue
        values = [_scaled(values) for values in points.values()]
        steps, means = list(points), [statistics.fmean(v) for v in values]
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        width = 2.6 if setting == BASELINE else 1.6
        axes.plot(steps, means, color=colour, linestyle=dashes, linewidth=width, clip_on=False)
        ends[setting] = (means[-1], colour)
    title = "Held-out accuracy of the Solver alone, greedy (line: mean, band: range of the seeds)"
    axes.set(title=title, xlabel="updates", ylabel="correct (%)")
    return ends


def _effect_panel(
    axes: "Axes", study: Study, name: str, looks: Mapping[str, tuple[str, str]]
) -> None:
    """Bars from the value that means no effect; dotted: before training."""
    column = EFFECTS[name]
    zero = 0.5 if name == "effect/critic" else 0.0  # an area of 0.5 is a coin's
    for place, (setting, (colour, _)) in enumerate(looks.items()):
        if value := summary(study, setting, column):
            mean, half = value.mean * column.scale, (value.half or 0) * column.scale
            axes.barh(place, mean - zero, left=zero, height=0.7, color=colour, alpha=0.75)
            for colour, width in (("white", 3), ("#333333", 1.2)):  # seen on dark bars too
                axes.errorbar(
                    mean, place, xerr=half, color=colour, linewidth=width, capsize=2.5, zorder=3
                )
    if start := studies.estimate(rows[0].get(name) for rows in study.all_runs()):
        at = start.mean * column.scale
        axes.axvline(at, color="white", linewidth=2.5)
        axes.axvline(at, color="#333333", linestyle=":", linewidth=1.4)
    axes.axvline(zero, color="#333333", linewidth=0.8)
    axes.set_yticks(range(len(looks)), list(looks))
    axes.set_ylim(len(looks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    title, _, unit = column.title.partition(", ")
    axes.set(title=title, xlabel=f"{unit} (dotted: before training)")


def _scaled(values: Sequence[float]) -> list[float]:
    return [100 * value for value in values]


def _moving(values: Sequence[float], width: int) -> list[float]:
    """Centred moving mean, over what there is at the ends."""
    half = width // 2
    return [statistics.fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


def _label_ends(axes: "Axes", ends: Mapping[str, tuple[float, str]]) -> None:
    """Name each line right of its end, in its colour, moved apart where they would meet.

    The figure must be laid out: how far apart depends on how tall the axes came out."""
    low, high = axes.get_ylim()
    # bbox is in pixels; a figure that was not saved yet has the style's default resolution.
    points = axes.bbox.height * 72 / axes.figure.dpi
    gap = 11 * (high - low) / points
    order = sorted(ends, key=lambda label: ends[label][0])
    heights = spread([ends[label][0] for label in order], gap, low, high)
    for label, height in zip(order, heights, strict=True):
        axes.annotate(
            label,
            xy=(1, height),
            xycoords=axes.get_yaxis_transform(),
            xytext=(3, 0),
            textcoords="offset points",
            color=ends[label][1],
            va="center",
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising heights moved as little as possible (least squares) to be `gap` apart, within low
    and high as far as they fit."""
    # Without the gaps it is isotonic regression: neighbours in the wrong order share their mean.
    blocks: list[list[float]] = []
    for i, height in enumerate(heights):
        blocks.append([height - i * gap])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    bases = [statistics.fmean(block) for block in blocks for _ in block]
    top = max(high - (len(heights) - 1) * gap, low)
    return [min(max(base, low), top) + i * gap for i, base in enumerate(bases)]


def _save(figure: "Figure", output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if output.suffix == ".svg" else {}
    figure.savefig(output, metadata=metadata)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 drawn, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m sage_jax.report.plots", allow_abbrev=False)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="of each run")
    parser.add_argument("--output", type=Path, required=True, help="an .svg or .png file")
    options = parser.parse_args(argv)
    try:
        drawn = run_figure(options.runs, options.output)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
