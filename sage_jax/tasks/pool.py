"""The pool: seed tasks for ever, admitted tasks by age, and who may come in."""

import hashlib
import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sage_jax.tasks.task import DOMAINS, Task
from sage_jax.verify.verdict import Verdict

ADMITTED, DUPLICATE, CONTAMINATED, FULL = "admitted", "duplicate", "contaminated", "full"


class Pool:
    """Seeds and admitted tasks. All draws are functions of (seed, step, contents) alone.

    capacity: most tasks held, seeds included; the oldest admitted one makes room, never a seed.
    seed_share: least share of each domain's draw that comes from seeds.
    half_life: steps after which an admitted task is half as likely to be drawn as a new one.
    dedup_threshold: see `Questions`.
    valid: validation tasks, which nothing in the pool may resemble; seeds that do are left out and
    listed in `refused_seeds` as (seed id, validation id).
    Raises ValueError naming the field for a value out of range, no seeds, or equal ids.
    """

    def __init__(
        self,
        seeds: Iterable[Task],
        valid: Iterable[Task] = (),
        *,
        capacity: int = 20_000,
        seed_share: float = 0.5,
        half_life: float = 20.0,
        dedup_threshold: float = 0.8,
    ):
        if not 0 <= seed_share <= 1:
            raise ValueError(f"seed_share is {seed_share}: use a share from 0 to 1")
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}: use a number of steps above 0")
        self.settings: dict[str, Any] = {
            "capacity": capacity,
            "seed_share": seed_share,
            "half_life": half_life,
            "dedup_threshold": dedup_threshold,
        }
        self._valid = Questions(dedup_threshold)
        for task in valid:
            self._valid.add(task.id, task.question)
        self._known = Questions(dedup_threshold)
        self.seeds: dict[str, Task] = {}
        self.admitted: dict[str, Task] = {}  # oldest first
        self.counters: Counter[str] = Counter()
        self.refused_seeds: list[tuple[str, str]] = []
        for task in seeds:
            self._keep_seed(task)
        if not self.seeds:
            pair = (
                ""
                if not self.refused_seeds
                else ", as {!r} does {!r}".format(*self.refused_seeds[0])
            )
            raise ValueError(
                f"seeds: none left ({len(self.refused_seeds)} resemble validation items{pair}); "
                "give at least one seed task"
            )
        if capacity < len(self.seeds):
            raise ValueError(
                f"capacity is {capacity} for {len(self.seeds)} seeds, which are never dropped: "
                "raise capacity or give fewer seeds"
            )

    def _keep_seed(self, task: Task) -> None:
        if task.id in self.seeds:
            raise ValueError(f"seeds: id {task.id!r} comes twice; give every task its own id")
        twin = self._valid.find(task.question)
        if twin is not None:
            self.refused_seeds.append((task.id, twin))
            return
        self.seeds[task.id] = task
        self._known.add(task.id, task.question)

    def __len__(self) -> int:
        return len(self.seeds) + len(self.admitted)

    def get(self, task_id: str) -> Task | None:
        return self.seeds.get(task_id) or self.admitted.get(task_id)

    def draw(self, step: int, n: int, math_share: float, seed: int) -> list[Task]:
        """n different tasks to solve, maths first. Changes nothing: see `record`.

        Both domains come up whenever n >= 2, both are there, and 0 < math_share < 1; the other
        domain fills in where one is too small. Raises ValueError when the pool holds fewer than n.
        """
        if n > len(self):
            raise ValueError(
                f"draw of {n} tasks from a pool of {len(self)}: add seeds or draw less"
            )
        return self._pick("draw", step, n, math_share, seed)

    def references(self, step: int, n: int, math_share: float, seed: int) -> list[Task]:
        """One reference task for each of n Challenger prompts: as `draw`, but tasks
        come again where the pool holds fewer than n of a domain.
        """
        wanted = self._domain_counts(n, math_share, fill=False)
        chosen = []
        for domain in DOMAINS:
            once = min(wanted[domain], self._size(domain))
            picks = self._pick_domain("reference", step, domain, once, seed)
            chosen += [picks[i % once] for i in range(wanted[domain])]
        return chosen

    def draw_seeds(self, step: int, n: int, math_share: float, seed: int) -> list[Task]:
        """At most n different seeds whose question holds a number, maths first."""
        numbered = [task for task in self.seeds.values() if re.search(r"\d", task.question)]
        n_math = math.floor(n * math_share + 0.5)
        wanted = {"math": n_math, "code": n - n_math}
        drawn = []
        for domain in DOMAINS:
            tasks = [task for task in numbered if task.domain == domain]
            tasks.sort(key=lambda task: (-_gumbel(f"{seed}/{step}/audit/{task.id}"), task.id))
            drawn += tasks[: wanted[domain]]
        return drawn

    def twin(self, question: str) -> str | None:
        """The id of a task held now which the question nearly repeats, or None."""
        return self._known.find(question)

    def _pick(self, use: str, step: int, n: int, math_share: float, seed: int) -> list[Task]:
        wanted = self._domain_counts(n, math_share, fill=True)
        return [
            task
            for domain in DOMAINS
            for task in self._pick_domain(use, step, domain, wanted[domain], seed)
        ]

    def _pick_domain(self, use: str, step: int, domain: str, n: int, seed: int) -> list[Task]:
        """The n tasks of highest log weight + Gumbel noise: a weighted draw without replacement
        in which a task's noise depends on nothing but (seed, step, use, id).
        """

        def rank(tasks: Iterable[Task], weighted: bool) -> list[Task]:
            scored = []
            for task in tasks:
                if task.domain == domain:
                    age = max(0, step - task.stats.born_step) if weighted else 0
                    log_weight = -math.log(2) * age / self.settings["half_life"]
                    noise = _gumbel(f"{seed}/{step}/{use}/{task.id}")
                    scored.append((-(log_weight + noise), task.id, task))
            return [task for _, _, task in sorted(scored, key=lambda item: item[:2])]

        seeds = rank(self.seeds.values(), weighted=False)
        admitted = rank(self.admitted.values(), weighted=True)
        n_seeds = min(len(seeds), math.ceil(n * self.settings["seed_share"] - 1e-9))
        n_seeds = max(n_seeds, n - len(admitted))
        return seeds[:n_seeds] + admitted[: n - n_seeds]

    def _size(self, domain: str) -> int:
        tasks = (*self.seeds.values(), *self.admitted.values())
        return sum(task.domain == domain for task in tasks)

    def _domain_counts(self, n: int, math_share: float, fill: bool) -> dict[str, int]:
        """Rows per domain by largest remainder, ties to maths."""
        if not 0 <= math_share <= 1:
            raise ValueError(f"math_share is {math_share}: use a share from 0 to 1")
        sizes = {domain: self._size(domain) for domain in DOMAINS}
        n_math = math.floor(n * math_share + 0.5)
        if n >= 2 and 0 < math_share < 1:
            n_math = min(max(n_math, 1), n - 1)
        if not sizes["math"]:
            n_math = 0
        elif not sizes["code"]:
            n_math = n
        elif fill:
            n_math = min(max(n_math, n - sizes["code"]), sizes["math"])
        return {"math": n_math, "code": n - n_math}

    def admit(self, task: Task) -> str:
        """Takes a task whose key has proved usable; returns what became of it.

        "contaminated" (resembles a validation item), "duplicate" (of a task held now), "full"
        (seeds fill the pool) or "admitted". Raises ValueError when its id is in use.
        """
        if self.get(task.id) is not None:
            raise ValueError(f"task id {task.id!r} is already in the pool: derive it from the row")
        outcome = self.outcome(task)
        self.counters[outcome] += 1
        if outcome == ADMITTED:
            if len(self) == self.settings["capacity"]:
                self._evict_oldest()
            self.admitted[task.id] = task
            self._known.add(task.id, task.question)
        return outcome

    def outcome(self, task: Task) -> str:
        """What `admit` would say to a task; changes nothing."""
        if self._valid.find(task.question) is not None:
            return CONTAMINATED
        if self.twin(task.question) is not None:
            return DUPLICATE
        return FULL if self.settings["capacity"] == len(self.seeds) else ADMITTED

    def _evict_oldest(self) -> None:
        oldest = next(iter(self.admitted))
        del self.admitted[oldest]
        self._known.remove(oldest)
        self.counters["evicted"] += 1

    def record(self, task_id: str, verdicts: Iterable[Verdict], *, drawn: bool = False) -> None:
        """Adds judged attempts, and with `drawn` one draw, to a task's statistics; masked verdicts
        count for nothing.

        Called once a step is finished, so that an abandoned one leaves no trace. A task that was
        evicted meanwhile is passed over.
        """
        task = self.get(task_id)
        if task is not None:
            judged = [verdict for verdict in verdicts if not verdict.masked]
            task.stats.drawn += drawn
            task.stats.attempts += len(judged)
            task.stats.correct += sum(verdict.verdict == "correct" for verdict in judged)

    def metrics(self, step: int) -> dict[str, float]:
        """Size, size by domain, evictions so far, and mean age of admitted tasks in steps."""
        row: dict[str, float] = {"pool/size": len(self), "pool/evicted": self.counters["evicted"]}
        row |= {f"pool/size_{domain}": self._size(domain) for domain in DOMAINS}
        if self.admitted:
            ages = [step - task.stats.born_step for task in self.admitted.values()]
            row["pool/age"] = sum(ages) / len(ages)
        return row

    def to_json(self) -> dict[str, Any]:
        """Settings, tasks, statistics and counters as plain JSON; validation tasks stay out."""
        return {
            "settings": dict(self.settings),
            "seeds": [task.to_json() for task in self.seeds.values()],
            "admitted": [task.to_json() for task in self.admitted.values()],
            "counters": dict(self.counters),
            "refused_seeds": [list(pair) for pair in self.refused_seeds],
        }

    @classmethod
    def from_json(
        cls,
        state: dict[str, Any],
        valid: Iterable[Task] = (),
        seeds: Iterable[Task] | None = None,
        **changed: Any,
    ) -> "Pool":
        """The pool that `to_json` wrote: the same draws and admissions follow.

        `changed` replaces settings, `seeds` the seeds: those known before keep their statistics.
        Tasks that resemble an item of a changed `valid` are left out.
        """
        settings = {**state["settings"], **changed}
        known = [Task.from_json(row) for row in state["seeds"]]
        pool = cls(known if seeds is None else seeds, valid, **settings)
        if seeds is None:
            earlier = [(seed, twin) for seed, twin in state["refused_seeds"]]
            pool.refused_seeds = earlier + pool.refused_seeds
        for task in known:
            if task.id in pool.seeds:
                pool.seeds[task.id].stats = task.stats
        pool.counters = Counter(state["counters"])
        for task in map(Task.from_json, state["admitted"]):
            if pool._valid.find(task.question) is None:
                pool.admitted[task.id] = task
                pool._known.add(task.id, task.question)
        while len(pool) > pool.settings["capacity"]:
            pool._evict_oldest()
        return pool


