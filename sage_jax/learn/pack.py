"""Rows of any length -> micro-batches of a few fixed shapes, so compiled programs stay few."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# A bucket is taken for a longer one that is filled better by this share of its slots only.
NEARLY = 0.02

Array = Any  # numpy here, a jax array once placed on devices


@dataclass(frozen=True)
class TrainRow:
    """One row to train on: ids as sampled (the stop token included), one log-prob per new token.

    `logps` are the sampler's (nats, untruncated, at `temperature`). An empty completion is legal
    and contributes nothing. Rows whose verdict is masked must not be passed at all.
    """

    id: str
    role: str
    prompt: Sequence[int]
    completion: Sequence[int] | np.ndarray
    logps: Sequence[float] | np.ndarray
    advantage: float
    temperature: float = 1.0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


class MicroBatch(NamedTuple):
    """Fixed-shape arrays [b, t]: sequences of one bucket's length, rows one after another in each.

    A token holds what is true of its row; position i of a [b, t] log-prob array belongs to the
    token at i. What follows the last row of a sequence is of length 0, so no row's.
    """

    tokens_bt: Array  # int32
    segment_bt: Array | None  # int32, which row of the sequence; None: one row each
    position_bt: Array  # int32, in its row
    prompt_length_bt: Array  # int32, tokens
    length_bt: Array  # int32, prompt + completion tokens
    adv_bt: Array  # float32
    role_bt: Array  # int32, index into the roles given to `pack`
    temperature_bt: Array  # float32
    sampler_logp_bt: Array  # float32, 0 outside the completion
    old_logp_bt: Array | None = None  # float32; None: the update's own, gradient stopped


class Packed(NamedTuple):
    """Micro-batches of one update, the row ids of each, and counts over all of them."""

    micros: list[MicroBatch]
    ids: list[list[str]]  # in the order of the tokens
    role_tokens: np.ndarray  # float32 [roles], completion tokens per role, of all rows given
    padding_share: float  # share of all slots (sequences x bucket) that hold no token, 0..1


def pack(
    rows: Sequence[TrainRow],
    roles: Sequence[str],
    buckets: Sequence[int],
    micro_rows: int,
    *,
    share: bool = True,
    flat: bool = True,
) -> Packed:
    """`rows`, longest first (ties by id), into micro-batches of `micro_rows` sequences.

    Each sequence takes the longest rows left that fit (first fit, decreasing); without `share` one
    row. The bucket of a micro-batch is the one that is filled best, the smaller where two are
    nearly as good. The result depends on the set of rows, not on their order. Rows with advantage 0
    count in the per-role token mean, as in the published code; without `flat` they only count: for
    a loss in which they have no gradient.
    ValueError for a row longer than the largest bucket or otherwise malformed.
    """
    _check_settings(buckets, micro_rows)
    _check_rows(rows, roles, max(buckets))
    used = [row for row in rows if flat or row.advantage]
    left = sorted(used, key=lambda row: (-row.length, row.id))
    role_index = {role: i for i, role in enumerate(roles)}
    micros, ids, role_tokens = [], [], np.zeros(len(roles), np.float32)
    while left:
        bucket, sequences, left = _fill(left, buckets, micro_rows, share)
        micros.append(_micro_batch(sequences, role_index, bucket, micro_rows, share))
        ids.append([row.id for sequence in sequences for row in sequence])
    for row in rows:
        role_tokens[role_index[row.role]] += len(row.completion)
    slots = sum(micro.tokens_bt.size for micro in micros)
    padding_share = 1 - sum(row.length for row in used) / slots if slots else 0.0
    return Packed(micros, ids, role_tokens, padding_share)


Sequences = list[list[TrainRow]]


def _fill(
    rows: list[TrainRow], buckets: Sequence[int], count: int, share: bool
) -> tuple[int, Sequences, list[TrainRow]]:
    """Bucket and rows of the next `count` sequences, and the rows left; `rows` are longest first.

    Among the buckets that hold the longest row: the smallest that is filled within 2 % of the best.
    """
    fills = []
    for bucket in sorted(size for size in buckets if size >= rows[0].length):
        sequences, left = _first_fit(rows, bucket, count, share)
        held = sum(row.length for sequence in sequences for row in sequence)
        fills.append((held / (bucket * count), bucket, sequences, left))
        if not share:  # a longer bucket holds the same rows
            break
    best = max(fill[0] for fill in fills)
    return next(fill for fill in fills if fill[0] >= best - NEARLY)[1:]


def _first_fit(
    rows: list[TrainRow], bucket: int, count: int, share: bool
) -> tuple[Sequences, list[TrainRow]]:
    left, sequences = list(rows), []
    # Ascending, for bisect.
    shortness = [-row.length for row in left]
    for _ in range(count):
        room, sequence = bucket, []
        while (i := bisect.bisect_left(shortness, -room)) < len(left) and (share or not sequence):
            room += shortness.pop(i)
            sequence.append(left.pop(i))
        if sequence:
            sequences.append(sequence)
    return sequences, left


def _micro_batch(
    sequences: Sequences, role_index: dict[str, int], bucket: int, micro_rows: int, share: bool
) -> MicroBatch:
    def zeros(dtype: type) -> np.ndarray:
        return np.zeros((micro_rows, bucket), dtype)

    micro = MicroBatch(
        tokens_bt=zeros(np.int32),
        segment_bt=zeros(np.int32) if share else None,
        position_bt=zeros(np.int32),
        prompt_length_bt=zeros(np.int32),
        length_bt=zeros(np.int32),
        adv_bt=zeros(np.float32),
        role_bt=zeros(np.int32),
        temperature_bt=np.ones((micro_rows, bucket), np.float32),
        sampler_logp_bt=zeros(np.float32),
    )
    for b, sequence in enumerate(sequences):
        start = 0
        for number, row in enumerate(sequence):
            place = b, slice(start, start + row.length)
            start += row.length
            micro.tokens_bt[place] = [*row.prompt, *row.completion]
            micro.position_bt[place] = np.arange(row.length)
            micro.prompt_length_bt[place] = len(row.prompt)
            micro.length_bt[place] = row.length
            micro.adv_bt[place] = row.advantage
            micro.role_bt[place] = role_index[row.role]
            micro.temperature_bt[place] = row.temperature
            micro.sampler_logp_bt[b, start - len(row.completion) : start] = row.logps
            if micro.segment_bt is not None:
                # To the end: what follows the last row is a segment of its own.
                micro.segment_bt[b, start:] = number + 1
    return micro


def _check_settings(buckets: Sequence[int], micro_rows: int) -> None:
    if not buckets or min(buckets) < 2:
        raise ValueError(f"optim.buckets={list(buckets)} needs sizes of at least 2 tokens")
    if micro_rows < 1:
        raise ValueError(f"optim.micro_rows={micro_rows} must be at least 1")


def _check_rows(rows: Sequence[TrainRow], roles: Sequence[str], longest: int) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ValueError(f"row {row.id!r}: id appears twice; ids must be unique in an update")
        seen.add(row.id)
        if row.role not in roles:
            raise ValueError(f"row {row.id!r}: role={row.role!r} is not one of {', '.join(roles)}")
        if row.length > longest:
            raise ValueError(
                f"row {row.id!r}: {row.length} tokens (prompt {len(row.prompt)} + completion "
                f"{len(row.completion)}) do not fit the largest of optim.buckets, {longest}; "
                "add a larger bucket or lower the prompt or completion limit"
            )
        if not row.prompt:
            raise ValueError(f"row {row.id!r}: prompt is empty; the first token needs a context")
        if len(row.logps) != len(row.completion):
            raise ValueError(
                f"row {row.id!r}: logps has {len(row.logps)} entries for "
                f"{len(row.completion)} completion tokens; give one per token"
            )
        if not np.isfinite(row.advantage):
            raise ValueError(f"row {row.id!r}: advantage={row.advantage} is not finite")
        if not np.all(np.isfinite(row.logps)):
            raise ValueError(f"row {row.id!r}: logps holds a value that is not finite")
        if not 0 <= row.temperature < np.inf:
            raise ValueError(
                f"row {row.id!r}: temperature={row.temperature} must be 0 (greedy) or above"
            )
