"""Settings x seeds of one config, as one table and one figure: what each part is worth.

    python launch/study.py --config=configs/tiny.py --workdir=runs/study --jobs=1

Each run lives in WORKDIR/SETTING/SEED (its output in `log`) and is made by `sage_jax.main`, which
continues what is there: the same command goes on after a stop, and adds settings, seeds or updates
to a study. `--table-only` writes the page again from the folders. `--config.a.b=value` changes a
field in every run. The figure needs the `plots` extra; `--figure=` leaves it out.

Exit: 0 done, 1 a run failed (the others are done), 2 usage, 143 stopped on a signal.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sage_jax.core.places import unusable
from sage_jax.report import plots, settings, study
from sage_jax.roles import ROLES
from sage_jax.spelling import hint

RUNNER = (sys.executable, "-m", "sage_jax.main")
STOPPED = 143
STOP_CODES = (STOPPED, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)
POLL_S = 0.1
PAGE, FIGURE = "study.md", "study.svg"
SHOWN_LINES = 8  # of the log of a failed run


class Setting(NamedTuple):
    """What a setting changes in the config, and what that means."""

    overrides: tuple[str, ...]
    meaning: str


def _without(role: str) -> Setting:
    others = ",".join(name for name in ROLES if name != role)
    return Setting((f"method.train_roles={others}",), f"the {role.title()}'s rows are not trained")


SETTINGS = {
    "full": Setting((), "nothing changed"),
    **{f"no_{role}": _without(role) for role in ROLES},
    "paper": Setting(
        ("method.rewards=paper", "method.advantage=role_token"), "the published rewards"
    ),
    "role_token": Setting(
        ("method.advantage=role_token",), "advantages whitened over a role's tokens"
    ),
    "role_sequence": Setting(
        ("method.advantage=role_sequence",), "advantages whitened over a role's responses"
    ),
}


@dataclass(frozen=True)
class Plan:
    """One run: its name SETTING/SEED, its folder and its command."""

    name: str
    folder: Path
    command: tuple[str, ...]


class Live(NamedTuple):
    """A run in progress."""

    plan: Plan
    process: subprocess.Popen
    started: float
    log_start: int  # where this attempt begins in the log
    step_before: int


class Signals:
    """Ctrl-C and SIGTERM while it is entered: kept, in order of arrival, to be passed on."""

    def __init__(self):
        self.waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._keep)
        return self

    def _keep(self, number: int, frame) -> None:
        self.waiting.append(number)

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)


def plans(options: argparse.Namespace, runner: Sequence[str] = RUNNER) -> list[Plan]:
    """All runs, all settings of one seed before the next seed."""
    made = []
    for seed in options.seeds:
        for name in options.settings:
            folder = options.workdir / name / str(seed)
            fields = [*options.fields, *SETTINGS[name].overrides, f"seed={seed}"]
            if options.steps:
                fields.append(f"train.steps={options.steps}")
            flags = [f"--config.{field}" for field in fields]
            command = (*runner, f"--config={options.config}", *flags, f"--workdir={folder}")
            made.append(Plan(f"{name}/{seed}", folder, command))
    return made


def carry_out(todo: Sequence[Plan], jobs: int, signals: Signals) -> tuple[list[str], bool]:
    """Run the plans, `jobs` at a time; returns the names of those that failed, and whether a
    signal stopped the rest. A signal is passed on, and what runs is waited for."""
    queue = iter(enumerate(todo, 1))
    failed: list[str] = []
    live: list[Live] = []
    stopped = False
    try:
        while True:
            while signals.waiting:
                number, stopped = signals.waiting.pop(0), True
                print(f"stopping, once saved: {', '.join(run.plan.name for run in live)}")
                for run in live:
                    os.kill(run.process.pid, number)
            while not stopped and len(live) < jobs and (item := next(queue, None)):
                print(f"{item[1].name}: started ({item[0]} of {len(todo)})", flush=True)
                live.append(_start(item[1]))
            if not live:
                return failed, stopped
            time.sleep(POLL_S)
            for run, code in list(_ended(live)):
                live.remove(run)
                if code == 0:
                    print(f"{run.plan.name}: done, {_accuracies(run.plan.folder)}", flush=True)
                elif not (stopped and code in STOP_CODES):
                    failed.append(run.plan.name)
                    print(_failure(run, code), file=sys.stderr, flush=True)
    finally:
        for run in live:
            run.process.terminate()
        for run in live:
            run.process.wait()


def _start(plan: Plan) -> Live:
    plan.folder.mkdir(parents=True, exist_ok=True)
    with (plan.folder / "log").open("ab") as log:
        # Before the run can write: both would move.
        log_start, step = log.tell(), _last_step(plan.folder)
        # A group of its own: Ctrl-C in the terminal reaches this process only, which passes it on.
        process = subprocess.Popen(
            plan.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        return Live(plan, process, time.monotonic(), log_start, step)


def _ended(live: list[Live]) -> Iterator[tuple[Live, int]]:
    """Runs that are over, with their exit codes."""
    for run in live:
        # Not Popen.poll: only wait4 gives the CPU time of one child.
        pid, status, usage = os.wait4(run.process.pid, os.WNOHANG)
        if pid:
            run.process.returncode = os.waitstatus_to_exitcode(status)
            if _last_step(run.plan.folder) > run.step_before:
                wall = time.monotonic() - run.started
                _add_cost(run.plan.folder, wall, usage.ru_utime + usage.ru_stime)
            yield run, run.process.returncode


def _add_cost(folder: Path, wall_s: float, cpu_s: float) -> None:
    cost = study.cost(folder)
    cost = {"wall_s": cost["wall_s"] + wall_s, "cpu_s": cost["cpu_s"] + cpu_s}
    temporary = folder / "cost.json.new"
    temporary.write_text(json.dumps(cost) + "\n")
    temporary.replace(folder / "cost.json")


def _last_step(folder: Path) -> int:
    """The run's newest row, -1 without one; a damaged file is for the run itself to report."""
    try:
        rows = study.read_rows(folder / "metrics.jsonl")
    except (OSError, ValueError):
        return -1
    return int(rows[-1]["step"]) if rows else -1


