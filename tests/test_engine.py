"""The rollout engine: same rows, same tokens, whatever runs beside them."""

import dataclasses
import importlib.util
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy import pad

from sage_jax.core.logprob import log_prob
from sage_jax.core.mesh import DECODE_RULES, Layout, make_mesh
from sage_jax.core.rng import row_key
from sage_jax.models import qwen, qwen_params
from sage_jax.models.stack import apart
from sage_jax.rollout import decode
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row
from sage_jax.runtime import Placement, decode_weights

CFG = qwen.QwenConfig(
    model_type="qwen3",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    attention_bias=False,
    qk_norm=True,
    max_position=128,
)
BUCKETS = (16, 32, 64)
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def params():
    # Above the usual scale: a flat distribution would hide a wrong temperature.
    plain = qwen_params.init(CFG, jax.random.key(0))
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, plain)


def engine(params, slots=4, chunk=5, prefill_rows=2, buckets=BUCKETS, attend="auto", split=apart):
    """As on one CPU: with weights `apart`, unless told otherwise."""
    made = Engine(
        CFG,
        slots=slots,
        buckets=buckets,
        max_new=24,
        chunk=chunk,
        prefill_rows=prefill_rows,
        attend=attend,
    )
    made.start(split(params))
    return made


def stacked(params):
    return params


def rows(count, **changes):
    made = []
    for i in range(count):
        prompt = tuple(int(t) for t in np.random.default_rng(i).integers(1, 97, 3 + i % 11))
        facts = {"max_new": 4 + (7 * i) % 21, "temperature": (1.0, 0.7, 1.3, 0.0)[i % 4]}
        facts |= changes
        key = row_key(0, 1, i)
        made.append(Row(f"r{i}", prompt, (int(key[0]), int(key[1])), stop_ids=(5, 6), **facts))
    return made


def test_a_row_alone_or_in_any_company_gives_the_same_tokens(params):
    want = {}
    for row in rows(12):
        want |= engine(params, slots=1, prefill_rows=1).generate([row])
    for slots, chunk, prefill_rows, order in ((4, 5, 2, 1), (12, 64, 12, 1), (3, 1, 1, -1)):
        got = engine(params, slots, chunk, prefill_rows).generate(rows(12)[::order])
        assert got.keys() == want.keys()
        for name, completion in got.items():
            np.testing.assert_array_equal(completion.tokens, want[name].tokens, name)
            np.testing.assert_allclose(completion.logps, want[name].logps, atol=1e-5)
            assert completion.finish == want[name].finish


def test_layers_apart_or_stacked_give_the_same_tokens(params):
    both = [engine(params, split=split) for split in (apart, stacked)]
    want, got = (made.generate(rows(12)) for made in both)
    for name, completion in got.items():
        np.testing.assert_array_equal(completion.tokens, want[name].tokens, name)
        np.testing.assert_allclose(completion.logps, want[name].logps, atol=1e-5)
    # The other way of the next parameters: the slots follow.
    both[0].start(params)
    assert both[0].generate(rows(1))["r0"].tokens.tolist() == want["r0"].tokens.tolist()


def test_keys_kept_aside_for_a_chunk_give_the_same_tokens(params):
    want = engine(params).generate(rows(12))
    # The last buckets: a cache that is written in whole tiles.
    for slots, chunk, buckets in (
        (4, 5, BUCKETS),
        (3, 64, BUCKETS),
        (12, 1, BUCKETS),
        (3, 5, (16, 128)),
    ):
        got = engine(params, slots, chunk, buckets=buckets, attend="blocked").generate(rows(12))
        for name, completion in got.items():
            np.testing.assert_array_equal(completion.tokens, want[name].tokens, name)
            np.testing.assert_allclose(completion.logps, want[name].logps, atol=1e-5)


@pytest.mark.multidevice
def test_rows_on_a_mesh_get_the_tokens_of_one_device():
    cfg = dataclasses.replace(CFG, vocab_size=98)
    params = qwen_params.init(cfg, jax.random.key(0))
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)
    on_mesh = Layout(make_mesh(2, 2, 2), DECODE_RULES)

    def done(attend, layout):
        sizes = {"slots": 8, "buckets": (128,), "max_new": 24, "chunk": 5, "prefill_rows": 4}
        made = Engine(cfg, **sizes, layout=layout, attend=attend)
        made.start(decode_weights(params, cfg, Placement(layout, layout, {}), "float32"))
        return made.generate(rows(12))

    want, got = done("xla", None), done("blocked", on_mesh)
    for name, completion in got.items():
        np.testing.assert_array_equal(completion.tokens, want[name].tokens, name)
        np.testing.assert_allclose(completion.logps, want[name].logps, atol=1e-5)


