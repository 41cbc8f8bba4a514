"""The rollout engine: rows of any role share the slots of one running batch.

`submit` queues rows, `step` admits, decodes a chunk and returns what has finished; freed slots are
refilled on the next `step`. All host decisions follow from the rows and the step count alone, so
that a resumed or repeated run takes the same ones, and so does every process of a run of several.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.core.mesh import Layout, put
from sage_jax.models import cache as kv
from sage_jax.models.qwen import QwenConfig
from sage_jax.rollout import decode as programs
from sage_jax.rollout.admission import (
    Call,
    Prefilled,
    PrefixCache,
    Prompt,
    Queue,
    bucket_of,
    plan_calls,
)
from sage_jax.rollout.row import Completion, Row

# Prefill calls kept for rows that wait, each [prefill_rows, bucket] of cache.
KEPT_CALLS = 4


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
      attend: one of attention.KINDS, for prompts and for new tokens.
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
        attend: str = "auto",
        notice: Callable[[str], None] = lambda words: None,
    ):
        self.notice = notice
        self.cfg, self.buckets, self.max_new, self.chunk = cfg, tuple(buckets), max_new, chunk
        # A call for a few late prompts need not pay for a full one.
        shares = 1 if layout is None else layout.parts("batch")
        few = shares * -(-prefill_rows // (4 * shares))
        self.prefill_rows = tuple(sorted({few, prefill_rows}))
        placed = {"dtype": dtype, "layout": layout}
        self._prefill_static = {"cfg": cfg, **placed, "attend": attend}
        self._choose = partial(kv.choose, attend, cfg, self.buckets[-1], dtype, layout)
        self._static = {"cfg": cfg, **placed}
        self._everywhere = None if layout is None else layout.sharding(())
        self._rows: list[Row | None] = [None] * slots
        self._count_s = np.zeros(slots, np.int64)  # tokens sampled
        self._queue = Queue()
        self._prefilled = PrefixCache(KEPT_CALLS)
        self._params: Any = None
        self._slots: Any = None  # made by `start`
        self._empty = partial(programs.empty_slots, cfg, slots, self.buckets[-1], max_new, **placed)
        self.shapes: set[tuple] = set()
        self.transfers = 0
        self.live_steps = self.slot_steps = 0

    def start(self, params) -> None:
        """Use these parameters, already in compute type and decode layout, from now on."""
        if self.busy:
            raise RuntimeError("Engine.start: rows are still running on the former parameters")
        self._prefilled.clear()
        self._params = params
        form = self._choose(apart=isinstance(params["layers"], tuple))
        if self._slots is None or form != self._static["form"]:
            self._static["form"] = form
            self._slots = self._empty(form=form)

    def release(self) -> None:
        """Give back the memory of slots and parameters, for something else, until `start`."""
        if self.busy:
            raise RuntimeError("Engine.release: rows are still running")
        self._prefilled.clear()
        self._params = self._slots = None

    @property
    def busy(self) -> bool:
        """True while a row is queued or running."""
        return bool(self._queue) or any(row is not None for row in self._rows)

    @property
    def hungry(self) -> bool:
        """True while a slot is free that no queued row is going to take."""
        return self._rows.count(None) > len(self._queue)

    def running(self) -> list[str]:
        """Rows in slots with the tokens they have so far, the longest first; for people."""
        rows = [(int(self._count_s[i]), row) for i, row in enumerate(self._rows) if row is not None]
        return [
            f"{row.id} ({count} of at most {row.max_new} tokens)"
            for count, row in sorted(rows, key=lambda pair: -pair[0])
        ]

    def submit(self, rows: Iterable[Row]) -> None:
        """Queue rows; they start by rank, then in this order, as slots become free. ValueError for
        unfit ones."""
        rows = list(rows)
        for row in rows:
            self._check(row)
        self._queue.push(rows)

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

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Completion]:
        """Admit queued rows, decode up to `chunk` tokens, return the rows that finished.

        `meanwhile` is called once while the device decodes; rows that it submits come next.
        """
        if self._params is None:
            raise RuntimeError("Engine.step: call start(params) first")
        self._admit()
        running = zip(self._rows, self._count_s.tolist(), strict=True)
        ends = [len(row.prompt) + count for row, count in running if row is not None]
        if not ends:
            meanwhile()
            return []
        reach = min(max(ends) + self.chunk, self.buckets[-1])
        read_length = bucket_of(reach, self.buckets)
        self._about_to_run("decode", read_length)
        self._slots = programs.decode(
            self._params, self._slots, steps=self.chunk, read_length=read_length, **self._static
        )
        meanwhile()
        return self._harvest()

    def _about_to_run(self, name: str, *shape: int) -> None:
        if (name, *shape) not in self.shapes:
            self.notice(f"compiling {name} for {' x '.join(map(str, shape))} tokens")
            self.shapes.add((name, *shape))

    def generate(self, rows: Iterable[Row]) -> dict[str, Completion]:
        """All rows to their end, keyed by row id."""
        self.submit(rows)
        done = {}
        while self.busy:
            done.update((c.row.id, c) for c in self.step())
        return done

    def _admit(self) -> None:
        starting: dict[Prompt, list[tuple[int, Row]]] = {}
        for slot in [i for i, row in enumerate(self._rows) if row is None]:
            if not self._queue:
                break
            row = self._queue.pop()
            self._rows[slot] = row
            starting.setdefault(row.prompt, []).append((slot, row))
        absent = [prompt for prompt in starting if prompt not in self._prefilled]
        ahead = [p for p in self._queue.ahead(len(self._rows)) if p not in self._prefilled]
        for call in plan_calls(absent, ahead, self.prefill_rows, self.buckets):
            self._prefilled.put(self._prefill(call))
        for source in self._prefilled.calls:
            if members := {p: starting[p] for p in source.rows if p in starting}:
                self._insert(source, members)
        self._prefilled.tidy(self._queue.wants)

    def _prefill(self, call: Call) -> Prefilled:
        self._about_to_run("prefill", call.rows, call.length)
        tokens_bp = np.zeros((call.rows, call.length), np.int32)
        lengths_b = np.ones(call.rows, np.int32)
        for b, prompt in enumerate(call.prompts):
            tokens_bp[b, : len(prompt)] = prompt
            lengths_b[b] = len(prompt)
        tokens_bp, lengths_b = self._to_device((tokens_bp, lengths_b))
        hidden_bd, prefix = programs.prefill(
            self._params, tokens_bp, lengths_b, **self._prefill_static
        )
        rows = {prompt: b for b, prompt in enumerate(call.prompts)}
        return Prefilled(rows, hidden_bd, prefix, lengths_b)

    def _insert(self, source: Prefilled, members: dict[Prompt, list[tuple[int, Row]]]) -> None:
        """Start rows in their slots, all that share a prompt from the same prefill."""
        rows, length = source.prefix["k"].shape[1:3]
        self._about_to_run("insert", rows, length)
        started = [(slot, row) for some in members.values() for slot, row in some]
        most = self.prefill_rows[-1]
        for first in range(0, len(started), most):
            self._slots = programs.insert(
                self._params,
                self._slots,
                source.hidden_bd,
                source.prefix,
                source.lengths_b,
                self._to_device(self._starts(source, started[first : first + most])),
                **self._static,
            )

    def _starts(self, source: Prefilled, started: list[tuple[int, Row]]) -> np.ndarray:
        """What `insert` is told of these rows, int32 [prefill_rows, words]."""
        starts_r = np.zeros(self.prefill_rows[-1], programs.START)
        starts_r["slot"] = len(self._rows)
        for r, (slot, row) in enumerate(started):
            stops = (*row.stop_ids, *[-1] * (programs.MAX_STOPS - len(row.stop_ids)))
            cut = row.top_k, row.top_p, row.min_p
            facts = row.key, row.temperature, *cut, stops, row.max_new
            starts_r[r] = (slot, source.rows[row.prompt], *facts)
            self._count_s[slot] = 1
        return starts_r.view(np.int32).reshape(len(starts_r), -1)

    def _to_device(self, arrays):
        """The only host-to-device transfers of a rollout: one a prefill and one an insert."""
        self.transfers += 1
        return put(arrays, self._everywhere)

    def _harvest(self) -> list[Completion]:
        """The only device-to-host transfers of a rollout: flags each step, tokens when needed."""
        live_s, count_s = jax.device_get((self._slots.live_s, self._slots.count_s))
        self.transfers += 1
        running = [(i, row) for i, row in enumerate(self._rows) if row is not None]
        decoded_s = count_s - self._count_s
        self._count_s[:] = count_s
        self.live_steps += sum(int(decoded_s[i]) for i, _ in running)
        self.slot_steps += len(self._rows) * max(int(decoded_s[i]) for i, _ in running)
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