def _accuracies(folder: Path) -> str:
    rows = study.read_rows(folder / "metrics.jsonl")
    values = [row["valid/accuracy"] for row in rows if "valid/accuracy" in row]
    return f"accuracy {values[0]:.3f} -> {values[-1]:.3f}" if values else "without an accuracy"


def _failure(run: Live, code: int) -> str:
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    with (run.plan.folder / "log").open("rb") as log:
        log.seek(run.log_start)
        lines = log.read().decode(errors="replace").splitlines()[-SHOWN_LINES:]
    told = "".join(f"\n    {line}" for line in lines)
    return f"{run.plan.name}: FAILED ({how}); the end of {run.plan.folder / 'log'}:{told}"


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name for name in text.split(",") if name))
    if unknown := [name for name in names if name not in SETTINGS]:
        raise argparse.ArgumentTypeError(
            f"unknown setting {', '.join(unknown)}; known are {', '.join(SETTINGS)}"
            + "".join(hint(name, SETTINGS) for name in unknown)
        )
    if not names:
        raise argparse.ArgumentTypeError(f"name at least one of {', '.join(SETTINGS)}")
    return names


def _seeds(text: str) -> list[int]:
    try:
        seeds = list(dict.fromkeys(int(seed) for seed in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give integers such as 0,1,2") from error
    if min(seeds) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: seeds start at 0")
    return seeds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 1 up")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; `fields` holds a.b=value of every --config.a.b=value. Exits 2 on bad ones."""
    parser = argparse.ArgumentParser(prog="study.py", allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.py"))
    parser.add_argument("--workdir", type=Path, default=Path("runs/study"))
    parser.add_argument("--settings", type=_names, default=list(SETTINGS), help="default: all")
    parser.add_argument("--seeds", type=_seeds, default=[0, 1, 2])
    parser.add_argument("--steps", type=_count, help="updates; default: the config's train.steps")
    parser.add_argument("--jobs", type=_count, default=1, help="runs at the same time")
    parser.add_argument("--peak", action="store_true", help="add the table of peaks (drift)")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("--output", type=Path, help="the page; default: WORKDIR/study.md")
    parser.add_argument("--figure", help="svg or png, empty for none; default: WORKDIR/study.svg")
    options, rest = parser.parse_known_args(argv)
    options.fields = [arg.removeprefix("--config.") for arg in rest]
    if wrong := [arg for arg in rest if not arg.startswith("--config.") or "=" not in arg]:
        parser.error(f"{wrong[0]}: not an option; a field is changed with --config.a.b=value")
    if not options.table_only and not options.config.is_file():
        parser.error(f"--config={options.config}: no such file")
    options.output = options.output or options.workdir / PAGE
    if reason := unusable(options.output, folder=False):
        parser.error(f"--output={options.output}: {reason}")
    if options.figure is None:
        options.figure = str(options.workdir / FIGURE)
    if options.figure:
        try:
            plots.check_output(Path(options.figure))
        except ValueError as error:
            parser.error(f"--figure: {error} (or leave the figure out with --figure=)")
    return options


def command_line(options: argparse.Namespace) -> str:
    """The command that makes this page, without what does not change it."""
    parts = ["python launch/study.py", f"--config={options.config}", f"--workdir={options.workdir}"]
    parts.append(f"--settings={','.join(options.settings)}")
    parts.append(f"--seeds={','.join(map(str, options.seeds))}")
    if options.steps:
        parts.append(f"--steps={options.steps}")
    parts += ["--peak"] * options.peak
    if options.output != options.workdir / PAGE:
        parts.append(f"--output={options.output}")
    if options.figure != str(options.workdir / FIGURE):
        parts.append(f"--figure={options.figure}")
    parts += [f"--config.{field}" for field in options.fields]
    return " ".join([parts[0], *map(shlex.quote, parts[1:])])


def write_page(options: argparse.Namespace) -> None:
    """Table and figure from the run folders. ValueError when they hold nothing to show."""
    found = study.read(options.workdir, options.settings, options.seeds, options.steps)
    found = replace(found, unlike=settings.unlike(found, options.workdir))
    for line in found.unlike:
        print(f"WARNING: seeds that are not alike: {line}", file=sys.stderr)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    link = ""
    if options.figure and found.runs:
        plots.study_figure(found, Path(options.figure))
        link = os.path.relpath(options.figure, options.output.parent)
    meanings = {name: setting.meaning for name, setting in SETTINGS.items()}
    text = study.page(found, meanings, command_line(options), link, options.peak)
    options.output.write_text(text, encoding="utf-8")
    print(f"{len(found.all_runs())} finished runs in {options.output}", flush=True)


def main(argv: Sequence[str] | None = None, runner: Sequence[str] = RUNNER) -> int:
    """Exit code; see the top of this file."""
    options = parse(argv)
    failed: list[str] = []
    if not options.table_only:
        with Signals() as signals:
            failed, stopped = carry_out(plans(options, runner), options.jobs, signals)
        if stopped:
            print("stopped; the same command goes on", file=sys.stderr)
            return STOPPED
    try:
        write_page(options)
    except ValueError as error:
        print(f"study.py: {error}", file=sys.stderr)
        return 1 if failed else 2
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
