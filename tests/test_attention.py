import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.core.mesh import UPDATE_RULES, Layout, make_mesh
from sage_jax.models import attention

# Rows, positions, query heads, key/value heads, head dim: grouped or not, lengths on and off a
# multiple of every block.
SHAPES = [(2, 300, 4, 2, 64), (1, 640, 4, 1, 128), (3, 512, 2, 2, 16)]


def inputs(shape, packed=True, dtype=jnp.float32):
    rows, length, heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(length)
    sizes = [(rows, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    qkv = [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes]
    segment_bt = np.sort(rng.integers(0, 4, (rows, length)), axis=1)
    return *qkv, jnp.asarray(segment_bt, jnp.int32) if packed else None


@cache
def program(kind, layout=None):
    """Jitted output and gradients of a loss in which every element of the output counts."""

    def loss(q, k, v, segment_bt):
        z = attention.attend(q, k, v, segment_bt, kind=kind, layout=layout).astype(jnp.float32)
        weights = jnp.cos(jnp.arange(z.size)).reshape(z.shape)
        return jnp.sum(weights * jnp.sin(z)), z

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def assert_same(got, want, atol):
    jax.tree.map(partial(np.testing.assert_allclose, atol=atol), got, want)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["blocked", "splash"])
def test_values_and_gradients_equal_those_of_plain_attention(kind, shape, packed):
    args = inputs(shape, packed)
    assert_same(program(kind)(*args), program("xla")(*args), 2e-5)


def test_blocks_without_a_common_segment_are_not_visited():
    # Were they, what is not a number in one row would reach the other, and masks would not help.
    q, k, v, _ = inputs((1, 4 * attention.BLOCK, 2, 1, 16))
    half = 2 * attention.BLOCK
    segment_bt = jnp.repeat(jnp.asarray([[0, 1]]), half, axis=1)
    v = v.at[:, :half].set(jnp.nan)
    dqkv, z = program("blocked")(q, k, v, segment_bt)
    assert jnp.isfinite(z[:, half:]).all() and not jnp.isfinite(z[:, :half]).any()
    assert all(jnp.isfinite(x[:, half:]).all() for x in dqkv)


def test_bf16_attention_accumulates_in_float32():
    shape = (1, 700, 2, 1, 64)
    exact = program("xla")(*inputs(shape))[1]
    errors = {}
    for kind in ("xla", "blocked", "splash"):
        grads, z = program(kind)(*inputs(shape, dtype=jnp.bfloat16))
        assert {x.dtype for x in grads} == {jnp.dtype(jnp.bfloat16)}
        errors[kind] = float(jnp.abs(z - exact).mean())
    assert max(errors.values()) < 1.5 * errors["xla"], errors


def test_the_scores_of_all_pairs_of_positions_never_exist():
    shape = (1, 8 * attention.BLOCK, 2, 1, 16)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(shape)]
    pairs = 4 * shape[1] ** 2
    plain, blocked = (
        program(kind).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for kind in ("xla", "blocked")
    )
    assert blocked < pairs / 4 and plain > pairs


def test_auto_follows_platform_and_length():
    class Chip:
        def __init__(self, platform):
            self.platform = platform

    class Mesh:
        def __init__(self, platform):
            self.devices = np.array([Chip(platform)])

    def chosen(platform, length, packed, kind="auto"):
        return attention.choose(kind, length, packed, Layout(Mesh(platform), UPDATE_RULES))

    assert {chosen(p, 256, True) for p in ("tpu", "cuda", "cpu")} == {"xla"}
    assert [chosen("tpu", 8192, p) for p in (True, False)] == ["splash"] * 2
    assert [chosen("cuda", 8192, p) for p in (True, False)] == ["blocked", "cudnn"]
    assert [chosen("cpu", 8192, p) for p in (True, False)] == ["blocked"] * 2
    assert [chosen("cuda", 64, p, "cudnn") for p in (True, False)] == ["blocked", "cudnn"]
    with pytest.raises(ValueError, match="model.attention='flash'"):
        chosen("cpu", 64, False, "flash")


def test_cudnn_is_what_runs_where_it_was_asked_for():
    # Without a GPU its lowering is all that can be tried, and that asks for the library.
    with pytest.raises(RuntimeError, match="cuDNN"):
        attention.attend(*inputs(SHAPES[0], packed=False), kind="cudnn")


@pytest.mark.multidevice
@pytest.mark.parametrize("kind", ["blocked", "splash"])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)], ids=str)
def test_on_a_mesh_rows_and_heads_stay_where_they_are(kind, sizes):
    layout = Layout(make_mesh(*sizes), UPDATE_RULES)
    args = inputs((8, 300, 4, 2, 16))
    axes = ("batch", "seq", "q_heads", "head_dim"), *[("batch", "seq", "kv_heads", "head_dim")] * 2
    shardings = [layout.sharding(a) for a in (*axes, ("batch", "seq"))]
    placed = [jax.device_put(x, s) for x, s in zip(args, shardings, strict=True)]
    assert_same(program(kind, layout)(*placed), program("xla")(*args), 2e-5)
    compiled = program(kind, layout).lower(*placed).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled)
