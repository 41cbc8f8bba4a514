"""Device mesh, and the one table that maps logical array axes to mesh axes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

AXES = ("data", "fsdp", "tensor")

MeshAxes = str | tuple[str, ...] | None

UPDATE_RULES: Mapping[str, MeshAxes] = {
    "batch": ("data", "fsdp"),
    "seq": None,
    "embed": "fsdp",
    "q_heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "vocab": "tensor",
    "layers": None,
    "lora_rank": "fsdp",
    # Embedding and head meet rows that fsdp shards no more, so that it shards them instead: neither
    # the [vocab, embed] weights nor their gradients are ever gathered.
    "outer_batch": "data",
    "all_vocab": ("tensor", "fsdp"),
}
# Where a pass holds rows enough for all devices, the tensor axis splits rows and weights further
# and devices exchange weights alone; to exchange what each layer gives moves several times more.
ROWS_RULES: Mapping[str, MeshAxes] = {
    **UPDATE_RULES,
    **dict.fromkeys(("q_heads", "kv_heads", "mlp", "vocab")),
    "batch": AXES,
    "embed": ("fsdp", "tensor"),
    "lora_rank": ("fsdp", "tensor"),
}
# A decode step reads every weight once for one token a row: gathering fsdp shards each time would
# cost more than the read itself, so decoding keeps whole weights but for the tensor axis.
DECODE_RULES: Mapping[str, MeshAxes] = {
    **UPDATE_RULES,
    "embed": None,
    "lora_rank": None,
    "outer_batch": ("data", "fsdp"),
    "all_vocab": "tensor",
}


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Mesh of shape [data, fsdp, tensor] over `devices` (default: all of this run).

    One size may be -1 and takes the devices that remain. ValueError when the sizes do not use up
    the devices exactly.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise ValueError(f"mesh.{axis} is {size}: give a positive size, or -1 for the rest")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"mesh axes {open_axes} are all -1: only one can take the rest")
    known = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        sizes[open_axes[0]] = len(devices) // known
    if known > len(devices) or math.prod(sizes.values()) != len(devices):
        shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        remedy = (
            f"choose the other sizes so that their product {known} divides {len(devices)}"
            if open_axes
            else "set one of the sizes to -1"
        )
        raise ValueError(f"mesh {shape} does not fit {len(devices)} devices: {remedy}")
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


@dataclass(frozen=True)
class Layout:
    """Where arrays live: a mesh, and the rules from logical axes to its axes.

    Hashable, so that a jitted function can take it as a static argument.
    """

    mesh: Mesh
    rules: Mapping[str, MeshAxes]

    def __hash__(self) -> int:
        return hash((self.mesh, tuple(sorted(self.rules.items()))))

    def sharding(
        self, axes: Sequence[str | None], shape: Sequence[int] | None = None
    ) -> NamedSharding:
        """Sharding of an array whose dimensions carry the logical `axes` (None: replicated).

        ValueError on an unknown axis, on a mesh axis used by two dimensions, and, where `shape` is
        given, on a dimension that its mesh axes do not divide.
        """
        if shape is not None and len(shape) != len(axes):
            raise ValueError(f"{len(axes)} axes {tuple(axes)} for an array of shape {shape}")
        taken: dict[str, str] = {}
        spec: list[MeshAxes] = []
        for dim, axis in enumerate(axes):
            mesh_axes = self._mesh_axes(axis)
            for mesh_axis in mesh_axes:
                if mesh_axis in taken:
                    raise ValueError(
                        f"mesh axis '{mesh_axis}' would shard both '{taken[mesh_axis]}' and "
                        f"'{axis}' of {tuple(axes)}: map one of them to None in the rules"
                    )
                taken[mesh_axis] = str(axis)
            parts = self.parts(axis)
            if shape is not None and shape[dim] % parts:
                raise ValueError(
                    f"axis '{axis}' of size {shape[dim]} is not divisible by mesh axis "
                    f"{'*'.join(mesh_axes)} of size {parts}: change the mesh, or map '{axis}' to "
                    "None in the rules"
                )
            spec.append(mesh_axes or None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def parts(self, axis: str | None) -> int:
        """How many shards the mesh makes of a logical axis."""
        return math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self._mesh_axes(axis))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, held under jit to the sharding of its logical `axes`."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def divides(self, axis: str, size: int) -> bool:
        """Whether the mesh axes of the logical `axis` divide a dimension of `size`."""
        return size % math.prod(self.mesh.shape[name] for name in self._mesh_axes(axis)) == 0

    def _mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        if axis is None:
            return ()
        if axis not in self.rules:
            raise ValueError(f"unknown logical axis '{axis}': the rules know {sorted(self.rules)}")
        rule = self.rules[axis]
        mesh_axes = (rule,) if isinstance(rule, str) else tuple(rule or ())
        for mesh_axis in mesh_axes:
            if mesh_axis not in self.mesh.shape:
                raise ValueError(
                    f"rule '{axis}' -> '{mesh_axis}': the mesh has axes {self.mesh.axis_names}"
                )
        return mesh_axes


def put(tree: Any, where: Any = None) -> Any:
    """Host arrays on devices: `where` is a sharding or a tree of them, None the default device.

    On several processes each holds the same arrays and sends its own devices their part only.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, where)
    places = jax.tree.map(lambda _: where, tree) if isinstance(where, Sharding) else where
    with jax.transfer_guard("allow"):
        return jax.tree.map(_put_parts, tree, places)


def _put_parts(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def whole(x: jax.Array) -> np.ndarray:
    """All of an array on the host. On several processes all must call it: their devices send each
    other the parts that are missing."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
