"""Start of `jax.distributed`: which processes make up this run, from the environment.

A single process starts nothing. Otherwise the first of these that is there counts:

    plain    COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID, or the same with JAX_ in front
    xpk      JAX_COORDINATOR_ADDRESS or JAX_COORDINATOR_IP, JAX_PROCESS_COUNT or NNODES, and
             NODE_RANK or JOB_INDEX x PROCESSES_IN_JOB + JOB_COMPLETION_INDEX
    SLURM    the variables that srun sets for each task
    TPU      TPU_WORKER_HOSTNAMES and TPU_WORKER_ID (GKE), or the metadata of a Cloud TPU VM
"""

import contextlib
import importlib.util
import os
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_jax.core import ending, rendezvous

PORT = 1234  # of the coordinator where none is given
START_TIMEOUT = 300  # seconds to wait for the other processes
GRACE = 60  # seconds after it in which JAX may still wait
HEARTBEAT_TIMEOUT = 100  # seconds after which a silent process counts as dead, which ends all
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


class DistributedError(ending.ProcessError):
    """The environment describes no set of processes that can be started."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and this one among them.

    `coordinator` (host:port) and `index` are None where JAX finds them itself. `local_devices`
    restricts a process to some GPUs of its host, None leaves it all. `counted_by` and `numbered_by`
    name the variables that gave count and index.
    """

    source: str
    count: int
    index: int | None = None
    coordinator: str | None = None
    local_devices: tuple[int, ...] | None = None
    counted_by: str = field(default="", compare=False)
    numbered_by: str = field(default="", compare=False)


def start(
    environ: Mapping[str, str] = os.environ,
    *,
    initialize: Callable[..., Any] | None = None,
    metadata: Callable[[str], str] | None = None,
    agree: Callable[[str, rendezvous.Told, float], None] | None = None,
) -> Processes | None:
    """Start `jax.distributed` for a run of several processes; to be called before any device.

    Returns them, None for a single process. ProcessError when the environment contradicts itself
    or that of another process, or the others do not come within START_TIMEOUT.
    """
    processes = find(environ, metadata or _metadata)
    if processes is None:
        return None
    settings: dict[str, Any] = {
        "initialization_timeout": START_TIMEOUT,
        "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT,
    }
    if processes.coordinator is not None and processes.index is not None:
        told = rendezvous.Told(
            processes.index, processes.count, processes.counted_by, processes.numbered_by
        )
        (agree or rendezvous.agree)(processes.coordinator, told, START_TIMEOUT)
        settings |= {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.count,
            "process_id": processes.index,
            "local_device_ids": processes.local_devices,
            # Otherwise JAX under SLURM leaves a process one GPU, even if it is alone on its node.
            "cluster_detection_method": "deactivate",
        }
    lost = (
        f"{processes.source}: the {processes.count} processes did not find together (%s); start "
        "all of them, with the same coordinator, whose port all hosts must reach"
    )
    try:
        with _bounded(START_TIMEOUT, lost % f"within {START_TIMEOUT} s"):
            (initialize or _initialize)(**settings)
    except RuntimeError as error:
        raise DistributedError(lost % str(error).splitlines()[0]) from error
    return processes


@contextlib.contextmanager
def _bounded(seconds: float, why: str) -> Iterator[None]:
    """Ends this process with `why` and exit code 2 when what is within takes longer."""

    def give_up() -> None:
        print(f"sage_jax: {why}", file=sys.stderr)
        ending.end_now(2)

    watch = threading.Timer(seconds, give_up)
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _initialize(**settings: Any) -> None:
    import jax  # a single process need not wait for it
    from jax._src import distributed  # the only way to the client, which Orbax takes as well

    # It would take SIGTERM for itself, on which a run of ours saves.
    jax.config.update("jax_enable_preemption_service", False)
    # Its own end would be an abort.
    settings["initialization_timeout"] += GRACE
    jax.distributed.initialize(**settings)
    ending.watch(distributed.global_state.client, distributed.global_state.process_id)


