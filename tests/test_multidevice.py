"""The same run on eight fake devices, sharded every way, gives the run of one device."""

import jax
import numpy as np
import pytest
from test_train import job, rows, small_config

from sage_jax import modes
from sage_jax.config import ConfigError
from sage_jax.run import start
from sage_jax.runtime import placement

pytestmark = pytest.mark.multidevice
MESHES = [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
PARTED = ("loss", "grad_norm", "logp_gap/mean", "logp_gap/max")


def meshed(folder, mesh, **changes):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, **mesh}
    changes |= {f"mesh__{a}": n for a, n in sizes.items()}
    return small_config(folder, **{"train__steps": 2} | changes)


def assert_same_figures(got, want):
    for mine, theirs in zip(rows(got), rows(want), strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            within = {"rel": 1e-3, "abs": 1e-4} if name in PARTED else {"abs": 1e-5}
            assert mine[name] == pytest.approx(theirs[name], **within), name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_two_updates_on_any_mesh_equal_those_of_one_device(single_run, tiny_asset, tmp_path, mesh):
    config = meshed(tiny_asset, mesh)
    assert modes.run_train(job(config, tmp_path), lambda: False) == 0
    workdir, params = single_run
    assert_same_figures(tmp_path, workdir)
    want_text = (workdir / "episodes.jsonl").read_text().splitlines()
    got_text = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert len(got_text) == len(want_text)
    with start(config, tmp_path, lambda: False) as run:
        sharded = [len(x.sharding.device_set) for x in jax.tree.leaves(run.state.params)]
        assert set(sharded) == {8}
        if "fsdp" in mesh:
            embed = run.state.params["embed"]
            assert embed.addressable_shards[0].data.size <= embed.size // mesh["fsdp"]
        got_params = jax.device_get(run.state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got_params, params)


def test_a_run_that_trains_an_adapter_on_a_mesh_equals_that_of_one_device(tiny_asset, tmp_path):
    changes = {"lora__rank": 4, "lora__alpha": 8.0, "optim__lr": 1e-2, "method__audits": 0}
    changes |= {"valid__every": 0, "valid__effects": 0, "valid__samples": 0}
    found = {}
    for name, mesh in (("one", {}), ("eight", {"fsdp": 4, "tensor": 2})):
        config = meshed(tiny_asset, mesh, **changes)
        assert modes.run_train(job(config, tmp_path / name), lambda: False) == 0
        with start(config, tmp_path / name, lambda: False) as run:
            assert run.step == 2
            leaves = jax.tree.leaves(run.state.params)
            assert {len(x.sharding.device_set) for x in leaves} == {8 if mesh else 1}
            if mesh:  # split over fsdp at least, the base as well
                frozen = run.state.frozen["layers"]["up_proj"]
                assert all(x.addressable_shards[0].data.size <= x.size / 4 for x in leaves)
                assert frozen.addressable_shards[0].data.size == frozen.size / 8
            found[name] = jax.device_get(run.state.params)
    assert_same_figures(tmp_path / "eight", tmp_path / "one")
    assert max(np.abs(x).max() for x in jax.tree.leaves(found["one"])) > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *found.values())


def test_rows_that_do_not_divide_over_the_mesh_are_refused_with_a_number(tiny_asset):
    config = small_config(tiny_asset, mesh__data=8, rollout__slots=12)
    with pytest.raises(ConfigError, match=r"rollout.slots=12.*8.*for example 16"):
        placement(config)
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        placement(small_config(tiny_asset, mesh__data=3))
