"""Speed of the rollout engine against its peers, each a ratio of medians within one run.

    python benchmarks/bench_rollout.py [uniform] [roles] [demo] [--model FOLDER] [--repeats 3]

uniform  16 chats of about 63 tokens, 64 new tokens each, greedy, float32, on the weights of
         --model; against google-tunix's sampler and transformers' generate
roles    8 questions, all four roles, 5 attempts a question, skewed response lengths (median 60, at
         most 400), a random model; against the same engine in wave mode, and tunix once a wave
demo     steps of configs/tiny.py; against the same steps in wave mode, and the share of a step in
         which the device waits for verifiers

Needs `pip install google-tunix torch` beside the project; a peer that is absent is left out.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rollout_peers import transformers_sampler, tunix_sampler
from waves import Waves

from sage_jax import config as schema
from sage_jax.core.tokens import Tokens
from sage_jax.methods import graph
from sage_jax.methods.graph import Episode, Node, Player, play
from sage_jax.models import hf, qwen, qwen_params
from sage_jax.models.stack import apart
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row
from sage_jax.run import start
from sage_jax.runtime import enable_compilation_cache
from sage_jax.tasks import sources
from sage_jax.train import one_step

PEERS = {"tunix": "google-tunix", "torch": "transformers"}


def alternate(contenders: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each contender, a warm-up and then turn by turn."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, work in contenders.items():
            started = time.perf_counter()
            tokens = work()
            if turn:
                rates[name].append(tokens / (time.perf_counter() - started))
    return rates


def show(title: str, rates: dict[str, list[float]], unit: str = "tokens/s") -> None:
    """Medians, ranges, and how many times faster the first is than each of the others."""
    print(
        f"\n{title}\n\n| | {unit}, median (range) | first is times as fast |\n| --- | --- | --- |"
    )
    first = statistics.median(next(iter(rates.values())))
    for name, values in rates.items():
        median, spread = statistics.median(values), f"{min(values):.4g}-{max(values):.4g}"
        print(f"| {name} | {median:.4g} ({spread}) | {first / median:.2f} |")


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --- uniform ------------------------------------------------------------------------------------

CHATS, PROMPT, NEW = 16, 63, 64


def uniform(folder: Path, repeats: int) -> None:
    tokens = Tokens.load(folder)
    tasks = sources.load(("asset:seeds/train.jsonl",))
    chats = [tokens.chat([{"role": "user", "content": task.question}]) for task in tasks]
    prompts = sorted(chats, key=lambda ids: abs(len(ids) - PROMPT))[:CHATS]
    params, cfg = hf.load(folder)
    engine = Engine(cfg, slots=CHATS, buckets=(64, 128), max_new=NEW, prefill_rows=CHATS)
    engine.start(apart(params))  # as a run on a CPU does
    del params
    answers: dict[str, list] = {}

    def ours() -> int:
        rows = [Row(str(i), tuple(p), (0, i), NEW, (), 0.0) for i, p in enumerate(prompts)]
        done = engine.generate(rows)
        answers["sage_jax"] = [done[row.id].tokens.tolist() for row in rows]
        return CHATS * NEW

    def peer(name, sample):
        def work() -> int:
            answers[name] = sample(prompts, NEW)
            return CHATS * NEW

        return work

    contenders = {"sage_jax": ours}
    if installed("tunix"):
        contenders["tunix"] = peer("tunix", tunix_sampler(folder, 128))
    if installed("torch"):
        contenders["transformers"] = peer("transformers", transformers_sampler(folder))
    rates = alternate(contenders, repeats)
    lengths = sorted(map(len, prompts))
    show(f"uniform: prompts of {lengths[0]}-{lengths[-1]} tokens, {folder.name}", rates)
    for name in contenders:
        same = sum(a == b for a, b in zip(answers[name], answers["sage_jax"], strict=True))
        print(f"answers of {name} equal to ours: {same} of {CHATS}")


# --- roles --------------------------------------------------------------------------------------

QUESTIONS, ATTEMPTS, SLOTS, MEDIAN, MOST = 8, 5, 16, 60, 400
RANDOM_MODEL = qwen.QwenConfig(
    model_type="qwen2",
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_embeddings=True,
    attention_bias=True,
    qk_norm=False,
    max_position=2048,
)


def response_length(row_id: str) -> int:
    """Lognormal about MEDIAN, at most MOST; a fact of the row."""
    rng = np.random.default_rng(list(row_id.encode()))
    return int(np.clip(rng.lognormal(np.log(MEDIAN), 0.8), 4, MOST))


class Lengths(Player):
    """Random prompts of 40 to 100 tokens, one a question and kind; responses of scripted lengths
    that no scheduler is told: each is its row's budget, and budgets are not looked at."""

    def encode(self, messages):
        rng = np.random.default_rng(list(messages[-1]["content"].encode()))
        return tuple(rng.integers(0, 4000, rng.integers(40, 101)).tolist())

    def row(self, sample, episode_id, index, rank):
        return Row(
            sample.id, sample.prompt, (0, index), response_length(sample.id), (), 0.0, rank=rank
        )

    def read(self, sample):
        sample.text = ""


def sage_like() -> list[Episode]:
    """For each question what SAGE asks of the four roles, none of it failing."""

    def node(kind, role, parents=(), fan_out=1):
        def ask(episode):
            return [{"role": "user", "content": f"{episode.id} {kind}"}]

        return Node(kind, role, ask, parents=parents, fan_out=fan_out)

    challenge = (
        node("challenge", "challenger"),
        node("judge_question", "critic", ("challenge",)),
        node("attempt", "solver", ("challenge",), ATTEMPTS),
    )
    solve = (
        node("plan", "planner"),
        node("judge_plan", "critic", ("plan",)),
        node("solve", "solver", ("plan", "judge_plan"), ATTEMPTS),
    )
    (task, *_) = sources.load(("asset:tiny/train.jsonl",))
    return [
        Episode(f"{name}{i}", task, nodes)
        for i in range(QUESTIONS)
        for name, nodes in (("new", challenge), ("task", solve))
    ]


