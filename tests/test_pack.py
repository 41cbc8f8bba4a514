from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_golden_layout_of_one_row():
    micro = pack([row("a", temperature=0.6, advantage=-2.0)], ROLES, [8], 2).micros[0]
    assert micro.tokens_bt.tolist() == [[10, 11, 12, 20, EOS, 0, 0, 0], [0] * 8]
    assert micro.prompt_length_b.tolist() == [3, 0] and micro.length_b.tolist() == [5, 0]
    assert micro.sampler_logp_bt[0].tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, 0]
    assert micro.adv_b.tolist() == [-2.0, 0.0] and micro.role_b.tolist() == [2, 0]
    np.testing.assert_allclose(micro.temperature_b, [0.6, 1.0])
    assert micro.old_logp_bt is None
    assert micro.tokens_bt.dtype == np.int32 and micro.adv_b.dtype == np.float32


def test_shapes_depend_on_bucket_and_micro_rows_only():
    rows = [row(f"r{i}", 3, 1 + i) for i in range(11)]
    packed = pack(rows, ROLES, [16, 8], 4)
    assert [micro.tokens_bt.shape for micro in packed.micros] == [(4, 16), (4, 16), (4, 8)]


def test_a_row_that_exactly_fills_a_bucket_fits_it():
    assert pack([row("a", 3, 5)], ROLES, [8, 16], 1).micros[0].tokens_bt.shape == (1, 8)


def test_order_is_by_length_then_id_whatever_the_input_order():
    rows = [row("b"), row("a"), row("c", 4, 4)]
    packed = pack(rows, ROLES, [8], 2)
    assert packed.ids == [["c", "a"], ["b"]]
    again = pack(rows[::-1], ROLES, [8], 2)
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
        position_t = np.arange(micro.tokens_bt.shape[1])
        for b in range(micro_rows):
            selected = (position_t >= micro.prompt_length_b[b]) & (position_t < micro.length_b[b])
            if b >= len(ids):
                assert not selected.any()
                continue
            assert micro.tokens_bt[b, selected].tolist() == by_id[ids[b]].completion
            seen.append(ids[b])
    assert sorted(seen) == sorted(by_id)
    assert packed.role_tokens.sum() == sum(c for _, c in lengths)
