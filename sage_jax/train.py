"""The loop: draw, play, reward, normalise, update, admit, report, evaluate, save."""

import time
from collections.abc import Callable

import jax

from sage_jax.evaluate import Evaluator
from sage_jax.learn.optimizer import lr_factor
from sage_jax.learn.pack import Packed
from sage_jax.learn.update import host_metrics
from sage_jax.methods.credit import assign_advantages, training_batches
from sage_jax.methods.graph import Cancelled, Episode, Player, Sample, play
from sage_jax.methods.measure import all_samples, episode_row, error_share, rollout_figures
from sage_jax.run import Run, guard, report, save


class RunFailure(RuntimeError):
    """Training cannot go on; the message says why and what to change."""


def train(run: Run) -> None:
    """Train until train.steps. Raises Cancelled, after saving, when a stop was asked for; in the
    validation before the first step there is nothing to save."""
    if run.fresh:
        with run.stage("validate"):
            figures = validate(run, stop=run.stop)
        report(run, figures)
    try:
        # Transfers happen in named functions only; the guard sees nothing on a CPU.
        with jax.transfer_guard("allow" if jax.default_backend() == "cpu" else "disallow"):
            while run.step < run.config.train.steps:
                one_step(run)
    except Cancelled:
        # Raised in a rollout only: parameters and pool are those of the last finished step.
        save(run, None)
        raise


def one_step(run: Run) -> None:
    """One update: the four roles play, verifiers judge, the shared weights move."""
    config, step = run.config, run.step + 1
    run.seconds.clear()
    started = time.monotonic()
    episodes = rollout(run, step)
    run.method.reward(episodes, run.pool)
    samples = all_samples(episodes)
    if not samples:
        raise RunFailure(
            f"no prompt fits tokens.max_prompt={config.tokens.max_prompt}: raise it, or let "
            "tokens.overlong=shorten cut them"
        )
    check_verdicts(samples, config)
    figures = rollout_figures(episodes, config.method) | assign_advantages(samples, config)
    batches = training_batches(samples, config)
    with run.stage("update"):
        figures |= update(run, batches)
    figures |= absorb(run, episodes, step)
    run.step = step
    last = step == config.train.steps
    if last or (config.valid.every and step % config.valid.every == 0):
        with run.stage("validate"):
            figures |= validate(run)
        guard(run, figures["valid/accuracy"])
        figures["lr_factor"] = lr_factor(run.state.opt_state)
    run.seconds["total"] = time.monotonic() - started
    for sample in samples:
        run.episodes.write(episode_row(step, sample, run.model.tokens.decode(sample.prompt)))
    report(run, figures)
    if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
        save(run, figures.get("valid/accuracy"))


def rollout(run: Run, step: int) -> list[Episode]:
    """All roles' rows of one step, sampled and judged."""
    with run.stage("rollout"):
        run.load_engine()
        episodes = run.method.episodes(run.pool, step)
        player = Player(run.config, run.model.tokens, step, run.config.rollout.temperature)
        clock = play(run.engine, run.verifier, episodes, player, stage=run.notice, stop=run.stop)
        run.engine.release()  # the update wants its memory
    run.seconds["verify"] = clock.verify
    run.seconds["rollout"] -= clock.verify
    return episodes


def check_verdicts(samples: list[Sample], config) -> None:
    """Stop when the machinery, not the responses, decides the verdicts."""
    share, limit = error_share(samples), config.sandbox.max_error_share
    if share > limit:
        reasons = sorted({s.verdict.reason for s in samples if s.verdict and s.verdict.masked})
        raise RunFailure(
            f"{share:.0%} of the verdicts were lost to {', '.join(reasons)}, more than "
            f"sandbox.max_error_share={limit:.0%}: mend the cause or raise the limit"
        )


def update(run: Run, batches: list[Packed]) -> dict[str, float | None]:
    """epochs x minibatches optimizer steps on one rollout; figures of the last one with a row."""
    if not batches:
        return {"tokens/trained": 0, "rows/taught": 0}
    if run.config.optim.epochs * len(batches) > 1:
        # The policy moves between these updates: ratios are taken against its start.
        batches = [_with_old_logps(run, packed) for packed in batches]
    shown: dict = {}
    for _ in range(run.config.optim.epochs):
        for packed in batches:
            before = run.update.skipped(run.state)
            run.state, metrics = run.update.step(run.state, packed)
            if packed.micros:  # an update of no row is always finite, and tells nothing
                _check_finite(run, packed, before)
            shown = metrics if packed.micros or not shown else shown
    slots = sum(micro.tokens_bt.size for packed in batches for micro in packed.micros)
    padding = sum(
        packed.padding_share * sum(micro.tokens_bt.size for micro in packed.micros)
        for packed in batches
    )
    trained = sum(int(packed.role_tokens.sum()) for packed in batches)
    figures = {"tokens/trained": trained, "padding/update": padding / slots if slots else None}
    figures["rows/taught"] = sum(len(ids) for packed in batches for ids in packed.ids)
    return host_metrics(shown) | figures


def _with_old_logps(run: Run, packed: Packed) -> Packed:
    micros = [
        micro._replace(old_logp_bt=run.update.old_logps(run.state, run.update.place(micro)))
        for micro in packed.micros
    ]
    return packed._replace(micros=micros)


def _check_finite(run: Run, packed: Packed, before: int) -> None:
    """Stop after optim.max_skipped non-finite updates in a row, naming rows and tensors."""
    skipped = run.update.skipped(run.state) > before
    run.skipped_in_a_row = run.skipped_in_a_row + 1 if skipped else 0
    if run.skipped_in_a_row >= run.config.optim.max_skipped:
        raise RunFailure(
            f"{run.skipped_in_a_row} updates in a row were not finite "
            f"({run.update.explain_skip(run.state, packed)}); lower optim.lr or look at the rows"
        )


def absorb(run: Run, episodes: list[Episode], step: int) -> dict[str, float]:
    """Record verdicts on drawn tasks, admit proposals; returns the pool's figures."""
    outcomes = run.method.admit(run.pool, episodes)
    for episode in episodes:
        for task, kind in ((episode.task, "solve"), (episode.facts.get("candidate"), "attempt")):
            if task and kind in episode.samples:
                verdicts = [s.judged for s in episode.samples[kind]]
                run.pool.record(task.id, verdicts, drawn=kind == "solve")
    names = {"admitted": "admitted", "duplicates": "duplicate", "invalid": "invalid"}
    names["contaminated"] = "contaminated"
    figures = {f"pool/{name}": outcomes.get(key, 0) for name, key in names.items()}
    return figures | run.pool.metrics(step)


def validate(run: Run, **hooks: Callable) -> dict[str, float | None]:
    """Held-out figures at the present weights. After an update not cut short by a stop request:
    the step it belongs to is only whole with them."""
    run.load_engine()
    evaluator = Evaluator(run.config, run.engine, run.verifier, run.model.tokens, run.method)
    figures = evaluator.figures(run.valid_items, run.pool, stage=run.notice, **hooks)
    run.engine.release()
    return figures | run.valid_set
