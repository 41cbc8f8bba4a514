"""The engine in wave mode, the peer of the one decode stream: same programs, slots and rows."""

from collections.abc import Callable, Iterable

from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Completion, Row


class Waves:
    """Runs what was submitted before a wave began, shortest prompts first, a batch of slots at a
    time, each batch to the end of its longest row; rows submitted meanwhile are the next wave.

    Stands in for the engine in `graph.play`. Set `graph.PATIENCE` to 0 beside it: a wave begins
    when all verdicts on the one before are in.
    """

    def __init__(self, engine: Engine, slots: int):
        self.engine, self.slots = engine, slots
        self.wave: list[Row] = []
        self.next: list[Row] = []

    def start(self, params) -> None:
        self.engine.start(params)

    def release(self) -> None:
        self.engine.release()

    @property
    def busy(self) -> bool:
        return bool(self.engine.busy or self.wave or self.next)

    @property
    def hungry(self) -> bool:
        return not self.engine.busy and not self.wave

    def running(self) -> list[str]:
        return self.engine.running()

    def submit(self, rows: Iterable[Row]) -> None:
        self.next += rows

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Completion]:
        if not self.engine.busy:
            self.engine.submit(self.batch())
        return self.engine.step(meanwhile)

    def batch(self) -> list[Row]:
        """The next batch of slots of the wave, and of the next wave when this one is over."""
        if not self.wave:
            self.wave = sorted(self.next, key=lambda row: len(row.prompt))
            self.next = []
        batch, self.wave = self.wave[: self.slots], self.wave[self.slots :]
        return batch

    @property
    def live_steps(self) -> int:
        return self.engine.live_steps

    @live_steps.setter
    def live_steps(self, count: int) -> None:
        self.engine.live_steps = count

    @property
    def slot_steps(self) -> int:
        return self.engine.slot_steps

    @slot_steps.setter
    def slot_steps(self, count: int) -> None:
        self.engine.slot_steps = count
