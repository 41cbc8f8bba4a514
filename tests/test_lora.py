"""LoRA: what the adapter adds, that nothing but it is trained, saved or donated, and that the
sampler has it."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_config import problems
from test_train import small_config
from test_update import (
    CFG,
    ROLES,
    SETTINGS,
    V,
    assert_trees_close,
    assert_trees_equal,
    make_params,
    make_rows,
)
from test_update import gradients as accumulated
from test_update import shared as full  # noqa: F401  (a fixture: full fine-tuning's programs)

from sage_jax.config import ConfigError
from sage_jax.core.mesh import DECODE_RULES, UPDATE_RULES, Layout, make_mesh
from sage_jax.core.rng import row_key
from sage_jax.learn.objective import completion_mask
from sage_jax.learn.optimizer import make_optimizer
from sage_jax.learn.pack import TrainRow, pack
from sage_jax.learn.update import TrainState, Update, host_metrics, init_state
from sage_jax.models import lora, qwen, qwen_params
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row
from sage_jax.runtime import Placement, decode_weights, placement

EOS = V - 1
RANK = 4
LORA = lora.LoraSettings(RANK, 8.0)
TUNED = replace(SETTINGS, lora_scale=LORA.scale)
KINDS = [
    CFG,
    replace(CFG, model_type="qwen2", qk_norm=False, attention_bias=True, num_kv_heads=2),
]


def random_adapter(cfg=CFG, layout=None, size=0.5):
    """An adapter as it is after some training: both factors random."""
    adapter = lora.init(cfg, RANK, jax.random.key(1), layout)
    return jax.tree.map(
        lambda x, k: x + size * jax.random.normal(k, x.shape),
        adapter,
        split_like(adapter),
    )


def split_like(tree):
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, list(jax.random.split(jax.random.key(2), len(leaves))))


def attached(base, adapter):
    return lora.attach(base, lora.scaled(adapter, LORA.scale))


def make_update(settings=TUNED, layout=None, adapter=None):
    base = make_params(layout)
    tx = make_optimizer(settings, 100)
    adapter = lora.init(CFG, RANK, jax.random.key(1), layout) if adapter is None else adapter
    state = init_state(adapter, tx, frozen=base)
    return Update(CFG, settings, ROLES, tx, state, layout), state


@pytest.fixture(scope="module")
def shared():
    """One set of compiled programs of an adapter's update."""
    return make_update()[0]


def fresh(shared, adapter=None):
    """A state that the test may donate."""
    adapter = lora.init(CFG, RANK, jax.random.key(1)) if adapter is None else adapter
    return init_state(adapter, shared.tx, frozen=make_params())


# What is computed.


@pytest.mark.parametrize("cfg", KINDS, ids=["qwen3", "qwen2"])
def test_a_new_adapter_changes_not_one_bit_and_a_trained_one_equals_the_merged_weights(cfg):
    base = qwen_params.init(cfg, jax.random.key(0))
    base = {**base, "embed": base["embed"] * 40}
    tokens_bt = np.random.default_rng(0).integers(0, V, (2, 9))
    hidden = jax.jit(partial(qwen.forward, cfg=cfg, tokens_bt=tokens_bt))
    plain, new = hidden(base), attached(base, lora.init(cfg, RANK, jax.random.key(1)))
    np.testing.assert_allclose(hidden(new), plain, atol=1e-6)
    # To the bit where nothing else is compiled into the sums.
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 3, cfg.hidden_size)), jnp.float32)
    layers = [{name: w[0] for name, w in p["layers"].items()} for p in (base, new)]
    exact = [qwen._linear(w, None, "q_proj", x, "d", "nh") for w in layers]
    np.testing.assert_array_equal(*exact)
    adapter = random_adapter(cfg)
    got, merged = attached(base, adapter), lora.merge(base, lora.scaled(adapter, LORA.scale))
    np.testing.assert_allclose(hidden(got), hidden(merged), atol=2e-5)
    assert np.abs(hidden(got) - plain).max() > 0.1
    assert qwen_params.param_table(cfg).keys() | {"layers"} >= merged.keys()


