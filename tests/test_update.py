import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.core.mesh import UPDATE_RULES, Layout, make_mesh
from sage_jax.learn.objective import completion_mask
from sage_jax.learn.optimizer import UpdateSettings, make_optimizer
from sage_jax.learn.pack import TrainRow, pack
from sage_jax.learn.update import Update, host_metrics, init_state
from sage_jax.models import qwen, qwen_params

ROLES = ("challenger", "planner", "solver", "critic")
V = 24
EOS = V - 1
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
# With a usual eps Adam would blow rounding of tiny gradients up to full steps.
SETTINGS = UpdateSettings(lr=1e-2, eps=1e-3, chunk=16)


def make_rows(count=16, seed=0, longest=10):
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        prompt, completion = rng.integers(1, 5), rng.integers(1, longest - 4)
        rows.append(
            TrainRow(
                id=f"row{i:02}",
                role=ROLES[i % 4],
                prompt=rng.integers(0, V, prompt).tolist(),
                completion=[*rng.integers(0, V, completion - 1).tolist(), EOS],
                logps=(-3 + 0.1 * rng.standard_normal(completion)).tolist(),
                advantage=float(rng.standard_normal()),
                temperature=float(rng.choice([0.6, 1.0, 1.3])),
            )
        )
    return rows


def make_params(layout=None):
    params = qwen_params.init(CFG, jax.random.key(0), layout=layout)
    return {**params, "embed": params["embed"] * 40}


def make_update(settings=SETTINGS, layout=None):
    tx = make_optimizer(settings, 100)
    state = init_state(make_params(layout), tx, reference=settings.kl_coef > 0)
    return Update(CFG, settings, ROLES, tx, state, layout), state


@pytest.fixture(scope="module")
def shared():
    """One set of compiled programs for all tests on one device with default settings."""
    return make_update()[0]


@pytest.fixture
def fresh(shared):
    """Those programs and a state that the test may donate."""
    return shared, init_state(make_params(), shared.tx)


def gradients(update, state, packed):
    acc, counts = update.zeros(state), update.place_counts(packed.role_tokens)
    for micro in packed.micros:
        acc = update.accumulate(state, acc, update.place(micro), counts)
    return acc


def assert_trees_close(got, want, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), got, want)


def assert_trees_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# The split into micro-batches, buckets and devices.


@pytest.fixture(scope="module")
def single(shared):
    """Programs, initial state (not to be donated) and gradients of the reference split."""
    state = init_state(make_params(), shared.tx)
    return shared, state, gradients(shared, state, pack(make_rows(), ROLES, [12], 16, share=False))


@pytest.mark.parametrize(
    ("buckets", "micro_rows", "share"),
    [([12], 4, True), ([6, 9, 12], 4, False), ([40], 2, True)],
)
def test_gradients_do_not_depend_on_micro_batches_or_buckets(single, buckets, micro_rows, share):
    update, state, want = single
    packed = pack(make_rows()[::-1], ROLES, buckets, micro_rows, share=share)
    got = gradients(update, state, packed)
    assert_trees_close(got.grads, want.grads, atol=1e-6, rtol=1e-5)
    assert_trees_close(got.sums, want.sums, atol=1e-5, rtol=1e-5)
    assert_trees_close(got.maxima, want.maxima, atol=1e-5)


def test_tokens_under_the_padding_change_nothing(single):
    update, state, _ = single
    packed = pack(make_rows(), ROLES, [12], 16)
    micro = packed.micros[0]
    inside_bt = micro.position_bt < micro.length_bt
    noise_bt = np.random.default_rng(1).integers(0, V, micro.tokens_bt.shape)
    noisy = micro._replace(
        tokens_bt=np.where(inside_bt, micro.tokens_bt, noise_bt).astype(np.int32)
    )
    assert (noisy.tokens_bt != micro.tokens_bt).any()
    counts = update.place_counts(packed.role_tokens)
    got, want = (
        update.accumulate(state, update.zeros(state), update.place(m), counts)
        for m in (noisy, micro)
    )
    assert_trees_close(got, want, atol=1e-7)


def test_a_completion_of_only_eos_is_trained(single):
    update, state, _ = single
    rows = [replace(row, completion=[EOS], logps=[-1.0]) for row in make_rows(4)]
    grads = gradients(update, state, pack(rows, ROLES, [12], 4)).grads
    assert float(jnp.abs(grads["embed"]).max()) > 1e-3