class LiveShare:
    """Share of live slots over the steps before the queue was empty for the last time."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.reset()

    def reset(self) -> None:
        self.engine.live_steps = self.engine.slot_steps = 0
        self.while_queued = (0, 1)

    def look(self, *_) -> None:
        if len(self.engine._queue):
            self.while_queued = (self.engine.live_steps, self.engine.slot_steps)

    @property
    def share(self) -> float:
        return self.while_queued[0] / max(self.while_queued[1], 1)


def roles(repeats: int) -> None:
    config = schema.validate(schema.base())
    params = qwen_params.init(RANDOM_MODEL, jax.random.key(0))
    stream = Engine(
        RANDOM_MODEL,
        slots=SLOTS,
        buckets=(64, 128, 192, 256, 384, 512),
        max_new=MOST,
        chunk=4,
        prefill_rows=8,
    )
    stream.start(apart(params))
    waves, live = Waves(stream, SLOTS), LiveShare(stream)

    def run(engine) -> int:
        episodes = sage_like()
        live.reset()
        play(engine, None, episodes, Lengths(config, None, 0, 0.0), stage=live.look)
        rows = [s for e in episodes for samples in e.samples.values() for s in samples]
        return sum(len(s.completion.tokens) for s in rows)

    shares = []

    def run_stream() -> int:
        tokens = run(stream)
        shares.append(live.share)
        return tokens

    contenders = {"stream": run_stream, "waves": lambda: run(waves)}
    if installed("tunix"):
        contenders["tunix, once a batch of a wave"] = tunix_in_waves(params, config)
    rates = alternate(contenders, repeats)
    show(f"roles: {QUESTIONS} questions, {SLOTS} slots", rates)
    print(f"live slots until the queue is empty: {statistics.median(shares):.3f}")


class TunixEngine:
    """tunix's sampler in the place of an engine's slots: a batch runs to its longest response. It
    is told that length; nothing else could stop its rows at scripted ones."""

    def __init__(self, sample):
        self.sample, self.rows = sample, []

    @property
    def busy(self):
        return bool(self.rows)

    def submit(self, rows):
        self.rows = list(rows)

    def step(self, meanwhile):
        meanwhile()
        rows, self.rows = self.rows, []
        prompts = [row.prompt for row in rows]
        # Always as many rows: other shapes would be compiled anew.
        prompts += prompts[:1] * (SLOTS - len(prompts))
        answers = self.sample(prompts, max(row.max_new for row in rows))
        return [
            graph.Completion(row, np.array(ids[: row.max_new]), np.zeros(row.max_new), "length")
            for row, ids in zip(rows, answers, strict=False)
        ]


def tunix_in_waves(params, config) -> Callable[[], int]:
    folder = Path(tempfile.mkdtemp())
    hf.export(params, RANDOM_MODEL, folder)
    waves = Waves(TunixEngine(tunix_sampler(folder, 128 + MOST)), SLOTS)

    def run() -> int:
        episodes = sage_like()
        play(waves, None, episodes, Lengths(config, None, 0, 0.0))
        rows = [s for e in episodes for samples in e.samples.values() for s in samples]
        return sum(len(s.completion.tokens) for s in rows)

    return run


# --- demo ---------------------------------------------------------------------------------------


def demo(steps: int) -> None:
    """Training steps of the demo, in turn as one stream and in waves, each run with its own
    weights and pool."""
    spec = importlib.util.spec_from_file_location("tiny", "configs/tiny.py")
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    c = tiny.get_config()
    c.train.steps, c.valid.every, c.valid.limit, c.checkpoint.every = 10_000, 0, 1, 0
    c.valid.effects, c.report.quiet = 0, True
    config, patience = schema.validate(c), graph.PATIENCE
    seconds: dict[str, list[float]] = {"stream": [], "waves": []}
    waits = []
    with (
        tempfile.TemporaryDirectory() as folder,
        start(config, Path(folder) / "stream", lambda: False) as stream,
        start(config, Path(folder) / "waves", lambda: False) as waves,
    ):
        waves.engine = Waves(waves.engine, config.rollout.slots)
        for turn in range(steps + 3):
            for name, run in (("stream", stream), ("waves", waves)):
                graph.PATIENCE = 0 if name == "waves" else patience
                one_step(run)
                if turn >= 3:
                    seconds[name].append(run.seconds["total"])
                if turn >= 3 and name == "stream":
                    waits.append(run.seconds["verify"] / run.seconds["total"])
    rates = {name: [1 / s for s in values] for name, values in seconds.items()}
    show(f"demo: {steps} steps of configs/tiny.py", rates, "steps/s")
    quarters = statistics.quantiles(waits, n=4)
    print(
        f"share of a step in which the device waits for verifiers: median {quarters[1]:.3f}, "
        f"quartiles {quarters[0]:.3f} and {quarters[2]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", default=["uniform", "roles", "demo"])
    parser.add_argument("--model", type=Path, help="Qwen2 folder for `uniform`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of `demo`")
    args = parser.parse_args()
    enable_compilation_cache()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, JAX {jax.__version__}")
    if "uniform" in args.what:
        if args.model is None:
            parser.error("uniform needs --model FOLDER, a Qwen2 or Qwen2.5 checkpoint")
        uniform(args.model, args.repeats)
    if "roles" in args.what:
        roles(args.repeats)
    if "demo" in args.what:
        demo(args.steps)


if __name__ == "__main__":
    main()
