"""A training run: what lives from step to step, how it starts, reports and is saved."""

import contextlib
import dataclasses
import io
import json
import resource
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sage_jax import roles
from sage_jax.config import ConfigError, flatten, recorded
from sage_jax.core import hosts
from sage_jax.core.checkpoint import CheckpointError, Checkpoints
from sage_jax.evaluate import first_of_each_domain, set_of
from sage_jax.learn.optimizer import UpdateSettings, lr_factor, make_optimizer, with_lr_factor
from sage_jax.learn.update import TrainState, Update, init_state
from sage_jax.methods.sage import Sage
from sage_jax.models import lora
from sage_jax.report.episodes import EpisodeWriter
from sage_jax.report.jsonl import cut
from sage_jax.report.metrics import MetricsWriter
from sage_jax.report.progress import Progress
from sage_jax.resume import changed_fields, changed_validation, restore_newest, saved_parts
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.verdicts import SharedVerifier
from sage_jax.runtime import (
    CompileCounter,
    Model,
    Placement,
    decode_weights,
    load_model,
    lora_settings,
    make_engine,
    make_prompts,
    make_verifier,
    placement,
)
from sage_jax.tasks import sources
from sage_jax.tasks.pool import Pool
from sage_jax.tasks.task import DOMAINS, Task
from sage_jax.verify import Verifier

SHOWN = ("valid/accuracy", "solve_rate", "difficulty", "pool/size", "loss", "grad_norm")

QUOTED = 70  # characters shown of a question


@dataclasses.dataclass
class Run:
    """Everything that lives from step to step."""

    config: Any
    model: Model
    place: Placement
    method: Sage
    pool: Pool
    valid_items: list[Task]
    valid_set: dict[str, int]  # count and digest of valid_items, as logged
    verifier: Verifier | SharedVerifier
    engine: Engine
    update: Update
    state: TrainState
    step: int
    checkpoints: Checkpoints
    metrics: MetricsWriter
    episodes: EpisodeWriter
    progress: Progress
    compiles: CompileCounter
    stop: Callable[[], bool]
    fresh: bool  # nothing has been measured or trained yet
    decode_base: dict | None = None  # with an adapter: the frozen base, in place for decoding
    skipped_in_a_row: int = 0
    told_shortened: bool = False
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the step and name it to the heartbeat."""
        self.progress.stage(name)
        started = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - started

    def notice(self, name: str, pending: Callable[[], Iterable[str]]) -> None:
        """Tell the heartbeat what runs, and how to learn which rows it waits for."""
        self.progress.stage(name, pending)

    def load_engine(self) -> None:
        """Cast and reshard the present weights for decoding, once."""
        settings, params = self.model.lora, self.state.params
        to_decode = partial(
            decode_weights, cfg=self.model.cfg, place=self.place, dtype=self.config.model.dtype
        )
        if settings is None:
            self.engine.start(to_decode(params))
            return
        if self.decode_base is None:
            self.decode_base = to_decode(self.model.params)
        adapter = to_decode(lora.scaled(params, settings.scale))
        self.engine.start(lora.attach(self.decode_base, adapter))

    def host_state(self) -> dict:
        config = recorded(flatten(self.config))
        state = {"step": self.step, "pool": self.pool.to_json(), "config": config}
        state["valid"] = self.valid_set
        if self.model.lora is not None:
            state["base"] = self.model.fingerprint
        return state


def update_settings(config) -> UpdateSettings:
    """The update's part of the config."""
    o = config.optim
    names = {f.name for f in dataclasses.fields(UpdateSettings)} - {"role_weights"}
    adapter = lora_settings(config)
    return UpdateSettings(
        **{name: value for name, value in o.items() if name in names},
        role_weights=dict(o.role_weights),
        chunk=o.logit_chunk,
        remat=config.model.remat,
        attention=config.model.attention,
        dtype=config.model.dtype,
        lora_scale=adapter.scale if adapter else 0.0,
    )