@pytest.mark.multidevice
@pytest.mark.parametrize(
    ("sizes", "buckets"), [((8, 1, 1), [12]), ((4, 2, 1), [12]), ((2, 1, 4), [8, 12])]
)
def test_sharded_update_equals_the_single_device_one(fresh, sizes, buckets):
    packed = pack(make_rows(), ROLES, buckets, 8)
    update, state = fresh
    want_acc = gradients(update, state, packed)
    want, want_metrics = update.step(state, packed)
    layout = Layout(make_mesh(*sizes), UPDATE_RULES)
    update, state = make_update(layout=layout)
    placed = jax.tree.map(lambda x: x.sharding, state)
    acc = gradients(update, state, packed)
    assert_trees_close(acc.grads, want_acc.grads, atol=1e-6, rtol=1e-5)
    got, metrics = update.step(state, packed)
    assert_trees_close(got.params, want.params, atol=1e-5)
    for name, value in host_metrics(want_metrics).items():
        np.testing.assert_allclose(host_metrics(metrics)[name], value, rtol=1e-4, err_msg=name)
    assert jax.tree.map(lambda x: x.sharding, got) == placed
    update.step(got, packed)
    assert update.accumulate._cache_size() == len(buckets)
    assert update.finish._cache_size() == 1


@pytest.mark.multidevice
def test_rows_that_do_not_divide_over_the_mesh_are_an_error():
    layout = Layout(make_mesh(8, 1, 1), UPDATE_RULES)
    update, _ = make_update(layout=layout)
    with pytest.raises(ValueError, match="'batch' of size 6"):
        update.place(pack(make_rows(), ROLES, [12], 6).micros[0])


# The step.


