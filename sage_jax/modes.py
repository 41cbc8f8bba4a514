"""What each --mode does, from a validated config to an exit code."""

import contextlib
import dataclasses
import fcntl
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from sage_jax import config as schema
from sage_jax import offline
from sage_jax.core import hosts
from sage_jax.core.checkpoint import CheckpointError, Checkpoints
from sage_jax.core.places import misplaced, missing, remove_empty
from sage_jax.evaluate import Evaluator, first_of_each_domain, write_answers
from sage_jax.methods.graph import Cancelled
from sage_jax.methods.measure import accuracy, all_samples
from sage_jax.methods.sage import Sage
from sage_jax.models import hf, lora, peft
from sage_jax.overrides import names_model, refuse_fine_tuned
from sage_jax.report.progress import Progress, accuracy_summary, setup_logging
from sage_jax.resume import check_fit, check_rank
from sage_jax.run import start
from sage_jax.runtime import (
    Model,
    Placement,
    decode_weights,
    enable_compilation_cache,
    load_model,
    make_engine,
    make_prompts,
    make_verifier,
    model_path,
    placement,
)
from sage_jax.startup import table
from sage_jax.tasks import sources
from sage_jax.train import RunFailure, train

TERMINATED = 143  # the exit code of a run saved on SIGTERM


@dataclasses.dataclass(frozen=True)
class Job:
    """One command line, read and checked."""

    config: Any
    overrides: Mapping
    workdir: Path
    input: Path
    output: Path
    named: bool = False  # --workdir was given
    topology: str = ""


MADE_AT_START = ("metrics.jsonl", "episodes.jsonl", "lock", "checkpoints")
OF_TRAINING = ("config.json", *MADE_AT_START)
FOLDERS = ("checkpoints", "model")  # what a run makes of these names; all else are files


@contextlib.contextmanager
def sole_use(workdir: Path, *names: str) -> Iterator[None]:
    """Make the folder and keep other runs out of it. ConfigError while one is in there, or when
    something of one of the `names` that will be written lies in their way.

    What ends before anything was written, such as a refused start, leaves no trace.
    """
    check_places(workdir, "lock", *names)
    made = missing(workdir, MADE_AT_START) if hosts.first() else []
    with contextlib.ExitStack() as held:
        try:
            with hosts.together():
                if hosts.first():
                    _lock(workdir, held)
            yield
        except BaseException:
            remove_empty(made)
            raise


def check_places(workdir: Path, *names: str) -> None:
    """ConfigError when something in `workdir` cannot be written under one of these names."""
    with hosts.together():
        if reason := misplaced({workdir / name: name in FOLDERS for name in names}):
            raise schema.ConfigError(f"{reason}; move it away, or choose another --workdir")


