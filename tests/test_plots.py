"""Figures: drawn from whatever metrics a run has, the same each time, labels apart."""

import json
import struct
from pathlib import Path

import pytest

from sage_jax.report import plots
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


def run_folder(folder: Path, **changes) -> Path:
    folder.mkdir()
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


def test_seeds_of_different_length_share_a_mean(tmp_path):
    folders = [run_folder(tmp_path / f"s{i}", seed=i, steps=4 + i) for i in range(3)]
    plots.run_figure(folders, tmp_path / "seeds.svg")
    assert "<!-- thick: mean of 3 seeds" in texts(tmp_path / "seeds.svg")


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
