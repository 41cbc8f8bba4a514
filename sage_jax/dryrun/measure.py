"""Compile one program of a step and read off what it takes."""

import re
import time
from dataclasses import dataclass, field
from typing import Any

import jax

from sage_jax.core import flops, hlo
from sage_jax.dryrun.programs import Abstract, bytes_per_chip

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = (
    re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm"),
    re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)B?\)"),
)
_ALLOCATION = re.compile(
    r"Size: ([\d.]+)([KMGT]?)\s+(?:Operator: op_name=\"([^\"]*)\")?.*?Shape: (\S+)", re.S
)


@dataclass(frozen=True)
class Measured:
    """What the compiler says of one program, in bytes on one device and in seconds.

    `beside` is what a run holds at that time that is no argument. `flops` are those of the traced
    program on all devices, recomputation included, `counted_flops` what the compiler counts on one
    device, loop bodies once. `error` holds the compiler's words where it refuses the program, most
    often for its memory: the rest is then partly unknown, and temporaries are 0 if they are.
    """

    name: str
    compile_seconds: float
    arguments: int
    temporaries: int
    beside: int
    flops: int = 0
    counted_flops: float = 0.0
    code: int = 0
    collectives: list[hlo.Collective] = field(default_factory=list)
    largest: list[hlo.Buffer] = field(default_factory=list)
    error: str = ""

    @property
    def total(self) -> int:
        """Bytes on a device while the program runs."""
        return self.arguments + self.temporaries + self.code + self.beside

    @property
    def collective_bytes(self) -> int:
        return sum(c.bytes for c in self.collectives)


def measure(program: Abstract, buffers: int = 3) -> Measured:
    """Trace, lower and compile; the largest `buffers` arrays are kept."""
    traced = program.trace()
    counted = round(flops.count(traced.jaxpr, program.kernel_share))
    beside = bytes_per_chip(program.beside)
    arguments = bytes_per_chip(program.arguments)
    lowered = traced.lower()
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _needed(str(error)) or 0
        return Measured(
            name=program.name,
            compile_seconds=time.monotonic() - started,
            arguments=arguments,
            temporaries=max(needed - arguments, 0),
            beside=beside,
            flops=counted,
            largest=_largest_allocations(str(error), buffers),
            error=str(error).strip().split("\n")[0] or type(error).__name__,
        )
    seconds = time.monotonic() - started
    memory: Any = compiled.memory_analysis()
    text = hlo.Program(compiled.as_text() or "")
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    analysis: Any = compiled.cost_analysis() or {}
    return Measured(
        name=program.name,
        compile_seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes + output,
        beside=beside,
        flops=counted,
        counted_flops=float(analysis.get("flops", 0.0)),
        code=memory.generated_code_size_in_bytes,
        collectives=text.collectives(),
        largest=text.largest(buffers),
    )


def _needed(message: str) -> int | None:
    """Bytes that a program would need, from the compiler's refusal."""
    for pattern in _NEEDED:
        if match := pattern.search(message):
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def _largest_allocations(message: str, count: int) -> list[hlo.Buffer]:
    found = [
        hlo.Buffer(int(float(size) * _UNITS[unit]), shape, (source or "").split(")/", 1)[-1])
        for size, unit, source, shape in _ALLOCATION.findall(message)
    ]
    return sorted(found, key=lambda b: -b.bytes)[:count]
