"""Runs that train an adapter: saved, resumed, refused, exported, and loaded again."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from greedy import pad
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_cli import run as command_line
from test_lora import LORA, RANK, learner_gap, prompts
from test_train import Killed, job, rows, small_config
from test_update import assert_trees_equal

from sage_jax import modes, train
from sage_jax.config import ConfigError
from sage_jax.core.checkpoint import Checkpoints
from sage_jax.models import hf, lora, peft, qwen
from sage_jax.run import start
from sage_jax.runtime import ASSETS, load_model, placement

BASE = ASSETS / "tiny-qwen3"
SHORT = {"valid__effects": 0, "valid__samples": 0, "method__audits": 0}


@pytest.fixture(scope="module")
def config(tiny_asset):
    changes = {"lora__rank": RANK, "lora__alpha": 8.0, "optim__lr": 1e-2, "train__steps": 2}
    changes |= {"checkpoint__every": 1, "valid__every": 0, "valid__planned": False}
    return small_config(tiny_asset, **changes, **SHORT)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("lora")
    assert modes.run_train(job(config, workdir), lambda: False) == 0
    with start(config, workdir, lambda: False) as run:
        return workdir, jax.device_get(run.state), run.pool.to_json()


def trained(config, workdir):
    named = replace(job(config, workdir), named=True)
    return modes.trained_model(named, placement(config))[0]


def changed(config, **changes):
    return small_config(config.model.path, **{"lora__rank": RANK, "lora__alpha": 8.0} | changes)


def test_sampler_and_learner_of_a_run_agree_after_its_updates(config, finished):
    workdir, state, _ = finished
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(state.params))
    assert max(row["logp_gap/max"] for row in rows(workdir)[1:]) < 1e-5
    with start(config, workdir, lambda: False) as run:
        run.load_engine()
        fitting = [replace(row, stop_ids=run.model.tokens.stop_ids) for row in prompts()]
        done = list(run.engine.generate(fitting).values())
        base = run.engine._params["layers"][0]["q_proj"]
        run.load_engine()
        assert run.engine._params["layers"][0]["q_proj"] is base  # made once
        to_learner, to_base = learner_gap(run.update, run.state, done)
    assert to_learner < 1e-5 and to_base > 1e-2


def test_a_killed_run_resumes_to_the_same_bits(config, finished, tmp_path, monkeypatch):
    real = train.report

    def report(run, figures):
        real(run, figures)
        if run.step == 2:
            raise Killed

    monkeypatch.setattr(train, "report", report)
    with pytest.raises(Killed):
        modes.run_train(job(config, tmp_path), lambda: False)
    monkeypatch.setattr(train, "report", real)
    assert modes.newest_step(tmp_path / "checkpoints") == 1
    assert modes.run_train(job(config, tmp_path), lambda: False) == 0
    workdir, state, pool = finished
    assert rows(tmp_path) == rows(workdir)
    with start(config, tmp_path, lambda: False) as run:
        assert_trees_equal(jax.device_get(run.state), state)
        assert run.pool.to_json() == pool


def test_a_checkpoint_holds_the_adapter_and_no_base(config, finished):
    checkpoints = Checkpoints(finished[0] / "checkpoints", 9)
    assert checkpoints.misfits(2, "params", finished[1].params) == []
    files = (finished[0] / "checkpoints" / "2").rglob("*")
    checkpoints.close()
    adapter = sum(x.nbytes for x in jax.tree.leaves(finished[1].params))
    base = sum(x.nbytes for x in jax.tree.leaves(finished[1].frozen))
    pool = len(json.dumps(finished[2]))
    assert sum(f.stat().st_size for f in files if f.is_file()) < 4 * adapter + pool + base / 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora__rank": 8},
            r"lora.rank=8, lora.alpha=8 here.*written with lora.rank=4, ",
        ),
        ({"lora__alpha": 4.0}, r"lora.alpha=4 here.*written with lora.rank=4, lora.alpha=8;"),
        ({"lora__rank": 0, "lora__alpha": 0.0}, r"lora.rank=0, .*\(all weights trained\) here"),
    ],
)
def test_another_rank_or_alpha_than_the_checkpoints_is_refused_with_both(
    config, finished, changes, said
):
    other = changed(config, **changes)
    with pytest.raises(ConfigError, match=said), start(other, finished[0], lambda: False):
        pass
    with pytest.raises(ConfigError, match=said):
        trained(other, finished[0])


def test_a_finished_run_advises_no_more_steps_to_who_asks_for_another_adapter(
    config, finished, tmp_path
):
    other = changed(config, lora__rank=8, lora__path="elsewhere", train__steps=2)
    said = r"lora.rank=8, lora.alpha=8 here.*; leave lora.path=elsewhere out and give those values"
    with pytest.raises(ConfigError, match=said):
        modes.run_train(job(other, finished[0]), lambda: False)
    damaged = shutil.copytree(finished[0], tmp_path / "run")
    (damaged / "checkpoints" / "2" / "host" / "metadata").write_text("{")
    assert modes.run_train(job(other, damaged), lambda: False) == 0  # said to be finished


def test_the_rank_of_the_adapter_in_lora_path_need_not_be_repeated(config, folder, tmp_path):
    given = [
        "--config=configs/tiny.py", f"--config.lora.path={folder}", "--config.mesh.data=1",
        f"--config.tasks.seeds={tmp_path}/absent.jsonl", f"--workdir={tmp_path}/run",
    ]  # fmt: skip
    done = command_line(*given)
    assert done.returncode == 2 and "absent.jsonl: no such" in done.stderr  # the rank is settled
    done = command_line(*given, "--config.lora.rank=8")
    assert done.returncode == 2
    assert f"lora.path={folder}:\n  lora.rank=8: the adapter there has r 4;" in done.stderr


def test_an_adapter_named_on_the_command_line_wins_over_a_run_that_nobody_named(
    config, finished, folder
):
    named = changed(config, lora__path=str(folder))
    wanted = replace(job(named, finished[0]), overrides={"lora.path": str(folder)})
    model, origin = modes.trained_model(wanted, placement(named))
    assert origin == f"{config.model.path} with the adapter {folder}"
    assert_trees_equal(jax.device_get(model.adapter), finished[1].params)


def test_a_checkpoint_of_all_weights_is_refused_for_an_adapter(config, tmp_path):
    whole = small_config(config.model.path, train__steps=1, **SHORT)
    with start(whole, tmp_path, lambda: False) as run:
        host = {**run.host_state()}
        run.checkpoints.save(1, {"params": run.state.params}, host, None)
    with pytest.raises(ConfigError, match=r"lora.rank=4.*written with lora.rank=0.*all weights"):
        trained(config, tmp_path)


def test_another_base_than_the_adapter_was_trained_on_is_refused(config, finished, tmp_path):
    folder = shutil.copytree(BASE, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    other = changed(config, model__path=str(folder))
    with pytest.raises(ConfigError, match=r"not those that the adapter .* was trained on"):
        trained(other, finished[0])


def logits(params, cfg):
    tokens_bt, _ = pad([[1, 2, 3, 40, 5, 6]], 6)
    return np.asarray(qwen.head_logits(params, cfg, qwen.forward(params, cfg, tokens_bt)))


def test_the_exported_model_gives_the_logits_of_base_and_adapter(config, finished, tmp_path):
    exported = replace(job(config, finished[0]), named=True, output=tmp_path / "out")
    assert modes.run_export(exported, lambda: False) == 0
    params, cfg = hf.load(tmp_path / "out")
    model = trained(config, finished[0])
    np.testing.assert_allclose(logits(params, cfg), logits(model.weights, cfg), atol=1e-4)
    assert np.abs(logits(params, cfg) - logits(model.params, cfg)).max() > 0.1


def test_a_run_is_read_without_being_told_its_rank_again(config, finished, tmp_path):
    here = ("--config.mesh.data=1", f"--workdir={finished[0]}")
    out = tmp_path / "adapter"
    form = ("--mode=export", "--config.lora.export=adapter", f"--output={out}")
    done = command_line(*here, *form)
    assert done.returncode == 0, done.stderr
    adapter = json.loads((out / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (RANK, 8)
    (tmp_path / "in.jsonl").write_text('{"id": "a", "tokens": [5, 6, 7, 8]}\n')
    files = (f"--input={tmp_path}/in.jsonl", f"--output={tmp_path}/out.jsonl")
    done = command_line("--mode=score", *here, *files)
    assert done.returncode == 0, done.stderr
    got = json.loads((tmp_path / "out.jsonl").read_text())["logps"]
    logps = jax.nn.log_softmax(whole_logits(trained(config, finished[0]), [5, 6, 7, 8]))
    np.testing.assert_allclose(got, [logps[i, t] for i, t in enumerate([6, 7, 8])], atol=1e-4)


def whole_logits(model, tokens):
    hidden = qwen.forward(model.weights, model.cfg, np.array([tokens]))
    return qwen.head_logits(model.weights, model.cfg, hidden)[0]


@pytest.fixture(scope="module")
def folder(config, finished, tmp_path_factory):
    """The finished run's adapter in PEFT's format."""
    out = tmp_path_factory.mktemp("peft") / "adapter"
    form = changed(config, lora__export="adapter")
    assert modes.run_export(replace(job(form, finished[0]), named=True, output=out), None) == 0
    return out


def test_an_exported_adapter_has_the_names_and_shapes_of_peft(config, finished, folder):
    content = json.loads((folder / "adapter_config.json").read_text())
    assert content["peft_type"] == "LORA" and content["task_type"] == "CAUSAL_LM"
    assert (content["r"], content["lora_alpha"], content["bias"]) == (RANK, 8, "none")
    assert content["base_model_name_or_path"] == str(BASE)
    assert set(content["target_modules"]) == set(lora.TARGETS)
    cfg = hf.read_config(BASE)
    with safe_open(folder / "adapter_model.safetensors", framework="np") as handle:
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
        assert handle.metadata()["format"] == "pt"
    block = "base_model.model.model.layers.1."
    q, d = cfg.num_heads * cfg.head_dim, cfg.hidden_size
    assert shapes[block + "self_attn.q_proj.lora_A.weight"] == (RANK, d)
    assert shapes[block + "self_attn.q_proj.lora_B.weight"] == (q, RANK)
    assert shapes[block + "self_attn.o_proj.lora_A.weight"] == (RANK, q)
    assert shapes[block + "mlp.down_proj.lora_B.weight"] == (d, RANK)
    assert len(shapes) == 14 * cfg.num_layers


def test_a_loaded_adapter_is_the_exported_one(config, finished, folder):
    again = changed(config, lora__path=str(folder))
    model = load_model(again, placement(again))
    assert_trees_equal(jax.device_get(model.adapter), finished[1].params)


def edited(folder, tmp_path, **fields):
    copy = shutil.copytree(folder, tmp_path / "adapter")
    content = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(content | fields))
    return copy


def without_fingerprint(copy):
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file(tensors, copy / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": 8}, "r is 8, lora.rank is 4"),
        ({"lora_alpha": 16}, "lora_alpha is 16, lora.alpha is 8"),
        ({"target_modules": ["q_proj", "v_proj"]}, r"target_modules is \['q_proj', 'v_proj'\]"),
        ({"target_modules": ".*"}, "target_modules is"),
        ({"target_modules": None}, "target_modules is None"),
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "all"}, "bias is 'all': only 'none'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3': only 'LORA'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"base_model_name_or_path": "Qwen/Qwen3-4B"}, "'Qwen/Qwen3-4B', model.path is"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named(config, folder, tmp_path, fields, said):
    copy = edited(folder, tmp_path, **fields)
    without_fingerprint(copy)
    with pytest.raises(ConfigError, match=rf"lora.path=(.|\n)*{said}"):
        refused = changed(config, lora__path=str(copy))
        load_model(refused, placement(refused))


def test_an_adapter_for_other_weights_of_the_same_name_is_refused(config, folder):
    cfg = hf.read_config(BASE)
    with pytest.raises(ValueError, match="trained on other weights.*0123"):
        peft.load(folder, peft.Base(cfg, str(BASE), "0123"), LORA)


def test_tensors_that_do_not_fit_are_all_named(config, folder, tmp_path):
    copy = edited(folder, tmp_path)
    file = copy / "adapter_model.safetensors"
    tensors, block = load_file(file), "base_model.model.model.layers.0."
    del tensors[block + "self_attn.k_proj.lora_A.weight"]
    tensors[block + "mlp.up_proj.lora_A.weight"] = np.zeros((RANK, 3), np.float32)
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((RANK, 3), np.float32)
    save_file(tensors, file)
    base = peft.Base(hf.read_config(BASE), str(BASE), "")
    with pytest.raises(ValueError) as error:
        peft.load(copy, base, LORA)
    said = str(error.value)
    assert "k_proj.lora_A.weight is missing" in said and "shape (4, 3), expected (4, " in said
    assert "lm_head.lora_A.weight belongs to no adapted layer" in said
    file.write_bytes(b"torn")
    with pytest.raises(ValueError, match="adapter_model.safetensors cannot be read"):
        peft.load(copy, base, LORA)
    with pytest.raises(ValueError, match="has no adapter_config.json"):
        peft.load(tmp_path, base, LORA)


def test_supervised_fine_tuning_refuses_an_adapter(config, tmp_path):
    with pytest.raises(ConfigError, match="lora.rank=4: --mode=sft trains all weights"):
        modes.run_sft(job(config, tmp_path), lambda: False)


def test_a_refused_fine_tuning_leaves_the_work_directory_as_it_was(config, tmp_path):
    refused = small_config(config.model.path, sft__data="absent.jsonl")
    for workdir in (tmp_path / "run", tmp_path):
        (tmp_path / "config.json").write_text("of an earlier run")
        with pytest.raises(ConfigError, match="absent.jsonl"):
            modes.run_sft(job(refused, workdir), lambda: False)
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
        assert (tmp_path / "config.json").read_text() == "of an earlier run"
