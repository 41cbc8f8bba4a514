"""Bytes that a compiled program moves to and from HBM, read from its text.

`cost_analysis()["bytes accessed"]` is another thing: a weight that is brought into the chip's own
memory ahead of its use counts there when copied in and again when read, an array of which a fusion
reads a slice may count whole, and the body of a loop counts once. Here an array in another memory
space than HBM (S(1) in its layout) costs nothing, slices and in-place updates count as what is
sliced or updated, loops as often as they run. Sizes are those of the shapes, padding apart.
"""

import re
from collections.abc import Iterator

from sage_jax.core.hlo import Instruction, Program, shape_bytes

_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_FREE = (
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "iota"),
    *("while", "conditional", "call", "partition-id", "replica-id"),
)
_SLICES = ("slice", "dynamic-slice", "gather")


def hbm_bytes(program: Program, inside: str = "") -> float:
    """Bytes of one call of the program, on one device; with `inside` only of what stands in the
    computation of this name or in loops and branches below it. Both branches of a conditional
    count; a loop whose trips depend on data counts once."""
    walk = program.walk(inside) if inside else program.walk()
    return float(sum(times * moved(program, name, i) for name, i, times in walk))


def step_bytes(program: Program) -> tuple[float, float]:
    """Bytes of one step and of all else, of a program whose largest loop runs steps until there is
    nothing to do: so long a loop counts once."""
    loops = [i for i in program.computations[program.entry].values() if i.opcode == "while"]
    step = max((hbm_bytes(program, loop.named("body")) for loop in loops), default=0.0)
    return step, hbm_bytes(program) - step


def moved(program: Program, computation: str, instruction: Instruction) -> int:
    """Bytes that one instruction reads and writes."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    body = program.computations[computation]
    if opcode.endswith("-start"):
        return _transfer(instruction)
    shapes = [body[name].shape if name in body else "" for name in instruction.operands]
    if opcode in _SLICES:
        return _in_hbm(instruction.shape) + min(_in_hbm(shapes[0]), instruction.bytes)
    if opcode == "dynamic-update-slice":
        part = shape_bytes(shapes[1])
        return _in_hbm(shapes[1]) + min(_in_hbm(instruction.shape), part)
    if opcode != "fusion":
        return _in_hbm(instruction.shape) + sum(_in_hbm(shape) for shape in shapes)
    fused = instruction.named("calls")
    reads = sum(
        min(_in_hbm(shape), _read(program, fused, number)) for number, shape in enumerate(shapes)
    )
    return int(reads) + _written(program, fused, instruction.shape)


def _in_hbm(shape: str) -> int:
    """Bytes of the arrays of a shape that no layout puts into another memory space."""
    return sum(shape_bytes(text) for text in _ARRAY.findall(shape) if "S(" not in text)


def _transfer(start: Instruction) -> int:
    """Of an asynchronous copy or slice, whose shape is (to, from, ...) or ((from), to, ...)."""
    arrays = _ARRAY.findall(start.shape)
    if start.opcode == "copy-start":
        to, source = arrays[:2]
        return _in_hbm(to) + _in_hbm(source)
    if start.opcode in ("slice-start", "dynamic-slice-start"):
        result = next(text for text in arrays[::-1] if shape_bytes(text) > 4)
        return _in_hbm(result) + min(_in_hbm(arrays[0]), shape_bytes(result))
    return sum(_in_hbm(text) for text in arrays)


def _parameter(body: dict[str, Instruction], number: int) -> str:
    return next(
        i.name for i in body.values() if i.opcode == "parameter" and i.rest.startswith(f"{number})")
    )


def _read(program: Program, fused: str, number: int) -> float:
    """Bytes that a fusion reads of its operand `number`; infinite where it reads all of it."""
    body = program.computations[fused]
    return sum(_uses(program, body, _parameter(body, number)))


def _uses(program: Program, body: dict[str, Instruction], name: str) -> Iterator[float]:
    """Bytes read of `name` by each of its users."""
    if body[name].root:
        yield float("inf")
    for user in body.values():
        for place in [i for i, operand in enumerate(user.operands) if operand == name]:
            if user.opcode == "bitcast":
                yield from _uses(program, body, user.name)
            elif user.opcode in _SLICES and place == 0:
                yield user.bytes
            elif user.opcode == "fusion":
                yield _read(program, user.named("calls"), place)
            elif user.opcode != "dynamic-update-slice" or place:
                yield float("inf")


def _written(program: Program, fused: str, shape: str) -> int:
    """Bytes that a fusion writes: of an array updated in place its new part only."""
    body = program.computations[fused]
    root = next(i for i in body.values() if i.root)
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0
    for text, result in zip(_ARRAY.findall(shape), results, strict=False):
        while result.opcode == "bitcast" and result.operands[0] in body:
            result = body[result.operands[0]]
        part = shape_bytes(text)
        if result.opcode == "dynamic-update-slice":
            part = body[result.operands[1]].bytes
        total += min(_in_hbm(text), part)
    return total
