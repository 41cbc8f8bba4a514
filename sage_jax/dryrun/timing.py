"""How long a step takes at least: each program at the peak rates of the chip, and nothing between.

    seconds of a call = max(FLOPs / peak, HBM bytes / HBM rate) + collective bytes / link rate

A bound, not a forecast: real programs reach a part of the peak, and verifiers are waited for.
"""

import math
from dataclasses import dataclass

import numpy as np

from sage_jax.config import ROLES
from sage_jax.core.chips import Chip
from sage_jax.dryrun.measure import Measured
from sage_jax.dryrun.programs import StepPrograms, bytes_per_chip
from sage_jax.learn.pack import TrainRow, pack
from sage_jax.models import costs
from sage_jax.rollout.engine import bucket_of


@dataclass(frozen=True)
class Load:
    """How long prompts and responses are, as a share of their limits."""

    name: str
    share: float


FULL = Load("every prompt and response at its limit", 1.0)
QUARTER = Load("prompts and responses at a quarter of their limits", 0.25)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by program, sampled tokens, and hours of the whole recipe."""

    load: str
    seconds: dict[str, float]
    new_tokens: int
    hours: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Timing:
    """The step of `step.config` on `devices` chips, from what was measured of its programs."""

    def __init__(
        self,
        step: StepPrograms,
        rows: dict[str, int],
        chip: Chip,
        devices: int,
        measured: dict[str, Measured],
    ):
        self.step, self.rows, self.chip, self.devices = step, rows, chip, devices
        self.measured, self.config, self.cfg = measured, step.config, step.cfg

    def of(self, load: Load) -> StepTime:
        """The step under a load. ValueError unless the chip's rates are known."""
        if not self.chip.timed:
            raise ValueError(f"the rates of {self.chip.name} are not known")
        r, m = self.config.rollout, self.config.method
        new = {role: max(1, int(r.max_new[role] * load.share)) for role in ROLES}
        prompt = max(1, int(self.config.tokens.max_prompt * load.share))
        total = sum(self.rows[role] * new[role] for role in ROLES)
        # Rows that share a prompt are prefilled once.
        shared = m.candidates * (m.attempts - 1) + m.drawn * (m.solutions - 1)
        prompts = max(sum(self.rows.values()) - shared, 1)
        calls = math.ceil(prompts / r.prefill_rows)
        chain = max(
            new["challenger"] + max(new["solver"], new["critic"]),
            new["planner"] + new["critic"] + new["solver"],
        )
        steps = max(math.ceil(total / r.slots), chain)
        read = bucket_of(min(prompt + max(new.values()) + r.chunk, r.buckets[-1]), r.buckets)
        passes = self.passes([prompt + new[role] for role in ROLES for _ in range(self.rows[role])])
        updates = self.config.optim.epochs
        scored = updates * self.config.optim.minibatches > 1
        seconds = {
            "cast": self.cast(),
            "prefill": calls * self.prefill(bucket_of(prompt, r.buckets)),
            "insert": calls * self._links("insert"),
            "decode": steps * self.decode(read),
            "score": sum(self.score(length) for length in passes) * scored,
            "update": updates * sum(self.update(length) for length in passes),
            "apply": updates * self.config.optim.minibatches * self.apply(),
        }
        hours = sum(seconds.values()) * self.config.train.steps / 3600
        return StepTime(load.name, seconds, total, hours)

    def passes(self, lengths: list[int]) -> list[int]:
        """The bucket of each forward-backward pass over rows of these lengths, as `pack` does."""
        o = self.config.optim
        rows = [
            TrainRow(str(i), ROLES[0], [0], np.zeros(n - 1, int), np.zeros(n - 1), 0.0)
            for i, n in enumerate(lengths)
        ]
        packed = pack(rows, ROLES, o.buckets, o.micro_rows)
        return [micro.tokens_bt.shape[1] for micro in packed.micros]

    def _links(self, name: str) -> float:
        return self.measured[name].collective_bytes / self.chip.link_rate

    def _call(self, name: str, flops: float, hbm: float) -> float:
        """Seconds of one call from FLOPs on all devices and HBM bytes on one."""
        work = max(flops / self.devices / self.chip.flops, hbm / self.chip.hbm_rate)
        return work + self._links(name)

    def cast(self) -> float:
        """Trained weights read, the sampler's written."""
        moved = bytes_per_chip(self.step.state.params) + self.measured["cast"].temporaries
        return self._call("cast", 0.0, moved)

    def prefill(self, length: int) -> float:
        rows = self.config.rollout.prefill_rows
        flops = rows * costs.forward_flops(self.cfg, length, self.step.rank, head_tokens=0)
        written = rows * length * self._cache_bytes()
        return self._call("prefill", flops, bytes_per_chip(self.step.weights) + written)

    def _cache_bytes(self) -> float:
        """Of one token of one row, on one device."""
        slots = self.step.slots()
        tokens = self.config.rollout.slots * self.config.rollout.buckets[-1]
        return bytes_per_chip(slots.cache) / tokens

    def decode_bytes(self, read_length: int) -> float:
        """HBM bytes of one step on one device: weights, cache up to `read_length`, logits."""
        slots = self.config.rollout.slots
        cache = slots * read_length * self._cache_bytes()
        place = self.step.place.decode
        parts = 1 if place is None else place.mesh.size
        logits = 4 * slots * self.cfg.vocab_size / parts
        return bytes_per_chip(self.step.weights) + cache + logits

    def decode(self, read_length: int) -> float:
        slots = self.config.rollout.slots
        flops = slots * costs.decode_flops(self.cfg, read_length, self.step.rank)
        return self._call("decode", flops, self.decode_bytes(read_length))

    def _scaled(self, name: str, length: int) -> float:
        """FLOPs of a pass over rows of `length`, from those of the longest."""
        longest = self.config.optim.buckets[-1]
        share = costs.update_flops(self.cfg, length, self.step.rank)
        share /= costs.update_flops(self.cfg, longest, self.step.rank)
        return self.measured[name].flops * share

    def score(self, length: int) -> float:
        return self._call("score", self._scaled("score", length), 0.0)

    def update_bytes(self) -> float:
        """HBM bytes of a pass: gathered weights read three times, gradients read and written."""
        weights = costs.Weights.of(self.cfg, self.step.rank)
        width = self.step.dtype.itemsize
        layout = self.step.place.update
        kept = 1 if layout is None else layout.parts("mlp")
        read = 3 * width * (weights.layers + weights.adapter + weights.head) / kept
        return read + 2 * bytes_per_chip(self.step.state.params)

    def update(self, length: int) -> float:
        return self._call("update", self._scaled("update", length), self.update_bytes())

    def apply(self) -> float:
        """Weights, moments and gradient read, weights and moments written."""
        state = self.step.state
        moved = 3 * bytes_per_chip(state.params) + 2 * bytes_per_chip(state.opt_state)
        return self._call("apply", 0.0, moved)


def useful_share(step: StepPrograms, measured: Measured) -> float:
    """Useful FLOPs over all FLOPs of an update pass, recomputation included."""
    c = step.config.optim
    useful = c.micro_rows * costs.update_flops(step.cfg, c.buckets[-1], step.rank)
    return useful / measured.flops


def fsdp_minimum(step: StepPrograms) -> float:
    """Bytes that a device must receive in one pass: its missing weights in compute type once in the
    forward and once in the backward pass, and the gradient of what it trains, float32."""
    layout = step.place.update
    if layout is None:
        return 0.0
    whole = costs.Weights.of(step.cfg, step.rank)
    trained = whole.adapter if step.rank else whole.total
    weights = 2 * step.dtype.itemsize * (whole.total + whole.adapter) + 4 * trained
    return weights / layout.parts("mlp") * (1 - 1 / layout.parts("embed"))
