from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.learn.objective import completion_mask
from sage_jax.learn.pack import TrainRow, pack

ROLES = ("challenger", "planner", "solver", "critic")
EOS = 7


def row(id, prompt=3, completion=2, role="solver", **kwargs):
    return TrainRow(
        id=id,
        role=role,
        prompt=list(range(10, 10 + prompt)),
        completion=[*range(20, 20 + completion - 1), EOS][:completion],
        logps=[-0.5] * completion,
        advantage=kwargs.pop("advantage", 1.0),
        **kwargs,
    )


def test_golden_layout_of_two_rows_in_one_sequence():
    rows = [row("a", temperature=0.6, advantage=-2.0), row("b", 1, 1, "critic")]
    micro = pack(rows, ROLES, [9], 2).micros[0]
    assert micro.tokens_bt.tolist() == [[10, 11, 12, 20, EOS, 10, EOS, 0, 0], [0] * 9]
    assert micro.segment_bt[0].tolist() == [0] * 5 + [1, 1, 2, 2]
    assert micro.position_bt[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 0]
    assert micro.prompt_length_bt[0].tolist() == [3] * 5 + [1, 1, 0, 0]
    assert micro.length_bt.tolist() == [[5] * 5 + [2, 2, 0, 0], [0] * 9]
    assert micro.sampler_logp_bt[0].tolist() == [0, 0, 0, -0.5, -0.5, 0, -0.5, 0, 0]
    assert micro.adv_bt[0].tolist() == [-2] * 5 + [1, 1, 0, 0]
    assert micro.role_bt[0].tolist() == [2] * 5 + [3, 3, 0, 0]
    np.testing.assert_allclose(micro.temperature_bt[0], [0.6] * 5 + [1] * 4)
    assert micro.old_logp_bt is None
    assert micro.tokens_bt.dtype == np.int32 and micro.adv_bt.dtype == np.float32


def test_a_row_that_does_not_share_has_its_sequence_to_itself():
    packed = pack([row("a"), row("b")], ROLES, [8, 16], 1, share=False)
    assert packed.ids == [["a"], ["b"]]
    assert all(micro.segment_bt is None for micro in packed.micros)
    assert [micro.tokens_bt.shape for micro in packed.micros] == [(1, 8), (1, 8)]


def test_shapes_depend_on_bucket_and_micro_rows_only():
    rows = [row(f"r{i}", 3, 1 + i) for i in range(11)]
    packed = pack(rows, ROLES, [16, 8], 4)
    assert {micro.tokens_bt.shape for micro in packed.micros} <= {(4, 16), (4, 8)}


def test_the_bucket_is_the_smallest_of_those_filled_nearly_as_well():
    threes = [row(f"r{i}", 2, 1) for i in range(8)]
    assert pack(threes, ROLES, [4, 6, 12], 2).micros[0].tokens_bt.shape == (2, 6)
    # 32 of 32 slots, but 30 of 30 in the smaller one.
    assert pack(threes, ROLES, [4, 12], 2).micros[0].tokens_bt.shape == (2, 12)


@pytest.mark.parametrize("spread", [0.7, 1.0, 1.4])
def test_padding_stays_under_a_tenth_on_skewed_lengths(spread):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(300), spread, 384), 2, 8192).astype(int)
    rows = [row(f"r{i}", 1, length - 1) for i, length in enumerate(lengths)]
    buckets = [512, 1024, 2048, 4096, 8192]
    packed = pack(rows, ROLES, buckets, 8)
    assert packed.padding_share < 0.1
    assert pack(rows, ROLES, buckets, 8, share=False).padding_share > 0.3
    assert len({micro.tokens_bt.shape for micro in packed.micros}) <= len(buckets)


def test_a_row_that_exactly_fills_a_bucket_fits_it():
    assert pack([row("a", 3, 5)], ROLES, [8, 16], 1).micros[0].tokens_bt.shape == (1, 8)


def test_order_is_by_length_then_id_whatever_the_input_order():
    rows = [row("b"), row("a"), row("c", 4, 4)]
    packed = pack(rows, ROLES, [9], 1)
    assert packed.ids == [["c"], ["a"], ["b"]]
    again = pack(rows[::-1], ROLES, [9], 1)
    assert again.ids == packed.ids
    np.testing.assert_array_equal(again.micros[0].tokens_bt, packed.micros[0].tokens_bt)


def test_role_tokens_count_completions_over_the_whole_update():
    rows = [row("a", 3, 2), row("b", 1, 5), row("c", 3, 4, "critic"), row("d", 2, 0, "planner")]
    assert pack(rows, ROLES, [8], 1).role_tokens.tolist() == [0, 0, 7, 4]


def test_padding_share_counts_empty_rows_and_pads():
    assert pack([row("a", 3, 5)], ROLES, [8], 1).padding_share == 0.0
    assert pack([row("a", 3, 5)], ROLES, [8], 2).padding_share == 0.5
    assert pack([], ROLES, [8], 2).micros == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("x", 5, 4), r"row 'x': 9 tokens \(prompt 5 \+ completion 4\).*optim.buckets, 8"),
        (row("x", role="judge"), "row 'x': role='judge'"),
        (row("x", prompt=0), "row 'x': prompt is empty"),
        (row("x", advantage=float("nan")), "row 'x': advantage=nan"),
        (row("x", temperature=-1.0), "row 'x': temperature=-1.0"),
        (replace(row("x"), logps=[-1.0]), "row 'x': logps has 1 entries for 2"),
        (replace(row("x"), logps=[-1.0, float("nan")]), "row 'x': logps holds"),
        (row("ok"), "row 'ok': id appears twice"),
    ],
)
def test_bad_rows_are_named_with_the_field(bad, message):
    with pytest.raises(ValueError, match=message):
        pack([row("ok"), bad], ROLES, [8], 2)


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"optim.buckets=\[\]"):
        pack([], ROLES, [], 2)
    with pytest.raises(ValueError, match="optim.micro_rows=0"):
        pack([], ROLES, [8], 0)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20),
    micro_rows=st.integers(1, 6),
)
def test_every_completion_token_is_selected_once_by_the_lengths(lengths, micro_rows):
    rows = [row(f"{i:02}", p, c, ROLES[i % 4]) for i, (p, c) in enumerate(lengths)]
    packed = pack(rows, ROLES, [6, 12, 18], micro_rows)
    by_id = {r.id: r for r in rows}
    seen = []
    for micro, ids in zip(packed.micros, packed.ids, strict=True):
        mask_bt = completion_mask(micro)
        rest = iter(ids)
        for b, segment_t in enumerate(micro.segment_bt):
            for segment in range(segment_t.max() + 1):
                own_t = segment_t == segment
                if not (micro.length_bt[b] * own_t).any():
                    continue  # what follows the last row
                seen.append(next(rest))
                tokens = micro.tokens_bt[b, own_t & mask_bt[b]].tolist()
                assert tokens == by_id[seen[-1]].completion
        assert next(rest, None) is None
    assert sorted(seen) == sorted(by_id)
    assert sum(int(completion_mask(m).sum()) for m in packed.micros) == sum(c for _, c in lengths)
    assert packed.role_tokens.sum() == sum(c for _, c in lengths)
