"""Rows of any length -> micro-batches of a few fixed shapes, so compiled programs stay few."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

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
    """Fixed-shape arrays: rows right-padded to one bucket; an unused row has length 0.

    Position i of a [b, t] log-prob array belongs to the token at position i.
    """

    tokens_bt: Array  # int32
    prompt_length_b: Array  # int32, tokens
    length_b: Array  # int32, prompt + completion tokens
    adv_b: Array  # float32
    role_b: Array  # int32, index into the roles given to `pack`
    temperature_b: Array  # float32
    sampler_logp_bt: Array  # float32, 0 outside the completion
    old_logp_bt: Array | None = None  # float32; None: the update's own, gradient stopped


class Packed(NamedTuple):
    """Micro-batches of one update, the row ids of each, and counts over all of them."""

    micros: list[MicroBatch]
    ids: list[list[str]]
    role_tokens: np.ndarray  # float32 [roles], completion tokens per role in the whole update
    padding_share: float  # share of all slots (rows x bucket) that hold no token, 0..1


def pack(
    rows: Sequence[TrainRow], roles: Sequence[str], buckets: Sequence[int], micro_rows: int
) -> Packed:
    """`rows`, longest first (ties by id), `micro_rows` at a time, each into its smallest bucket.

    The result depends on the set of rows, not on their order. A half-filled micro-batch takes
    rows of the next smaller bucket along: its slots are paid for anyway. Rows with advantage 0
    stay in (they count in the per-role token mean, as in the published code).
    ValueError for a row longer than the largest bucket or otherwise malformed.
    """
    _check_settings(buckets, micro_rows)
    _check_rows(rows, roles, max(buckets))
    ordered = sorted(rows, key=lambda row: (-row.length, row.id))
    chunks = [ordered[i : i + micro_rows] for i in range(0, len(ordered), micro_rows)]
    role_index = {role: i for i, role in enumerate(roles)}
    micros, role_tokens = [], np.zeros(len(roles), np.float32)
    for chunk in chunks:
        bucket = min(size for size in buckets if size >= chunk[0].length)
        micros.append(_micro_batch(chunk, role_index, bucket, micro_rows))
        for row in chunk:
            role_tokens[role_index[row.role]] += len(row.completion)
    slots = sum(micro.tokens_bt.size for micro in micros)
    padding_share = 1 - sum(row.length for row in rows) / slots if slots else 0.0
    return Packed(
        micros, [[row.id for row in chunk] for chunk in chunks], role_tokens, padding_share
    )


def _micro_batch(
    chunk: Sequence[TrainRow], role_index: dict[str, int], bucket: int, micro_rows: int
) -> MicroBatch:
    micro = MicroBatch(
        tokens_bt=np.zeros((micro_rows, bucket), np.int32),
        prompt_length_b=np.zeros(micro_rows, np.int32),
        length_b=np.zeros(micro_rows, np.int32),
        adv_b=np.zeros(micro_rows, np.float32),
        role_b=np.zeros(micro_rows, np.int32),
        temperature_b=np.ones(micro_rows, np.float32),
        sampler_logp_bt=np.zeros((micro_rows, bucket), np.float32),
    )
    for b, row in enumerate(chunk):
        prompt_length = len(row.prompt)
        micro.tokens_bt[b, :prompt_length] = row.prompt
        micro.tokens_bt[b, prompt_length : row.length] = row.completion
        micro.sampler_logp_bt[b, prompt_length : row.length] = row.logps
        micro.prompt_length_b[b] = prompt_length
        micro.length_b[b] = row.length
        micro.adv_b[b] = row.advantage
        micro.role_b[b] = role_index[row.role]
        micro.temperature_b[b] = row.temperature
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