def test_repeated_updates_raise_the_probability_of_rewarded_rows_and_lower_the_others(fresh):
    update, state = fresh
    rows = [replace(row, advantage=(-1.0) ** (i // 4)) for i, row in enumerate(make_rows(8))]
    packed = pack(rows, ROLES, [12], 4, share=False)

    def mean_logps(state):
        return np.concatenate(
            [
                np.mean(
                    update.old_logps(state, update.place(micro)),
                    axis=1,
                    where=np.asarray(completion_mask(micro)),
                )
                for micro in packed.micros
            ]
        )

    before = mean_logps(state)
    for _ in range(5):
        state, _ = update.step(state, packed)
    change = mean_logps(state) - before
    signs = np.sign(np.concatenate([micro.adv_bt[:, 0] for micro in packed.micros]))
    assert np.all(np.sign(change) == signs)
    assert int(state.step) == 5 and int(state.skipped) == 0


def test_what_is_replaced_is_donated(fresh):
    update, state = fresh
    packed = pack(make_rows(4), ROLES, [12], 4)
    acc, counts = update.zeros(state), update.place_counts(packed.role_tokens)
    update.accumulate(state, acc, update.place(packed.micros[0]), counts)
    update.step(state, packed)
    for tree in (acc.grads, state.params, state.opt_state[1][0].mu):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def test_a_step_that_is_not_finite_is_skipped_counted_and_explained(fresh):
    update, state = fresh
    good = pack(make_rows(8), ROLES, [12], 4)
    state, _ = update.step(state, good)
    before = jax.device_get(state)
    micro = good.micros[1]
    bad_adv_bt = micro.adv_bt.copy()
    bad_adv_bt[0] = np.nan
    bad = good._replace(micros=[good.micros[0], micro._replace(adv_bt=bad_adv_bt)])
    state, metrics = update.step(state, bad)
    after = jax.device_get(state)
    assert_trees_equal(after.params, before.params)
    assert_trees_equal(after.opt_state, before.opt_state)
    assert (after.step, after.skipped) == (1, 1)
    shown = host_metrics(metrics)
    assert shown["skipped_updates"] == 1 and "grad_norm" not in shown and "loss" not in shown
    message = update.explain_skip(state, bad)
    assert message.startswith(f"rows {', '.join(good.ids[1])}: not finite in loss, ")
    assert "gradient['layers']['q_proj']" in message and update.explain_skip(state, good) == ""
    state, metrics = update.step(state, good)
    assert int(state.step) == 2 and host_metrics(metrics)["grad_norm"] > 0


def test_metrics_come_from_the_arrays_of_the_loss(fresh):
    rows = make_rows(8)
    update, state = fresh
    packed = pack(rows, ROLES, [12], 4)
    gaps, ratios = [], []
    for micro in packed.micros:
        mask_bt = np.asarray(completion_mask(micro))
        logp_bt = np.asarray(update.old_logps(state, update.place(micro)))
        gaps.append(np.abs(logp_bt - micro.sampler_logp_bt)[mask_bt])
        ratios.append(mask_bt.sum())
    state, metrics = update.step(state, packed)
    shown = host_metrics(metrics)
    np.testing.assert_allclose(shown["logp_gap/mean"], np.concatenate(gaps).mean(), rtol=1e-4)
    np.testing.assert_allclose(shown["logp_gap/max"], np.concatenate(gaps).max(), rtol=1e-4)
    assert (
        shown["ratio/max"] == 1.0 and shown["clip_share"] == 0.0 and shown["skipped_updates"] == 0
    )
    token_mean = {
        role: np.average(
            [r.advantage for r in rows if r.role == role],
            weights=[len(r.completion) for r in rows if r.role == role],
        )
        for role in ROLES
    }
    np.testing.assert_allclose(shown["loss"], -sum(token_mean.values()), rtol=1e-4)


def test_rows_of_advantage_0_cost_nothing_and_change_nothing(fresh):
    rows = [replace(r, advantage=r.advantage * (i % 3 > 0)) for i, r in enumerate(make_rows())]
    every, some = (pack(rows, ROLES, [12], 4, share=False, flat=flat) for flat in (True, False))
    assert (len(every.micros), len(some.micros)) == (4, 3)
    assert {r.id for r in rows if r.advantage} == {id for ids in some.ids for id in ids}
    update, state = fresh
    want, got = (gradients(update, state, packed) for packed in (every, some))
    assert_trees_close(got.grads, want.grads, atol=1e-7)
    np.testing.assert_allclose(got.sums["loss"], want.sums["loss"], rtol=1e-5)
    # With nothing to learn from, the optimizer goes on by its momentum, and no figure is made up.
    state, _ = update.step(state, every)
    none = pack([replace(r, advantage=0.0) for r in rows], ROLES, [12], 4, flat=False)
    before = jax.device_get(state.params)
    state, metrics = update.step(state, none)
    assert none.micros == [] and float(jnp.abs(state.params["embed"] - before["embed"]).max()) > 0
    shown = host_metrics(metrics)
    assert shown["loss"] == shown["grad_norm"] == 0 and "ratio/max" not in shown
    with pytest.raises(ValueError, match="no row to train on"):
        update.step(state, pack([], ROLES, [12], 4))


def test_a_second_epoch_has_ratios_off_one_and_the_first_has_them_at_one(fresh):
    update, state = fresh
    packed = pack(make_rows(4), ROLES, [12], 4)
    old = [update.old_logps(state, update.place(micro)) for micro in packed.micros]
    micros = [m._replace(old_logp_bt=o) for m, o in zip(packed.micros, old, strict=True)]
    packed = packed._replace(micros=micros)
    state, first = update.step(state, packed)
    np.testing.assert_allclose(host_metrics(first)["ratio/max"], 1.0, atol=1e-5)
    _, second = update.step(state, packed)
    assert host_metrics(second)["ratio/max"] > 1.01
    assert host_metrics(second)["clip_share"] > 0


def test_kl_pulls_back_to_the_reference_and_vanishes_at_it():
    settings = replace(SETTINGS, kl_coef=1.0, importance_cap=2.0)
    update, state = make_update(settings)
    rows = [replace(row, advantage=0.0) for row in make_rows(4)]
    packed = pack(rows, ROLES, [12], 4)
    state, metrics = update.step(state, packed)
    assert abs(host_metrics(metrics)["kl"]) < 1e-6 and host_metrics(metrics)["grad_norm"] < 1e-4
    assert 0 < host_metrics(metrics)["importance/mean"] <= 2
    moved = jax.tree.map(lambda x: x + 0.02, state.params)
    state, metrics = update.step(state._replace(params=moved), packed)
    assert host_metrics(metrics)["kl"] > 1e-4 and host_metrics(metrics)["grad_norm"] > 1e-4
    assert_trees_equal(state.ref_params, make_params())


def test_bf16_compute_keeps_float32_gradients_near_the_float32_ones(single):
    _, state, want = single
    settings = replace(SETTINGS, dtype="bfloat16", remat="full")
    tx = make_optimizer(settings, 10)
    update = Update(CFG, settings, ROLES, tx, state)
    got = gradients(update, state, pack(make_rows(), ROLES, [12], 8))
    for a, b in zip(jax.tree.leaves(got.grads), jax.tree.leaves(want.grads), strict=True):
        assert a.dtype == jnp.float32
        a, b = np.ravel(a), np.ravel(b)
        assert 0.98 < a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) < 1


def shapes_of_the_gradient(vocab, layout=None):
    """Shapes of all arrays, as one device sees them, in the compiled gradient program."""
    cfg = replace(CFG, vocab_size=vocab)
    settings = UpdateSettings(chunk=16, entropy_coef=0.1)
    tx = make_optimizer(settings, 10)
    state = init_state(qwen_params.init(cfg, jax.random.key(0), layout=layout), tx)
    update = Update(cfg, settings, ROLES, tx, state, layout)
    row = TrainRow("a", "solver", [1] * 10, [2] * 22, [-1.0] * 22, 1.0)
    packed = pack([row], ROLES, [32], 4)
    counts = update.place_counts(packed.role_tokens)
    args = state, update.zeros(state), update.place(packed.micros[0]), counts
    compiled = update.accumulate.lower(*args).compile().as_text()
    return {
        tuple(int(n) for n in dims.split(","))
        for dims in re.findall(r"\b[a-z]+[0-9]*\[([0-9,]+)\]", compiled)
    }


def test_no_array_over_all_positions_and_the_vocabulary_exists():
    # 4 rows x 32 positions in chunks of 16: the probe must see a chunk, and nothing larger.
    sizes = [np.prod(shape) for shape in shapes_of_the_gradient(4100) if 4100 in shape]
    assert max(sizes) == 16 * 4100


@pytest.mark.multidevice
@pytest.mark.parametrize("sizes", [(2, 1, 4), (2, 2, 2), (1, 4, 2)], ids=str)
def test_neither_head_nor_logits_are_ever_gathered(sizes):
    data, fsdp, tensor = sizes
    shapes = shapes_of_the_gradient(4104, Layout(make_mesh(*sizes), UPDATE_RULES))
    # A device has its shard of the head as it is stored, and as the product with a chunk takes it.
    stored, spread = 4104 // tensor, 4104 // (tensor * fsdp)
    chunk = 16 // data * spread
    wide = [shape for shape in shapes if max(shape) >= spread and np.prod(shape) > 512]
    assert max(np.prod(shape) for shape in wide) == max(chunk, 8 // fsdp * stored)
    assert any(spread in shape for shape in wide)


def test_role_weights_of_the_settings_reach_the_gradient(single):
    update, state, _ = single
    rows = make_rows()
    weighted = Update(
        CFG,
        replace(SETTINGS, role_weights={"critic": 0.0, "solver": 2.0, "planner": 0.0}),
        ROLES,
        update.tx,
        state,
    )
    got = gradients(weighted, state, pack(rows, ROLES, [12], 16)).grads
    parts = {
        role: gradients(update, state, pack([r for r in rows if r.role == role], ROLES, [12], 16))
        for role in ("challenger", "solver")
    }
    want = jax.tree.map(lambda x, y: x + 2 * y, parts["challenger"].grads, parts["solver"].grads)
    assert_trees_close(got, want, atol=2e-6, rtol=1e-5)


def test_settings_that_do_not_fit_the_run_are_named():
    tx = make_optimizer(SETTINGS, 10)
    state = init_state(make_params(), tx)
    with pytest.raises(ValueError, match="role_weights names judge"):
        Update(CFG, replace(SETTINGS, role_weights={"judge": 1.0}), ROLES, tx, state)
    with pytest.raises(ValueError, match="optim.kl_coef=0.1 needs reference"):
        Update(CFG, replace(SETTINGS, kl_coef=0.1), ROLES, tx, state)
    half = {**make_params(), "final_norm": jnp.ones(8, jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"\['final_norm'\] is bfloat16"):
        init_state(half, tx)
    with pytest.raises(ValueError, match="no row to train on"):
        Update(CFG, SETTINGS, ROLES, tx, state).step(state, pack([], ROLES, [8], 2))