class Questions:
    """Finds near-duplicates: the same normalised text, or the same numbers and word-3-gram Jaccard
    similarity of at least `threshold`. Questions that differ in a number are never duplicates.

    Only questions with the same numbers are compared, through an index on those.
    """

    def __init__(self, threshold: float):
        if not 0 < threshold <= 1:
            raise ValueError(f"dedup_threshold is {threshold}: use a similarity in (0, 1]")
        self._threshold = threshold
        self._numbers: dict[str, tuple[str, ...]] = {}
        self._by_numbers: dict[tuple[str, ...], dict[str, frozenset[int]]] = {}

    def add(self, id: str, question: str) -> None:
        numbers, grams = _fingerprint(question)
        self._numbers[id] = numbers
        self._by_numbers.setdefault(numbers, {})[id] = grams

    def remove(self, id: str) -> None:
        numbers = self._numbers.pop(id)
        del self._by_numbers[numbers][id]
        if not self._by_numbers[numbers]:
            del self._by_numbers[numbers]

    def find(self, question: str) -> str | None:
        """The id of the first question added that this one nearly repeats, or None."""
        numbers, grams = _fingerprint(question)
        size, threshold = len(grams), self._threshold
        for id, others in self._by_numbers.get(numbers, {}).items():
            smaller, larger = sorted((size, len(others)))
            if smaller < threshold * larger - 1e-9:
                continue  # sets of such unequal size cannot be similar enough
            shared = len(grams & others)
            if shared >= threshold * (size + len(others) - shared) - 1e-9:
                return id
        return None


