import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from greedy import pad

from sage_jax.core.mesh import DECODE_RULES, UPDATE_RULES, Layout, make_mesh
from sage_jax.models import cache as kv
from sage_jax.models import qwen, qwen_params
from sage_jax.models.qwen import QwenConfig

QWEN3 = QwenConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    tie_embeddings=True,
    qk_norm=True,
)
QWEN2 = dataclasses.replace(
    QWEN3, model_type="qwen2", qk_norm=False, attention_bias=True, tie_embeddings=False
)
# Every kind of parameter at once, for what does not depend on the family.
BOTH = dataclasses.replace(QWEN2, qk_norm=True)
HF_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
}


@cache
def random_params(cfg):
    """No parameter at its default, so that a forgotten bias or norm shows."""
    rng = np.random.default_rng(0)
    flat = {
        name: jnp.asarray(("norm" in name) + 0.2 * rng.standard_normal(p.shape), jnp.float32)
        for name, p in qwen_params.param_table(cfg).items()
    }
    return unflatten_dict(flat, sep=".")


forward = jax.jit(qwen.forward, static_argnames=("cfg", "dtype", "layout", "remat"))


def random_tokens(b, t, seed=0):
    return jax.random.randint(jax.random.key(seed), (b, t), 0, QWEN3.vocab_size)


@pytest.fixture(params=[QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def cfg(request):
    return request.param


# --- config -----------------------------------------------------------------------------------


def test_config_of_qwen3_4b():
    cfg = QwenConfig.from_hf(HF_QWEN3)
    assert (cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim) == (36, 32, 8, 128)
    assert cfg.qk_norm and cfg.tie_embeddings and not cfg.attention_bias
    assert cfg.rope_theta == 1e6


def test_rope_theta_is_read_from_either_place_it_is_stored():
    nested = {k: v for k, v in HF_QWEN3.items() if k != "rope_theta"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    assert QwenConfig.from_hf(nested).rope_theta == 5e6
    assert QwenConfig.from_hf({**HF_QWEN3, "rope_theta": 1e4}).rope_theta == 1e4


def test_qwen2_has_qkv_bias_and_derives_head_dim():
    cfg = QwenConfig.from_hf({**HF_QWEN3, "model_type": "qwen2", "head_dim": None})
    assert cfg.attention_bias and not cfg.qk_norm and cfg.head_dim == 80


def test_config_survives_the_way_to_hugging_face_and_back(cfg):
    assert QwenConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "mrope": [1]}}, "mrope"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "differ"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"head_dim": 7}, "head_dim 7"),
    ],
)
def test_a_field_that_changes_the_mathematics_is_an_error_naming_it(change, named):
    with pytest.raises(ValueError, match=named):
        QwenConfig.from_hf({**HF_QWEN3, **change})


def test_all_problems_of_a_config_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        QwenConfig.from_hf({"model_type": "qwen3", "hidden_act": "gelu", "rope_theta": 1e6})
    for field in ("hidden_act", "vocab_size", "num_hidden_layers", "num_key_value_heads"):
        assert field in str(error.value)


# --- parameters -------------------------------------------------------------------------------


def test_every_parameter_has_its_own_name_and_an_axis_for_each_dimension(cfg):
    table = qwen_params.param_table(cfg)
    assert len({p.hf_name for p in table.values()}) == len(table)
    for name, p in table.items():
        assert len(p.axes) == len(p.shape), name
        assert set(p.axes) - {None} <= set(UPDATE_RULES), name
        assert (p.axes[0] == "layers") == name.startswith("layers.") == ("{layer}" in p.hf_name)


def test_transform_stores_output_rows_first_and_inverts(cfg):
    for name, p in qwen_params.param_table(cfg).items():
        tensor = np.arange(np.prod(p.hf_shape)).reshape(p.hf_shape)
        ours = p.from_hf(tensor)
        assert ours.shape == (p.shape[1:] if name.startswith("layers.") else p.shape), name
        np.testing.assert_array_equal(p.to_hf(ours), tensor, err_msg=name)
    p = qwen_params.param_table(cfg)["layers.q_proj"]
    tensor = np.arange(np.prod(p.hf_shape)).reshape(p.hf_shape)
    # Output row 7 is head 1, dimension 1 (head_dim 6); column 3 is input 3.
    assert p.from_hf(tensor)[3, 1, 1] == tensor[7, 3]


