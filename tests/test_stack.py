from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.core import flops
from sage_jax.learn.optimizer import UpdateSettings, make_optimizer
from sage_jax.learn.pack import TrainRow, pack
from sage_jax.learn.update import Update, init_state
from sage_jax.models import attention, qwen, qwen_params
from sage_jax.models import cache as kv
from sage_jax.models.qwen import QwenConfig
from sage_jax.models.stack import apart

CFG = QwenConfig(
    model_type="qwen2",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    attention_bias=True,
    tie_embeddings=True,
)
PARAMS = qwen_params.init(CFG, jax.random.key(0))
TOKENS = jax.random.randint(jax.random.key(1), (2, 7), 0, CFG.vocab_size)


def loss(params, totals, remat, attend="auto"):
    hidden = qwen.forward(params, CFG, TOKENS, remat=remat, attend=attend, totals=totals)
    return jnp.sum(hidden * jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape))


@pytest.mark.parametrize("remat", qwen.REMAT)
def test_the_gradient_of_trained_layers_is_added_to_their_totals(remat):
    want = jax.grad(loss)(PARAMS, None, "none")
    trained = {name: PARAMS["layers"][name] for name in ("q_proj", "q_bias", "down_proj")}
    totals = jax.tree.map(jnp.ones_like, trained)
    got, added = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(PARAMS, totals, remat)
    assert added.keys() == trained.keys()
    for name, total in added.items():
        np.testing.assert_allclose(total - 1, want["layers"][name], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["embed"], want["embed"], rtol=1e-4, atol=1e-5)
    assert not any(x.any() for x in got["layers"].values())


def test_full_remat_keeps_the_input_of_each_layer_and_nothing_else():
    totals = jax.tree.map(jnp.zeros_like, PARAMS["layers"])
    jaxpr = jax.make_jaxpr(jax.grad(loss, 1), static_argnums=2)(PARAMS, totals, "full")
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert [v.aval.shape for v in forward.outvars] == [(2, 7, 16), (3, 2, 7, 16)]


def test_attention_remat_keeps_what_attention_gave_and_does_not_compute_it_again():
    totals = jax.tree.map(jnp.zeros_like, PARAMS["layers"])
    traced = jax.make_jaxpr(jax.grad(loss, 1), static_argnums=(2, 3))
    full, jaxpr = (traced(PARAMS, totals, r, "blocked") for r in ("full", "attention"))
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    kept = [v.aval.shape for v in forward.outvars[1:]]
    heads = (CFG.num_kv_heads, CFG.num_heads // CFG.num_kv_heads)
    padded = (3, 2, attention.BLOCK, *heads)
    assert sorted(kept) == sorted([(3, 2, 7, 16), (*padded, CFG.head_dim), padded])
    # Scores and weighted values of one pair of blocks of each of 3 layers (a loop counts one trip).
    again = 3 * 2 * 2 * 2 * CFG.num_heads * attention.BLOCK**2 * CFG.head_dim
    assert flops.count(full) - flops.count(jaxpr) == again


def test_no_second_gradient_of_the_layers_exists_beside_the_running_one():
    cfg = replace(CFG, num_layers=16, hidden_size=64, intermediate_size=256)
    settings = UpdateSettings(remat="full", chunk=8)
    tx = make_optimizer(settings, 10)
    state = init_state(qwen_params.init(cfg, jax.random.key(0)), tx)
    update = Update(cfg, settings, ("solver",), tx, state)
    packed = pack([TrainRow("a", "solver", [1], [2] * 7, [-1.0] * 7, 1.0)], ("solver",), [8], 1)
    args = update.zeros(state), packed.micros[0], packed.role_tokens
    memory = update.accumulate.lower(state, *args).compile().memory_analysis()
    layers = sum(x.nbytes for x in jax.tree.leaves(state.params["layers"]))
    assert memory.alias_size_in_bytes > layers
    assert memory.temp_size_in_bytes < layers / 2


@pytest.mark.parametrize("tied", [True, False])
def test_layers_apart_give_the_same_numbers(tied):
    cfg = replace(CFG, tie_embeddings=tied)
    params = qwen_params.init(cfg, jax.random.key(0))
    split = apart(params)
    tokens_bp, lengths_b = jnp.arange(12).reshape(2, 6), jnp.array([6, 4])
    both = []
    for weights in (params, split):
        hidden_bd, prefix = qwen.prefill(weights, cfg, tokens_bp, lengths_b)
        cache = {
            name: kv.init(cfg, 2, 9)[name].at[:, :, :6].set(part) for name, part in prefix.items()
        }
        step_sd, cache = qwen.decode_step(
            weights, cfg, jnp.array([1, 2]), lengths_b, cache, read_length=8
        )
        logits = [qwen.head_logits(weights, cfg, h) for h in (hidden_bd, step_sd)]
        both.append((logits, prefix, cache))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *both)
    assert isinstance(split["layers"], tuple) and len(split["layers"]) == cfg.num_layers