def _lock(workdir: Path, held: contextlib.ExitStack) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    file = held.enter_context((workdir / "lock").open("w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise schema.ConfigError(
            f"{workdir} is in use by another run; let it end, or choose another --workdir"
        ) from error


def say(text: str, to: TextIO | None = None) -> None:
    """Print a result, once a run."""
    if hosts.first():
        print(text, file=to or sys.stdout)


def run_train(job: Job, stop) -> int:
    """Train, or continue, in the work directory."""
    config = job.config
    hosts.check_shared(job.workdir)
    refuse_fine_tuned(job.workdir)
    done = newest_step(job.workdir / "checkpoints")
    if done is not None and done >= config.train.steps:
        _refuse_other_rank(job, done)
        say(finished(job.workdir, done, "train.steps", config.train.steps))
        return 0
    log = setup_logging(quiet=config.report.quiet or not hosts.first())
    with sole_use(job.workdir, *OF_TRAINING), start(config, job.workdir, stop) as run:
        if hosts.first():
            schema.dump(config, job.overrides, job.workdir / "config.json")
        log.info(table(run, job.workdir))
        stopped, failure = False, ""
        try:
            train(run)
        except Cancelled:
            stopped = True
        except RunFailure as error:
            failure = str(error)
        saved = run.checkpoints.latest
    # Below the status line, which ends with the run.
    if failure:
        say(f"sage_jax: stopped at step {run.step}: {failure}", sys.stderr)
        return 1
    if not hosts.first():
        return TERMINATED if stopped else 0
    if stopped and saved is None:
        log.warning("stopped before the first step: nothing to save; the same command starts anew")
    elif stopped:
        log.warning(f"saved step {run.step} in {job.workdir}; the same command continues")
    else:
        say(f"finished {run.step} steps; results in {job.workdir}", sys.stderr)
        log.info(accuracy_summary(run.metrics.path))
    return TERMINATED if stopped else 0


def _refuse_other_rank(job: Job, done: int) -> None:
    """ConfigError when a finished run is asked for an adapter that it does not have: more steps,
    which it would else be advised, are no way to that."""
    checkpoints = Checkpoints(job.workdir / "checkpoints", keep=1 << 30)
    try:
        with contextlib.suppress(CheckpointError):  # nothing is read of a damaged one
            check_rank(checkpoints, done, job.config)
    finally:
        checkpoints.close()


def finished(workdir: Path, done: int, field: str, steps: int) -> str:
    """Why nothing is left to do for a run that has reached step `done` of `steps`."""
    if done == steps:
        return (
            f"{workdir} is finished: step {done} of {field}={steps}; raise {field} to go on, or "
            "choose another --workdir"
        )
    return (
        f"{workdir} is past {field}={steps}: it has reached step {done}, nothing was done; give a "
        f"{field} above {done} to go on, or another --workdir to start anew"
    )


def newest_step(folder: Path) -> int | None:
    """Step of the newest checkpoint in a folder that may not exist."""
    if not folder.is_dir():
        return None
    checkpoints = Checkpoints(folder, keep=1 << 30)
    try:
        return checkpoints.latest
    finally:
        checkpoints.close()


def trained_model(job: Job, place: Placement) -> tuple[Model, str]:
    """The newest checkpoint of the work directory, else model.path; and which it was.

    A model.path or lora.path on the command line wins over a work directory that nobody named.
    ConfigError when the one that was named holds no checkpoint, or it holds those of --mode=sft.
    """
    folder = job.workdir / "checkpoints"
    if job.named:
        hosts.check_shared(job.workdir)
    step = None
    if job.named or not names_model(job.overrides):
        refuse_fine_tuned(job.workdir)
        step = newest_step(folder)
    if step is None and job.named:
        raise schema.ConfigError(
            f"--workdir={job.workdir}: holds no checkpoint; check the path, or leave it out to use "
            f"model.path={job.config.model.path}"
        )
    model = load_model(job.config, place)
    if step is None:
        if not names_model(job.overrides):
            say(f"{job.workdir} holds no checkpoint: model.path is read", sys.stderr)
        adapter = job.config.lora.path and f" with the adapter {job.config.lora.path}"
        return model, f"{job.config.model.path}{adapter}"
    checkpoints = Checkpoints(folder, keep=1 << 30)
    try:
        check_fit(checkpoints, step, model, job.config)
        if model.adapter is None:
            model.params = checkpoints.restore(step, {"params": model.params})["params"]
        else:
            model.adapter = checkpoints.restore(step, {"params": model.adapter})["params"]
    except CheckpointError as error:
        raise schema.ConfigError(f"{error}; move it away to use the one before") from error
    finally:
        checkpoints.close()
    return model, f"{job.workdir} at step {step}"


def run_eval(job: Job, stop) -> int:
    """Greedy accuracy on eval.benchmarks, or on valid.path judged as in training."""
    config = job.config
    quiet = config.report.quiet or not hosts.first()
    setup_logging(quiet=quiet)
    place = placement(config)
    names = list(dict.fromkeys(config.eval.benchmarks)) or [config.valid.path]
    policy = "eval" if config.eval.benchmarks else "reward"
    files = [f"eval_{number}_{Path(name).stem}.jsonl" for number, name in enumerate(names)]
    check_places(job.workdir, "eval.json", *files)
    with hosts.together():
        loaded = sources.load_apart([name] for name in names)
        suites = dict(zip(names, loaded, strict=True))
        method = Sage(config, make_prompts(config))
    results = {}
    with (
        make_verifier(config, policy) as verifier,
        Progress(len(suites), quiet=quiet) as progress,
    ):
        model, origin = trained_model(job, place)
        engine = make_engine(config, model.cfg, place, notice=progress.stage)
        engine.start(decode_weights(model.weights, model.cfg, place, config.model.dtype))
        evaluator = Evaluator(config, engine, verifier, model.tokens, method)
        say(f"evaluating {origin} (verifier policy {policy})")
        for file, (name, tasks) in zip(files, suites.items(), strict=True):
            tasks = first_of_each_domain(tasks, config.valid.limit)
            try:
                episodes = evaluator.run(
                    tasks,
                    method.bare_graph("answer", 1),
                    0.0,
                    stage=lambda n, ids: progress.stage(n, lambda: ids),
                    stop=stop,
                )
            except Cancelled:
                say(f"sage_jax: stopped before the end of {name}", sys.stderr)
                return TERMINATED
            samples = all_samples(episodes)
            if not samples:
                raise schema.ConfigError(
                    f"{name}: no prompt fits tokens.max_prompt={config.tokens.max_prompt}; raise it"
                )
            results[name] = {
                "items": len(samples),
                "accuracy": accuracy(samples),
                "wellformed": accuracy([s for s in samples if s.parsed.ok]),
                "truncated": sum(s.completion.finish == "length" for s in samples) / len(samples),
                "masked": sum(s.judged.masked for s in samples) / len(samples),
            }
            if hosts.first():
                job.workdir.mkdir(parents=True, exist_ok=True)
                write_answers(job.workdir / file, episodes)
            say(f"{name}: accuracy {results[name]['accuracy']:.4f} on {len(samples)} items")
    summary = {"model": origin, "policy": policy, "results": results}
    if hosts.first():
        (job.workdir / "eval.json").write_text(json.dumps(summary, indent=1) + "\n")
    say(f"wrote {job.workdir / 'eval.json'} and the judged answers beside it: {', '.join(files)}")
    return 0


def _offline(work: Callable) -> Callable[[Job, Callable], int]:
    def run(job: Job, stop) -> int:
        quiet = job.config.report.quiet or not hosts.first()
        setup_logging(quiet=quiet)
        place = placement(job.config)
        with hosts.together():
            lines = f"{zlib.crc32(job.input.read_bytes()):08x}"
        hosts.check_same({"--input": lines})
        with Progress(1, quiet=quiet) as progress:

            def stage(name: str, pending: Callable[[], Iterable[str]]) -> None:
                if stop():
                    raise Cancelled
                progress.stage(name, pending)

            model = trained_model(job, place)[0] if job.named else load_model(job.config, place)
            try:
                problems = work(job.config, model, place, job.input, job.output, stage)
            except Cancelled:
                say(f"sage_jax: stopped before the end of {job.input}", sys.stderr)
                return TERMINATED
        for problem in problems:
            say(f"{job.input}:{problem.line}: {problem.text}", sys.stderr)
        left_out = f"; bad lines left out: {len(problems)}" if problems else ""
        say(f"wrote {job.output}{left_out}", sys.stderr)  # --output may be standard output
        return 1 if problems else 0

    return run


def run_export(job: Job, stop) -> int:
    """Write a Hugging Face folder, adapter merged, or with lora.export=adapter a PEFT adapter
    folder; and read it back."""
    place = placement(job.config)
    model, origin = trained_model(job, place)
    try:
        if model.lora is None or model.adapter is None:
            hf.export(model.params, model.cfg, job.output, source_dir=model.folder)
        elif job.config.lora.export == "adapter":
            path = model_path(job.config.model.path)
            base = peft.Base(model.cfg, path, model.fingerprint)
            peft.export(model.adapter, base, model.lora, job.output)
        else:
            merged = lora.merge(model.params, lora.scaled(model.adapter, model.lora.scale))
            hf.export(merged, model.cfg, job.output, source_dir=model.folder)
    except ValueError as error:
        raise schema.ConfigError(f"--output={job.output}: {error}") from error
    say(f"exported {origin} to {job.output}; read back and equal")
    return 0


def run_sft(job: Job, stop) -> int:
    """Supervised fine-tuning into WORKDIR/model; the recipe of the packaged tiny model."""
    from sage_jax.sft import SftSettings, sft

    c = job.config
    setup_logging(quiet=c.report.quiet)
    if c.lora.rank:
        remedy = "leave lora.path out" if c.lora.path else "set lora.rank=0"
        raise schema.ConfigError(
            f"lora.rank={c.lora.rank}: --mode=sft trains all weights; {remedy}"
        )
    if hosts.count() > 1:
        raise schema.ConfigError(
            f"--mode=sft runs in one process on one device, this is one of {hosts.count()}: start "
            "it alone"
        )
    its_model = f"the model is {job.workdir / 'model'}"
    settings = SftSettings(
        model_path=model_path(c.model.path),
        **c.sft,
        micro_rows=c.optim.micro_rows,
        weight_decay=c.optim.weight_decay,
        clip_norm=c.optim.clip_norm,
        seed=c.seed,
        prompts=c.method.prompts,
        dtype=c.model.dtype,
        remat=c.model.remat,
        attention=c.model.attention,
        checkpoint_every=c.checkpoint.every or c.sft.steps,
    )
    if (done := newest_step(job.workdir / "checkpoints")) is not None and done >= c.sft.steps:
        if (job.workdir / "model" / "config.json").is_file():  # its last file
            say(f"{finished(job.workdir, done, 'sft.steps', c.sft.steps)}; {its_model}")
            return 0
    with sole_use(job.workdir, "config.json", *FOLDERS):
        try:
            record = partial(schema.dump, c, job.overrides, job.workdir / "config.json")
            folder = sft(settings, job.workdir, stop, record)
        except (OSError, ValueError) as error:
            raise schema.ConfigError(str(error)) from error
    if folder is None:
        return TERMINATED
    say(f"finished {max(done or 0, c.sft.steps)} steps; {its_model}")
    return 0


def run_dryrun(job: Job, stop) -> int:
    """Compile the programs of a step for the chips of --topology; 1 when one does not fit."""
    from sage_jax.dryrun.mode import run

    named = job.output != Path("")  # an empty flag
    output = job.output if named else job.workdir / "dryrun.json"
    return run(job.config, job.topology, output)


MODES = {
    "train": run_train,
    "sft": run_sft,
    "eval": run_eval,
    "generate": _offline(offline.generate),
    "score": _offline(offline.score),
    "export": run_export,
    "dryrun": run_dryrun,
}


def run(mode: str, job: Job, asked: Callable[[], bool]) -> int:
    """Exit code of a mode. A stop that one of several processes is asked for stops all of them."""
    return MODES[mode](job, lambda: hosts.any_of(asked()))


enable_compilation_cache()
