"""How a run continues: which checkpoint is taken, whether it fits, and what has changed since."""

import json
from typing import Any

from sage_jax.config import ConfigError, flatten, recorded
from sage_jax.core.checkpoint import CheckpointError, Checkpoints
from sage_jax.learn.update import TrainState
from sage_jax.report.progress import Progress
from sage_jax.runtime import Model


def restore_newest(
    checkpoints: Checkpoints, state: TrainState, model: Model, config, progress: Progress
) -> tuple[int, dict[str, Any], dict]:
    """Step, array trees and host facts of the newest checkpoint that can be read.

    Damaged ones before it are set aside, each with a loud line. ConfigError, and nothing is moved,
    when none can be read, or the newest is of another architecture.
    """
    damaged: list[tuple[int, CheckpointError]] = []
    for step in checkpoints.steps:
        try:
            host = checkpoints.host(step)
            check_fit(checkpoints, step, model, config)
            arrays = checkpoints.restore(step, saved_parts(state))
        except CheckpointError as error:
            damaged.append((step, error))
            continue
        for bad, error in damaged:
            progress.note(
                f"WARNING: {error}: set aside in {checkpoints.set_aside(bad)}; continues from "
                f"step {step}, the one before",
                quiet=False,
            )
        return step, arrays, host
    reasons = "\n  ".join(str(error) for _, error in damaged)
    raise ConfigError(
        f"no checkpoint can be read:\n  {reasons}\n  bring back a copy of one, or choose another "
        "--workdir to start anew"
    )


def check_fit(checkpoints: Checkpoints, step: int, model: Model, config) -> None:
    """ConfigError when the checkpoint holds parameters of other shapes than model.path and lora
    give, or an adapter that is meant otherwise or for another base."""
    check_rank(checkpoints, step, config)
    host = checkpoints.host(step)
    now = recorded(flatten(config))["model.path"]
    before = recorded(host["config"]).get("model.path")
    if model.lora is not None and (of := host.get("base")) != model.fingerprint:
        raise ConfigError(
            f"model.path={now!r}: its weights are not those that the adapter in "
            f"{checkpoints.path(step)} was trained on (fingerprint {of}, model.path={before!r}); "
            "give that model, or choose another --workdir"
        )
    params = model.params if model.adapter is None else model.adapter
    misfits = checkpoints.misfits(step, "params", params)
    if not misfits:
        return
    if now == before:
        cause = "and so was the checkpoint, but the folder has changed since; bring it back"
    else:
        cause = f"the checkpoint was written with model.path={before!r}; give that one"
    raise ConfigError(
        f"model.path={now!r}: its parameters do not fit {checkpoints.path(step)} ({misfits[0]}; "
        f"{len(misfits)} differ): {cause}, or choose another --workdir"
    )


def check_rank(checkpoints: Checkpoints, step: int, config) -> None:
    """ConfigError when the checkpoint was written with another rank or alpha than config.lora's."""
    host = checkpoints.host(step)
    ranks = {name: host["config"].get(name, 0) for name in ("lora.rank", "lora.alpha")}
    here = {"lora.rank": config.lora.rank, "lora.alpha": config.lora.alpha}
    if ranks != here:
        first = f"leave lora.path={config.lora.path} out and " if config.lora.path else ""
        raise ConfigError(
            f"{_lora_words(here)} here, but {checkpoints.path(step)} was written with "
            f"{_lora_words(ranks)}; {first}give those values, or choose another --workdir"
        )


def _lora_words(values: dict[str, Any]) -> str:
    words = ", ".join(f"{name}={value:g}" for name, value in values.items())
    return words if values["lora.rank"] else f"{words} (all weights trained)"


def changed_fields(before: dict, config) -> list[str]:
    """Fields whose values are not those that the checkpoint was written with."""
    now, before = json.loads(json.dumps(recorded(flatten(config)))), recorded(before)
    reference = " and the KL reference" if config.optim.kl_coef > 0 else ""
    remarks = {
        "model.path": "; the weights are those of the checkpoint, only the tokenizer"
        f"{reference} comes from there",
        "lora.path": "; the adapter is that of the checkpoint",
    }
    if config.lora.rank:
        remarks["model.path"] = "; the weights there are the same"
    return [
        f"{name}: {now[name]!r}, not {before.get(name)!r}{remarks.get(name, '')}"
        for name in now
        if now[name] != before.get(name)
    ]


def changed_validation(before: dict[str, int] | None, now: dict[str, int]) -> str:
    """What it means that the validation items are not those of the checkpoint; "" if they are."""
    if before == now:
        return ""
    had = f"{before['valid/items']} there" if before else "not recorded there"
    return (
        f"validates on other items than the checkpoint ({had}, {now['valid/items']} now): "
        "train.rollback, the best checkpoint and the closing line compare accuracies from here on "
        "only"
    )


def saved_parts(state: TrainState) -> dict:
    """The saved parts of a state. The KL reference is the starting model: loaded, not saved."""
    rest = {"opt_state": state.opt_state, "step": state.step, "skipped": state.skipped}
    return {"params": state.params, "rest": rest}