def test_rows_of_one_prompt_draw_independently(params):
    prompt = (1, 2, 3)
    many = [Row(f"s{i}", prompt, tuple(map(int, row_key(0, i))), 8, (), 2.0) for i in range(8)]
    done = engine(params, slots=8, prefill_rows=8).generate(many)
    assert len({tuple(c.tokens) for c in done.values()}) == 8


@jax.jit
def full_pass(params, tokens_bt, temperature_b):
    """Log-prob of every token after the first, and the likeliest token in its place."""
    logits_btv = qwen.head_logits(params, CFG, qwen.forward(params, CFG, tokens_bt))[:, :-1]
    temperature_bt = jnp.broadcast_to(temperature_b[:, None], tokens_bt[:, 1:].shape)
    return log_prob(logits_btv, tokens_bt[:, 1:], temperature_bt), logits_btv.argmax(-1)


def assert_log_probs_are_those_of_a_full_pass(params, buckets):
    done = list(engine(params, buckets=buckets).generate(rows(8)).values())
    tokens_bt, length_b = pad([[*c.row.prompt, *c.tokens] for c in done], BUCKETS[-1])
    temperature_b = jnp.asarray([c.row.temperature for c in done])
    logp_bt, best_bt = map(np.asarray, full_pass(params, tokens_bt, temperature_b))
    for completion, length, logp_t, best_t in zip(done, length_b, logp_bt, best_bt, strict=True):
        own = slice(len(completion.row.prompt) - 1, int(length) - 1)
        np.testing.assert_allclose(completion.logps, logp_t[own], atol=1e-5)
        if completion.row.temperature == 0:
            np.testing.assert_array_equal(completion.tokens, best_t[own])


def test_sampler_log_probs_are_those_of_a_full_forward_pass(params):
    assert_log_probs_are_those_of_a_full_pass(params, BUCKETS)


def test_top_p_cuts_the_tail_but_not_the_log_prob(params):
    plain = engine(params).generate(rows(8, temperature=1.0, max_new=20))
    cut = engine(params).generate(rows(8, temperature=1.0, max_new=20, top_p=1e-6))
    greedy = engine(params).generate(rows(8, temperature=0.0, max_new=20))
    assert any(not np.array_equal(plain[n].tokens, cut[n].tokens) for n in plain)
    for name in cut:
        np.testing.assert_array_equal(cut[name].tokens, greedy[name].tokens)
        np.testing.assert_allclose(cut[name].logps, greedy[name].logps, atol=1e-5)


def test_stop_token_ends_a_row_and_is_kept_once(params):
    free = engine(params).generate(rows(8, max_new=20, temperature=1.0))
    for row in rows(8, max_new=20, temperature=1.0):
        tokens = free[row.id].tokens
        stop = int(tokens[min(3, len(tokens) - 1)])
        want = tokens[: list(tokens).index(stop) + 1]
        stopping = Row(row.id, row.prompt, row.key, row.max_new, (96, stop), 1.0)
        got = engine(params).generate([stopping])[row.id]
        np.testing.assert_array_equal(got.tokens, want)
        assert got.finish == "stop"


@pytest.mark.parametrize("budget", [1, 2, 24])
def test_budget_is_spent_exactly(params, budget):
    row = Row("r", (1, 2, 3), (1, 2), budget, (), 1.0)
    done = engine(params).generate([row])["r"]
    assert len(done.tokens) == len(done.logps) == budget and done.finish == "length"


@pytest.mark.parametrize("attend", ["xla", "blocked"])
def test_prompt_and_budget_may_fill_the_cache_to_the_last_position(params, attend):
    row = Row("r", tuple(range(1, 41)), (1, 2), 24, (), 1.0)
    got = [engine(params, chunk=chunk, attend=attend).generate([row])["r"] for chunk in (5, 24)]
    assert len(got[0].tokens) == 24
    np.testing.assert_array_equal(got[0].tokens, got[1].tokens)


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (Row("r", (), (1, 2), 4, ()), "prompt is empty"),
        (Row("r", (1,) * 50, (1, 2), 24, ()), "rollout.buckets"),
        (Row("r", (1,), (1, 2), 25, ()), "max_new=25"),
        (Row("r", (1,), (1, 2), 0, ()), "max_new=0"),
        (Row("r", (97,), (1, 2), 4, ()), "token 97"),
        (Row("r", (1,), (1, 2), 4, tuple(range(17))), "17 stop ids"),
    ],
)
def test_a_row_that_cannot_run_is_refused_by_name(params, row, field):
    with pytest.raises(ValueError, match="row r.*") as error:
        engine(params).submit([row])
    assert field in str(error.value)