def test_linen_module_is_the_functions_over_the_same_pytree():
    params, tokens_bt = random_params(BOTH), random_tokens(2, 5)
    module = qwen.Qwen(BOTH)
    made = module.init(jax.random.key(0), tokens_bt)["params"]
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)
    logits = qwen.head_logits(params, BOTH, forward(params, BOTH, tokens_bt))
    np.testing.assert_allclose(module.apply({"params": params}, tokens_bt), logits, atol=1e-5)


# --- the full pass ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "tolerance"), [(1, 1e-6), (257, 5e-5), (4095, 5e-4), (30000, 4e-3)]
)
def test_rope_phases_hold_at_long_positions(position, tolerance):
    cfg = dataclasses.replace(QWEN3, head_dim=128, rope_theta=1e6)
    exact = position / 1e6 ** (np.arange(64, dtype=np.float64) / 64)
    angles = qwen.rope_angles(cfg, jnp.asarray([[position]]))
    assert angles.dtype == jnp.float32
    assert np.abs(np.cos(np.asarray(angles, np.float64)[0, 0]) - np.cos(exact)).max() < tolerance


def test_bfloat16_compute_keeps_rope_phases_and_logits_in_float32():
    params, tokens_bt = random_params(BOTH), random_tokens(1, 600)
    exact = forward(params, BOTH, tokens_bt)
    hidden = forward(params, BOTH, tokens_bt, dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    # Phases in bfloat16 would leave the late positions far worse than the early ones.
    error_t = np.abs(np.asarray(hidden - exact, np.float32)).mean(axis=(0, 2))
    assert error_t[-100:].mean() < 2 * error_t[:100].mean() + 0.01
    logits = qwen.head_logits(params, BOTH, hidden)
    assert logits.dtype == jnp.float32
    rounded = logits.astype(jnp.bfloat16).astype(jnp.float32)
    assert (rounded != logits).mean() > 0.9  # accumulated, not only returned, in float32


def test_what_stands_right_of_a_row_changes_nothing_in_it():
    params, rows = random_params(BOTH), [[3, 1, 4, 1, 5], [9, 2]]
    base = forward(params, BOTH, pad(rows, 5)[0])
    for length, fill in ((5, 63), (9, 0), (9, 7)):
        other = forward(params, BOTH, pad(rows, length, fill)[0])
        for i, ids in enumerate(rows):
            np.testing.assert_allclose(other[i, : len(ids)], base[i, : len(ids)], atol=1e-5)


def test_segments_of_a_packed_row_do_not_see_each_other():
    params = random_params(BOTH)
    first, second = random_tokens(1, 5, seed=1), random_tokens(1, 5, seed=2)
    packed = forward(
        params,
        BOTH,
        jnp.concatenate([first, second], axis=1),
        segment_ids_bt=jnp.asarray([[0] * 5 + [1] * 5]),
    )
    alone = forward(params, BOTH, jnp.concatenate([first, second]))
    np.testing.assert_allclose(packed[0], alone.reshape(10, -1), atol=1e-5)


def loss(params, cfg, tokens_bt, layout=None, remat="none"):
    hidden = qwen.forward(params, cfg, tokens_bt, layout=layout, remat=remat)
    logits = qwen.head_logits(params, cfg, hidden)
    logp = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(logp, tokens_bt[:, 1:, None], axis=-1).mean(), (hidden, logits)


loss_and_grad = jax.jit(
    jax.value_and_grad(loss, has_aux=True), static_argnames=("cfg", "layout", "remat")
)


@cache
def reference():
    """Params, tokens, and the loss, hidden states, logits and gradients of one device."""
    params, tokens_bt = random_params(BOTH), random_tokens(8, 10)
    return params, tokens_bt, loss_and_grad(params, BOTH, tokens_bt)


def assert_close(actual, expected):
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), actual, expected)


