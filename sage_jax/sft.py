"""Supervised fine-tuning on responses: how the tiny model is made, and a warm start for others.

The loss is the mean negative log-probability of response tokens, the end of turn included, over
the whole batch. Rows come from scripted demonstrations of the tiny world or from a JSONL file.
"""

import codecs
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sage_jax.core.checkpoint import CheckpointError, Checkpoints
from sage_jax.core.masked import masked_sum
from sage_jax.core.tokens import Tokens, resolve
from sage_jax.learn.objective import completion_mask
from sage_jax.learn.pack import MicroBatch, TrainRow, pack
from sage_jax.learn.score import token_logps
from sage_jax.models import hf, qwen_params
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.report import jsonl
from sage_jax.report.progress import duration, logger
from sage_jax.roles import PromptSet, load_prompts
from sage_jax.spelling import hint
from sage_jax.tasks.task import PublicTask
from sage_jax.tasks.tiny_demos import Demo, demonstrations

TINY_WORLD = "tiny_world"
# Fields of the config behind settings that are not of its sft part.
FIELDS = {
    "model_path": "model.path",
    "dtype": "model.dtype",
    "remat": "model.remat",
    "attention": "model.attention",
    "micro_rows": "optim.micro_rows",
    "weight_decay": "optim.weight_decay",
    "clip_norm": "optim.clip_norm",
    "seed": "seed",
    "prompts": "method.prompts",
}
UNTOLD = ("checkpoint_every", "log_every")  # what no weight depends on
PRINTED_PROBLEMS = 20


@dataclass(frozen=True)
class SftSettings:
    """One supervised run. `length`: longest row in tokens, prompt included; longer rows are left
    out. `practice`: share of the run in which the tiny world shows mostly good habits; after it
    the learning rate falls. `from_scratch`: random weights in place of those of `model_path`."""

    model_path: str
    data: str = TINY_WORLD
    steps: int = 3000
    batch: int = 128
    micro_rows: int = 16
    length: int = 128
    lr: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 0
    practice: float = 0.0
    prompts: str = "short"
    from_scratch: bool = False
    dtype: str = "float32"
    remat: str = "full"  # less memory traffic, so on a CPU it is the faster choice as well
    attention: str = "auto"
    checkpoint_every: int = 500
    log_every: int = 50


class Example(NamedTuple):
    """A rendered prompt and the response to it, in token ids; the response ends its turn."""

    prompt: list[int]
    response: list[int]


class State(NamedTuple):
    params: Any
    opt_state: Any


def sft(
    settings: SftSettings,
    workdir: Path,
    should_stop: Callable[[], bool] = lambda: False,
    begins: Callable[[], None] = lambda: None,
) -> Path | None:
    """Trains for `steps` updates and exports a Hugging Face folder `workdir/model`; returns it.

    Continues from the last checkpoint in `workdir`, and says so, as it does of settings that have
    changed since. When `should_stop` says so it saves and returns None. `begins` is called when
    nothing of the input can be refused any more.
    """
    # The cheap checks first: a bad line should not cost the loading of a model.
    cfg = hf.read_config(resolve(settings.model_path))
    tokens = Tokens.load(settings.model_path)
    tokens.check_vocabulary(cfg.vocab_size)
    examples = stream(settings, tokens)
    params, cfg = _start(settings)
    tx = make_optimizer(settings)
    state = State(params, tx.init(params))
    accumulate, finish = make_programs(settings, cfg, tx)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    done = checkpoints.latest or 0
    if done:
        try:
            state = State(*checkpoints.restore(done, {"state": state})["state"])
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}, or of another model than {settings.model_path}; choose another --workdir"
            ) from error
    begins()
    _announce(settings, cfg, workdir, done, checkpoints.host(done) if done else {})
    examples = islice(examples, done * settings.batch, None)
    started, counted = time.monotonic(), 0
    for step in range(done + 1, settings.steps + 1):
        micros, count = _batch(list(islice(examples, settings.batch)), settings)
        acc = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        for micro in micros:
            acc = accumulate(state.params, acc, micro, count)
        state, loss, norm = finish(state, acc)
        counted += count
        last = step == settings.steps
        if step % settings.log_every == 0 or step in (done + 1, settings.steps):
            seconds = time.monotonic() - started
            logger.info(
                "sft step %d/%d  loss %.4f  grad_norm %.3f  response tokens/s %.0f  ETA %s",
                *(step, settings.steps, loss, norm, counted / seconds),
                duration(seconds / (step - done) * (settings.steps - step)),
            )
        stopping = should_stop()
        if step % settings.checkpoint_every == 0 or last or stopping:
            checkpoints.save(step, {"state": state}, asdict(settings), None)
        if stopping and not last:
            checkpoints.close()
            logger.warning(f"saved step {step} in {workdir}; the same command continues")
            return None
    checkpoints.close()
    return _export(state.params, cfg, workdir / "model", settings.model_path)