def test_rows_submitted_while_others_run_fill_freed_slots(params):
    made = engine(params, slots=2, chunk=2)
    first, later = rows(12)[:6], rows(12)[6:]
    made.submit(first)
    done = {c.row.id: c for c in made.step()}
    made.submit(later)
    while made.busy:
        done.update((c.row.id, c) for c in made.step())
    want = engine(params).generate(rows(12))
    assert done.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(done[name].tokens, want[name].tokens)


def test_compiled_programs_stay_within_the_declared_buckets():
    made = Engine(CFG, slots=5, buckets=BUCKETS, max_new=24, chunk=3, prefill_rows=9)
    made.start(qwen_params.init(CFG, jax.random.key(1)))
    counts = lambda: [f._cache_size() for f in (decode.prefill, decode.insert, decode.decode)]  # noqa: E731
    before = counts()
    for i in range(1, 40):
        key = row_key(i)
        one = Row("a", (1,) * i, (int(key[0]), int(key[1])), 1 + i % 24, ())
        many = [dataclasses.replace(one, id=f"b{n}", prompt=(1,) * i + (n,)) for n in range(i % 5)]
        made.generate([one, *many])
    grown = [after - start for after, start in zip(counts(), before, strict=True)]
    # Prefill and insert for a few rows or all.
    assert 5 < sum(grown) <= 5 * len(BUCKETS)
    assert len(made.shapes) == sum(grown)


def test_transfers_per_step_are_counted_and_bounded(params):
    made = engine(params, slots=4, prefill_rows=4)
    made.submit(rows(4, max_new=20, temperature=1.0))
    before = made.transfers
    made.step()
    assert made.transfers - before <= 3
    before = made.transfers
    made.step()
    assert made.transfers - before <= 2


