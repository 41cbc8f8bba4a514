"""The rollout engine: rows of any role share the slots of one running batch.

`submit` queues rows, `step` admits, decodes a chunk and returns what has finished; freed slots are
refilled on the next `step`. All host decisions follow from the rows and the step count alone, so
that a resumed or repeated run takes the same ones.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.core.mesh import Layout, put
from sage_jax.models.qwen import QwenConfig
from sage_jax.rollout import decode as programs


@dataclasses.dataclass(frozen=True)
class Row:
    """One completion to sample. `key` uint32 [2] from core.rng.row_key; temperature 0 is greedy;
    top_k 0, top_p 1 and min_p 0 are off."""

    id: str
    prompt: tuple[int, ...]
    key: tuple[int, int]
    max_new: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Completion:
    """Sampled tokens int32 [c] with the stop token, their log-probs fp32 [c] of the untruncated
    distribution at the row's temperature, and why it ended: 'stop' or 'length'."""

    row: Row
    tokens: np.ndarray
    logps: np.ndarray
    finish: str


def bucket_of(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `length`."""
    return next(b for b in buckets if b >= length)


class Engine:
    """Slots with a static cache over one set of parameters.

    Args:
      cfg: the model.
      slots: rows decoded at the same time.
      buckets: increasing token counts; prompts are padded to one of them, cache reads are bounded
        by one of them, the last is the cache length.
      max_new: largest response budget a row may ask for.
      chunk: decode steps between two looks of the host.
      prefill_rows: prompts in one prefill call.
      dtype: compute and cache type.
      layout: mesh and decode rules, None on one device.
      notice: told in words before a program of a new shape is compiled.
    """

    def __init__(
        self,
        cfg: QwenConfig,
        *,
        slots: int,
        buckets: tuple[int, ...],
        max_new: int,
        chunk: int = 16,
        prefill_rows: int = 8,
        dtype=jnp.float32,
        layout: Layout | None = None,
        notice: Callable[[str], None] = lambda words: None,
    ):
        self.notice = notice
        self.cfg, self.buckets, self.max_new, self.chunk = cfg, tuple(buckets), max_new, chunk
        self.prefill_rows = prefill_rows
        self._static = {"cfg": cfg, "dtype": dtype, "layout": layout}
        self._everywhere = None if layout is None else layout.sharding(())
        self._rows: list[Row | None] = [None] * slots
        self._longest = np.zeros(slots, np.int64)
        self._queue: deque[Row] = deque()
        self._params = None
        self._slots = programs.empty_slots(cfg, slots, self.buckets[-1], max_new, dtype, layout)
        self.shapes: set[tuple] = set()
        self.transfers = 0
        self.live_steps = self.slot_steps = 0

    def start(self, params) -> None:
        """Use these parameters, already in compute type and decode layout, from now on."""
        if self.busy:
            raise RuntimeError("Engine.start: rows are still running on the former parameters")
        self._params = params

    @property
    def busy(self) -> bool:
        """True while a row is queued or running."""
        return bool(self._queue) or any(row is not None for row in self._rows)

    def submit(self, rows: Iterable[Row]) -> None:
        """Queue rows; they start in this order as slots become free. ValueError for unfit ones."""
        rows = list(rows)
        for row in rows:
            self._check(row)
        self._queue.extend(rows)

    def _check(self, row: Row) -> None:
        limit = self.buckets[-1]
        if not row.prompt:
            raise ValueError(f"row {row.id}: the prompt is empty; give at least one token")
        if not 0 < row.max_new <= self.max_new:
            raise ValueError(f"row {row.id}: max_new={row.max_new} must lie in [1, {self.max_new}]")
        if len(row.prompt) + row.max_new > limit:
            raise ValueError(
                f"row {row.id}: {len(row.prompt)} prompt tokens + max_new={row.max_new} exceed "
                f"rollout.buckets[-1]={limit}; raise it, or shorten the prompt or max_new"
            )
        if len(row.stop_ids) > programs.MAX_STOPS:
            raise ValueError(
                f"row {row.id}: {len(row.stop_ids)} stop ids, at most {programs.MAX_STOPS}"
            )
        bad = [t for t in row.prompt if not 0 <= t < self.cfg.vocab_size]
        if bad:
            raise ValueError(
                f"row {row.id}: token {bad[0]} is outside the vocabulary [0, {self.cfg.vocab_size})"
            )

    def step(self) -> list[Completion]:
        """Admit queued rows, decode up to `chunk` tokens, return the rows that finished."""
        if self._params is None:
            raise RuntimeError("Engine.step: call start(params) first")
        self._admit()
        running = [i for i, row in enumerate(self._rows) if row is not None]
        if not running:
            return []
        reach = min(int(self._longest[running].max()) + self.chunk, self.buckets[-1])
        read_length = bucket_of(reach, self.buckets)
        self._about_to_run(("decode", read_length))
        self._slots = programs.decode(
            self._params, self._slots, steps=self.chunk, read_length=read_length, **self._static
        )
        self._longest[running] += self.chunk
        return self._harvest()

    def _about_to_run(self, shape: tuple[str, int]) -> None:
        if shape not in self.shapes:
            self.notice(f"compiling {shape[0]} for {shape[1]} tokens")
            self.shapes.add(shape)

    def generate(self, rows: Iterable[Row]) -> dict[str, Completion]:
        """All rows to their end, keyed by row id."""
        self.submit(rows)
        done = {}
        while self.busy:
            done.update((c.row.id, c) for c in self.step())
        return done

    def _admit(self) -> None:
        free = [i for i, row in enumerate(self._rows) if row is None]
        starting: dict[tuple[int, ...], list[tuple[int, Row]]] = {}
        for slot in free:
            if not self._queue:
                break
            row = self._queue.popleft()
            self._rows[slot] = row
            self._longest[slot] = len(row.prompt) + 1
            starting.setdefault(row.prompt, []).append((slot, row))
        by_bucket: dict[int, list[tuple[int, ...]]] = {}
        for prompt in starting:
            by_bucket.setdefault(bucket_of(len(prompt), self.buckets), []).append(prompt)
        for length in sorted(by_bucket):
            prompts = by_bucket[length]
            for first in range(0, len(prompts), self.prefill_rows):
                group = prompts[first : first + self.prefill_rows]
                self._start_group(length, group, [starting[p] for p in group])

    def _start_group(self, length, prompts, members) -> None:
        """Prefill each distinct prompt once and insert it into all the slots that want it."""
        self._about_to_run(("prefill", length))
        self._about_to_run(("insert", length))
        tokens_bp, lengths_b, source_s, facts = self._to_device(length, prompts, members)
        hidden_bd, prefix = programs.prefill(self._params, tokens_bp, lengths_b, **self._static)
        self._slots = programs.insert(
            self._params,
            self._slots,
            hidden_bd,
            prefix,
            lengths_b,
            source_s,
            facts,
            **self._static,
        )

    def _to_device(self, length, prompts, members):
        """The only host-to-device transfer of a rollout, once a prefill group."""
        slots = len(self._rows)
        tokens_bp = np.zeros((self.prefill_rows, length), np.int32)
        lengths_b = np.ones(self.prefill_rows, np.int32)
        source_s = np.full(slots, -1, np.int32)
        facts = programs.RowFacts(
            np.zeros((slots, 2), np.uint32),
            np.zeros(slots, np.float32),
            programs.Truncation(
                np.zeros(slots, np.int32), np.ones(slots, np.float32), np.zeros(slots, np.float32)
            ),
            np.full((slots, programs.MAX_STOPS), -1, np.int32),
            np.zeros(slots, np.int32),
        )
        for source, (prompt, rows) in enumerate(zip(prompts, members, strict=True)):
            tokens_bp[source, : len(prompt)] = prompt
            lengths_b[source] = len(prompt)
            for slot, row in rows:
                source_s[slot] = source
                facts.key_s2[slot] = row.key
                facts.temperature_s[slot] = row.temperature
                facts.cut.top_k_s[slot] = row.top_k
                facts.cut.top_p_s[slot] = row.top_p
                facts.cut.min_p_s[slot] = row.min_p
                facts.stop_sn[slot, : len(row.stop_ids)] = row.stop_ids
                facts.budget_s[slot] = row.max_new
        self.transfers += 1
        return put((tokens_bp, lengths_b, source_s, facts), self._everywhere)

    def _harvest(self) -> list[Completion]:
        """The only device-to-host transfers of a rollout: flags each step, tokens when needed."""
        live_s, count_s = jax.device_get((self._slots.live_s, self._slots.count_s))
        self.transfers += 1
        running = [(i, row) for i, row in enumerate(self._rows) if row is not None]
        self.live_steps += len(running)
        self.slot_steps += len(self._rows)
        ended = [(i, row) for i, row in running if not live_s[i]]
        if not ended:
            return []
        tokens_sc, logps_sc = jax.device_get((self._slots.tokens_sc, self._slots.logps_sc))
        self.transfers += 1
        done = []
        for i, row in ended:
            count = int(count_s[i])
            tokens = tokens_sc[i, :count].copy()
            finish = "stop" if tokens[-1] in row.stop_ids else "length"
            done.append(Completion(row, tokens, logps_sc[i, :count].copy(), finish))
            self._rows[i] = None
        return done