def _announce(
    settings: SftSettings, cfg: QwenConfig, workdir: Path, done: int, before: dict[str, Any]
) -> None:
    """What is about to be done, and what is not as it was `before`, when `done` was saved."""
    weights = "random weights" if settings.from_scratch else settings.model_path
    logger.info(
        f"sft of {weights} ({cfg.model_type}) on {settings.data}: {settings.batch} rows an update, "
        f"a checkpoint every {settings.checkpoint_every}; the model will be {workdir / 'model'}"
    )
    if done:
        logger.info(f"resumed at step {done} of {settings.steps} in {workdir}")
    for name, value in asdict(settings).items():
        if name in before and name not in UNTOLD and before[name] != value:
            field = FIELDS.get(name, f"sft.{name}")
            logger.info(f"continues with another {field}: {value!r}, not {before[name]!r}")


def _start(settings: SftSettings) -> tuple[Any, QwenConfig]:
    if not settings.from_scratch:
        return hf.load(settings.model_path)
    cfg = hf.read_config(resolve(settings.model_path))
    return qwen_params.init(cfg, jax.random.key(settings.seed)), cfg


def _export(params: Any, cfg: QwenConfig, out: Path, source: str) -> Path:
    for old in out.glob("*.safetensors*"):
        old.unlink()  # of an earlier, shorter run in the same place
    return hf.export(params, cfg, out, source)


# ---- data --------------------------------------------------------------------------------------


def stream(settings: SftSettings, tokens: Tokens) -> Iterator[Example]:
    """Endless examples of at most `length` tokens, a pure function of data and seed.

    ValueError when a file holds a bad line (all of them listed) or no row that fits.
    """
    if settings.data == TINY_WORLD:
        prompts, end = load_prompts(settings.prompts), end_of_turn(tokens)
        examples = (
            encode(demo_messages(demo, prompts), demo.response, tokens, end)
            for demo in demonstrations(settings.seed, _practice_steps(settings) * settings.batch)
        )
    else:
        examples = _shuffled(_read(Path(settings.data), settings, tokens), Random(settings.seed))
    return (e for e in examples if len(e.prompt) + len(e.response) <= settings.length)


def demo_messages(demo: Demo, prompts: PromptSet) -> list[dict[str, str]]:
    """Chat messages of a demonstration, from the prompt set that training uses."""
    kind = demo.role
    if demo.role == "critic":
        kind = "critic_plan" if demo.plan else "critic_question"
    entry_point = "f" if demo.domain == "code" else ""
    task = PublicTask("demo", demo.domain, demo.question, entry_point)
    return prompts.messages(kind, task, plan=demo.plan or "")


def encode(messages: list[dict[str, str]], response: str, tokens: Tokens, end: int) -> Example:
    return Example(tokens.chat(messages), [*tokens.encode(response), end])


def end_of_turn(tokens: Tokens) -> int:
    """The stop id that the chat template puts behind an assistant's message."""
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    stops = [token for token in tokens.chat(turn) if token in tokens.stop_ids]
    return stops[-1] if stops else tokens.stop_ids[0]


