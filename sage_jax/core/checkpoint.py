"""One checkpoint: parameters, optimizer, pool, counters and config, committed together by Orbax."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

METRIC = "valid/accuracy"


class CheckpointError(ValueError):
    """A folder of checkpoints that cannot be used; the message says which and what to do."""


def _accuracy(metrics: dict) -> float:
    return metrics[METRIC]


class Checkpoints:
    """The numbered checkpoints of a run; half-written ones are never seen.

    Keeps the newest `keep` and the best by validation accuracy. CheckpointError when the folder
    cannot be made.
    """

    def __init__(self, folder: Path, keep: int):
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be made a folder ({error})") from error
        # Below that it remarks on every save without an accuracy.
        logging.getLogger("absl").setLevel(logging.ERROR)
        best = policies.BestN(get_metric_fn=_accuracy, n=1, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=_accuracy,
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
                enable_async_checkpointing=False,
            ),
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None in a new run."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the best validation accuracy, None if none was measured."""
        return self._manager.best_step()

    def save(self, step: int, arrays: dict[str, Any], host: dict, accuracy: float | None) -> None:
        """Write named array trees and the JSON-able `host` facts as one step; returns when it is
        on disk."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)),
            metrics=None if accuracy is None else {METRIC: accuracy},
            force=True,
        )
        self._manager.wait_until_finished()

    def restore(self, step: int, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict]:
        """The named trees of `step`, placed as their abstract ones say (any mesh), and the host
        facts. Trees that are not named are not read.

        CheckpointError when parts are missing or of another shape; damage inside an array shows
        as whatever its reader raises.
        """
        items = {name: ocp.args.StandardRestore(abstract(tree)) for name, tree in arrays.items()}
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(**items, host=ocp.args.JsonRestore())
            )
        except (KeyError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{self._folder / str(step)}: cannot be restored for this model and optimizer "
                f"({error}); if it is damaged, delete it to go on from the one before"
            ) from error
        return {name: restored[name] for name in arrays}, restored["host"]

    def close(self) -> None:
        self._manager.close()


def abstract(state: Any) -> Any:
    """Shapes, dtypes and shardings of a state, without its values."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
