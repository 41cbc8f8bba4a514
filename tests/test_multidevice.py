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
PARTED = ("loss", "grad_norm", "logp_gap/mean", "logp_gap/max", "entropy/solver")


def meshed(folder, mesh):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, **mesh}
    return small_config(folder, train__steps=2, **{f"mesh__{a}": n for a, n in sizes.items()})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_two_updates_on_any_mesh_equal_those_of_one_device(single_run, tiny_asset, tmp_path, mesh):
    config = meshed(tiny_asset, mesh)
    assert modes.run_train(job(config, tmp_path), lambda: False) == 0
    workdir, params = single_run
    for got, want in zip(rows(tmp_path), rows(workdir), strict=True):
        assert got.keys() == want.keys()
        for name in want:
            within = {"rel": 1e-3, "abs": 1e-4} if name in PARTED else {"abs": 1e-5}
            assert got[name] == pytest.approx(want[name], **within), name
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


def test_rows_that_do_not_divide_over_the_mesh_are_refused_with_a_number(tiny_asset):
    config = small_config(tiny_asset, mesh__data=8, rollout__slots=12)
    with pytest.raises(ConfigError, match=r"rollout.slots=12.*8.*for example 16"):
        placement(config)
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        placement(small_config(tiny_asset, mesh__data=3))
