"""Figures: drawn from whatever metrics a run has, the same each time, labels apart."""

import json
import struct
from pathlib import Path

import pytest

from sage_jax import config as schema
from sage_jax.report import plots
from sage_jax.report.settings import Run, group
from sage_jax.report.study import Study

ALL = {
    "valid/accuracy": 0.3,
    "valid/accuracy_sampled": 0.2,
    "valid/accuracy_planned": 0.4,
    "valid/accuracy_hard": 0.1,
    "difficulty": 0.5,
    "solve_rate": 0.4,
    "pool/size": 500,
    "pool/admitted": 4,
    "gate/question_pass": 0.6,
    "gate/plan_pass": 0.8,
    "effect/planner": 0.1,
    "effect/critic": 0.7,
    "effect/challenger_yield": 0.5,
}


def rows(seed=0, steps=6, without=()):
    values = {name: value for name, value in ALL.items() if name not in without}
    return [
        {
            "step": step,
            **{name: value * (1 + 0.05 * step + 0.01 * seed) for name, value in values.items()},
        }
        for step in range(steps + 1)
    ]


def run_folder(folder: Path, config=None, **changes) -> Path:
    folder.mkdir()
    if config is not None:
        values = schema.flatten(schema.base()) | config
        recorded = {name: {"value": value, "source": "file"} for name, value in values.items()}
        (folder / "config.json").write_text(json.dumps(recorded))
    text = "".join(json.dumps(row) + "\n" for row in rows(**changes))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def texts(path: Path) -> str:
    """Letters are drawn as paths; the file names each text in a comment."""
    return path.read_text(encoding="utf-8")


def test_a_run_is_drawn_with_its_lines_named(tmp_path):
    output = tmp_path / "new" / "run.svg"
    assert plots.main([str(run_folder(tmp_path / "a")), f"--output={output}"]) == 0
    for label in ("greedy", "sampled", "planned", "hard half", "difficulty", "plans", "questions"):
        assert f"<!-- {label} -->" in texts(output)
    assert "<!-- thick: the run" in texts(output)


def test_metrics_that_a_run_lacks_are_left_out(tmp_path):
    lacking = ("valid/accuracy_hard", "pool/admitted", "gate/plan_pass", "difficulty")
    folder = run_folder(tmp_path / "a", without=lacking)
    plots.run_figure([folder], tmp_path / "run.svg")
    drawn = texts(tmp_path / "run.svg")
    assert "<!-- greedy -->" in drawn and "<!-- questions -->" in drawn
    for label in ("hard half", "admitted an update", "plans", "difficulty"):
        assert f"<!-- {label} -->" not in drawn