def find(
    environ: Mapping[str, str], metadata: Callable[[str], str] | None = None
) -> Processes | None:
    """The processes that `environ` names, None when this one is alone.

    `metadata(key)` gives an instance attribute of a Cloud TPU VM, "" where there is none; None
    leaves it unasked. DistributedError when values are missing, malformed or contradictory.
    """
    for look in (_plain, _xpk, _slurm, _tpu_gke):
        if (found := look(environ)) is not None:
            return found if found.count > 1 else None
    if metadata is not None and _on_tpu_vm(environ):
        found = _tpu_vm(metadata)
        return found if found.count > 1 else None
    if coordinator := _same(environ, "COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"):
        raise DistributedError(
            f"{'='.join(coordinator)}, but NUM_PROCESSES and PROCESS_ID are not set: set all "
            "three, or none"
        )
    return None


def _plain(environ: Mapping[str, str]) -> Processes | None:
    coordinator = _same(environ, "COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
    count = _same(environ, "NUM_PROCESSES", "JAX_NUM_PROCESSES")
    index = _same(environ, "PROCESS_ID", "JAX_PROCESS_ID")
    if count is None and index is None:
        return None
    return _explicit("environment", environ, coordinator, count, index, "PROCESS_ID")


def _xpk(environ: Mapping[str, str]) -> Processes | None:
    coordinator = _same(environ, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
    count = _same(environ, "JAX_PROCESS_COUNT", "NNODES")
    if coordinator is None or count is None:
        return None
    index = _same(environ, "NODE_RANK")
    if index is None and environ.get("JOB_COMPLETION_INDEX"):
        within = _integer(environ, "JOB_COMPLETION_INDEX")
        job = _integer(environ, "JOB_INDEX") if environ.get("JOB_INDEX") else 0
        size = _integer(environ, "PROCESSES_IN_JOB", least=1) if job else 1
        name = "JOB_INDEX and JOB_COMPLETION_INDEX" if job else "JOB_COMPLETION_INDEX"
        index = (name, str(job * size + within))
    name = "NODE_RANK or JOB_COMPLETION_INDEX"
    return _explicit("xpk", environ, coordinator, count, index, name)


def _explicit(
    source: str,
    environ: Mapping[str, str],
    coordinator: tuple[str, str] | None,
    count: tuple[str, str] | None,
    index: tuple[str, str] | None,
    index_name: str,
) -> Processes:
    """Processes of (variable, value) pairs. DistributedError where they do not fit together."""
    if count is None:
        named = "=".join(index or ())
        raise DistributedError(f"{named}, but NUM_PROCESSES is not set: set both, or neither")
    total = _integer(dict([count]), count[0], least=1)
    if total == 1:
        return Processes(source, 1)
    if index is None:
        raise DistributedError(
            f"{count[0]}={total}, but {index_name} is not set: give each process its number, "
            f"0 to {total - 1}"
        )
    number = _integer(dict([index]), index[0])
    if number >= total:
        raise DistributedError(
            f"{index[0]}={number} with {count[0]}={total}: processes are numbered 0 to {total - 1}"
        )
    if coordinator is None:
        raise DistributedError(
            f"{count[0]}={total}, but COORDINATOR_ADDRESS is not set: give the host:port of "
            "process 0, the same in every process"
        )
    address = _address(environ, *coordinator)
    return Processes(source, total, number, address, None, count[0], index[0])


def _address(environ: Mapping[str, str], name: str, value: str) -> str:
    """host:port of the coordinator; the port may stand in a variable of its own."""
    known = re.fullmatch(r"(\[[^\[\]]+\]|[^:\s]+)(?::(\d+))?", value)
    port = known and (known[2] or environ.get("JAX_COORDINATOR_PORT") or PORT)
    if not known or not str(port).isdecimal() or not 0 < int(port or 0) < 65536:
        raise DistributedError(
            f"{name}={value}: must be host:port, such as 10.0.0.1:{PORT} (an IPv6 host in "
            "brackets); JAX_COORDINATOR_PORT may hold the port"
        )
    return f"{known[1]}:{port}"


def _slurm(environ: Mapping[str, str]) -> Processes | None:
    # A batch script and a shell of salloc have the task count too; only a step has a node list.
    if not environ.get("SLURM_STEP_NODELIST") or not environ.get("SLURM_PROCID"):
        return None
    name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    count, index = _integer(environ, name, least=1), _integer(environ, "SLURM_PROCID")
    if count == 1:
        return Processes("SLURM", 1)
    if index >= count:
        raise DistributedError(
            f"SLURM_PROCID={index} with {name}={count}: tasks are numbered 0 to {count - 1}; start "
            "the program with srun, and unset variables of an outer job"
        )
    host = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", environ["SLURM_STEP_NODELIST"])
    if not host:
        raise DistributedError(
            f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']}: names no node; set "
            "COORDINATOR_ADDRESS, NUM_PROCESSES and PROCESS_ID yourself"
        )
    # A port of the ephemeral range that two jobs on one node rarely share.
    port = 61440 + _integer(environ, "SLURM_JOB_ID") % 4096
    given = _same(environ, "COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS")
    coordinator = f"{host[1]}{host[2] or ''}:{environ.get('JAX_COORDINATOR_PORT') or port}"
    address = _address(environ, *(given or ("JAX_COORDINATOR_PORT", coordinator)))
    return Processes("SLURM", count, index, address, _slurm_devices(environ), name, "SLURM_PROCID")


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """All GPUs for the only task of a node; else the one of its local number.

    A task that SLURM has bound to one GPU sees that one alone, as number 0.
    """
    # "2(x3),1" is two tasks on each of three nodes and one on a fourth.
    tasks = re.sub(r"\(x\d+\)", "", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    if set(tasks.split(",")) <= {"", "1"} or (visible and "," not in visible):
        return None
    return (_integer(environ, "SLURM_LOCALID"),)


def _tpu_gke(environ: Mapping[str, str]) -> Processes | None:
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not hosts or not _wants_tpu(environ):
        return None
    per_slice = len(hosts.split(","))
    several = environ.get("MEGASCALE_NUM_SLICES")
    slices = _integer(environ, "MEGASCALE_NUM_SLICES", least=1) if several else 1
    if per_slice > 1:
        worker = _integer(environ, "TPU_WORKER_ID")
        if worker >= per_slice:
            raise DistributedError(
                f"TPU_WORKER_ID={worker} with {per_slice} hosts in TPU_WORKER_HOSTNAMES={hosts}: "
                f"workers are numbered 0 to {per_slice - 1}; unset what an earlier slice left"
            )
    return Processes("Cloud TPU", per_slice * slices)


def _wants_tpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    return not platforms or "tpu" in platforms.split(",")


def _on_tpu_vm(environ: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """True where TPU chips and their library are: only there is the metadata worth asking for."""
    chips = [*devices.glob("accel[0-9]*"), *devices.glob("vfio/[0-9]*")]
    library = importlib.util.find_spec("libtpu") is not None
    return bool(chips) and library and _wants_tpu(environ) and not environ.get("TPU_SKIP_MDS_QUERY")


def _tpu_vm(metadata: Callable[[str], str]) -> Processes:
    hosts = [host for host in metadata("worker-network-endpoints").split(",") if host]
    slices = re.search(r"^\s*MEGASCALE_NUM_SLICES:\s*'?(\d+)", metadata("tpu-env"), re.MULTILINE)
    return Processes("Cloud TPU", max(len(hosts), 1) * (int(slices[1]) if slices else 1))


def _metadata(key: str) -> str:
    """Attribute of this Google Cloud instance; "" when it or the server is not there."""
    request = urllib.request.Request(_METADATA + key, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return ""


def _same(environ: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    """(variable, value) of the first of `names` that is set; an error when they differ."""
    found = [(name, environ[name]) for name in names if environ.get(name)]
    if len({value for _, value in found}) > 1:
        (a, x), (b, y) = found[:2]
        raise DistributedError(f"{a}={x} but {b}={y}: they mean the same; unset one of them")
    return found[0] if found else None


def _integer(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    value = environ.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < least:
        shown = f"{name}={value}" if value else f"{name} is not set"
        raise DistributedError(f"{shown}: must be a whole number of at least {least}")
    return int(value)
