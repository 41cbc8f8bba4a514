"""The accelerators that a dry run knows, and the devices behind the name of a topology.

Peaks are those of the makers' data sheets (cloud.google.com/tpu/docs, nvidia.com), of what JAX
shows as one device. HBM is what the TPU compiler grants to a program, a little less than is built
in.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from sage_jax.spelling import hint

GIB = 2**30
# Without a TPU libtpu asks for where it runs and complains at length; programs are compiled only.
_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is locked by a compile
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_STDERR_LOG_LEVEL": "4",
    "TPU_MIN_LOG_LEVEL": "4",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
INSTALL = 'pip install "sage_jax[dryrun]" (from a checkout: pip install -e ".[dryrun]")'


@dataclass(frozen=True)
class Chip:
    """One device: HBM in bytes, bf16 FLOP/s, HBM bytes/s, and bytes/s that a collective along one
    mesh axis moves out of it (on a torus two links, one each way). A rate of 0 is not known."""

    name: str
    hbm: int
    flops: float = 0.0
    hbm_rate: float = 0.0
    link_rate: float = 0.0
    cores: int = 1

    @property
    def timed(self) -> bool:
        """Whether its rates are known."""
        return min(self.flops, self.hbm_rate, self.link_rate) > 0


# A tpu7x chip is two devices; a v4 chip is one (its two cores work as one).
TPUS = {
    "v4": Chip("v4", int(30.75 * GIB), 275e12, 1228e9, 100e9, 2),
    "v5e": Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 100e9, 1),
    "v5p": Chip("v5p", int(95.74 * GIB), 459e12, 2765e9, 200e9, 2),
    "v6e": Chip("v6e", int(31.25 * GIB), 918e12, 1638e9, 200e9, 1),
    "tpu7x": Chip("tpu7x", int(94.75 * GIB), 1153e12, 3690e9, 200e9, 1),
}
# By a word of the device's name; HBM is asked of the device. Links: NVLink, one way.
GPUS = {
    "A100": Chip("A100", 0, 312e12, 2039e9, 300e9),
    "H100": Chip("H100", 0, 989e12, 3350e9, 450e9),
    "H200": Chip("H200", 0, 989e12, 4800e9, 450e9),
    "B200": Chip("B200", 0, 2250e12, 8000e9, 900e9),
}
TOPOLOGIES = (
    "v5e:2x4",
    "v5e:4x4",
    "v5e:8x8",
    "v5p:2x2x1",
    "v5p:2x2x2",
    "v5p:2x2x4",
    "v6e:2x4",
    "v6e:4x4",
    "v6e:8x8",
    "v4:2x2x2",
    "tpu7x:2x2x1",
)


def describe() -> str:
    """The names that `find` takes, for messages."""
    return f"{', '.join(TOPOLOGIES)}, cpu:N (N fake devices) or gpu (those of this machine)"


def find(name: str) -> tuple[Sequence[Any], Chip]:
    """Devices to compile for, none of them needed here unless `name` is gpu, and what one is like.

    ValueError, with the valid names or what to install, for anything else. Call it before JAX has
    looked for devices.
    """
    if name in TOPOLOGIES:
        return _tpu_devices(name), TPUS[name.split(":")[0]]
    if name == "gpu":
        return _gpu_devices()
    kind, _, count = name.partition(":")
    if kind == "cpu" and count.isdecimal() and 0 < int(count) <= 1024:
        devices = _cpu_devices(int(count))
        return devices, Chip("cpu", _host_memory() // len(devices))
    near = hint(name, (*TOPOLOGIES, "gpu", "cpu:8"))
    raise ValueError(f"--topology={name}: choose one of {describe()}{near}")


def _tpu_devices(name: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"--topology={name}: the TPU compiler (libtpu) is not installed here; {INSTALL}"
        )
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    # Imported late: it looks for the library at once.
    from jax.experimental import topologies

    options = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    return topologies.get_topology_desc(name, platform="tpu", **options).devices


def _gpu_devices() -> tuple[Sequence[Any], Chip]:
    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        raise ValueError(
            f"--topology=gpu: JAX finds no GPU here ({error}); choose one of {describe()}"
        ) from error
    hbm = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    kind = devices[0].device_kind
    known = next((chip for word, chip in GPUS.items() if word in kind), Chip(kind, 0))
    return devices, Chip(kind, hbm, known.flops, known.hbm_rate, known.link_rate)


def _host_memory() -> int:
    """Bytes of this machine, 0 where the system does not say."""
    try:
        return max(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0)
    except (OSError, ValueError):
        return 0


def _cpu_devices(count: int) -> Sequence[Any]:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already: they may be enough
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"--topology=cpu:{count}: JAX already runs with {len(devices)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]
