"""Studies: statistics by hand, tables from folders, and runs that resume, fail and are stopped."""

import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_jax.config import SCHEMA
from sage_jax.report import study
from sage_jax.report.study import COLUMNS, EFFECTS, Estimate, Study, estimate
from sage_jax.roles import ROLES

ROOT = Path(__file__).parents[1]


def load_launcher():
    spec = importlib.util.spec_from_file_location("study_launcher", ROOT / "launch" / "study.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["study_launcher"] = module
    spec.loader.exec_module(module)
    return module


launcher = load_launcher()

# Stands for sage_jax.main: one update a moment, resumed from metrics.jsonl, stopped by SIGTERM.
RUNNER = """
import json, pathlib, signal, sys, time
flags = dict(arg.removeprefix("--").split("=", 1) for arg in sys.argv[1:])
folder, steps = pathlib.Path(flags["workdir"]), int(flags.get("config.train.steps", 2))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("attempt", " ".join(sys.argv[1:]), flush=True)
plan = json.loads(pathlib.Path(flags["config"]).read_text())
setting = folder.parent.name
if setting in plan.get("fail", ()):
    print("no memory left", file=sys.stderr)
    sys.exit(3)
(folder / "config.json").write_text(json.dumps({"train.steps": {"value": steps}}))
path = folder / "metrics.jsonl"
done = len(path.read_text().splitlines()) if path.exists() else 0
(folder / "started").touch()
deadline = time.monotonic() + 100  # nothing outlives a test that failed
while plan.get("wait_for") and not (folder.parent.parent / plan["wait_for"] / "started").exists():
    time.sleep(0.01)
    if time.monotonic() > deadline:
        sys.exit("the other run did not start")
for step in range(done, steps + 1):
    while plan.get("endless") and not stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    if stopped:
        (folder / "saved").touch()
        sys.exit(143)
    with path.open("a") as file:
        gain = 0.1 * len(setting) * step / steps
        file.write(json.dumps({"step": step, "valid/accuracy": 0.2 + gain}) + "\\n")
"""


@pytest.fixture
def lab(tmp_path):
    """(options, runner) of a study whose runs take a moment; config.json says how they behave."""
    (tmp_path / "runner.py").write_text(RUNNER)
    (tmp_path / "config.json").write_text("{}")
    options = [f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'study'}"]
    return [*options, "--figure="], (sys.executable, str(tmp_path / "runner.py"))


def log(tmp_path, name):
    return (tmp_path / "study" / name / "log").read_text()


def rows(*accuracies, every=10, **more):
    """Validation rows every 10 updates; `more` maps a metric to values of the same rows."""
    made = [{"step": every * i, "valid/accuracy": a} for i, a in enumerate(accuracies)]
    for name, values in more.items():
        for row, value in zip(made, values, strict=True):
            row |= {} if value is None else {name.replace("__", "/"): value}
    return made


def of(runs, steps=20, **more):
    return Study(steps=steps, runs=runs, **more)


# --- statistics


def test_the_quantiles_are_those_of_student():
    for df, quantile in enumerate(study.T95, 1):
        scale = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
        n, h = 2000, quantile / 2000
        density = [scale * (1 + (i * h) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
        half = (
            h / 3 * (density[0] + density[-1] + 4 * sum(density[1::2]) + 2 * sum(density[2:-1:2]))
        )
        assert half == pytest.approx(0.475, abs=3e-6), df


def test_mean_and_interval_by_hand():
    # s = 1, so the half-width is 4.3027 / sqrt(3).
    assert estimate([1, 2, 3]) == (2, pytest.approx(2.48416, abs=1e-4), 3)
    # s = 2, t(1) = 12.7062: 12.7062 * 2 / sqrt(2).
    assert estimate([0, None, 2 * math.sqrt(2)])[1] == pytest.approx(17.9693, abs=1e-3)
    assert estimate([5.0]) == Estimate(5.0, None, 1)
    assert estimate([None, None]) is None
    many = list(range(50))
    assert estimate(many)[1] == pytest.approx(2.0423 * statistics.stdev(many) / math.sqrt(50))


def test_columns_read_first_and_last_rows():
    run = rows(0.3, 0.6, 0.8, effect__planner=[0.0, 0.1, 0.25], time__total=[60, 3, 5])
    assert study.gain("valid/accuracy")(run) == pytest.approx(0.5)
    assert study.late("effect/planner")(run) == 0.25
    six = rows(*[0.1] * 7, effect__planner=[9, 9, 9, 9, 0.1, 0.2, 0.6])
    assert study.late("effect/planner")(six) == pytest.approx(0.3)  # updates 40 to 60 of 60
    assert study.early_share(run) == pytest.approx(0.6)
    assert study.update_seconds(run) == 4  # not the validation before training


def test_what_a_run_lacks_is_absent_not_zero_and_not_stale():
    run = rows(0.3, 0.6, 0.8, effect__planner=[0.2, 0.3, None], valid__accuracy_hard=[None, 0, 1])
    assert study.late("effect/planner")(run) is None
    assert study.gain("valid/accuracy_hard")(run) is None
    assert study.gain("valid/accuracy_sampled")(run) is None
    assert study.update_seconds(run) is None
    assert study.late("effect/planner")([{"step": 0, "effect/planner": 1.0}]) is None


def test_the_share_of_a_gain_that_is_noise_is_absent():
    assert study.early_share(rows(0.3, 0.34, 0.33)) is None
    assert study.early_share(rows(0.3, 0.1, 0.2)) is None
    assert study.early_share(rows(0.3, 0.6, every=20)) is None  # nothing measured at update 10


def test_differences_are_taken_within_seeds():
    full = {0: rows(0.3, 0.9), 1: rows(0.3, 0.7), 2: rows(0.3, 0.8)}
    other = {2: rows(0.3, 0.6), 1: rows(0.3, 0.4), 5: rows(0.3, 0.3)}
    found = study.paired(of({"full": full, "no_solver": other}), "no_solver", study.ACCURACY)
    # 0.3 and 0.2 over the two seeds that both have: mean 0.25, half 12.7062 * 0.0707 / sqrt(2).
    assert found == (pytest.approx(0.25), pytest.approx(0.635310, abs=1e-5), 2)
    assert study.paired(of({"paper": other}), "paper", study.ACCURACY) is None


def test_the_peak_is_that_of_the_mean_and_is_compared_at_twice_its_step():
    runs = {0: rows(0.2, 0.9, 0.6, 0.7, 0.1), 1: rows(0.2, 0.5, 0.9, 0.5, 0.2)}
    found = study.peak(of({"full": runs}, steps=40), "full")
    # Means: 0.2, 0.7, 0.75, 0.6, 0.15: the peak is at 20, twice that is 40.
    assert found[:5] == (2, 20, pytest.approx(0.75), 40, pytest.approx(0.15))
    assert found.change.mean == pytest.approx(-0.6)
    assert found.change.half == pytest.approx(12.7062 * 0.1, abs=1e-5)  # changes -0.5 and -0.7


def test_a_peak_late_at_the_start_or_at_the_end_is_compared_with_the_end():
    def steps(*accuracies):
        found = study.peak(of({"a": {0: rows(*accuracies)}}, steps=30), "a")
        return found.step, found.later_step, found.change and round(found.change.mean, 6)

    assert steps(0.2, 0.5, 0.6, 0.4) == (20, 30, -0.2)
    assert steps(0.6, 0.5, 0.5, 0.4) == (0, 30, -0.2)
    assert steps(0.2, 0.3, 0.4, 0.5) == (30, 30, None)
    assert steps(0.2, 0.5, 0.4, 0.1) == (10, 20, -0.1)
    assert study.peak(of({"a": {0: [{"step": 0}, {"step": 30}]}}), "a") is None


# --- tables


def test_a_cell_shows_sign_interval_and_a_differing_n():
    signed, plain = study.ACCURACY, EFFECTS["effect/critic"]
    assert study.shown(Estimate(-0.123, 0.05, 3), signed, 3) == "−12.3 ± 5.0"
    assert study.shown(Estimate(0.123, 0.05, 2), signed, 3, bold=True) == "**+12.3 ± 5.0** (n=2)"
    assert study.shown(Estimate(0.04, 0.05, 3), signed, 3, bold=True) == "+4.0 ± 5.0"
    assert study.shown(Estimate(0.7, None, 1), plain, 1, bold=True) == "0.70"
    assert study.shown(Estimate(-0.0004, None, 1), signed, 1) == "+0.0"
    assert study.shown(None, signed, 3) == "–"


def test_tables_are_well_formed_and_mark_what_is_absent():
    runs = {"full": {0: rows(0.3, 0.6, 0.8)}, "paper": {0: rows(0.3, 0.5, 0.7), 1: [{"step": 0}]}}
    found = of(runs)
    for table in (study.main_table(found), study.paired_table(found), study.peak_table(found)):
        assert len({line.count("|") for line in table}) == 1, table
    cells = study.main_table(found)[2].strip("| ").split(" | ")
    assert len(cells) == 2 + len(COLUMNS)
    assert cells[:3] == ["`full`", "1", "+50.0"] and cells[3:] == [*"––––––––", "60", "–"]
    assert study.main_table(found)[3].startswith("| `paper` | 2 | +40.0 (n=1) |")
    assert study.paired_table(found)[2] == "| `full` − `paper` | 1 | +10.0 | – | – | – | – |"
    assert study.paired_table(of({"paper": runs["paper"]})) == []


def test_a_figure_before_training_is_the_mean_of_all_runs():
    runs = {"full": {0: rows(0.3, 0.6, effect__critic=[0.5, 0.9])}, "paper": {0: rows(0.5, 0.6)}}
    assert study.before(of(runs)) == "greedy accuracy 40.0 %, Critic effect 0.50"


# --- folders


def write_run(folder, run, steps, cost=None):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run))
    (folder / "config.json").write_text(json.dumps({"train.steps": {"value": steps}}))
    if cost:
        (folder / "cost.json").write_text(json.dumps({"wall_s": cost, "cpu_s": 2 * cost}))


def test_only_finished_runs_count_and_the_others_are_named(tmp_path):
    write_run(tmp_path / "full" / "0", rows(0.3, 0.5, 0.8), 20, cost=1800)
    write_run(tmp_path / "full" / "1", rows(0.3, 0.5), 20, cost=1800)
    found = study.read(tmp_path, ["full", "paper"], [0, 1], None)
    assert found.steps == 20 and {k: list(v) for k, v in found.runs.items()} == {"full": [0]}
    text = study.page(found, {"full": "nothing changed"}, "the command")
    assert "Not counted: full/1 at 10 of 20 updates; paper/0, paper/1 not started." in text
    assert "Runs: 1; seeds: 0; updates of each: 20; 1.00 h of run time, 2.00 h of CPU:" in text
    assert text.endswith("    the command\n")


def test_a_longer_run_is_read_up_to_the_asked_step(tmp_path):
    write_run(tmp_path / "full" / "0", rows(0.3, 0.5, 0.8), 20)
    write_run(tmp_path / "full" / "1", rows(0.3, 0.7), 10)
    with pytest.raises(ValueError, match="different train.steps .*--steps=N"):
        study.read(tmp_path, ["full"], [0, 1], None)
    found = study.read(tmp_path, ["full"], [0, 1], 10)
    assert study.summary(found, "full", study.ACCURACY).mean == pytest.approx(0.3)
    with pytest.raises(ValueError, match="holds no run"):
        study.read(tmp_path / "elsewhere", ["full"], [0], None)


def test_seeds_of_one_setting_that_differ_in_more_are_told(tmp_path, capsys):
    fields = [{"seed": 0}, {"seed": 1, "optim.lr": 0.5}, {"seed": 2, "train.steps": 40}]
    for seed, config in enumerate(fields):
        folder = tmp_path / "full" / str(seed)
        write_run(folder, rows(0.3, 0.5, 0.8), 20)
        recorded = {"train.steps": 20, "optim.lr": 3e-6} | config
        text = json.dumps({name: {"value": value} for name, value in recorded.items()})
        (folder / "config.json").write_text(text)
    write_run(tmp_path / "paper" / "0", rows(0.3, 0.5, 0.8), 20)
    chosen = [f"--workdir={tmp_path}", "--settings=full,paper", "--steps=20", "--figure="]
    assert launcher.main([*chosen, "--table-only"]) == 0
    told = "`full` in optim.lr: 3e-06 (seed 0 2), 0.5 (seed 1)"
    page = (tmp_path / "study.md").read_text()
    assert f"Seeds of one setting that are not alike: {told}.\n" in page
    assert f"WARNING: seeds that are not alike: {told}\n" in capsys.readouterr().err
    assert launcher.main([*chosen, "--seeds=0,2", "--table-only"]) == 0
    assert "not alike" not in (tmp_path / "study.md").read_text()


def test_the_torn_line_of_a_live_run_is_left_out_and_damage_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert study.read_rows(path) == [{"step": 0}, {"step": 1}]
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2: not a JSON row"):
        study.read_rows(path)


# --- running


def test_settings_change_known_fields_and_leave_out_one_role():
    fields = {
        name: dict(override.split("=", 1) for override in setting.overrides)
        for name, setting in launcher.SETTINGS.items()
    }
    assert {field for changes in fields.values() for field in changes} <= SCHEMA.keys()
    assert fields["full"] == {}
    for role in ROLES:
        kept = fields[f"no_{role}"]["method.train_roles"].split(",")
        assert kept == [other for other in ROLES if other != role]
    assert fields["paper"] == {"method.rewards": "paper", "method.advantage": "role_token"}


def test_all_settings_of_one_seed_come_before_the_next_seed(lab):
    options, runner = lab
    options = launcher.parse([*options, "--settings=full,paper", "--seeds=3,1", "--steps=7"])
    plans = launcher.plans(options, runner)
    assert [plan.name for plan in plans] == ["full/3", "paper/3", "full/1", "paper/1"]
    assert plans[1].command[2:] == (
        f"--config={options.config}",
        "--config.method.rewards=paper",
        "--config.method.advantage=role_token",
        "--config.seed=3",
        "--config.train.steps=7",
        f"--workdir={options.workdir}/paper/3",
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--settings=full,no_planer", "unknown setting no_planer; known are full, no_challenger"),
        ("--settings=", "name at least one of full"),
        ("--seeds=0,x", "give integers such as 0,1,2"),
        ("--seeds=-1", "seeds start at 0"),
        ("--steps=0", "whole number from 1 up"),
        ("--config=nowhere.py", "no such file"),
        ("--setting=full", "--setting=full: not an option"),
        ("--config.optim.lr", "changed with --config.a.b=value"),
        ("--figure=a.jpg", "ends in .svg or .png"),
    ],
)
def test_a_wrong_option_is_told_with_its_remedy(lab, capsys, argument, message):
    with pytest.raises(SystemExit) as stop:
        launcher.parse([*lab[0], argument])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_study_runs_resumes_grows_and_writes_the_same_page_from_its_folders(lab, tmp_path):
    options, runner = lab
    page = tmp_path / "study" / "study.md"
    chosen = [*options, "--settings=full,paper", "--seeds=0,1", "--config.optim.lr=1e-4"]
    assert launcher.main(chosen, runner) == 0
    assert "--config.optim.lr=1e-4" in log(tmp_path, "paper/1")
    first = page.read_text()
    assert "`full` | 2 | +40.0 ± 0.0" in first and "`paper` | 2 | +50.0" in first
    assert "--settings=full,paper --seeds=0,1 --figure= --config.optim.lr=1e-4" in first

    page.unlink()
    assert launcher.main([*chosen, "--table-only"], runner) == 0
    assert page.read_text() == first
    assert log(tmp_path, "full/0").count("attempt") == 1

    spent = (tmp_path / "study" / "full" / "0" / "cost.json").read_text()
    assert json.loads(spent)["cpu_s"] > 0
    assert launcher.main(chosen, runner) == 0  # nothing was left to do
    assert log(tmp_path, "full/0").count("attempt") == 2
    assert (tmp_path / "study" / "full" / "0" / "cost.json").read_text() == spent
    assert page.read_text() == first

    assert launcher.main([*chosen, "--steps=4", "--peak"], runner) == 0
    assert "updates of each: 4" in page.read_text() and "Peak of the mean" in page.read_text()
    steps = [row["step"] for row in study.read_rows(tmp_path / "study/full/0/metrics.jsonl")]
    assert steps == [0, 1, 2, 3, 4]