def saved_for_backward(remat):
    def pull_back(params):
        return jax.vjp(lambda p: loss(p, BOTH, tokens_bt, None, remat)[0], params)[1]

    params, tokens_bt, _ = reference()
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(pull_back, params)))


def test_remat_saves_less_and_leaves_gradients_as_they_are():
    params, tokens_bt, expected = reference()
    for remat in ("dots", "attention", "full"):
        assert_close(loss_and_grad(params, BOTH, tokens_bt, remat=remat), expected)
    sizes = [saved_for_backward(remat) for remat in ("full", "dots", "none")]
    assert sizes[0] < sizes[1] < sizes[2], sizes
    with pytest.raises(ValueError, match="remat 'some'"):
        loss(params, BOTH, tokens_bt, remat="some")


# --- decoding ---------------------------------------------------------------------------------

prefill = jax.jit(qwen.prefill, static_argnames=("cfg", "layout"))
decode_step = jax.jit(
    qwen.decode_step, static_argnames=("cfg", "read_length", "layout"), donate_argnames="cache"
)


def decode_all(params, cfg, rows, prompt_lengths, padded, length, read_length, fill, layout=None):
    """Hidden states [b, t, d] from the last prompt token on, fed with the rows' own tokens."""
    prompts = [ids[:n] for ids, n in zip(rows, prompt_lengths, strict=True)]
    hidden, filled = prefill(params, cfg, *pad(prompts, padded, fill), layout=layout)
    cache = kv.init(cfg, len(rows), length, layout=layout)
    cache = {name: c.at[:, :, :padded].set(filled[name]) for name, c in cache.items()}
    position, out = np.asarray(prompt_lengths), [hidden]
    while (position < [len(ids) for ids in rows]).any():
        token = [ids[min(p, len(ids) - 1)] for ids, p in zip(rows, position, strict=True)]
        hidden, cache = decode_step(
            params,
            cfg,
            jnp.asarray(token),
            jnp.asarray(position),
            cache,
            read_length=read_length,
            layout=layout,
        )
        out.append(hidden)
        position = position + 1
    return jnp.stack(out, axis=1), cache


def random_rows(count, length):
    return [list(map(int, random_tokens(1, length, seed=s)[0])) for s in range(count)]


@pytest.mark.parametrize(
    ("padded", "length", "read_length", "fill"), [(6, 12, 12, 0), (11, 32, 16, 63)]
)
def test_decoding_equals_the_full_pass(padded, length, read_length, fill):
    params = random_params(BOTH)
    rows = random_rows(3, 12)
    rows[1] = rows[1][:9]
    full = forward(params, BOTH, pad(rows, 12)[0])
    prompt_lengths = [6, 3, 1]
    hidden, _ = decode_all(params, BOTH, rows, prompt_lengths, padded, length, read_length, fill)
    for i, (ids, n) in enumerate(zip(rows, prompt_lengths, strict=True)):
        own = full[i, n - 1 : len(ids)]
        np.testing.assert_allclose(hidden[i, : len(own)], own, atol=1e-5)


def test_a_row_past_the_end_of_its_cache_writes_nothing():
    params = random_params(BOTH)
    tokens, positions = jnp.asarray([1, 2]), jnp.asarray([3, 4])
    empty = kv.init(BOTH, 2, 4)
    _, after = decode_step(params, BOTH, tokens, positions, empty, read_length=4)
    for name in ("k", "v"):
        assert (after[name][:, 0, 3] != 0).all()
        assert (after[name][:, 0, :3] == 0).all() and (after[name][:, 1] == 0).all()


def test_a_read_length_past_the_cache_is_an_error():
    ids = jnp.zeros(2, jnp.int32)
    empty = kv.init(BOTH, 2, 4)
    with pytest.raises(ValueError, match="read_length 5 .* 4"):
        qwen.decode_step(random_params(BOTH), BOTH, ids, ids, empty, read_length=5)


