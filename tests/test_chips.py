"""The chips that are known, and what a compiled program says of itself."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sage_jax.core import chips, flops, hlo
from sage_jax.core.mesh import make_mesh

GIB = 2**30


# ---- chips


@pytest.mark.parametrize("name", ["v5e", "v5e:3x3", "cpu", "cpu:0", "tpu", "v9:2x2"])
def test_an_unknown_topology_is_refused_with_all_that_are_known(name):
    with pytest.raises(ValueError, match="choose one of v5e:2x4, .*v4:2x2x2, .*cpu:N.*gpu"):
        chips.find(name)


def test_without_libtpu_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"libtpu.*pip install .*sage_jax\[dryrun\]"):
        chips.find("v5e:4x4")


def test_fake_devices_share_the_memory_of_the_machine_and_have_no_rates():
    devices, chip = chips.find("cpu:8")
    assert len(devices) == 8 and {d.platform for d in devices} == {"cpu"}
    assert 0 < chip.hbm * 8 < 2**50 and not chip.timed
    with pytest.raises(ValueError, match="already runs with 8 CPU devices.*XLA_FLAGS"):
        chips.find("cpu:16")


def test_every_known_topology_is_of_a_known_chip_with_rates():
    kinds = {name.split(":")[0] for name in chips.TOPOLOGIES}
    assert kinds == set(chips.TPUS)
    for chip in chips.TPUS.values():
        assert chip.timed and 15 * GIB < chip.hbm < 200 * GIB


# ---- what a compiled program says


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    mesh = make_mesh(8, 1, 1)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    @jax.jit
    def program(x):
        def body(x, _):
            total = jax.shard_map(
                lambda part: jax.lax.psum(part, "data"),
                mesh=mesh,
                in_specs=PartitionSpec("data"),
                out_specs=PartitionSpec(),
            )(x)
            return x + jnp.sum(total), None

        return jax.lax.scan(body, x, length=5)[0]

    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=rows)
    found = hlo.Program(program.lower(x).compile().as_text()).collectives()
    assert [(c.kind, c.count) for c in found] == [("all-reduce", 5)]
    assert found[0].bytes == pytest.approx(5 * 2 * 4096 * 7 / 8, abs=5)


def test_a_collective_that_runs_beside_other_work_counts_once_and_permutes_in_full():
    text = """\
%step (p: bf16[8,4]) -> bf16[64,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[64,4]{1,0} all-gather(%p), channel_id=7, replica_groups=[2,8]<=[16]
}

%more (p: bf16[8,4]) -> bf16[64,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[64,4]{1,0} all-gather(%p), channel_id=7, replica_groups=[2,8]<=[16]
}

ENTRY %main (a: bf16[8,4]) -> bf16[64,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %send = (bf16[8,4], bf16[8,4], u32[], u32[]) collective-permute-start(%a), channel_id=8
  %start = bf16[64,4]{1,0} fusion(%a), kind=kCustom, calls=%step
  ROOT %end = bf16[64,4]{1,0} fusion(%a), kind=kCustom, calls=%more
}
"""
    found = hlo.Program(text).collectives()
    assert found == [
        hlo.Collective("all-gather", 1, 64 * 4 * 2 * 7 // 8),
        hlo.Collective("collective-permute", 1, 64),
    ]


def test_flops_count_loops_gradients_and_what_is_computed_again():
    def loss(w, x):
        body = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None))
        return jnp.sum(jax.lax.scan(body, x, w)[0])

    w, x = jnp.zeros((3, 8, 8)), jnp.zeros((4, 8))
    product = 2 * 4 * 8 * 8
    forward = jax.jit(loss).trace(w, x)
    assert flops.count(forward.jaxpr) == 3 * product
    backward = jax.jit(jax.grad(loss)).trace(w, x)
    assert flops.count(backward.jaxpr) == pytest.approx(4 * 3 * product, rel=0.1)


def test_flops_leave_out_what_nothing_needs():
    def unused(x):
        jax.jit(jnp.dot)(x, x)
        return x + 1

    x = jnp.zeros((4, 4))
    assert flops.count(jax.make_jaxpr(unused)(x)) == 0
    assert flops.count(jax.make_jaxpr(lambda x: unused(x) @ x)(x)) == 2 * 4**3