def test_factors_start_as_those_of_peft_do():
    table = lora.adapter_table(CFG, RANK)
    adapter = lora.init(CFG, RANK, jax.random.key(1))["layers"]
    assert {f"layers.{name}" for name in adapter} == table.keys() and len(table) == 14
    for name, x in adapter.items():
        outputs, inputs = qwen_params.param_table(CFG)[f"layers.{name[:-7]}"].hf_shape
        assert x.dtype == jnp.float32
        if name.endswith("_b"):
            assert not x.any() and x[0].size == RANK * outputs
        else:
            largest = float(jnp.abs(x).max()) * inputs**0.5
            assert 0.85 < largest <= 1 and x[0].size == RANK * inputs


def test_gradients_follow_from_those_of_full_fine_tuning(shared, full):  # noqa: F811
    packed = pack(make_rows(), ROLES, [12], 16)
    adapter = random_adapter(size=0.1)
    acc = accumulated(shared, fresh(shared, adapter), packed)
    got = lora.scaled(acc.grads, LORA.scale)["layers"]
    merged = lora.merge(make_params(), lora.scaled(adapter, LORA.scale))
    whole = accumulated(full, init_state(merged, full.tx), packed).grads["layers"]
    for target in lora.TARGETS:
        a, b = (adapter["layers"][target + end] for end in (qwen_params.LORA_A, qwen_params.LORA_B))
        a, b = a.reshape(CFG.num_layers, -1, RANK), b.reshape(CFG.num_layers, RANK, -1)
        dw = whole[target].reshape(CFG.num_layers, a.shape[1], b.shape[2])
        want_a = LORA.scale * jnp.einsum("lio,lro->lir", dw, b)
        want_b = LORA.scale * jnp.einsum("lir,lio->lro", a, dw)
        for end, want in ((qwen_params.LORA_A, want_a), (qwen_params.LORA_B, want_b)):
            x = got[target + end]
            assert float(jnp.abs(want).max()) > 1e-4, target
            np.testing.assert_allclose(x.reshape(want.shape), want, atol=2e-6, rtol=1e-4)


# What is trained.


def test_updates_move_every_factor_and_leave_the_base_to_the_bit(shared):
    state = fresh(shared)
    base, before = state.frozen, jax.device_get(state.params)
    packed = pack(make_rows(), ROLES, [12], 8)
    for _ in range(2):
        state, metrics = shared.step(state, packed)
    assert host_metrics(metrics)["grad_norm"] > 0
    assert state.frozen is base  # neither copied nor donated
    assert_trees_equal(base, make_params())
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), state.params, before)
    assert min(jax.tree.leaves(moved)) > 1e-4
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_gradient_program_makes_no_second_copy_of_the_base(remat):
    cfg = replace(CFG, hidden_size=64, intermediate_size=1000, num_layers=3)
    settings = replace(TUNED, remat=remat)
    tx = make_optimizer(settings, 10)
    base = jax.eval_shape(partial(qwen_params.init, cfg), jax.random.key(0))
    adapter = jax.eval_shape(partial(lora.init, cfg, RANK), jax.random.key(1))
    counter = jax.ShapeDtypeStruct((), jnp.int32)
    state = TrainState(adapter, jax.eval_shape(tx.init, adapter), counter, counter, None, base)
    update = Update(cfg, settings, ROLES, tx, state)
    packed = pack(make_rows(2), ROLES, [12], 2)
    acc = jax.eval_shape(update._zeros, state)
    args = state, acc, packed.micros[0], packed.role_tokens
    compiled = update.accumulate.lower(*args).compile().as_text()
    made = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", compiled)
    stacked = {op for dims, op in made if np.prod([*map(int, dims.split(","))]) == 3 * 64 * 1000}
    assert "parameter" in stacked  # the probe sees the weights
    assert stacked <= {"parameter", "get-tuple-element", "bitcast"}, stacked


