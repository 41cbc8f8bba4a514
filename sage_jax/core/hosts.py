"""The processes of one run: what they agree on, gathered at fixed points of the same loop.

All processes run the same host code on the same facts. What one of them alone knows (a verdict, a
signal, a failure) enters that code through `gather`, which all call equally often and in the same
order. So none can take another way, and a slow one delays the others without parting from them.
A single process gathers nothing and waits for nobody.
"""

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sage_jax.core.ending import ProcessError
from sage_jax.core.places import missing, remove_empty

SMALLEST = 1024  # bytes; longer texts are padded to a power of two, so that few shapes are compiled
SEEN_WITHIN = 20.0  # seconds in which a file system shows one host what another has written
MARK = "processes"  # the file by which they find out that they share a folder


def count() -> int:
    """Number of processes of this run."""
    return jax.process_count()


def index() -> int:
    """Number of this process, from 0."""
    return jax.process_index()


def first() -> bool:
    """True in the one process that writes files and talks to the user."""
    return index() == 0


def gather(value: Any) -> list[Any]:
    """The JSON-able values of all processes, by process. All must call it; it waits for the last.

    Two steps, sizes and then texts padded to one length; the second is left out where all texts
    are empty strings.
    """
    if count() == 1:
        return [value]
    text = b"" if value == "" else json.dumps(value).encode()
    sizes = _all(np.array(len(text), np.int32))
    if not sizes.any():
        return [""] * len(sizes)
    room = SMALLEST
    while room < sizes.max():
        room *= 2
    padded = np.zeros(room, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    texts = [row[:size].tobytes() for row, size in zip(_all(padded), sizes, strict=True)]
    return [json.loads(text) if text else "" for text in texts]


def meet(mesh: Mesh) -> None:
    """Connect the devices of each set of axes now, while all processes are at the same point.

    Done at the first use, gloo (the collectives of CPUs) gives up when one process comes to it 30 s
    after another, as happens when it compiles longer.
    """
    if count() == 1 or jax.default_backend() != "cpu":
        return
    axes = mesh.axis_names
    groups = [g for n in range(len(axes)) for g in itertools.combinations(axes, n + 1)]
    rest = [PartitionSpec(tuple(a for a in axes if a not in group)) for group in groups]

    def sums(x_1: jax.Array) -> list[jax.Array]:
        return [jax.lax.psum(x_1, group) for group in groups]

    where = PartitionSpec(axes)
    over_all = jax.shard_map(sums, mesh=mesh, in_specs=where, out_specs=rest)
    ones = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, where), lambda index: np.ones(mesh.size)[index]
    )
    gather("")
    jax.block_until_ready(jax.jit(over_all)(ones))


def any_of(flag: bool) -> bool:
    """True when it is true in at least one process."""
    return flag if count() == 1 else bool(_all(np.array(flag, np.uint8)).any())


def _all(x: np.ndarray) -> np.ndarray:
    """One array of each process, stacked: the only transfers between hosts of host facts."""
    with jax.transfer_guard("allow"):
        return np.asarray(multihost_utils.process_allgather(x))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around local work that may fail in one process alone: either all go on, or all raise.

    The failing one raises its own ValueError, OSError or RuntimeError, the others ProcessError with
    its message. The work within must not gather anything itself.
    """
    if count() == 1:
        yield
        return
    failure, text = None, ""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        failure, text = error, str(error) or type(error).__name__
    texts = gather(text)
    if failure is not None:
        raise failure
    for process, text in enumerate(texts):
        if text:
            raise ProcessError(f"process {process} of {len(texts)}: {text}")


def check_same(facts: Mapping[str, str]) -> None:
    """ProcessError, naming them, when `facts` (name to value) differ between processes."""
    everyone = gather(dict(facts))
    differing = [name for name in facts if len({other.get(name) for other in everyone}) > 1]
    if not differing:
        return
    shown = "; ".join(
        f"{name}: "
        + ", ".join(f"{other.get(name)} in process {i}" for i, other in enumerate(everyone))
        for name in differing
    )
    raise ProcessError(
        f"the processes of this run do not have the same {' and '.join(differing)} ({shown}): "
        "give all the same command line and the same files"
    )


def check_shared(folder: Path) -> None:
    """ProcessError unless all processes see what process 0 writes in `folder`, which is made for
    the time where it is not there."""
    if count() == 1:
        return
    mark = gather(secrets.token_hex(8))[0]
    file, made = folder / MARK, missing(folder)
    with together():
        if first():
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(mark)
    seen = gather(_shows(file, mark))
    if first():
        file.unlink()
        remove_empty(made)
    if not all(seen):
        blind = ", ".join(str(i) for i, sees in enumerate(seen) if not sees)
        raise ProcessError(
            f"{folder}: process {blind} does not see the files that process 0 writes there; "
            "give --workdir on a file system that all hosts share"
        )


def _shows(file: Path, mark: str) -> bool:
    """Whether the file comes to hold `mark`; a network file system may take a while."""
    until = time.monotonic() + SEEN_WITHIN
    while not (file.is_file() and file.read_text() == mark):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