def test_a_run_that_has_only_begun_is_drawn(tmp_path):
    folder = run_folder(tmp_path / "a", steps=0, without=[n for n in ALL if "valid" not in n])
    plots.run_figure([folder], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5000


@pytest.fixture
def drawn(monkeypatch):
    """Every line of a figure that is drawn: (label, steps, values)."""
    from matplotlib.axes import Axes

    lines, real = [], Axes.plot

    def plot(self, steps, values, **look):
        lines.append((look.get("label", ""), list(steps), list(values)))
        return real(self, steps, values, **look)

    monkeypatch.setattr(Axes, "plot", plot)
    return lines


def test_seeds_of_different_length_share_a_mean_and_each_goes_to_its_end(tmp_path, drawn):
    folders = [run_folder(tmp_path / f"s{i}", {"seed": i}, seed=i, steps=4 + i) for i in range(3)]
    told = plots.run_figure(folders, tmp_path / "seeds.svg")
    said = "thick: mean of 3 seeds up to update 4, which all have reached, right column"
    assert f"<!-- {said}" in texts(tmp_path / "seeds.svg")
    ends = {max(steps) for _, steps, _ in drawn}
    assert ends == {4, 5, 6}
    assert (
        told[0]
        == "drawn: "
        + ", ".join(f"{tmp_path}/s{i} ({4 + i} updates)" for i in range(3))
        + ", 3 seeds"
    )
    assert told[1:] == [f"wrote {tmp_path}/seeds.svg"]


def test_runs_that_may_be_of_one_seed_are_called_runs(tmp_path):
    for name, configs in (("unknown", (None, None)), ("same", ({"seed": 1}, {"seed": 1}))):
        folders = [run_folder(tmp_path / f"{name}{i}", c) for i, c in enumerate(configs)]
        plots.run_figure(folders, tmp_path / f"{name}.svg")
        drawn = texts(tmp_path / f"{name}.svg")
        assert "<!-- thick: mean of 2 runs, right" in drawn and "thin: each run -->" in drawn


def test_runs_of_different_settings_and_lengths_are_told_apart_and_drawn_whole(tmp_path, drawn):
    robust = {"method.rewards": "robust", "train.steps": 9}
    folders = [
        run_folder(tmp_path / "a", {"seed": 0, "train.steps": 4}, steps=4),
        run_folder(tmp_path / "b", {"seed": 1, "train.steps": 4}, steps=3),
        run_folder(tmp_path / "c", robust | {"seed": 0}, steps=9),
    ]
    told = plots.run_figure(folders, tmp_path / "all.svg")
    paper = "train.steps=4, method.rewards=paper"
    other = "train.steps=9, method.rewards=robust"
    assert told[:2] == [
        f"{paper}: {tmp_path}/a (4 updates), {tmp_path}/b (3 updates), 2 seeds",
        f"{other}: {tmp_path}/c (9 updates), 1 seed",
    ]
    for label in (f"{paper} (2 seeds up to update 3, which all have reached)", f"{other} (1 seed)"):
        assert f"<!-- {label} -->" in texts(tmp_path / "all.svg")
    ends = {label.split(" (")[0]: max(steps) for label, steps, _ in drawn if label}
    assert ends == {paper: 3, other: 9}
    assert {max(steps) for label, steps, _ in drawn if not label} == {3, 4, 9}  # thin


def test_only_what_figures_depend_on_tells_runs_apart():
    def runs(**changes):
        config = {name: field.default for name, field in schema.SCHEMA.items()}
        fields = {name.replace("__", "."): value for name, value in changes.items()}
        both = (config, config | fields)
        return [Run(Path(str(i)), rows(), c) for i, c in enumerate(both)]

    for same in ({}, {"seed": 3}, {"checkpoint__every": 7}, {"report__quiet": True}):
        assert [one.label for one in group(runs(**same))] == [""]
    assert [one.label for one in group(runs(optim__lr=0.5))] == ["optim.lr=3e-06", "optim.lr=0.5"]
    many = {"optim__lr": 0.5, "method__alpha": 0.1, "method__beta": 0.2, "train__steps": 7}
    assert [one.label.split(" and ")[1] for one in group(runs(**many))] == ["1 more"] * 2
    # What every run of a setting has in common with it comes last.
    twins = runs(method__rewards="robust", method__advantage="grouped")
    third = runs(method__train_roles=("solver",))[1]
    named = [Run(Path(str(i)), run.rows, run.config) for i, run in enumerate([*twins, third])]
    assert group(named)[1].settings == (
        "method.rewards=robust, method.train_roles=challenger,planner,solver,critic, "
        "method.advantage=grouped"
    )
    # Long values that end alike, and lists.
    long = {"valid__path": "/a" + "/x" * 40}, {"valid__path": "/b" + "/x" * 40}
    pair = [runs(**x)[1] for x in long]
    named = [Run(Path(name), run.rows, run.config) for name, run in zip("ab", pair, strict=True)]
    assert [one.label.split(":")[0] for one in group(named)] == ["a", "b"]
    roles = [one.label for one in group(runs(method__train_roles=("solver",)))]
    assert roles[1] == "method.train_roles=solver"


def test_runs_measured_on_other_items_are_told_apart_where_all_say_on_which():
    def run(name, items):
        found = [row | ({"valid/set": items} if items else {}) for row in rows()]
        return Run(Path(name), found, schema.flatten(schema.base()))

    assert [one.label for one in group([run("a", 1), run("b", 2)])] == [
        "valid/set=1",
        "valid/set=2",
    ]
    assert len(group([run("a", 1), run("b", 1)])) == 1
    assert len(group([run("a", 1), run("b", None)])) == 1  # from before it was logged


def test_runs_without_their_config_are_not_taken_for_those_with_one(tmp_path):
    folders = [run_folder(tmp_path / "a", {}), run_folder(tmp_path / "b")]
    plots.run_figure(folders, tmp_path / "a.svg")
    assert "<!-- settings unknown: no config.json (1 run) -->" in texts(tmp_path / "a.svg")
    (tmp_path / "a" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="a/config.json: is not the config of a run"):
        plots.run_figure(folders, tmp_path / "a.svg")


def test_a_run_given_twice_is_refused_and_one_that_has_not_begun_is_named(tmp_path):
    folders = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b")]
    with pytest.raises(ValueError, match="a, .*a: the same run; give each once"):
        plots.run_figure([folders[0], tmp_path / "b" / ".." / "a"], tmp_path / "a.svg")
    (tmp_path / "b" / "metrics.jsonl").write_text("")
    told = plots.run_figure(folders, tmp_path / "a.svg")
    assert told[1] == f"not drawn, no step is finished yet: {tmp_path}/b"


def test_a_png_is_wide_enough_for_a_page(tmp_path):
    plots.run_figure([run_folder(tmp_path / "a")], tmp_path / "run.png")
    head = (tmp_path / "run.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", head[16:]) == (1200, 810)


def a_study(without=(), seeds=(0, 1)):
    runs = {name: {s: rows(s, without=without) for s in seeds} for name in ("full", "no_solver")}
    return Study(steps=6, runs=runs)


def test_a_study_shows_every_setting_and_effect_and_is_the_same_each_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        plots.study_figure(a_study(), tmp_path / name)
    drawn = texts(tmp_path / "a.svg")
    # Each setting names its curve and its bars.
    assert drawn.count("<!-- full -->") == 2 and drawn.count("<!-- no_solver -->") == 2
    for panel in ("Planner effect", "Critic effect", "Challenger yield"):
        assert f"<!-- {panel} -->" in drawn
    assert drawn == texts(tmp_path / "b.svg")


def test_a_study_without_effects_or_with_one_seed_is_drawn(tmp_path):
    effects = [name for name in ALL if name.startswith("effect/")]
    plots.study_figure(a_study(without=effects, seeds=(0,)), tmp_path / "study.svg")
    assert "<!-- full -->" in texts(tmp_path / "study.svg")
    assert "effect -->" not in texts(tmp_path / "study.svg")
    plots.study_figure(a_study(without=effects[1:]), tmp_path / "planner.svg")
    assert texts(tmp_path / "planner.svg").count("effect -->") == 1


def test_settings_beyond_the_palette_stay_distinct():
    runs = {name: {} for name in ["full", *map(str, range(20))]}
    looks = plots._looks(Study(steps=1, runs=runs))
    assert len(set(looks.values())) == 21 and looks["full"] == (plots.BLACK, "-")


def test_labels_are_moved_apart_as_little_as_possible():
    assert plots.spread([10, 50], 5, 0, 100) == [10, 50]
    assert plots.spread([10, 12, 50], 6, 0, 100) == [8, 14, 50]
    assert plots.spread([50, 50, 50], 4, 0, 100) == [46, 50, 54]
    assert plots.spread([99, 100], 10, 0, 100) == [90, 100]
    assert plots.spread([0, 1], 10, 0, 100) == [0, 10]
    assert plots.spread([], 10, 0, 100) == []


def test_the_moving_mean_is_centred_and_shorter_at_the_ends():
    assert plots._moving([0, 3, 6, 9, 30], 3) == [1.5, 3, 6, 15, 19.5]
    assert plots._moving([1, 2], 1) == [1, 2]


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, capsys):
    folder = run_folder(tmp_path / "a")
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        plots.main([str(folder), f"--output={tmp_path / 'a.svg'}"])
    assert stop.value.code == 2
    assert 'pip install "sage_jax[plots]"' in capsys.readouterr().err


def test_a_wrong_folder_or_file_ending_is_named(tmp_path):
    folder = run_folder(tmp_path / "a")
    with pytest.raises(ValueError, match=r"nowhere: no metrics.jsonl there"):
        plots.run_figure([folder, tmp_path / "nowhere"], tmp_path / "a.svg")
    with pytest.raises(ValueError, match=r"ends in .svg or .png"):
        plots.run_figure([folder], tmp_path / "a.pdf")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no step is finished yet"):
        plots.run_figure([folder], tmp_path / "a.svg")


def test_an_unusable_output_is_refused_before_anything_is_read(tmp_path, capsys):
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").touch()
    for name, part in (("folder.svg", "is a folder"), ("file/a.svg", "file is a file")):
        with pytest.raises(SystemExit):
            plots.main([str(tmp_path / "absent"), f"--output={tmp_path / name}"])
        said = capsys.readouterr().err
        assert part in said and "choose another file" in said