def load_tasks(config) -> tuple[list[Task], list[Task]]:
    """Seeds and validation tasks. SourceError naming all that is wrong with them; ConfigError when
    a step asks for more than there is."""
    seeds, valid = sources.load_apart([config.tasks.seeds, [config.valid.path]])
    pool = make_pool(config, seeds, valid)
    kept = pool.seeds.values()  # without those met in validation
    present = {domain: sum(t.domain == domain for t in kept) for domain in DOMAINS}
    if config.method.drawn > len(kept):
        raise ConfigError(
            f"method.drawn={config.method.drawn}: tasks.seeds holds only {len(kept)} problems"
            f"{_bracketed(refused(pool, seeds, valid))}; lower it or add seeds"
        )
    for domain, share in (("math", config.tasks.math_share), ("code", 1 - config.tasks.math_share)):
        if share > 0 and not present[domain]:
            raise ConfigError(
                f"tasks.math_share={config.tasks.math_share}: tasks.seeds holds no {domain} "
                f"problem{_bracketed(refused(pool, seeds, valid))}; add some, or set the share to "
                "leave that domain out"
            )
    return seeds, valid


def refused(pool: Pool, seeds: list[Task], valid: list[Task]) -> str:
    """Which seeds the pool left out and why, with one example; "" when it took all of them."""
    if not pool.refused_seeds:
        return ""
    mine, theirs = pool.refused_seeds[0]
    seed = next(task.question for task in seeds if task.id == mine)
    item = next(task.question for task in valid if task.id == theirs)
    return (
        f"{len(pool.refused_seeds)} left out: they resemble items of valid.path, as {mine} "
        f"({_start(seed)!r}) does {theirs} ({_start(item)!r})"
    )


def _start(question: str) -> str:
    return question if len(question) <= QUOTED else question[: QUOTED - 3] + "..."


def _bracketed(text: str) -> str:
    return f" ({text})" if text else ""


@contextlib.contextmanager
def start(config, workdir: Path, stop: Callable[[], bool]) -> Iterator[Run]:
    """Build a run in `workdir`, continuing from its newest checkpoint when there is one."""
    with hosts.together():
        seeds, valid = load_tasks(config)
        method = Sage(config, make_prompts(config))
    hosts.check_same(_digests(config, method, seeds, valid))
    place = placement(config)
    valid_items = first_of_each_domain(valid, config.valid.limit)
    valid_set = set_of(valid_items)
    try:
        checkpoints = Checkpoints(
            workdir / "checkpoints", config.checkpoint.keep, valid_set["valid/set"]
        )
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    fresh, done = checkpoints.latest is None, checkpoints.latest or 0
    with contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        progress = stack.enter_context(
            Progress(
                config.train.steps,
                done,
                validates=config.valid.every,
                stream=None if hosts.first() else io.StringIO(),
                quiet=config.report.quiet or not hosts.first(),
                heartbeat=config.report.heartbeat,
            )
        )
        verifier = stack.enter_context(make_verifier(config, "reward"))
        progress.stage(f"loading {config.model.path}")
        model = load_model(config, place)
        engine = make_engine(config, model.cfg, place, notice=progress.stage)
        settings = update_settings(config)
        updates = config.optim.epochs * config.optim.minibatches
        tx = make_optimizer(settings, max(config.train.steps, 1), updates)
        if model.adapter is None:
            state = init_state(model.params, tx, reference=config.optim.kl_coef > 0)
        else:
            state = init_state(model.adapter, tx, frozen=model.params)
        pool = make_pool(config, seeds, valid)
        if text := refused(pool, seeds, valid):
            progress.note(f"tasks.seeds: {text}")
        if not fresh:
            progress.stage(f"restoring step {done}")
            done, arrays, host = restore_newest(checkpoints, state, model, config, progress)
            state = state._replace(**arrays["rest"], params=arrays["params"])
            pool = Pool.from_json(host["pool"], valid, seeds, **pool.settings)
            for line in changed_fields(host["config"], config):
                progress.note(f"continues with another {line}")
            if line := changed_validation(host.get("valid"), valid_set):
                progress.note(line)
        # Held by the state alone, which gives them to the first update.
        if model.adapter is None:
            model.params = state.params
        else:
            model.adapter = state.params
        mute = not hosts.first()
        with hosts.together():
            try:
                for name in () if mute else ("metrics.jsonl", "episodes.jsonl"):
                    cut(workdir / name, -1 if fresh else done)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        run = Run(
            config=config,
            model=model,
            place=place,
            method=method,
            pool=pool,
            valid_items=valid_items,
            valid_set=valid_set,
            verifier=verifier,
            engine=engine,
            update=Update(model.cfg, settings, roles.ROLES, tx, state, place.update),
            state=state,
            step=done,
            checkpoints=checkpoints,
            metrics=stack.enter_context(MetricsWriter(workdir / "metrics.jsonl", mute)),
            episodes=stack.enter_context(EpisodeWriter(workdir / "episodes.jsonl", mute)),
            progress=progress,
            compiles=CompileCounter(),
            stop=stop,
            fresh=fresh,
        )
        yield run


