"""What waits for a slot: rows in their order, and prompts that were prefilled before their turn."""

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import jax

from sage_jax.rollout.row import Row

Prompt = tuple[int, ...]


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`."""
    return next(b for b in buckets if b >= length)


class Queue:
    """Rows by rank, the highest first; among equals first come, first served."""

    def __init__(self):
        # Sorted so that the next row stands last, where it is popped at no cost.
        self._rows: list[tuple[int, int, Row]] = []
        self._wanted: Counter[Prompt] = Counter()
        self._came = 0

    def __len__(self) -> int:
        return len(self._rows)

    def push(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._came += 1
            bisect.insort(self._rows, (row.rank, -self._came, row))
            self._wanted[row.prompt] += 1

    def pop(self) -> Row:
        row = self._rows.pop()[2]
        self._wanted[row.prompt] -= 1
        if not self._wanted[row.prompt]:
            del self._wanted[row.prompt]
        return row

    def wants(self, prompt: Prompt) -> bool:
        """Whether a row with this prompt is still to start."""
        return prompt in self._wanted

    def ahead(self, rows: int) -> Iterator[Prompt]:
        """Prompts of the next `rows` rows, in order."""
        return (row.prompt for _, _, row in islice(reversed(self._rows), rows))


@dataclass(frozen=True)
class Prefilled:
    """Prompts of one prefill call: their rows in it, last hidden states [b, d], cache prefix
    {k, v: [l, b, p, k, h]} and lengths [b]."""

    rows: dict[Prompt, int]
    hidden_bd: jax.Array
    prefix: dict[str, jax.Array]
    lengths_b: jax.Array


class PrefixCache:
    """Prefill calls some of whose prompts are still wanted, at most `most` of them.

    Siblings that find no slot together, and prompts that only filled up a call, start from here
    without another prefill. What is dropped for want of room is prefilled again.
    """

    def __init__(self, most: int):
        self._most = most
        self.calls: list[Prefilled] = []

    def __contains__(self, prompt: Prompt) -> bool:
        return any(prompt in call.rows for call in self.calls)

    def put(self, call: Prefilled) -> None:
        self.calls.append(call)

    def tidy(self, wanted: Callable[[Prompt], bool]) -> None:
        """Drop calls that nobody wants, and the oldest beyond the limit."""
        self.calls = [c for c in self.calls if any(map(wanted, c.rows))][-self._most :]

    def clear(self) -> None:
        self.calls.clear()


@dataclass(frozen=True)
class Call:
    """One prefill to make: `prompts`, each padded to `length`, in `rows` rows."""

    prompts: list[Prompt]
    rows: int
    length: int


def plan_calls(
    wanted: Iterable[Prompt],
    ahead: Iterable[Prompt],
    row_buckets: Sequence[int],
    buckets: Sequence[int],
) -> list[Call]:
    """Calls that prefill every prompt of `wanted`.

    Long ones first, each call in the length bucket of its first prompt. Rows of a call that are
    left over cost the same empty: shorter wanted prompts take them, then those of `ahead` that fit.
    """
    left = sorted(dict.fromkeys(wanted), key=len, reverse=True)
    spare = [prompt for prompt in dict.fromkeys(ahead) if prompt not in set(left)]
    calls = []
    while left:
        length = bucket_of(len(left[0]), buckets)
        alike = sum(bucket_of(len(prompt), buckets) == length for prompt in left)
        rows = next((r for r in row_buckets if r >= alike), row_buckets[-1])
        prompts, left = left[:rows], left[rows:]
        filling = [p for p in spare if len(p) <= length][: rows - len(prompts)]
        spare = [p for p in spare if p not in set(filling)]
        calls.append(Call(prompts + filling, rows, length))
    return calls