def _read(path: Path, settings: SftSettings, tokens: Tokens) -> list[Example]:
    """Rows of a JSONL file of `messages` (chat, up to the response) and `response`."""
    if not path.is_file():
        near = hint(settings.data, [TINY_WORLD])
        raise ValueError(
            f"sft.data={settings.data!r} is neither {TINY_WORLD!r} nor a JSONL file{near}"
        )
    end, examples, problems = end_of_turn(tokens), [], []
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = jsonl.parse(line)
            if problem := _row_problem(row):
                raise ValueError(problem)
            examples.append(encode(row["messages"], row["response"], tokens, end))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        more = len(problems) - PRINTED_PROBLEMS
        shown = problems[:PRINTED_PROBLEMS] + ([f"... and {more} more"] if more > 0 else [])
        raise ValueError("sft.data: bad lines; mend or delete them\n  " + "\n  ".join(shown))
    if not examples:
        raise ValueError(f"sft.data={settings.data!r} holds no rows; give at least one")
    fitting = [e for e in examples if len(e.prompt) + len(e.response) <= settings.length]
    if not fitting:
        raise ValueError(f"{path}: no row fits sft.length={settings.length} tokens; raise it")
    if len(fitting) < len(examples):
        logger.warning(
            f"WARNING: sft.data: {len(examples) - len(fitting)} of {len(examples)} rows are longer "
            f"than sft.length={settings.length} tokens and left out"
        )
    return fitting


def _row_problem(row: Any) -> str:
    if not isinstance(row, dict):
        return f"a row is an object of messages and response, not {row!r:.80}"
    if not isinstance(row.get("response"), str):
        return f"response is {row.get('response')!r:.80}: give text"
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return f"messages is {messages!r:.80}: give a list of at least one"
    for message in messages:
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return f"messages holds {message!r:.80}: each needs text under role and content"
    return ""


def _shuffled(examples: list[Example], rng: Random) -> Iterator[Example]:
    while True:
        rng.shuffle(examples)
        yield from examples


def _batch(examples: list[Example], settings: SftSettings) -> tuple[list[MicroBatch], float]:
    """Micro-batches of few shapes, and the number of response tokens in all of them."""
    rows = [
        TrainRow(str(i), "sft", e.prompt, e.response, [0.0] * len(e.response), 1.0)
        for i, e in enumerate(examples)
    ]
    step = max(8, settings.length // 16)
    buckets = sorted({*range(step, settings.length, step), settings.length})
    share = settings.attention != "cudnn"
    packed = pack(rows, ("sft",), buckets, settings.micro_rows, share=share)
    return packed.micros, float(packed.role_tokens[0])


# ---- update ------------------------------------------------------------------------------------


def _practice_steps(settings: SftSettings) -> int:
    return round(settings.practice * settings.steps)


def make_optimizer(settings: SftSettings) -> optax.GradientTransformation:
    """AdamW, norm clipped: linear warm-up, the peak to the end of practice, a cosine to a tenth."""
    warm, peak = settings.warmup_steps, settings.lr
    fall = max(_practice_steps(settings), warm)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, max(warm, 1)),
            optax.cosine_decay_schedule(peak, max(settings.steps - fall, 1), alpha=0.1),
        ],
        [fall],
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(schedule, b2=0.98, weight_decay=settings.weight_decay),
    )


def make_programs(settings: SftSettings, cfg: QwenConfig, tx: optax.GradientTransformation):
    """Two jitted functions: accumulate(params, acc, micro, count) -> acc, and
    finish(state, acc) -> (state, loss, gradient norm); they donate acc and state."""
    dtype = jnp.dtype(settings.dtype)

    def loss(params, micro: MicroBatch, count):
        logp_bt, _ = token_logps(
            params,
            cfg,
            micro.tokens_bt,
            micro.temperature_bt,
            position_bt=micro.position_bt,
            segment_bt=micro.segment_bt,
            dtype=dtype,
            remat=settings.remat,
            attend=settings.attention,
            chunk=1024,
        )
        return -masked_sum(logp_bt, completion_mask(micro)) / count

    @partial(jax.jit, donate_argnums=1)
    def accumulate(params, acc, micro: MicroBatch, count):
        return jax.tree.map(jnp.add, acc, jax.value_and_grad(loss)(params, micro, count))

    @partial(jax.jit, donate_argnums=0)
    def finish(state: State, acc):
        total, grads = acc
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), total, optax.tree.norm(grads)

    return accumulate, finish
