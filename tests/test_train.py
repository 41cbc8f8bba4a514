"""The loop: resume to the bit, saves on request, stops on machine faults, accounts for its time."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from sage_jax import modes, train
from sage_jax.config import ConfigError, base, validate
from sage_jax.core.checkpoint import Checkpoints
from sage_jax.methods.graph import Cancelled
from sage_jax.report import study
from sage_jax.report.metrics import METRICS
from sage_jax.run import start, tell_shortened
from sage_jax.runtime import ASSETS, placement
from sage_jax.verify import Verdict

STEPS = 3
VARYING = ("time/", "rates/", "memory/", "compiles")


def small_config(folder, **changes):
    c = base()
    c.model.path = str(folder)
    c.tokens.max_prompt = 72
    c.tasks.seeds = ("asset:tiny/train.jsonl",)
    c.valid.path = "asset:tiny/valid.jsonl"
    c.valid.every, c.valid.limit, c.valid.samples, c.valid.effects = 2, 2, 1, 2
    c.train.steps = STEPS
    c.checkpoint.every = 2
    c.method.prompts = "short"
    c.method.candidates, c.method.drawn = 4, 2
    c.method.attempts = c.method.solutions = 2
    c.method.rewards, c.method.bare, c.method.audits = "robust", 1, 2
    c.rollout.slots, c.rollout.chunk, c.rollout.prefill_rows = 16, 8, 8
    c.rollout.buckets = (112,)
    for role in ("challenger", "planner", "solver", "critic"):
        c.rollout.max_new[role] = 40
    c.optim.lr, c.optim.micro_rows, c.optim.buckets = 1e-4, 16, (112,)
    c.mesh.data = 1
    c.report.quiet = True
    for name, value in changes.items():
        group, leaf = name.split("__")
        c[group][leaf] = value
    return validate(c)


def job(config, workdir):
    return modes.Job(config, {}, workdir, Path(), Path())


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(VARYING)} for line in lines
    ]


def final_state(workdir, config):
    with start(config, workdir, lambda: False) as run:
        return jax.device_get(run.state), run.pool.to_json()


@pytest.fixture(scope="module")
def finished(tiny_asset, tmp_path_factory):
    """An uninterrupted run, the yardstick of the resumed ones."""
    config = small_config(tiny_asset)
    workdir = tmp_path_factory.mktemp("whole")
    assert modes.run_train(job(config, workdir), lambda: False) == 0
    return config, workdir, *final_state(workdir, config)


def assert_same_run(finished, workdir):
    config, whole, state, pool = finished
    assert rows(workdir) == rows(whole)
    for name in ("metrics.jsonl", "episodes.jsonl"):
        assert len((workdir / name).read_text().splitlines()) == len(
            (whole / name).read_text().splitlines()
        )
    assert (workdir / "episodes.jsonl").read_bytes() == (whole / "episodes.jsonl").read_bytes()
    got_state, got_pool = final_state(workdir, config)
    assert got_pool == pool
    jax.tree.map(np.testing.assert_array_equal, got_state, state)


class Killed(BaseException):
    """Stands for kill -9: nothing in the program may catch it and tidy up."""


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_killed_after_any_step_resumes_to_the_same_bits(
    finished, tmp_path, monkeypatch, step
):
    real = train.report

    def report(run, figures):
        real(run, figures)
        if run.step == step:
            raise Killed

    monkeypatch.setattr(train, "report", report)
    with pytest.raises(Killed):
        modes.run_train(job(finished[0], tmp_path), lambda: False)
    monkeypatch.setattr(train, "report", real)
    # The kill fell into the middle of a line of each file.
    for name in ("metrics.jsonl", "episodes.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 9, "torn')
    assert modes.run_train(job(finished[0], tmp_path), lambda: False) == 0
    assert_same_run(finished, tmp_path)


def test_a_stop_in_the_middle_of_a_rollout_saves_the_last_whole_step(finished, tmp_path, capsys):
    def stop():
        return (tmp_path / "metrics.jsonl").read_text().count("\n") == STEPS

    assert modes.run_train(job(finished[0], tmp_path), stop) == modes.TERMINATED
    assert modes.newest_step(tmp_path / "checkpoints") == STEPS - 1
    assert modes.run_train(job(finished[0], tmp_path), lambda: False) == 0
    # In a quiet run too.
    assert capsys.readouterr().err.endswith(f"finished {STEPS} steps; results in {tmp_path}\n")
    assert_same_run(finished, tmp_path)


@pytest.mark.parametrize("step", [1, STEPS])
def test_a_stop_while_verdicts_are_awaited_saves_the_last_whole_step(
    finished, tmp_path, monkeypatch, step
):
    polls = []
    real = train.rollout

    def rollout(run, now):
        if now == step:
            monkeypatch.setattr(run.verifier, "poll", lambda timeout: polls.append(timeout) or [])
        return real(run, now)

    monkeypatch.setattr(train, "rollout", rollout)
    stopped = modes.run_train(job(finished[0], tmp_path), lambda: len(polls) > 2)
    assert stopped == modes.TERMINATED and len(polls) == 3
    assert modes.newest_step(tmp_path / "checkpoints") == step - 1
    monkeypatch.setattr(train, "rollout", real)
    assert modes.run_train(job(finished[0], tmp_path), lambda: False) == 0
    assert_same_run(finished, tmp_path)


def test_a_finished_run_says_so_and_changes_nothing(finished, capsys):
    config, workdir, *_ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    assert modes.run_train(job(config, workdir), lambda: False) == 0
    out = capsys.readouterr().out
    assert f"step {STEPS} of train.steps={STEPS}" in out and "--workdir" in out
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_fewer_steps_than_a_run_has_reached_are_named_with_both(finished, capsys):
    config, workdir, *_ = finished
    before = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    fewer = small_config(config.model.path, train__steps=STEPS - 1)
    assert modes.run_train(job(fewer, workdir), lambda: False) == 0
    said = capsys.readouterr().out
    assert f"{workdir} is past train.steps={STEPS - 1}: it has reached step {STEPS}, noth" in said
    assert f"give a train.steps above {STEPS} to go on, or another --workdir" in said
    assert {path: path.stat().st_mtime_ns for path in workdir.rglob("*")} == before


def test_every_step_writes_the_promised_metrics(finished):
    _, workdir, *_ = finished
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert "valid/accuracy" in lines[0] and "loss" not in lines[0]
    promised = """solve_rate masked loss grad_norm ratio/max logp_gap/mean logp_gap/max
        tokens/generated memory/rss_gib compiles pool/size pool/admitted pool/duplicates
        pool/invalid time/rollout time/verify time/update time/total live_slots""".split()
    for role in ("challenger", "planner", "solver", "critic"):
        promised += [f"reward/{role}", f"parse_fail/{role}", f"entropy/{role}", f"length/{role}"]
        promised += [f"adv/{role}_mean", f"adv/{role}_std"]
    for line in lines[1:]:
        assert set(line) <= set(METRICS)
        absent = [name for name in promised if name not in line]
        # A random model writes no valid proposal, so there may be no row of a Critic.
        assert not [name for name in absent if "critic" not in name], absent
        assert line["ratio/max"] == 1.0 and line["logp_gap/max"] < 1e-3
    assert ["valid/accuracy" in line for line in lines] == [True, False, True, True]


def test_the_figures_of_a_run_move(finished):
    """Those that a rollout alone does not give; the others are told apart in test_sage."""
    _, workdir, *_ = finished
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    moving = """step loss grad_norm logp_gap/mean entropy/solver entropy/planner
        tokens/generated tokens/trained padding/update live_slots compiles time/rollout
        time/update time/total time/validate rates/tokens_per_s""".split()
    still = [m for m in moving if len({line[m] for line in lines if m in line}) < 2]
    assert not still
    # A peak, which what ran before in this process may have set.
    assert all(0.1 < line["memory/rss_gib"] < 100 for line in lines)
    # A few units in the last place, which two steps may have in common.
    assert all(line["logp_gap/max"] > 0 for line in lines[1:])


def test_weights_move_and_the_sampler_follows_them(finished):
    config, workdir, state, _ = finished
    with start(config, workdir / "other", lambda: False) as run:
        first = jax.device_get(run.state.params)
    moved = [
        np.abs(a - b).max()
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(state.params), strict=True)
    ]
    assert min(moved) > 0
    # Sampler and learner agree at every step, so the sampler had the moved weights too.
    for row in rows(workdir)[1:]:
        assert row["logp_gap/max"] < 1e-3


def test_a_run_stops_when_the_machinery_loses_too_many_verdicts(
    tiny_asset, tmp_path, monkeypatch, capsys
):
    lost = Verdict("error", "sandbox_error")
    real = train.rollout

    def rollout(run, step):
        episodes = real(run, step)
        for episode in episodes:
            for sample in episode.samples.get("solve", ()):
                sample.verdict, sample.masked = lost, True
        return episodes

    monkeypatch.setattr(train, "rollout", rollout)
    config = small_config(tiny_asset)
    assert modes.run_train(job(config, tmp_path), lambda: False) == 1
    assert "sandbox_error" in capsys.readouterr().err
    monkeypatch.setattr(train, "rollout", real)
    easy = small_config(tiny_asset, sandbox__max_error_share=1.0, train__steps=1)
    assert modes.run_train(job(easy, tmp_path / "b"), lambda: False) == 0


def test_updates_that_stay_non_finite_stop_the_run_and_leave_the_weights(
    tiny_asset, tmp_path, monkeypatch, capsys
):
    real = train.training_batches

    def poisoned(samples, config):
        batches = real(samples, config)
        for micro in batches[0].micros:
            micro.adv_bt[:] = np.inf
        # One without a row to learn from, which is finite whatever the weights are.
        return [batches[0], batches[0]._replace(micros=[], ids=[])]

    monkeypatch.setattr(train, "training_batches", poisoned)
    config = small_config(tiny_asset, optim__max_skipped=2)
    assert modes.run_train(job(config, tmp_path), lambda: False) == 1
    assert "2 updates in a row" in capsys.readouterr().err
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["skipped_updates"] == 1 and "grad_norm" not in lines[1]


@pytest.mark.parametrize("changes", [{"epochs": 2}, {"minibatches": 2}, {"kl_coef": 0.1}])
def test_several_updates_on_one_rollout_take_ratios_against_its_start(
    tiny_asset, tmp_path, changes
):
    fields = {f"optim__{name}": value for name, value in changes.items()}
    config = small_config(tiny_asset, train__steps=1, **fields)
    assert modes.run_train(job(config, tmp_path), lambda: False) == 0
    row = rows(tmp_path)[-1]
    if "kl_coef" in changes:
        assert row["kl"] == 0 and row["ratio/max"] == 1.0
    else:
        assert row["ratio/max"] > 1.0
    checkpoints = Checkpoints(tmp_path / "checkpoints", 9)
    with start(config, tmp_path, lambda: False) as run:
        assert int(run.state.step) == changes.get("epochs", 1) * changes.get("minibatches", 1)
    checkpoints.close()


def spoil_metrics(workdir):
    (workdir / "metrics.jsonl").write_text('garbage\n{"step": 1}\n')


def block_checkpoints(workdir):
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").write_text("")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (spoil_metrics, "metrics.jsonl:1"),
        (block_checkpoints, "cannot be made a folder"),
    ],
)
def test_a_damaged_work_directory_is_named_and_left_alone(finished, tmp_path, damage, part):
    workdir = shutil.copytree(finished[1], tmp_path / "run")
    damage(workdir)
    before = (workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=part), start(finished[0], workdir, lambda: False):
        pass
    assert (workdir / "metrics.jsonl").read_bytes() == before


def damage_array(checkpoint):
    files = (p for p in (checkpoint / "params").rglob("*") if p.is_file())
    largest = max(files, key=lambda p: p.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def test_a_run_validated_on_other_items_starts_its_comparison_afresh(
    finished, tiny_asset, tmp_path, capsys
):
    workdir = shutil.copytree(finished[1], tmp_path / "run")
    fields = {"train__steps": STEPS + 1, "valid__every": 1, "report__quiet": False}
    assert modes.run_train(job(small_config(tiny_asset, **fields), workdir), lambda: False) == 0
    before = len(json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0]))
    err = capsys.readouterr().err
    assert "validates on other items" not in err and f"{STEPS + 1} updates (best" in err
    with start(finished[0], workdir, lambda: False) as run:
        assert run.checkpoints.best is not None
    fields |= {"train__steps": STEPS + 3, "valid__limit": 5}
    other = small_config(tiny_asset, **fields)
    with start(other, workdir, lambda: False) as run:
        assert run.checkpoints.best is None
    capsys.readouterr()
    assert modes.run_train(job(other, workdir), lambda: False) == 0
    said = "validates on other items than the checkpoint (4 there, 10 now)"
    err = capsys.readouterr().err
    assert err.count(said) == 1
    lines = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("valid/items") for row in lines] == [4, None, 4, 4, 4, 10, 10]
    assert len({row["valid/set"] for row in lines if "valid/set" in row}) == 2
    first, last = (row["valid/accuracy"] for row in lines[-2:])
    assert f"accuracy {first:.4f} -> {last:.4f} after {STEPS + 3} updates" in err
    assert len(study.read_rows(workdir / "metrics.jsonl")[0]) < before
    assert json.loads((workdir / "metrics.jsonl").read_text().splitlines()[0])["valid/items"] == 4


def test_a_run_that_lost_its_newest_checkpoint_ends_with_the_same_bits(finished, tmp_path):
    workdir = shutil.copytree(finished[1], tmp_path / "run")
    damage_array(workdir / "checkpoints" / str(STEPS))
    with start(finished[0], workdir, lambda: False) as run:
        assert run.step == 2 and len(rows(workdir)) == 3
        train.train(run)
    assert modes.newest_step(workdir / "checkpoints") == STEPS
    assert_same_run(finished, workdir)


def test_a_damaged_checkpoint_is_a_clear_error_in_the_modes_that_only_read(finished, tmp_path):
    workdir = shutil.copytree(finished[1], tmp_path / "run")
    damage_array(workdir / "checkpoints" / str(STEPS))
    with pytest.raises(ConfigError, match=f"checkpoints/{STEPS} is damaged.*the one before"):
        modes.trained_model(job(finished[0], workdir), placement(finished[0]))


def test_a_model_of_another_shape_is_refused_with_both_paths(finished, tiny_folder, tmp_path):
    config, whole, *_ = finished
    workdir = shutil.copytree(whole, tmp_path / "run")
    other = small_config(tiny_folder)
    said = f"model.path='{tiny_folder}'.*written with model.path='{config.model.path}'"
    with pytest.raises(ConfigError, match=said), start(other, workdir, lambda: False):
        pass
    with pytest.raises(ConfigError, match=said):
        modes.trained_model(job(other, workdir), placement(other))
    assert rows(workdir) == rows(whole) and not (workdir / "checkpoints_damaged").exists()


def test_of_a_model_with_other_weights_the_checkpoint_wins_and_says_so(finished, tmp_path, capsys):
    folder = shutil.copytree(ASSETS / "tiny-qwen3", tmp_path / "copy")
    workdir = shutil.copytree(finished[1], tmp_path / "run")
    with start(small_config(folder, report__quiet=False), workdir, lambda: False) as run:
        state = jax.device_get(run.state)
    jax.tree.map(np.testing.assert_array_equal, state, finished[2])
    err = capsys.readouterr().err
    assert f"another model.path: '{folder}', not 'asset:tiny-qwen3'; the weights are those" in err


def test_a_resumed_run_takes_the_seeds_and_pool_settings_it_is_given(finished, capsys):
    _, workdir, state, pool = finished
    one = small_config(
        finished[0].model.path,
        tasks__seeds=("asset:seeds/train.jsonl",),
        pool__capacity=7,
        pool__half_life=3.0,
        report__quiet=False,
    )
    with start(one, workdir, lambda: False) as run:
        assert all(name.startswith("seed/") for name in run.pool.seeds)
        assert run.pool.settings["half_life"] == 3.0
        assert run.pool.settings["capacity"] == 7 + len(run.pool.seeds)
        assert [*run.pool.admitted] == [row["id"] for row in pool["admitted"]]
    err = capsys.readouterr().err
    assert "another pool.half_life: 3.0, not 50.0" in err and "tasks.seeds" in err


def test_a_step_without_a_single_row_stops_the_run(tiny_asset, tmp_path, capsys):
    config = small_config(tiny_asset, tokens__max_prompt=8, tokens__overlong="skip")
    assert modes.run_train(job(config, tmp_path), lambda: False) == 1
    assert "no prompt fits tokens.max_prompt=8" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no prompt fits"):
        modes.run_eval(job(config, tmp_path), lambda: False)


def test_a_stop_before_the_first_step_saves_nothing_and_is_no_finished_run(tiny_asset, tmp_path):
    config = small_config(tiny_asset, train__steps=1)
    with start(config, tmp_path, lambda: True) as run, pytest.raises(Cancelled):
        train.train(run)
    assert modes.newest_step(tmp_path / "checkpoints") is None
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert modes.run_train(job(config, tmp_path), lambda: True) == modes.TERMINATED


def test_prompts_that_are_cut_are_told_once_even_by_a_quiet_run():
    said = []
    run: Any = SimpleNamespace(
        config=base(),
        told_shortened=False,
        progress=SimpleNamespace(note=lambda text, quiet: said.append((text, quiet))),
    )
    tell_shortened(run, 40, 31)
    tell_shortened(run, 40, 31)
    ((text, quiet),) = said
    assert "31 of 40 prompts were cut to tokens.max_prompt=1024" in text and quiet is False
