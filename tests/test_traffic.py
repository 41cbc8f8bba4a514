"""What counts as HBM traffic of a compiled program, on small texts."""

import pytest

from sage_jax.core import hlo, traffic

MB = 1024 * 1024 * 2  # of a bf16[1024,1024]


def moved(text: str, inside: str = "") -> float:
    return traffic.hbm_bytes(hlo.Program(text), inside)


def test_a_weight_brought_into_the_chips_memory_ahead_of_its_use_counts_once():
    text = """\
ENTRY %main (w: bf16[1024,1024], x: bf16[8,1024]) -> bf16[8,1024] {
  %w = bf16[1024,1024]{1,0} parameter(0)
  %x = bf16[8,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %copy-start = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %copy-done = bf16[1024,1024]{1,0:S(1)} copy-done(%copy-start)
  ROOT %dot = bf16[8,1024]{1,0:S(1)} dot(%x, %copy-done), lhs_contracting_dims={1}
}
"""
    assert moved(text) == MB
    # In parts as well, of which each says how much of the whole it takes.
    sliced = text.replace(
        "(bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) copy-start(%w)",
        "((bf16[1024,1024]{1,0}), bf16[256,1024]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%w)",
    )
    assert moved(sliced) == MB / 4


def test_what_a_product_reads_and_writes_counts_where_it_lies_in_hbm():
    text = """\
ENTRY %main (w: bf16[1024,1024], x: bf16[8,1024]) -> f32[8,1024] {
  %w = bf16[1024,1024]{1,0} parameter(0)
  %x = bf16[8,1024]{1,0} parameter(1)
  ROOT %dot = f32[8,1024]{1,0} dot(%x, %w), lhs_contracting_dims={1}
}
"""
    assert moved(text) == MB + 8 * 1024 * (2 + 4)


STACK = """\
%slice (p: bf16[8,1024,1024], i: s32[]) -> bf16[1024,1024] {
  %p = bf16[8,1024,1024]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %same = bf16[8,1024,1024]{2,1,0} bitcast(%p)
  %part = bf16[1,1024,1024]{2,1,0} dynamic-slice(%same, %i, %zero, %zero)
  ROOT %flat = bf16[1024,1024]{1,0} bitcast(%part)
}

%product (w: bf16[8,1024,1024], i: s32[], x: bf16[8,1024]) -> bf16[8,1024] {
  %w = bf16[8,1024,1024]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %x = bf16[8,1024]{1,0} parameter(2)
  %inner = bf16[1024,1024]{1,0} fusion(%w, %i.1), kind=kLoop, calls=%slice
  ROOT %dot = bf16[8,1024]{1,0} dot(%x, %inner), lhs_contracting_dims={1}
}

ENTRY %main (w: bf16[8,1024,1024], i: s32[], x: bf16[8,1024]) -> bf16[8,1024] {
  %w.1 = bf16[8,1024,1024]{2,1,0} parameter(0)
  %i.2 = s32[]{:S(6)} parameter(1)
  %x.1 = bf16[8,1024]{1,0:S(1)} parameter(2)
  ROOT %out = bf16[8,1024]{1,0:S(1)} fusion(%w.1, %i.2, %x.1), kind=kOutput, calls=%product
}
"""


def test_a_fusion_that_reads_one_layer_of_a_stack_reads_one_layer():
    assert moved(STACK) == MB
    whole = STACK.replace("dot(%x, %inner)", "dot(%x, %w)")
    assert moved(whole) == 8 * MB


UPDATE = """\
%write (c: bf16[8,1024,1024], x: bf16[1,1024,1024], i: s32[]) -> bf16[8,1024,1024] {
  %c = bf16[8,1024,1024]{2,1,0} parameter(0)
  %x = bf16[1,1024,1024]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %out = bf16[8,1024,1024]{2,1,0} dynamic-update-slice(%c, %x, %i, %zero, %zero)
}

ENTRY %main (c: bf16[8,1024,1024], x: bf16[1,1024,1024], i: s32[]) -> bf16[8,1024,1024] {
  %c.1 = bf16[8,1024,1024]{2,1,0} parameter(0)
  %x.1 = bf16[1,1024,1024]{2,1,0:S(1)} parameter(1)
  %i.1 = s32[]{:S(6)} parameter(2)
  ROOT %done = bf16[8,1024,1024]{2,1,0} fusion(%c.1, %x.1, %i.1), kind=kLoop, calls=%write
}
"""


def test_an_update_in_place_counts_as_what_is_updated():
    assert moved(UPDATE) == MB
    alone = UPDATE.replace(
        "fusion(%c.1, %x.1, %i.1), kind=kLoop, calls=%write",
        "dynamic-update-slice(%c.1, %x.1, %i.1, %i.1, %i.1)",
    )
    assert moved(alone) == MB


def test_a_copy_counts_as_read_and_written():
    text = """\
ENTRY %main (c: bf16[1024,1024]) -> bf16[1024,1024] {
  %c = bf16[1024,1024]{1,0} parameter(0)
  ROOT %copy = bf16[1024,1024]{0,1} copy(%c)
}
"""
    assert moved(text) == 2 * MB


def test_the_body_of_a_loop_counts_as_often_as_it_runs_and_can_be_asked_for():
    text = """\
%body (s: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %s = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%s), index=0
  %one = s32[]{:S(6)} constant(1)
  %next = s32[]{:S(6)} add(%i, %one)
  %c = bf16[1024,1024]{1,0} get-tuple-element(%s), index=1
  %copy = bf16[1024,1024]{1,0} copy(%c)
  ROOT %t = (s32[], bf16[1024,1024]{1,0}) tuple(%next, %copy)
}

%more (s: (s32[], bf16[1024,1024])) -> pred[] {
  %s.1 = (s32[], bf16[1024,1024]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (c: bf16[1024,1024]) -> (s32[], bf16[1024,1024]) {
  %c.1 = bf16[1024,1024]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[1024,1024]{1,0}) tuple(%zero, %c.1)
  ROOT %loop = (s32[], bf16[1024,1024]{1,0}) while(%start), condition=%more, body=%body
}
"""
    assert moved(text) == pytest.approx(5 * 2 * MB, abs=100)
    assert moved(text, "body") == pytest.approx(2 * MB, abs=20)
    step, rest = traffic.step_bytes(hlo.Program(text))
    assert step == moved(text, "body") and step + rest == moved(text)
