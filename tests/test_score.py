import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.core.logprob import entropy, log_prob
from sage_jax.core.mesh import UPDATE_RULES, Layout, make_mesh
from sage_jax.learn.score import token_logps
from sage_jax.models import qwen, qwen_params

V = 24
CFG = qwen.QwenConfig(
    model_type="qwen3",
    vocab_size=V,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    rope_theta=1e4,
    tie_embeddings=True,
    qk_norm=True,
)


def sharp_params(layout=None):
    """Random params with logits far from uniform, so that an error shows."""
    params = qwen_params.init(CFG, jax.random.key(0), layout=layout)
    return {**params, "embed": params["embed"] * 40}


PARAMS = sharp_params()
STATIC = ("dtype", "layout", "remat", "chunk", "entropy")
program = jax.jit(token_logps, static_argnums=1, static_argnames=STATIC)


def score(params, cfg, tokens_bt, temperature_b, **static):
    return program(params, cfg, tokens_bt, temperature_b[:, None], **static)


def batch(rows, length, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.array(rng.integers(0, V, (rows, length)), jnp.int32)


@jax.jit
def full_logps(params, tokens_bt, temperature_b):
    """The plain version: logits of all positions at once."""
    hidden_btd = qwen.forward(params, CFG, tokens_bt)
    logits_btv = qwen.head_logits(params, CFG, hidden_btd)[:, :-1]
    temperature_bt = jnp.broadcast_to(temperature_b[:, None], tokens_bt[:, 1:].shape)
    logp_bt = log_prob(logits_btv, tokens_bt[:, 1:], temperature_bt)
    pad = [(0, 0), (1, 0)]
    return jnp.pad(logp_bt, pad), jnp.pad(entropy(logits_btv, temperature_bt), pad)


def weighted(logps_fn):
    """Jitted (loss, (logp, entropy)), gradient of a loss in which every position counts."""

    def loss(params, tokens_bt, temperature_b):
        logp_bt, entropy_bt = logps_fn(params, tokens_bt, temperature_b)
        weight_bt = jnp.cos(jnp.arange(tokens_bt.size)).reshape(tokens_bt.shape)
        return jnp.sum(weight_bt * (logp_bt + 0.3 * entropy_bt)), (logp_bt, entropy_bt)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def chunked(chunk, layout=None):
    def logps(params, tokens_bt, temperature_b):
        return token_logps(
            params, CFG, tokens_bt, temperature_b[:, None], layout=layout, chunk=chunk, entropy=True
        )

    return weighted(logps)


CHUNKED = {chunk: chunked(chunk) for chunk in (1, 4, 6, 512)}
FULL = weighted(full_logps)


def assert_same(got, want):
    (_, values), grads = got
    (_, want_values), want_grads = want
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), values, want_values)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.abs(y).max()))


@settings(deadline=None, max_examples=20)
@given(
    chunk=st.sampled_from(sorted(CHUNKED)),
    temperature=st.sampled_from([0.0, 0.6, 1.3]),
    seed=st.integers(0, 1000),
)
def test_chunked_equals_full_logits_in_value_and_gradient(chunk, temperature, seed):
    args = PARAMS, batch(2, 6, seed), jnp.array([temperature, 1.0])
    assert_same(CHUNKED[chunk](*args), FULL(*args))


def test_position_zero_is_zero_and_the_others_are_of_their_own_token():
    tokens_bt = batch(2, 5)
    logp_bt, entropy_bt = score(PARAMS, CFG, tokens_bt, jnp.ones(2))
    assert logp_bt.shape == (2, 5) and entropy_bt is None
    np.testing.assert_array_equal(logp_bt[:, 0], [0, 0])
    other_bt = tokens_bt.at[0, 3].add(1)
    changed_bt = np.asarray(score(PARAMS, CFG, other_bt % V, jnp.ones(2))[0] != logp_bt)
    assert changed_bt[0].tolist() == [False, False, False, True, True]
    assert not changed_bt[1].any()


@pytest.mark.parametrize(("rows", "length", "chunk"), [(3, 7, 8), (1, 2, 1), (4, 1, 8), (5, 9, 2)])
def test_any_shape_scores_whatever_the_chunk(rows, length, chunk):
    tokens_bt = batch(rows, length)
    got_bt, _ = score(PARAMS, CFG, tokens_bt, jnp.ones(rows), chunk=chunk)
    assert got_bt.shape == (rows, length)
    if length > 1:
        want_bt, _ = full_logps(PARAMS, tokens_bt, jnp.ones(rows))
        np.testing.assert_allclose(got_bt, want_bt, atol=1e-5)


def test_bf16_compute_keeps_float32_results_close_to_the_oracle():
    tokens_bt = batch(2, 12)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), PARAMS)
    logp_bt, entropy_bt = score(
        rounded, CFG, tokens_bt, jnp.ones(2), dtype=jnp.bfloat16, entropy=True
    )
    assert logp_bt.dtype == jnp.float32 and entropy_bt.dtype == jnp.float32
    want_bt, _ = full_logps(rounded, tokens_bt, jnp.ones(2))
    error = float(jnp.abs(logp_bt - want_bt).max())
    assert 0 < error < 0.25
    # A logsumexp in bf16 would leave normalised probabilities short of or beyond 1.
    every = jnp.stack(
        [
            score(rounded, CFG, tokens_bt.at[:, -1].set(v), jnp.ones(2), dtype=jnp.bfloat16)[0]
            for v in range(V)
        ]
    )
    np.testing.assert_allclose(jnp.exp(every[..., -1]).sum(0), [1, 1], atol=1e-5)


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (2, 1, 4)])
def test_vocabulary_sharded_over_the_mesh_gives_the_same_values_and_gradients(sizes):
    layout = Layout(make_mesh(*sizes), UPDATE_RULES)
    tokens_bt, temperature_b = batch(8, 6), jnp.linspace(0.5, 1.5, 8)

    table = qwen_params.param_table(CFG)
    placed = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(
            x, layout.sharding(table[".".join(key.key for key in path)].axes, x.shape)
        ),
        PARAMS,
    )
    got = chunked(16, layout)(placed, tokens_bt, temperature_b)
    assert_same(got, FULL(PARAMS, tokens_bt, temperature_b))


def test_chunk_below_one_is_an_error():
    with pytest.raises(ValueError, match="optim.logit_chunk=0"):
        token_logps(PARAMS, CFG, batch(1, 4), jnp.ones((1, 1)), chunk=0)