def test_a_failed_run_is_told_with_its_log_and_the_rest_goes_on(lab, tmp_path, capsys):
    options, runner = lab
    (tmp_path / "config.json").write_text('{"fail": ["no_critic"]}')
    chosen = [*options, "--settings=full,no_critic,paper", "--seeds=0"]
    assert launcher.main(chosen, runner) == 1
    told = capsys.readouterr()
    assert "no_critic/0: FAILED (exit 3)" in told.err and "no memory left" in told.err
    assert told.err.rstrip().endswith("failed: no_critic/0")
    assert "paper/0: done, accuracy 0.200 -> 0.700" in told.out
    page = (tmp_path / "study" / "study.md").read_text()
    assert "`paper` | 1" in page and "no_critic/0 not started" in page
    assert launcher.main(chosen, runner) == 1
    assert capsys.readouterr().err.count("no memory left") == 1  # the earlier attempt is not told


def test_jobs_run_at_the_same_time(lab, tmp_path):
    options, runner = lab
    # The first waits for the second to have begun: one at a time, it fails.
    (tmp_path / "config.json").write_text('{"wait_for": "paper/0"}')
    options = launcher.parse([*options, "--settings=full,paper", "--seeds=0", "--jobs=2"])
    with launcher.Signals() as signals:
        assert launcher.carry_out(launcher.plans(options, runner), 2, signals) == ([], False)


def test_a_signal_reaches_the_runs_and_is_waited_for(lab, tmp_path):
    options, runner = lab
    (tmp_path / "config.json").write_text('{"endless": true}')
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('s', {str(ROOT / 'launch/study.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['s'] = module\n"
        "spec.loader.exec_module(module)\n"
        f"sys.exit(module.main(sys.argv[1:], {runner!r}))\n"
    )
    command = [sys.executable, "-c", program, *options, "--settings=full,paper", "--seeds=0"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    started = tmp_path / "study" / "full" / "0" / "started"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        deadline = time.monotonic() + 90
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate()
    assert process.returncode == 143, told
    assert started.with_name("saved").exists()
    assert not (tmp_path / "study" / "paper").exists()
    assert "FAILED" not in told and "the same command goes on" in told