def abstract(cfg, slots, length, layout=None):
    """Arguments of a decode step as shapes and shardings only."""

    def shape(axes, sizes, dtype=jnp.float32):
        sharding = layout and layout.sharding(axes, sizes)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    flat = {name: shape(p.axes, p.shape) for name, p in qwen_params.param_table(cfg).items()}
    sizes = (cfg.num_layers, slots, length, cfg.num_kv_heads, cfg.head_dim)
    row = shape(("batch",), (slots,), jnp.int32)
    cache = {name: shape(kv.PREFIX_AXES, sizes) for name in ("k", "v")}
    return unflatten_dict(flat, sep="."), cfg, row, row, cache


def test_decoding_never_copies_the_whole_cache():
    cfg = dataclasses.replace(BOTH, num_layers=16)
    arguments = abstract(cfg, slots=8, length=512)
    memory = decode_step.lower(*arguments, read_length=512).compile().memory_analysis()
    total = 4 * sum(c.size for c in arguments[-1].values())
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < total / cfg.num_layers + 400_000


# --- meshes -----------------------------------------------------------------------------------


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 1, 4)], ids=str)
def test_logits_and_gradients_are_the_same_on_any_mesh(sizes):
    params, tokens_bt, expected = reference()
    layout = Layout(make_mesh(*sizes), UPDATE_RULES)
    tokens_bt = jax.device_put(tokens_bt, layout.sharding(("batch", "seq")))
    actual = loss_and_grad(place(params, BOTH, layout), BOTH, tokens_bt, layout=layout)
    assert_close(actual, expected)
    (_, (hidden, logits)), _ = actual
    rows_each = 8 // (sizes[0] * sizes[1])
    assert {s.data.shape for s in hidden.addressable_shards} == {(rows_each, 10, 32)}
    assert logits.addressable_shards[0].data.shape[0] == rows_each


def place(params, cfg, layout):
    table = qwen_params.param_table(cfg)
    shardings = {name: layout.sharding(p.axes, p.shape) for name, p in table.items()}
    return jax.device_put(params, unflatten_dict(shardings, sep="."))


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", [(4, 1, 2), (2, 2, 2)], ids=str)
def test_decoding_is_the_same_on_any_mesh_with_a_sharded_cache(sizes):
    params = random_params(BOTH)
    rows, lengths = random_rows(8, 8), [1, 2, 3, 4, 5, 4, 3, 2]
    expected, _ = decode_all(params, BOTH, rows, lengths, 5, 8, 8, 0)
    layout = Layout(make_mesh(*sizes), DECODE_RULES)
    on_mesh = place(params, BOTH, layout)
    actual, cache = decode_all(on_mesh, BOTH, rows, lengths, 5, 8, 8, 0, layout)
    assert_close(actual, expected)
    rows_each, heads_each = 8 // (sizes[0] * sizes[1]), 4 // sizes[2]
    for c in cache.values():
        shapes = {s.data.shape for s in c.addressable_shards}
        assert shapes == {(2, rows_each, 8, heads_each, 6)}


@pytest.mark.multidevice
def test_decoding_on_a_mesh_moves_no_cache_between_devices():
    layout = Layout(make_mesh(2, 2, 2), DECODE_RULES)
    arguments = abstract(BOTH, 8, 16, layout)
    program = decode_step.lower(*arguments, read_length=16, layout=layout).compile().as_text()
    assert "all-reduce(" in program
    for moved in ("all-gather(", "all-to-all(", "collective-permute("):
        assert moved not in program


@pytest.mark.multidevice
def test_initial_params_do_not_depend_on_the_mesh():
    alone = qwen_params.init(BOTH, jax.random.key(3))
    layout = Layout(make_mesh(2, 2, 2), UPDATE_RULES)
    on_mesh = qwen_params.init(BOTH, jax.random.key(3), layout=layout)
    jax.tree.map(np.testing.assert_array_equal, on_mesh, alone)
    shapes = {s.data.shape for s in on_mesh["layers"]["q_proj"].addressable_shards}
    assert shapes == {(2, 16, 4, 6)}
