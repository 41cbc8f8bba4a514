import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from sage_jax.core.mesh import AXES, DECODE_RULES, UPDATE_RULES, Layout, make_mesh

pytestmark = pytest.mark.multidevice


def test_one_open_size_takes_the_remaining_devices():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(data=2, fsdp=-1, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    one = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    assert one.devices.size == 1 and one.axis_names == AXES


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((3, 1, 1), ["data 3 x fsdp 1 x tensor 1", "8 devices", "-1"]),
        ((-1, 3, 1), ["fsdp 3", "8 devices", "product 3"]),
        ((16, 1, -1), ["data 16", "8 devices"]),
        ((-1, -1, 1), ["data", "fsdp", "only one"]),
        ((0, 1, 1), ["mesh.data is 0", "positive"]),
        ((1, 1, -2), ["mesh.tensor is -2"]),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_named(sizes, named):
    with pytest.raises(ValueError) as error:
        make_mesh(*sizes)
    assert all(part in str(error.value) for part in named), error.value


def test_sharding_follows_the_rules():
    layout = Layout(make_mesh(2, 2, 2), UPDATE_RULES)
    spec = layout.sharding(("batch", "seq", "q_heads", "head_dim"), (4, 3, 2, 5)).spec
    assert spec == PartitionSpec(("data", "fsdp"), None, "tensor", None)
    assert layout.sharding(("embed", None)).spec == PartitionSpec("fsdp", None)


def test_decode_rules_keep_weights_whole_over_fsdp():
    layout = Layout(make_mesh(2, 2, 2), DECODE_RULES)
    assert layout.sharding(("embed", "mlp")).spec == PartitionSpec(None, "tensor")


@pytest.mark.parametrize(
    ("axes", "shape", "named"),
    [
        (("batch", "head"), None, ["unknown", "'head'", "head_dim"]),
        (("batch", "embed"), None, ["'fsdp'", "'batch'", "'embed'"]),
        (("kv_heads",), (3,), ["'kv_heads'", "size 3", "tensor of size 2"]),
        (("batch",), (6,), ["'batch'", "size 6", "data*fsdp of size 4"]),
        (("batch",), (8, 2), ["1 axes", "(8, 2)"]),
    ],
)
def test_impossible_shardings_name_axis_mesh_axis_and_size(axes, shape, named):
    layout = Layout(make_mesh(2, 2, 2), UPDATE_RULES)
    with pytest.raises(ValueError) as error:
        layout.sharding(axes, shape)
    assert all(part in str(error.value) for part in named), error.value


def test_a_rule_for_an_axis_the_mesh_lacks_is_an_error():
    layout = Layout(make_mesh(), {**UPDATE_RULES, "seq": "context"})
    with pytest.raises(ValueError, match="'seq' -> 'context'"):
        layout.sharding(("seq",))


def test_constrain_shards_an_activation_under_jit():
    layout = Layout(make_mesh(4, 1, 2), UPDATE_RULES)
    x = jax.jit(lambda x: layout.constrain(2 * x, "batch", "mlp"))(jnp.ones((8, 6)))
    assert {s.data.shape for s in x.addressable_shards} == {(2, 3)}
    assert (x == 2).all()


def test_equal_layouts_share_one_compiled_program():
    traces = []

    def count(x, layout):
        traces.append(layout)
        return layout.constrain(x, "batch")

    jitted = jax.jit(count, static_argnums=1)
    jitted(jnp.ones(8), Layout(make_mesh(8), dict(UPDATE_RULES)))
    jitted(jnp.ones(8), Layout(make_mesh(8), dict(UPDATE_RULES)))
    assert len(traces) == 1
    assert hash(traces[0]) == hash(Layout(make_mesh(8), dict(UPDATE_RULES)))
    changed = dataclasses.replace(traces[0], rules={**UPDATE_RULES, "batch": None})
    jitted(jnp.ones(8), changed)
    assert len(traces) == 2
