"""One checkpoint: parameters, optimizer, pool, counters and config, committed together by Orbax.

On several processes all call the same methods: each writes and reads its own shards, process 0 the
host facts, in one folder that all share.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from sage_jax.core import hosts
from sage_jax.core.ending import ProcessError

METRIC = "valid/accuracy"
MEASURED_ON = "valid/set"
READ_FAULTS = (KeyError, OSError, TypeError, ValueError)
ORBAX = str(Path(ocp.__file__).parent)


class CheckpointError(ValueError):
    """A folder of checkpoints that cannot be used; the message says which and what to do."""


class Unfinished:
    """`sys.unraisablehook` once a checkpoint was damaged. Where one reader fails, Orbax leaves the
    others unfinished. Each fills a page when Python frees it, or finds that the loop it wants to
    tell of its end is closed: the fault has been told by then.
    """

    def __init__(self, usual: Callable[..., Any]):
        self._usual = usual

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        freed = code is not None and code.co_filename.startswith(ORBAX)
        late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        if not freed and not late:
            self._usual(unraisable)


class Checkpoints:
    """The numbered checkpoints of a run; half-written ones are never seen.

    Keeps the newest `keep` and the best by validation accuracy. Accuracies compare only on the same
    items: those on others than `measured_on`, the digest of the present ones, rank below all that
    are on these. CheckpointError when the folder cannot be made.
    """

    def __init__(self, folder: Path, keep: int, measured_on: int = 0):
        self._folder, self._measured_on = folder, measured_on
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be made a folder ({error})") from error
        # Below that it remarks on every save without an accuracy.
        logging.getLogger("absl").setLevel(logging.ERROR)
        best = policies.BestN(get_metric_fn=self._rank, n=1, keep_checkpoints_without_metrics=False)
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                best_fn=self._rank,
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
                enable_async_checkpointing=False,
            ),
        )

    def _rank(self, metrics: dict) -> float:
        return metrics[METRIC] - 2 * (metrics.get(MEASURED_ON, 0) != self._measured_on)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint, None in a new run."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    @property
    def best(self) -> int | None:
        """Step of the checkpoint with the best accuracy on the present validation items, None if
        none was measured on them."""
        step = self._manager.best_step()
        return step if step is not None and self._rank(self._metrics(step)) >= 0 else None

    def accuracy(self, step: int) -> float:
        """The validation accuracy that `step` was saved with."""
        return self._metrics(step)[METRIC]

    def _metrics(self, step: int) -> dict:
        metrics: Any = self._manager.metrics(step)
        return metrics or {METRIC: -1.0}  # saved without an accuracy

    def save(self, step: int, arrays: dict[str, Any], host: dict, accuracy: float | None) -> None:
        """Write named array trees and the JSON-able `host` facts as one step; returns when it is
        on disk."""
        measured = {METRIC: accuracy, MEASURED_ON: self._measured_on}
        items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
        self._manager.save(
            step,
            args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)),
            metrics=None if accuracy is None else measured,
            force=True,
        )
        self._manager.wait_until_finished()

    def host(self, step: int) -> dict:
        """The host facts of `step`. CheckpointError when they cannot be read."""
        with self._reading(step):
            return dict(ocp.JsonCheckpointHandler().restore(self._item(step, "host")))

    def restore(self, step: int, arrays: dict[str, Any]) -> dict[str, Any]:
        """The named trees of `step`, placed as their abstract ones say (any mesh). Trees that are
        not named are not read. CheckpointError when parts are missing, damaged or of another shape.
        """
        # Not by the manager, in which a process that can read waits for one that cannot.
        handler = ocp.StandardCheckpointHandler()
        with self._reading(step):
            return {
                name: handler.restore(
                    self._item(step, name), args=ocp.args.StandardRestore(abstract(tree))
                )
                for name, tree in arrays.items()
            }

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """CheckpointError, in all processes, when what is read within is damaged for one."""
        try:
            with hosts.together(), self._damage_named(step):
                yield
        except ProcessError as error:
            raise CheckpointError(str(error)) from error

    @contextlib.contextmanager
    def _damage_named(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Orbax itself raises a bare Exception where a file of an array is absent or cut.
            if type(error) is Exception or isinstance(error, READ_FAULTS):
                if not isinstance(sys.unraisablehook, Unfinished):
                    sys.unraisablehook = Unfinished(sys.unraisablehook)
                raise CheckpointError(f"{self.path(step)} is damaged ({_brief(error)})") from error
            raise

    def _item(self, step: int, name: str) -> epath.Path:
        return epath.Path(self.path(step).absolute()) / name

    def path(self, step: int) -> Path:
        return self._folder / str(step)

    def misfits(self, step: int, name: str, tree: dict) -> list[str]:
        """How the arrays of the nested dict `tree` differ in shape from those saved under `name`;
        [] when none does. CheckpointError when their description cannot be read."""
        with self._reading(step):
            stored = ocp.StandardCheckpointHandler().metadata(self._item(step, name)).tree
        there, here = ({k: tuple(x.shape) for k, x in _flat(t).items()} for t in (stored, tree))
        return [
            f"{key} is {there.get(key, 'absent')} there and {here.get(key, 'absent')} here"
            for key in sorted(there.keys() | here.keys())
            if there.get(key) != here.get(key)
        ]

    def set_aside(self, step: int) -> Path:
        """Move a damaged checkpoint out of the way, so that its step can be saved again; returns
        its new place."""
        target = self._folder
        with hosts.together():
            if hosts.first():
                folder = self._folder.with_name(f"{self._folder.name}_damaged")
                folder.mkdir(exist_ok=True)
                number = sum(1 for _ in folder.glob(f"{step}*"))
                target = folder / (f"{step}_{number}" if number else str(step))
                self.path(step).rename(target)
        self._manager.reload()
        return Path(hosts.gather(str(target))[0])

    def close(self) -> None:
        self._manager.close()


def abstract(state: Any) -> Any:
    """Shapes, dtypes and shardings of a state, without its values."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def _flat(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _brief(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
