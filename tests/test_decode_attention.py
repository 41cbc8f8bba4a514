"""Attention of new tokens over the cache: one result in all its forms, and good entries stay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.core.mesh import DECODE_RULES, Layout, make_mesh
from sage_jax.models import cache as kv
from sage_jax.models import decode_attention
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.models.stack import over_layers

LAYERS, KV_HEADS, GROUPS = 2, 2, 2


def turned(cache, source, form):
    """A cache of one form in another."""
    if source == "apart":
        cache = {name: jnp.stack(c) for name, c in cache.items()}
    axes = {**kv.AXES, "apart": ("layers", *kv.AXES["apart"])}
    order = [axes[source].index(axis) for axis in axes[form]]
    cache = {name: jnp.transpose(c, order) for name, c in cache.items()}
    return {name: tuple(c) for name, c in cache.items()} if form == "apart" else cache


def random_cache(slots, length, head_dim, dtype):
    shape = LAYERS, slots, length, KV_HEADS, head_dim
    keys = jax.random.split(jax.random.key(0), 2)
    return {n: jax.random.normal(k, shape, dtype) for n, k in zip("kv", keys, strict=True)}


def run(form, cache, start_s, live_s, steps, dtype=jnp.float32, layout=None, read_length=None):
    """Outputs [step, layer, s, n, h] of `steps` tokens a row of which `live_s` count, and the cache
    as a scatter has it."""
    slots, length, _, head_dim = cache["k"].shape[1:]
    cache = turned(cache, "scatter", form)
    if layout is not None:
        cache = jax.device_put(cache, layout.sharding(kv.AXES[form]))
    position_s, rng = jnp.asarray(start_s), np.random.default_rng(1)

    def token():
        heads = (KV_HEADS * GROUPS, KV_HEADS, KV_HEADS)
        shapes = [(LAYERS, slots, 1, n, head_dim) for n in heads]
        return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]

    read = read_length or length

    @jax.jit
    def step(cache, qkv, position_s):
        def body(cache, layer):
            index, qkv = layer
            z, cache = decode_attention.attend(
                form, cache, index, tuple(qkv[n] for n in "qkv"), position_s, read, layout
            )
            return cache, z[:, 0]

        layers = dict(zip("qkv", qkv, strict=True))
        if form == "apart":
            layers = tuple({n: x[i] for n, x in layers.items()} for i in range(LAYERS))
        cache, seen = over_layers(body, cache, layers)
        return (cache._replace(step=cache.step + 1) if form == "aside" else cache), seen

    if form == "aside":
        cache = kv.open_chunk(cache, position_s, steps, layout)
    seen = []
    for i in range(steps):
        cache, of_step = step(cache, token(), position_s)
        seen.append(np.asarray(of_step, np.float32))
        position_s += i < jnp.asarray(live_s)
    if form == "aside":
        cache = jax.jit(kv.close_chunk, static_argnums=2)(cache, position_s, layout)
    return np.stack(seen), turned(cache, form, "scatter")


def assert_same(got, want, before, start_s, live_s, within):
    """Outputs of rows that count, and what a row holds in the end; the rest as it was `before`."""
    (seen, cache), (expected, written) = got, want
    for s, (start, live) in enumerate(zip(start_s, live_s, strict=True)):
        np.testing.assert_allclose(seen[:live, :, s], expected[:live, :, s], **within)
        end = start + live
        for name in ("k", "v"):
            np.testing.assert_array_equal(cache[name][:, s, :end], written[name][:, s, :end])
            if before is not None:
                np.testing.assert_array_equal(cache[name][:, s, end:], before[name][:, s, end:])


# Of 128, which is written in whole tiles, and of 40, which is not; rows that end within the chunk,
# one at the very end of its cache, one that never lived; a chunk longer than the cache.
ROWS = [
    (40, [0, 3, 35, 38, 7], [5, 2, 5, 2, 0], 5),
    (128, [0, 3, 123, 126, 128], [5, 2, 5, 2, 0], 5),
    (256, [126, 127, 128, 251, 255], [5, 5, 1, 5, 1], 5),
    (8, [0, 3, 7, 8, 2], [8, 5, 1, 0, 0], 9),
]


@pytest.mark.parametrize("form", ["aside", "apart"])
@pytest.mark.parametrize(("length", "start_s", "live_s", "steps"), ROWS)
def test_other_forms_give_what_keys_scattered_at_once_give(form, length, start_s, live_s, steps):
    cache = random_cache(len(start_s), length, 8, jnp.float32)
    want = run("scatter", cache, start_s, live_s, steps)
    got = run(form, cache, start_s, live_s, steps)
    # What is kept aside never comes to the cache of a row that does not count.
    before = cache if form == "aside" else None
    assert_same(got, want, before, start_s, live_s, {"atol": 1e-5})


def test_positions_past_the_read_length_are_not_seen_and_those_before_it_are():
    start_s, live_s = [0, 3, 11], [3, 3, 3]
    cache = random_cache(3, 40, 8, jnp.float32)
    want = run("scatter", cache, start_s, live_s, 3)
    for form in ("scatter", "aside", "apart"):
        got = run(form, cache, start_s, live_s, 3, read_length=14)
        assert_same(got, want, None, start_s, live_s, {"atol": 1e-5})


def test_the_kernel_of_the_library_gives_what_the_plain_program_gives():
    start_s, live_s = [0, 15, 17, 46, 48], [2, 2, 1, 2, 0]
    cache = random_cache(5, 48, 128, jnp.bfloat16)
    want = run("scatter", cache, start_s, live_s, 2, jnp.bfloat16)
    got = run("paged", cache, start_s, live_s, 2, jnp.bfloat16)
    # A row at the end of its cache writes nothing, so that its last entry stays.
    assert_same(got, want, None, start_s, live_s, {"atol": 2e-2, "rtol": 2e-2})


@pytest.mark.multidevice
def test_keys_kept_aside_are_the_same_on_a_mesh():
    start_s, live_s = [0, 3, 123, 126, 9, 1, 64, 100], [2, 1, 2, 2, 0, 2, 2, 2]
    cache = random_cache(8, 128, 8, jnp.float32)
    layout = Layout(make_mesh(2, 2, 2), DECODE_RULES)
    want = run("scatter", cache, start_s, live_s, 2)
    got = run("aside", cache, start_s, live_s, 2, layout=layout)
    assert_same(got, want, cache, start_s, live_s, {"atol": 1e-5})


def test_what_a_row_gets_at_its_start_is_the_same_in_every_form():
    prefix = {n: jnp.ones((3, 5, KV_HEADS, 8)) * (1 + i) for i, n in enumerate("kv")}
    cache = random_cache(4, 16, 8, jnp.float32)
    want = kv.place(cache, 1, prefix, jnp.array([2, 4, 0]), "scatter")
    for form in ("aside", "paged", "apart"):
        got = kv.place(turned(cache, "scatter", form), 1, prefix, jnp.array([2, 4, 0]), form)
        for name, c in turned(got, form, "scatter").items():
            np.testing.assert_array_equal(c, want[name], form)
    assert (want["k"][1, 2, :5] == 1).all() and (want["k"][0] == cache["k"][0]).all()


def test_the_kernel_is_chosen_only_where_it_can_serve():
    wide = QwenConfig(**SIZES, head_dim=128)
    narrow = dataclasses.replace(wide, head_dim=64)
    assert kv.choose("splash", wide, 64, jnp.bfloat16, None) == "paged"
    for cfg, length, dtype in (
        (narrow, 64, jnp.bfloat16),
        (wide, 60, jnp.bfloat16),
        (wide, 64, jnp.float32),
    ):
        assert kv.choose("splash", cfg, length, dtype, None) == "aside"
    on_cpus = Layout(make_mesh(), DECODE_RULES)
    assert kv.choose("splash", wide, 64, jnp.bfloat16, on_cpus) == "aside"
    kinds = {"auto": "scatter", "xla": "scatter", "blocked": "aside", "cudnn": "cudnn"}
    assert {kind: kv.choose(kind, wide, 64, jnp.bfloat16, None) for kind in kinds} == kinds
    kinds |= {"auto": "apart", "xla": "apart"}
    chosen = {kind: kv.choose(kind, wide, 64, jnp.bfloat16, None, apart=True) for kind in kinds}
    assert chosen == kinds


SIZES = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": LAYERS,
    "num_heads": KV_HEADS * GROUPS,
    "num_kv_heads": KV_HEADS,
    "tie_embeddings": True,
    "qk_norm": True,
}
