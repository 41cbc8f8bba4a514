import dataclasses
import json
import shutil
import socket
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from greedy import greedy, pad
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from sage_jax.core.mesh import UPDATE_RULES, Layout, make_mesh
from sage_jax.models import hf, qwen, qwen_params

DATA = Path(__file__).parent / "data"
GOLDENS = ["golden_qwen2", "golden_qwen2_5", "golden_qwen3"]


@pytest.fixture
def folder(tmp_path):
    """A copy of the tied Qwen3 golden, one weight file, to break."""
    return shutil.copytree(DATA / "golden_qwen3", tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    """A copy of the untied Qwen2 golden, three shards and an index, to break."""
    return shutil.copytree(DATA / "golden_qwen2", tmp_path / "sharded")


def edit_weights(file, **changes):
    """Replace tensors by underscored name in one safetensors file; None removes."""
    tensors = load_file(file)
    for name, value in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def problems(folder):
    with pytest.raises(ValueError) as error:
        hf.load(folder)
    return str(error.value)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# --- parity with transformers, as stored in the goldens ------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_and_greedy_tokens_equal_transformers(name):
    golden = np.load(DATA / name / "golden.npz")
    prompts = [list(map(int, p)) for p in np.split(golden["prompts"], golden["lengths"][:-1])]
    params, cfg = hf.load(DATA / name)
    tokens_bt, _ = pad(prompts, max(golden["lengths"]))
    logits = qwen.head_logits(params, cfg, qwen.forward(params, cfg, tokens_bt))
    assert np.abs(np.asarray(logits) - golden["logits"]).max() < 1e-4
    tokens = greedy(params, cfg, prompts, golden["greedy"].shape[1])
    np.testing.assert_array_equal(tokens, golden["greedy"])


def test_goldens_cover_both_heads_both_families_and_shards():
    configs = [json.loads((DATA / name / "config.json").read_text()) for name in GOLDENS]
    assert {c["model_type"] for c in configs} == {"qwen2", "qwen3"}
    assert {c["tie_word_embeddings"] for c in configs} == {True, False}
    assert {c["dtype"] for c in configs} == {"float32", "bfloat16"}
    assert (DATA / GOLDENS[0] / hf.INDEX).is_file()


# --- load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_16_bit_files_load_exactly_into_float32_and_back(folder, stored):
    file = folder / "model.safetensors"
    save_file({k: v.astype(stored) for k, v in load_file(file).items()}, file)
    values = load_file(file)
    params, _ = hf.load(folder)
    assert params["embed"].dtype == jnp.float32
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(params["embed"], values[name].astype(np.float32))
    assert_equal(hf.load(folder, stored)[0]["embed"], values[name])


@pytest.mark.multidevice
def test_load_places_each_device_its_shard_only():
    alone, cfg = hf.load(DATA / "golden_qwen2")
    layout = Layout(make_mesh(1, 4, 2), UPDATE_RULES)
    params, _ = hf.load(DATA / "golden_qwen2", layout=layout)
    assert_equal(params, alone)
    for name, p in qwen_params.param_table(cfg).items():
        array = params
        for key in name.split("."):
            array = array[key]
        expected = layout.sharding(p.axes).shard_shape(p.shape)
        assert {s.data.shape for s in array.addressable_shards} == {expected}, name
    assert params["embed"].addressable_shards[0].data.size == params["embed"].size // 8


@pytest.mark.multidevice
def test_the_host_never_holds_the_whole_model(tmp_path):
    cfg = dataclasses.replace(
        hf.load(DATA / "golden_qwen3")[1], hidden_size=128, intermediate_size=160, num_layers=16
    )
    layout = Layout(make_mesh(1, 4, 2), UPDATE_RULES)
    rng = np.random.default_rng(0)
    flat = {
        name: jnp.asarray(rng.standard_normal(p.shape), jnp.float32)
        for name, p in qwen_params.param_table(cfg).items()
    }
    params = unflatten_dict(flat, sep=".")
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    largest = max(x.nbytes for x in jax.tree.leaves(params))
    hf.export(params, cfg, tmp_path / "out")
    tracemalloc.start()
    loaded, _ = hf.load(tmp_path / "out", layout=layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest * 2.5 < total and peak < largest * 2.5, (largest, peak, total)
    assert_equal(loaded, params)


@pytest.mark.multidevice
def test_each_byte_is_read_once_and_no_host_array_exceeds_a_shard(monkeypatch):
    layout, held, read = Layout(make_mesh(1, 4, 2), UPDATE_RULES), [], []
    real_read, real_shard = hf._Stored.read, hf._read_shard

    def reading(*args):
        read.append(real_read(*args).nbytes)
        return real_read(*args)

    def shard(*args):
        host = real_shard(*args)
        held.append(host.nbytes)
        return host

    monkeypatch.setattr(hf._Stored, "read", reading)
    monkeypatch.setattr(hf, "_read_shard", shard)
    params, cfg = hf.load(DATA / "golden_qwen3", layout=layout)
    largest = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    stored = sum(x.nbytes for x in load_file(DATA / "golden_qwen3" / "model.safetensors").values())
    assert max(held) == largest < max(x.nbytes for x in jax.tree.leaves(params)) / 4
    assert sum(read) == stored and max(read) <= largest


def test_a_shard_that_is_no_block_of_its_tensor_is_an_error():
    q_proj = qwen_params.param_table(hf.load(DATA / "golden_qwen3")[1])["layers.q_proj"]
    layers, d, n, h = q_proj.shape
    whole = [slice(0, layers), slice(0, d), slice(0, n), slice(0, h)]
    assert hf._hf_block(q_proj, tuple(whole)) == (slice(0, n * h), slice(0, d))
    part = (whole[0], slice(4, 8), slice(1, 2), whole[3])
    assert hf._hf_block(q_proj, part) == (slice(h, 2 * h), slice(4, 8))
    with pytest.raises(ValueError, match="q_proj.*not one block"):
        hf._hf_block(q_proj, (*whole[:3], slice(0, h // 2)))


def test_shards_without_an_index_load(sharded):
    expected = hf.load(sharded)[0]
    (sharded / hf.INDEX).unlink()
    files = sorted(sharded.glob("*.safetensors"))
    files[0].rename(sharded / "zzz.safetensors")  # order must not matter
    assert_equal(hf.load(sharded)[0], expected)


def test_all_problems_of_a_folder_are_reported_at_once(folder):
    edit_weights(
        folder / "model.safetensors",
        model__norm__weight=None,
        model__layers__1__self_attn__q_norm__weight=np.ones(9, np.float32),
        model__layers__0__mlp__up_proj__weight=np.ones((24, 16), np.int8),
        model__layers__2__mlp__up_proj__weight=np.ones((24, 16), np.float32),
    )
    save_file({"model.embed_tokens.weight": np.ones((64, 16))}, folder / "other.safetensors")
    (folder / "third.safetensors").write_bytes(b"not weights")
    text = problems(folder)
    for expected in (
        "model.norm.weight is missing",
        "model.layers.1.self_attn.q_norm.weight has shape (9,), config.json asks for (8,)",
        "model.layers.0.mlp.up_proj.weight has type I8",
        "model.layers.2.mlp.up_proj.weight is not a parameter of a qwen3 model",
        "model.embed_tokens.weight is in both model.safetensors and other.safetensors",
        "third.safetensors cannot be read",
    ):
        assert expected in text


def test_index_that_does_not_match_the_shards_is_an_error(sharded):
    index = json.loads((sharded / hf.INDEX).read_text())
    files = sorted(f.name for f in sharded.glob("*.safetensors"))
    moved = next(k for k, f in index["weight_map"].items() if f == files[0])
    index["weight_map"][moved] = files[1]
    index["weight_map"]["lm_head.weight"] = "../model-9.safetensors"
    (sharded / hf.INDEX).write_text(json.dumps(index))
    text = problems(sharded)
    assert f"places {moved} in {files[1]}, which does not hold it" in text
    assert "lists '../model-9.safetensors', which is not a file name within" in text


def test_an_absent_shard_is_named_with_the_tensors_it_held(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    names = list(load_file(file))
    file.unlink()
    text = problems(sharded)
    assert f"lists {file.name}, which is absent" in text
    assert all(f"{name} is missing" in text for name in names)


def test_a_stale_whole_file_beside_shards_is_an_error(sharded):
    save_file({"model.norm.weight": np.ones(16, np.float32)}, sharded / "model.safetensors")
    assert "remove the stale one" in problems(sharded)


def test_a_tied_folder_that_also_stores_its_head_loads(folder):
    expected = hf.load(folder)[0]
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(folder / "model.safetensors", lm_head__weight=embedding)
    params, cfg = hf.load(folder)
    assert cfg.tie_embeddings and "lm_head" not in params
    assert_equal(params, expected)


def test_a_tied_folder_with_another_head_is_an_error(folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(folder / "model.safetensors", lm_head__weight=embedding + 1)
    assert "set tie_word_embeddings to false" in problems(folder)
    edit_config(folder, tie_word_embeddings=False)
    params, cfg = hf.load(folder)
    np.testing.assert_array_equal(params["lm_head"], embedding + 1)


def test_an_untied_folder_without_a_head_says_how_to_tie_it(folder):
    edit_config(folder, tie_word_embeddings=False)
    text = problems(folder)
    assert "lm_head.weight is missing" in text and "tie_word_embeddings to true" in text


def test_folders_without_safetensors_or_config_are_errors(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no *.safetensors file" in problems(folder)
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in problems(folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in problems(folder)


def test_unsupported_config_fields_are_errors(folder):
    edit_config(folder, use_sliding_window=True)
    assert "use_sliding_window" in problems(folder)


# --- export -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_export_gives_back_every_tensor_bit_for_bit(name, tmp_path):
    source = DATA / name
    params, cfg = hf.load(source, json.loads((source / "config.json").read_text())["dtype"])
    out = hf.export(params, cfg, tmp_path / "out", source)
    before = {k: v for f in source.glob("*.safetensors") for k, v in load_file(f).items()}
    after = load_file(out / "model.safetensors")
    assert sorted(after) == sorted(before)
    for key in before:
        assert after[key].tobytes() == before[key].tobytes(), key
    again, same = hf.load(out)
    assert same == cfg
    assert_equal(again, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_large_exports_are_sharded_with_an_index(tmp_path):
    params, cfg = hf.load(DATA / "golden_qwen3")
    out = hf.export(params, cfg, tmp_path / "out", shard_bytes=6_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 6_000 for f in files)
    index = json.loads((out / hf.INDEX).read_text())["weight_map"]
    assert index == {name: f.name for f in files for name in load_file(f)}
    assert_equal(hf.load(out)[0], params)


@pytest.mark.multidevice
def test_sharded_params_export_like_whole_ones(tmp_path):
    layout = Layout(make_mesh(1, 4, 2), UPDATE_RULES)
    params, cfg = hf.load(DATA / "golden_qwen3", layout=layout)
    out = hf.export(params, cfg, tmp_path / "out")
    assert_equal(hf.load(out)[0], hf.load(DATA / "golden_qwen3")[0])


def test_export_casts_and_says_so(tmp_path):
    params, cfg = hf.load(DATA / "golden_qwen3")
    out = hf.export(params, cfg, tmp_path / "out", dtype=jnp.bfloat16)
    with safe_open(out / "model.safetensors", framework="np") as handle:
        assert {handle.get_slice(k).get_dtype() for k in handle.keys()} == {"BF16"}
        assert handle.metadata()["format"] == "pt"  # transformers refuses files without it
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_export_carries_over_tokenizer_files_and_token_ids(folder, tmp_path):
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    (folder / "optimizer.json").write_text("{}")
    params, cfg = hf.load(folder)
    out = hf.export(params, cfg, tmp_path / "out", folder)
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert (out / "chat_template.jinja").read_text() == "chat_template.jinja"
    assert (out / "generation_config.json").is_file() and not (out / "optimizer.json").exists()
    config = json.loads((out / "config.json").read_text())
    assert config["eos_token_id"] == 63 and config["rope_theta"] == 1e6
    assert (out / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_export_never_mixes_with_older_weights(folder):
    params, cfg = hf.load(folder)
    with pytest.raises(ValueError, match="already holds weights"):
        hf.export(params, cfg, folder)


def test_export_of_params_that_do_not_fit_the_config_is_an_error(tmp_path):
    params, cfg = hf.load(DATA / "golden_qwen3")
    with pytest.raises(ValueError, match="final_norm"):
        hf.export({**params, "final_norm": jnp.ones(3)}, cfg, tmp_path / "out")
    with pytest.raises(ValueError, match="lm_head"):
        hf.export({**params, "lm_head": params["embed"]}, cfg, tmp_path / "out")


def test_export_notices_a_tensor_that_reads_back_different(tmp_path, monkeypatch):
    def corrupt(tensors, file, metadata):
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        save_file(tensors, file, metadata)

    monkeypatch.setattr(hf, "save_file", corrupt)
    params, cfg = hf.load(DATA / "golden_qwen3")
    with pytest.raises(OSError, match="model.norm.weight reads back different"):
        hf.export(params, cfg, tmp_path / "out")
    with pytest.raises(ValueError, match="config.json"):  # nor does the broken folder load
        hf.load(tmp_path / "out")


# --- where a model is ---------------------------------------------------------------------------


def test_a_local_folder_loads_without_network(monkeypatch):
    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    params, _ = hf.load(DATA / "golden_qwen3")
    assert params["embed"].shape == (64, 16)


def no_network(*_args, **_kwargs):
    raise OSError("network is blocked in this test")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "missing", "a/b/c"])
def test_a_missing_folder_is_named(path):
    with pytest.raises(ValueError, match=f"'{path}' is not a folder"):
        hf.load(path)


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="'no-such/model' is neither a local folder"):
        hf.resolve("no-such/model")