_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()
_TENS = "thirty forty fifty sixty seventy eighty ninety".split()
_WORD_NUMBERS = {word: str(i) for i, word in enumerate(_UNITS)} | {
    word: str(10 * i) for i, word in enumerate(_TENS, 3)
}
# Numbers (with a sign where the minus is no operator), words, and symbols that carry meaning.
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_TOKEN = re.compile(
    rf"(?P<number>(?<![\w)\]}}])-{_UNSIGNED}|{_UNSIGNED})|[^\W\d_]+|[^\w\s.,;:!?'\"$]"
)


def _fingerprint(question: str) -> tuple[tuple[str, ...], frozenset[int]]:
    """The sorted numbers of a question and the hashed 3-grams of its normalised tokens.

    Case, spacing, punctuation and number words do not matter; operators do.
    """
    tokens, numbers = [], []
    for match in _TOKEN.finditer(unicodedata.normalize("NFKC", question).casefold()):
        token = _WORD_NUMBERS.get(match[0], match[0])
        if match["number"] or match[0] in _WORD_NUMBERS:
            token = token.replace(",", "")
            if "." in token:
                token = token.rstrip("0").rstrip(".")
            numbers.append(token)
        tokens.append(token)
    grams: Sequence[Sequence[str]] = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    # crc32 rather than hash(): the same on every run.
    hashed = frozenset(zlib.crc32(" ".join(gram).encode()) for gram in grams or [tokens])
    return tuple(sorted(numbers)), hashed


def _gumbel(name: str) -> float:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    # 52 bits: with more, the sum below could round to 1.
    uniform = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))