def _digests(config, method: Sage, seeds: list[Task], valid: list[Task]) -> dict[str, str]:
    """What all processes of a run must have in common, each by a few digits of its hash."""
    parts = {
        "config": flatten(config),
        "method.prompts": method.prompts.digest,
        "tasks.seeds": [task.to_json() for task in seeds],
        "valid.path": [task.to_json() for task in valid],
    }
    return {
        name: f"{zlib.crc32(json.dumps(part, sort_keys=True).encode()):08x}"
        for name, part in parts.items()
    }


def make_pool(config, seeds: list[Task], valid: list[Task]) -> Pool:
    """The pool of a new run. ConfigError when no seed is left of `seeds`."""
    p = config.pool
    try:
        return Pool(
            seeds,
            valid,
            capacity=p.capacity + len(seeds),
            seed_share=p.seed_share,
            half_life=p.half_life,
            dedup_threshold=p.dedup,
        )
    except ValueError as error:
        raise ConfigError(f"tasks.seeds: {error}") from error


def report(run: Run, figures: dict) -> None:
    """One row of metrics.jsonl and one progress line."""
    engine, seconds = run.engine, run.seconds
    row = {"step": run.step, **figures}
    row |= {f"time/{name}": value for name, value in seconds.items()}
    row["memory/rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    row["compiles"] = run.compiles.count
    row["live_slots"] = engine.live_steps / engine.slot_steps if engine.slot_steps else None
    engine.live_steps = engine.slot_steps = 0
    if figures.get("tokens/generated") and seconds["rollout"] > 0:
        row["rates/tokens_per_s"] = figures["tokens/generated"] / seconds["rollout"]
    prompts, cut_short = run.model.tokens.fitted()
    row["shortened"] = cut_short / prompts if prompts else None
    run.metrics.write(row)
    shown = {name: row[name] for name in SHOWN if row.get(name) is not None}
    compiled, validation = run.compiles.new() > 0, seconds["validate"]
    run.progress.step(run.step, shown, compiled=compiled, validation=validation)
    tell_shortened(run, prompts, cut_short)


def tell_shortened(run: Run, prompts: int, cut_short: int) -> None:
    """A line about prompts that were cut, at the first step that has some."""
    if cut_short and not run.told_shortened:
        run.told_shortened = True
        run.progress.note(
            f"WARNING: {cut_short} of {prompts} prompts were cut to tokens.max_prompt="
            f"{run.config.tokens.max_prompt} (tokens.overlong=shorten): raise it, or shorten the "
            "prompts of method.prompts; said once",
            quiet=False,
        )


def guard(run: Run, accuracy: float | None) -> None:
    """Undo a drift: where held-out accuracy has fallen by more than train.rollback, the best
    checkpoint's parameters and optimizer come back, and the learning rate is halved.

    The pool, the step count and with it the randomness go on, so that the run takes another way.
    """
    best = run.checkpoints.best
    if not run.config.train.rollback or accuracy is None or best is None:
        return
    wanted = run.checkpoints.accuracy(best)
    if accuracy >= wanted - run.config.train.rollback:
        return
    try:
        arrays = run.checkpoints.restore(best, saved_parts(run.state))
    except CheckpointError as error:
        run.progress.note(f"WARNING: no roll-back: {error}", quiet=False)
        return
    factor = lr_factor(run.state.opt_state) / 2
    opt_state = with_lr_factor(arrays["rest"]["opt_state"], factor)
    run.state = run.state._replace(params=arrays["params"], opt_state=opt_state)
    run.progress.note(
        f"rolled back to the weights of step {best}: accuracy {accuracy:.3f} is more than "
        f"train.rollback={run.config.train.rollback:g} below {wanted:.3f}; "
        f"learning rate times {factor:g}"
    )


def save(run: Run, accuracy: float | None) -> None:
    """Write the state of the last finished step, once."""
    if run.checkpoints.latest == run.step:
        return
    run.progress.stage("checkpoint")
    run.metrics.sync()
    run.episodes.sync()
    run.checkpoints.save(run.step, saved_parts(run.state), run.host_state(), accuracy)
