"""What cannot be run is refused before it costs anything, by name, and leaves no trace."""

import numpy as np
import pytest
from test_train import job, small_config

from sage_jax import modes
from sage_jax.config import ConfigError, base
from sage_jax.core.checkpoint import Checkpoints
from sage_jax.overrides import take_model_of_run
from sage_jax.run import load_tasks, start
from sage_jax.runtime import load_model, placement
from sage_jax.tasks.sources import SourceError


def test_more_tasks_a_step_than_there_are_seeds_is_refused_before_the_model_loads(tiny_asset):
    said = (
        r"method.drawn=499.*498.*2 left out: they resemble items of valid.path, as .*\('.*'\) does"
    )
    with pytest.raises(ConfigError, match=said):
        load_tasks(small_config(tiny_asset, method__drawn=499))


def test_seeds_and_validation_are_both_named_and_so_is_every_benchmark(tiny_asset, tmp_path):
    bad = {"tasks__seeds": ("a.jsonl",), "valid__path": "b.jsonl"}
    config = small_config(tiny_asset, **bad, eval__benchmarks=("c.jsonl", "d.jsonl"))
    with pytest.raises(SourceError, match=r"a.jsonl: no such(.|\n)*b.jsonl: no such"):
        modes.run_train(job(config, tmp_path), lambda: False)
    with pytest.raises(SourceError, match=r"c.jsonl: no such(.|\n)*d.jsonl: no such"):
        modes.run_eval(job(config, tmp_path), lambda: False)


REFUSED = {
    "seeds": {"tasks__seeds": ("absent.jsonl",)},
    "model": {"model__path": "absent"},
    "positions": {
        "tokens__max_prompt": 5000, "rollout__buckets": (6000,), "optim__buckets": (6000,)
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_a_refused_start_leaves_no_trace_and_takes_nothing_away(tiny_asset, tmp_path, changes):
    changes = {"model__path": tiny_asset} | changes
    config = small_config(changes.pop("model__path"), **changes)
    with pytest.raises(ValueError):
        modes.run_train(job(config, tmp_path / "deep" / "run"), lambda: False)
    assert not list(tmp_path.iterdir())
    # A run that was stopped before it saved anything, and what someone else keeps there.
    before = {"metrics.jsonl": '{"step": 0}\n', "notes": "", "lock": "", "config.json": "{}"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError):
        modes.run_train(job(config, tmp_path), lambda: False)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("mode", "name", "kind"),
    [
        *(
            ("train", n, "folder")
            for n in ("config.json", "metrics.jsonl", "episodes.jsonl", "lock")
        ),
        ("train", "checkpoints", "file"),
        *(("sft", name, "folder") for name in ("config.json", "lock")),
        *(("sft", name, "file") for name in ("checkpoints", "model")),
        *(("eval", name, "folder") for name in ("eval.json", "eval_0_valid.jsonl")),
    ],
)
def test_what_lies_where_a_run_will_write_is_named_before_the_model_loads(
    tmp_path, mode, name, kind
):
    path = tmp_path / name
    path.mkdir() if kind == "folder" else path.touch()
    said = "is a folder, not a file" if kind == "folder" else "is a file, not a folder"
    with pytest.raises(ConfigError, match=f"^{path}: {said}; move it away, or choose another --w"):
        modes.MODES[mode](job(small_config("absent"), tmp_path), lambda: False)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_refused_evaluation_and_a_refused_scoring_leave_no_trace(tiny_asset, tmp_path):
    config = small_config(tiny_asset, valid__path="absent.jsonl")
    with pytest.raises(ValueError, match="absent.jsonl"):
        modes.run_eval(job(config, tmp_path / "run"), lambda: False)
    assert not list(tmp_path.iterdir())
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "tokens": [5, 6]}\n')
    wanted = modes.Job(small_config("absent"), {}, tmp_path, source, tmp_path / "deep" / "out")
    for mode in ("generate", "score"):
        with pytest.raises(ConfigError, match="model.path=absent"):
            modes.MODES[mode](wanted, lambda: False)
    assert list(tmp_path.iterdir()) == [source]


def test_another_run_in_the_same_work_directory_is_refused(tiny_asset, tmp_path):
    with modes.sole_use(tmp_path), pytest.raises(ConfigError, match="in use by another run"):
        modes.run_train(job(small_config(tiny_asset), tmp_path), lambda: False)
    with modes.sole_use(tmp_path):  # free again
        assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("ids", [tuple(range(100, 130)), (512,)])
def test_stop_ids_that_the_engine_cannot_hold_are_refused_with_the_model(tiny_asset, ids):
    config = small_config(tiny_asset, tokens__stop_ids=ids)
    with pytest.raises(ConfigError, match="tokens.stop_ids"):
        load_model(config, placement(config))


def test_a_missing_prompt_set_and_seeds_met_in_validation_are_config_errors(tiny_asset, tmp_path):
    for changes, part in (
        ({"method__prompts": "nope"}, "method.prompts='nope'"),
        ({"tasks__seeds": ("asset:tiny/valid.jsonl",)}, "tasks.seeds.*none left"),
    ):
        config = small_config(tiny_asset, **changes)
        with pytest.raises(ConfigError, match=part), start(config, tmp_path, lambda: False):
            pass


def test_the_work_directory_of_a_fine_tuning_is_refused_with_its_model(tmp_path):
    workdir, config = tmp_path / "tuned", small_config("absent", train__steps=1)
    saved = Checkpoints(workdir / "checkpoints", 1)
    saved.save(2, {"state": {"x": np.zeros(1)}}, {}, None)
    saved.close()
    (tmp_path / "in.jsonl").write_text("")
    files = (tmp_path / "in.jsonl", tmp_path / "out")
    wanted = modes.Job(config, {}, workdir, *files, named=True)
    reading = ("train", "eval", "generate", "score", "export")

    def refused(said):
        for mode in reading:
            with pytest.raises(
                ConfigError, match=f"{workdir} holds checkpoints of --mode=sft{said}"
            ):
                modes.MODES[mode](wanted, lambda: False)
        with pytest.raises(ConfigError, match=said):
            take_model_of_run(base(), {"lora.rank": 4}, workdir)

    refused(", which has not finished")
    (workdir / "model").mkdir()
    (workdir / "model" / "config.json").write_text("{}")
    refused(f"; its model is {workdir}/model, give it as --config.model.path")
    assert {path.name for path in tmp_path.iterdir()} == {"tuned", "in.jsonl"}