@pytest.mark.parametrize("form", ["scatter", "apart"])
def test_decode_keeps_its_temporaries_under_one_layers_cache(form):
    cfg = qwen.QwenConfig(**{**CFG.__dict__, "num_layers": 8})
    placed = {"dtype": jnp.float32, "layout": None, "form": form}
    slots = jax.eval_shape(lambda: decode.empty_slots(cfg, 64, 512, 16, **placed))
    split = apart if form == "apart" else stacked
    shapes = jax.eval_shape(lambda: split(qwen_params.init(cfg, jax.random.key(0))))
    static = {"cfg": cfg, "steps": 4, "read_length": 512}
    compiled = decode.decode.lower(shapes, slots, **static, **placed).compile()
    whole = sum(x.size * 4 for x in jax.tree.leaves(slots.cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= whole, "the cache was not donated"
    assert memory.temp_size_in_bytes < whole / cfg.num_layers * 1.6


def count_calls(monkeypatch, name):
    """Prompt lengths [b] of each call of a program of the engine."""
    seen, program = [], getattr(decode, name)

    def counted(params, tokens_bp, lengths_b, **static):
        seen.append([int(n) for n in lengths_b])
        return program(params, tokens_bp, lengths_b, **static)

    monkeypatch.setattr(decode, name, counted)
    return seen


def with_prompts(count, prompt_of, **changes):
    return [dataclasses.replace(row, prompt=prompt_of(i)) for i, row in enumerate(rows(count))]


def test_siblings_share_one_prefill_even_if_they_start_at_different_times(params, monkeypatch):
    calls = count_calls(monkeypatch, "prefill")
    siblings = with_prompts(6, lambda i: (1, 2, 3))
    done = engine(params, slots=2, prefill_rows=1).generate(siblings)
    assert len(calls) == 1
    for row in siblings:
        alone = engine(params, slots=1, prefill_rows=1).generate([row])[row.id]
        np.testing.assert_array_equal(done[row.id].tokens, alone.tokens)


def test_rows_left_over_in_a_prefill_take_prompts_that_still_wait(params, monkeypatch):
    calls = count_calls(monkeypatch, "prefill")
    engine(params, slots=2, prefill_rows=4).generate(with_prompts(8, lambda i: (1, 2, 3, i)))
    assert calls == [[4, 4, 4, 4], [4, 4, 4, 4]]


def test_what_the_prefix_cache_drops_is_prefilled_again_with_the_same_tokens(params, monkeypatch):
    want = engine(params, slots=12, prefill_rows=1).generate(with_prompts(12, lambda i: (7, i % 6)))
    # Siblings are six rows apart, so each call is dropped before the second of them starts.
    monkeypatch.setattr("sage_jax.rollout.engine.KEPT_CALLS", 1)
    calls = count_calls(monkeypatch, "prefill")
    made = engine(params, slots=2, prefill_rows=1)
    got = made.generate(with_prompts(12, lambda i: (7, i % 6)))
    assert len(calls) > 6
    for name in want:
        np.testing.assert_array_equal(got[name].tokens, want[name].tokens)


def test_new_parameters_never_meet_prefixes_of_the_old(params):
    made = engine(params, slots=2, prefill_rows=4)
    made.generate(rows(8))
    other = jax.tree.map(lambda x: -x if x.ndim > 1 else x, params)
    made.start(other)
    got, want = made.generate(rows(8)), engine(other, slots=2, prefill_rows=4).generate(rows(8))
    for name in want:
        np.testing.assert_array_equal(got[name].tokens, want[name].tokens)


def test_released_memory_is_free_and_a_new_start_gives_the_same_tokens(params):
    made = engine(params)
    want = made.generate(rows(6))
    held = jax.tree.leaves(made._slots)
    made.submit(rows(1))
    with pytest.raises(RuntimeError, match="rows are still running"):
        made.release()
    made.generate([])
    made.release()
    cache = [weakref.ref(x) for x in held]
    del held
    assert not any(ref() for ref in cache)
    with pytest.raises(RuntimeError, match="start"):
        made.step()
    made.start(params)
    got = made.generate(rows(6))
    for name in want:
        np.testing.assert_array_equal(got[name].tokens, want[name].tokens)


def test_rows_of_a_higher_rank_start_first(params):
    made = engine(params, slots=1, chunk=24)
    made.submit([dataclasses.replace(row, rank=i // 2) for i, row in enumerate(rows(6))])
    ended = []
    while made.busy:
        ended += [c.row.id for c in made.step()]
    assert ended == ["r4", "r5", "r2", "r3", "r0", "r1"]


def test_it_is_hungry_only_while_a_slot_is_free_for_a_row_not_yet_submitted(params):
    made = engine(params, slots=3)
    assert made.hungry
    made.submit(rows(2))
    assert made.hungry
    made.submit(rows(4)[2:])
    assert not made.hungry
    made.generate([])
    assert made.hungry


def test_running_rows_are_told_with_their_tokens_longest_first(params):
    made = engine(params, slots=3, chunk=2)
    made.submit([dataclasses.replace(r, max_new=9, stop_ids=()) for r in rows(2)])
    made.step()
    made.submit([dataclasses.replace(rows(3)[2], max_new=9, stop_ids=())])
    made.step()
    assert made.running() == [
        "r0 (5 of at most 9 tokens)",
        "r1 (5 of at most 9 tokens)",
        "r2 (3 of at most 9 tokens)",
    ]


def test_live_slots_count_the_steps_a_row_really_took(params):
    made = engine(params, slots=4, chunk=8)
    budgets = (9, 3)  # 8 and 2 steps after the token that the prefill gives
    both = [
        dataclasses.replace(row, max_new=budget, stop_ids=())
        for row, budget in zip(rows(2), budgets, strict=True)
    ]
    made.generate(both)
    assert (made.live_steps, made.slot_steps) == (8 + 2, 4 * 8)


def test_waves_and_one_stream_give_the_same_tokens(params):
    spec = importlib.util.spec_from_file_location("waves", ROOT / "benchmarks" / "waves.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    waves = module.Waves(engine(params, slots=3), 3)
    waves.submit(rows(5))
    got, submitted = {}, False
    while waves.busy:
        got.update((c.row.id, c) for c in waves.step())
        if not submitted:  # rows of the next wave come while this one runs
            waves.submit(rows(12)[5:])
            submitted = True
    want = engine(params).generate(rows(12))
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name].tokens, want[name].tokens)