def test_kl_is_to_the_base_without_the_adapter_and_needs_no_weights_of_its_own():
    settings = replace(TUNED, kl_coef=1.0)
    update, state = make_update(settings)
    rows = [replace(row, advantage=0.0) for row in make_rows(4)]
    packed = pack(rows, ROLES, [12], 4)
    micro = update.place(packed.micros[0])
    base_bt = np.asarray(update.old_logps(state, micro))  # B is zero: the base
    state, metrics = update.step(state, packed)
    assert state.ref_params is None
    assert abs(host_metrics(metrics)["kl"]) < 1e-6
    state = init_state(random_adapter(), update.tx, frozen=state.frozen)
    d = np.clip(np.asarray(update.old_logps(state, micro)) - base_bt, -20, 20)
    kl = np.minimum(np.exp(-d) + d - 1, 10)[np.asarray(completion_mask(micro))].mean()
    _, metrics = update.step(state, packed)
    assert kl > 0.1
    np.testing.assert_allclose(host_metrics(metrics)["kl"], kl, rtol=1e-4)


def test_a_state_that_does_not_fit_the_settings_is_refused():
    tx = make_optimizer(TUNED, 10)
    adapter = lora.init(CFG, RANK, jax.random.key(1))
    with pytest.raises(ValueError, match="lora_scale=0.0"):
        Update(CFG, SETTINGS, ROLES, tx, init_state(adapter, tx, frozen=make_params()))
    with pytest.raises(ValueError, match="lora_scale=2.0"):
        Update(CFG, TUNED, ROLES, tx, init_state(make_params(), tx))


# What the sampler has.


def sampled(cfg, weights, place, dtype="float32"):
    """Completions of four prompts on the engine, each with its log-probs."""
    engine = Engine(
        cfg, slots=8, buckets=(24,), max_new=12, chunk=4, prefill_rows=8, layout=place.decode
    )
    engine.start(decode_weights(weights, cfg, place, dtype))
    return list(engine.generate(prompts()).values())


def prompts():
    keys = [row_key(0, "lora", i) for i in range(4)]
    return [
        Row(str(i), (1 + i, 2, 3), (int(k[0]), int(k[1])), 12, (EOS,), (1.0, 0.7)[i % 2])
        for i, k in enumerate(keys)
    ]


def learner_gap(update, state, done):
    """Largest difference of the sampler's log-probs to the learner's, and to the base's."""
    packed = pack(
        [
            TrainRow(
                c.row.id,
                "solver",
                list(c.row.prompt),
                c.tokens.tolist(),
                c.logps.tolist(),
                1.0,
                c.row.temperature,
            )
            for c in done
        ],
        ROLES,
        [24],
        8,
    )
    micro = update.place(packed.micros[0])
    mask_bt = np.asarray(completion_mask(micro))
    plain = state._replace(params=jax.tree.map(jnp.zeros_like, state.params))
    return [
        np.abs(np.asarray(update.old_logps(s, micro)) - packed.micros[0].sampler_logp_bt)[
            mask_bt
        ].max()
        for s in (state, plain)
    ]


def test_after_updates_the_sampler_equals_the_learner_and_not_the_base(shared):
    state, packed = fresh(shared), pack(make_rows(), ROLES, [12], 8)
    for _ in range(3):
        state, _ = shared.step(state, packed)
    done = sampled(CFG, attached(state.frozen, state.params), Placement(None, None, {}))
    to_learner, to_base = learner_gap(shared, state, done)
    assert to_learner < 1e-5 and to_base > 1e-2


def test_what_is_in_place_for_decoding_is_not_copied():
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    weights = attached(base, random_adapter())
    got = decode_weights(weights, CFG, Placement(None, None, {}), "bfloat16")
    assert got["layers"]["q_proj"] is base["layers"]["q_proj"]
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {"bfloat16"}


