"""What a compiled program does, read from its text: collectives and the largest buffers.

The compiler's own cost analysis counts the body of a loop once. Here the trip count of a loop is
found in its condition, and what stands in the body counts that often.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

WIDTHS = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1,
    "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
    "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
# What names or moves a buffer that is there already.
_VIEWS = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "constant")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|async_wrapped)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_GROUP = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])")
_MESH_GROUP = re.compile(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One line: its name, the text of its shape, opcode, operands and attributes."""

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool

    @property
    def bytes(self) -> int:
        return shape_bytes(self.shape)

    @property
    def operands(self) -> list[str]:
        depth, end = 1, len(self.rest)
        for i, char in enumerate(self.rest):
            depth += (char == "(") - (char == ")")
            if depth == 0:
                end = i
                break
        return re.findall(r"%([\w.\-]+)", self.rest[:end])

    @property
    def called(self) -> list[str]:
        names = _CALLED.findall(self.rest)
        for group in _BRANCHES.findall(self.rest):
            names += re.findall(r"%?([\w.\-]+)", group)
        return names

    def named(self, role: str) -> str:
        """The computation that this instruction has as its body or condition."""
        match = re.search(rf"\b{role}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def index(self) -> int:
        match = re.search(r"index=(\d+)", self.rest)
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind: how many run in one call of the program, and the bytes that one
    device receives in them."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Buffer:
    """An array made by the program: bytes on one device, its shape and which source it is from."""

    bytes: int
    shape: str
    source: str


def shape_bytes(text: str) -> int:
    """Bytes of all arrays in a shape, tuples included."""
    return sum(
        WIDTHS.get(kind, 0) * math.prod(int(d) for d in dims.split(",") if d)
        for kind, dims, _ in _SHAPE.findall(text)
    )


class Program:
    """The computations of an optimised HLO module."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        self._caller: dict[str, tuple[str, Instruction]] = {}
        lines: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _HEADER.match(line):
                lines = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif match := _LINE.match(line):
                root = line.lstrip().startswith("ROOT ")
                lines[match[1]] = Instruction(match[1], match[2], match[3], match[4], root)
        for name, body in self.computations.items():
            for instruction in body.values():
                for called in instruction.called:
                    self._caller.setdefault(called, (name, instruction))

    def trips(self, computation: str, loop: Instruction) -> int:
        """How often a while loop runs; 1 where that depends on data."""
        condition = self.computations.get(loop.named("condition"), {})
        compare = next((i for i in condition.values() if i.root), None)
        where = loop.named("condition")
        if compare is not None and compare.opcode == "fusion":
            where = compare.named("calls")
            inside = self.computations.get(where, {})
            compare = next((i for i in inside.values() if i.root), None)
        if compare is None or compare.opcode != "compare":
            return 1
        direction = re.search(r"direction=(\w+)", compare.rest)
        bounds = [self._constant(where, name) for name in compare.operands]
        known = [bound for bound in bounds if bound is not None]
        if direction is None or direction[1] not in ("LT", "GT", "NE") or len(known) != 1:
            return 1
        return max(known[0], 1)

    def _constant(self, computation: str, name: str, depth: int = 0) -> int | None:
        """The value of a scalar that does not change from one trip to the next, if it is known."""
        body = self.computations.get(computation, {})
        instruction = body.get(name)
        if instruction is None or depth > 40:
            return None
        if instruction.opcode == "constant":
            match = re.match(r"\s*(-?\d+)\)", instruction.rest)
            return int(match[1]) if match else None
        if instruction.opcode in ("copy", "bitcast", "convert", "reshape", "copy-done"):
            return self._constant(computation, instruction.operands[0], depth + 1)
        if instruction.opcode == "parameter":
            return self._argument(computation, int(instruction.rest.split(")")[0]), depth)
        if instruction.opcode == "get-tuple-element":
            return self._element(computation, instruction, depth)
        return None

    def _argument(self, computation: str, number: int, depth: int) -> int | None:
        outer, caller = self._caller.get(computation, ("", None))
        if caller is None or caller.opcode != "fusion":
            return None
        return self._constant(outer, caller.operands[number], depth + 1)

    def _element(self, computation: str, element: Instruction, depth: int) -> int | None:
        source = self.computations[computation].get(element.operands[0])
        if source is None:
            return None
        if source.opcode == "parameter":
            outer, loop = self._caller.get(computation, ("", None))
            if loop is None or loop.opcode != "while":
                return None
            if not self._carried(loop, element.index):
                return None
            source = self.computations[outer].get(loop.operands[0])
            computation = outer
        if source is None or source.opcode != "tuple":
            return None
        return self._constant(computation, source.operands[element.index], depth + 1)

    def _carried(self, loop: Instruction, index: int) -> bool:
        """Whether element `index` of a loop's state leaves the body as it came in."""
        body = self.computations.get(loop.named("body"), {})
        root = next((i for i in body.values() if i.root), None)
        if root is None or root.opcode != "tuple":
            return False
        name, seen = root.operands[index], 0
        while (now := body.get(name)) is not None and now.opcode in ("copy", "bitcast"):
            name, seen = now.operands[0], seen + 1
            if seen > 8:
                return False
        now = body.get(name)
        return now is not None and now.opcode == "get-tuple-element" and now.index == index

    def walk(self, start: str = "") -> Iterator[tuple[str, Instruction, int]]:
        """Computation, instruction and how often it runs, from the entry or computation `start`
        on; the inside of fusions is left out."""
        stack: list[tuple[str, int]] = [(start or self.entry, 1)]
        while stack:
            computation, times = stack.pop()
            for instruction in self.computations.get(computation, {}).values():
                yield computation, instruction, times
                if instruction.opcode == "while":
                    trips = self.trips(computation, instruction)
                    stack.append((instruction.named("body"), times * trips))
                elif instruction.opcode in ("call", "conditional", "async-start"):
                    stack += [(name, times) for name in instruction.called]

    def collectives(self) -> list[Collective]:
        """By kind: all-gather counts what comes in from the others, all-reduce twice its share."""
        found: dict[str, list[int]] = {}
        channels: set[str] = set()
        for _, instruction, times in self.walk():
            subject = _fused_collective(self, instruction) or instruction
            kind = subject.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            # One that runs beside other work stands in several fusions, on one channel.
            if channel := re.search(r"channel_id=(\d+)", subject.rest):
                if channel[1] in channels:
                    continue
                channels.add(channel[1])
            entry = found.setdefault(kind, [0, 0])
            entry[0] += times
            entry[1] += times * _received(subject)
        return [Collective(kind, *found[kind]) for kind in sorted(found)]

    def largest(self, count: int) -> list[Buffer]:
        """The largest arrays that the program makes, one of each shape and source."""
        seen: dict[tuple[str, str], Buffer] = {}
        for _, instruction, _ in self.walk():
            in_place = re.search("dynamic-update-slice|scatter", instruction.name)
            if instruction.opcode in _VIEWS or instruction.shape.startswith("(") or in_place:
                continue
            name = re.search(r'op_name="([^"]*)"', instruction.rest)
            source = name[1].split(")/", 1)[-1] if name else instruction.opcode
            shape = _SHAPE.match(instruction.shape)
            text = f"{shape[1]}[{shape[2]}]" if shape else instruction.shape
            seen[text, source] = Buffer(instruction.bytes, text, source)
        return sorted(seen.values(), key=lambda b: (-b.bytes, b.shape, b.source))[:count]


def _fused_collective(program: Program, instruction: Instruction) -> Instruction | None:
    """The collective inside a fusion of its own, as the TPU compiler writes some of them."""
    if instruction.opcode != "fusion":
        return None
    inside = program.computations.get(instruction.named("calls"), {})
    return next((i for i in inside.values() if i.opcode in COLLECTIVES), None)


def _received(instruction: Instruction) -> int:
    """Bytes that one device receives."""
    size = _group_size(instruction.rest)
    kind, whole = instruction.opcode.removesuffix("-start"), instruction.bytes
    if instruction.opcode.endswith("-start") and instruction.shape.startswith("("):
        # The tuple holds operand and result (and, of a permute, two words).
        parts = [shape_bytes(s[0]) for s in re.finditer(_SHAPE, instruction.shape)]
        whole = max(parts)
    share = (size - 1) / size
    if kind == "all-reduce":
        return int(2 * whole * share)
    if kind == "reduce-scatter":
        return int(whole * (size - 1))
    return whole if kind == "collective-permute" else int(whole * share)


def _group_size(rest: str) -> int:
    """Devices that take part in one collective."""
    if mesh := _MESH_GROUP.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return max(math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2])), 1)
    if group := _GROUP.search(rest):
        return group[1].count(",") + 1 if group[1] else int(group[3])
    return 2