def test_small_updates_reach_a_bfloat16_sampler_that_merged_weights_would_lose():
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    adapter = lora.init(CFG, RANK, jax.random.key(1))
    adapter = jax.tree.map(lambda x: jnp.where(x == 0, 1e-6, x), adapter)  # Adam's first steps
    weights = attached(base, adapter)
    merged = lora.merge(base, lora.scaled(adapter, LORA.scale))
    same = jax.tree.map(lambda x, y: float((x.astype(jnp.bfloat16) == y).mean()), merged, base)
    assert min(same["layers"][t] for t in lora.TARGETS) > 0.95
    factors = decode_weights(weights, CFG, Placement(None, None, {}), "bfloat16")["layers"]
    b = np.asarray(factors["q_proj" + qwen_params.LORA_B], np.float32)
    np.testing.assert_allclose(b, LORA.scale * 1e-6, rtol=1e-2)


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1), (1, 2, 4)])
def test_updates_and_samples_are_those_of_one_device_on_any_mesh(shared, sizes):
    mesh = make_mesh(*sizes)
    place = Placement(Layout(mesh, UPDATE_RULES), Layout(mesh, DECODE_RULES), {})
    packed = pack(make_rows(), ROLES, [12], 8)
    adapter = lora.init(CFG, RANK, jax.random.key(1), place.update)
    assert_trees_close(adapter, lora.init(CFG, RANK, jax.random.key(1)), atol=0)
    state = fresh(shared, random_adapter(size=0.1))
    want_acc = accumulated(shared, state, packed)
    want, want_metrics = shared.step(state, packed)
    update, state = make_update(layout=place.update, adapter=random_adapter_on(place, 0.1))
    for name, x in state.params["layers"].items():  # each factor is split over fsdp
        assert x.addressable_shards[0].data.size * sizes[1] <= x.size, name
    acc = accumulated(update, state, packed)
    assert_trees_close(acc.grads, want_acc.grads, atol=1e-6, rtol=1e-5)
    placed = jax.tree.map(lambda x: x.sharding, state)
    got, metrics = update.step(state, packed)
    assert jax.tree.map(lambda x: x.sharding, got) == placed
    assert_trees_close(got.params, want.params, atol=1e-5)
    for name, value in host_metrics(want_metrics).items():
        np.testing.assert_allclose(host_metrics(metrics)[name], value, rtol=1e-4, err_msg=name)
    done = sampled(CFG, attached(got.frozen, got.params), place)
    alone = sampled(CFG, attached(want.frozen, want.params), Placement(None, None, {}))
    tokens = [{c.row.id: c.tokens.tolist() for c in group} for group in (done, alone)]
    assert tokens[0] == tokens[1]
    assert learner_gap(update, got, done)[0] < 1e-5


def random_adapter_on(place, size):
    placed = lora.init(CFG, RANK, jax.random.key(1), place.update)
    return jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), random_adapter(size=size), placed
    )


@pytest.mark.multidevice
def test_a_rank_that_does_not_split_over_the_mesh_is_refused(tiny_folder):
    fields = {"lora__rank": 6, "mesh__fsdp": -1, "rollout__slots": 16}
    with pytest.raises(ConfigError, match=r"lora.rank=6.*multiple of mesh.fsdp=8"):
        placement(small_config(tiny_folder, **fields))
    assert "lora.rank=6: must be a multiple of mesh.fsdp=4" in problems(lora__rank=6, mesh__fsdp=4)


# The config.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora__alpha": 16.0}, "lora.alpha=16.0: lora.rank=0"),
        ({"lora__path": "somewhere"}, "lora.path='somewhere': lora.rank=0"),
        ({"lora__export": "adapter"}, "lora.export='adapter': lora.rank=0"),
    ],
)
def test_fields_of_an_adapter_without_a_rank_are_refused(fields, said):
    assert said in problems(**fields)


def test_alpha_is_twice_the_rank_unless_given(tiny_folder):
    assert small_config(tiny_folder, lora__rank=8).lora.alpha == 16
    assert small_config(tiny_folder, lora__rank=8, lora__alpha=8.0).lora.alpha == 8
    assert small_config(tiny_folder).lora.alpha == 0
