"""How many slots and rows fit, and what is the smallest change that makes a run fit.

Memory grows in a straight line with slots and with rows of a pass: two compiles give the line, a
third confirms the choice. What a program's neighbours take is counted, not compiled.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_collections

from sage_jax.core.chips import Chip
from sage_jax.dryrun.measure import Measured, measure
from sage_jax.dryrun.programs import StepPrograms, bytes_per_chip

SHARE = 0.9  # of HBM that a program may take: the rest is for fragments and the runtime

Build = Callable[[Any], StepPrograms]


@dataclass(frozen=True)
class Choice:
    """A value found for a field, and the program that was compiled with it and fits."""

    field: str
    value: int
    confirmed: Measured | None


def with_fields(config: Any, **fields: Any) -> ml_collections.FrozenConfigDict:
    """The config with other values; '__' stands for the dot of a name."""
    changed: Any = ml_collections.ConfigDict(config.to_dict())
    for name, value in fields.items():
        group, leaf = name.split("__")
        changed[group][leaf] = value
    return ml_collections.FrozenConfigDict(changed)


def limit(chip: Chip) -> int:
    """Bytes that a program may take."""
    return int(SHARE * chip.hbm)


def misfits(measured: dict[str, Measured], chip: Chip) -> list[str]:
    """The programs that take more, most of all first."""
    over = [m for m in measured.values() if m.total > limit(chip) or m.error]
    return [m.name for m in sorted(over, key=lambda m: -m.total)]


def most_slots(
    config: Any, build: Build, chip: Chip, measured: dict[str, Measured], unit: int, rows: int
) -> Choice:
    """The most slots that fit beside everything else, a multiple of `unit`, at most `rows`."""
    slots = config.rollout.slots
    base = measured["decode"]
    other = 2 * slots if base.total <= limit(chip) / 2 else slots + unit
    second = measure(build(with_fields(config, rollout__slots=other)).decode())
    slope = max((second.total - base.total) / (other - slots), 1.0)
    # The others keep slots beside them: their room for more, at what the slots alone take.
    alone = bytes_per_chip(build(config).slots()) / slots
    room = [(limit(chip) - base.total) / slope]
    room += [(limit(chip) - m.total) / alone for name, m in measured.items() if name != "decode"]
    value = int(slots + min(room)) // unit * unit
    value = min(value, -(-rows // unit) * unit)
    if value < unit:
        return Choice("rollout.slots", 0, None)
    known = {slots: base, other: second}
    if value not in known:
        known[value] = measure(build(with_fields(config, rollout__slots=value)).decode())
    return _largest("rollout.slots", known, value, chip)


def _largest(field: str, known: dict[int, Measured], most: int, chip: Chip) -> Choice:
    """The largest value up to `most` whose program was compiled and fits; memory may bend."""
    fitting = [v for v, m in known.items() if v <= most and not m.error and m.total <= limit(chip)]
    return Choice(field, max(fitting), known[max(fitting)]) if fitting else Choice(field, 0, None)


def most_micro_rows(
    config: Any, build: Build, chip: Chip, measured: Measured, unit: int, rows: int
) -> Choice:
    """The most rows of a pass that fit, a multiple of `unit`, at most `rows`."""
    name, now = "optim.micro_rows", config.optim.micro_rows
    step = build(config)
    # What the backward pass keeps of one more row on each device; no compile when that is too much.
    kept = step.kept_bytes() * unit / now
    if measured.total > limit(chip) or measured.total + kept > limit(chip):
        return Choice(name, now if measured.total <= limit(chip) else 0, measured)
    other = min(now + unit, -(-rows // unit) * unit)
    if other == now:
        return Choice(name, now, measured)
    second = measure(build(with_fields(config, optim__micro_rows=other)).accumulate())
    slope = max((second.total - measured.total) / (other - now), 1.0)
    value = int(now + (limit(chip) - measured.total) / slope) // unit * unit
    value = max(min(value, -(-rows // unit) * unit), now)
    known = {now: measured, other: second}
    if value not in known:
        known[value] = measure(build(with_fields(config, optim__micro_rows=value)).accumulate())
    return _largest(name, known, value, chip)


def changes(config: Any, chips: int) -> Iterator[dict[str, Any]]:
    """Changes of the config that save memory, the least costly to a run first."""
    o, r = config.optim, config.rollout
    unit = chips
    slots = [s for s in (r.slots // 2, r.slots // 4) if s >= unit and s % unit == 0]
    if config.model.remat != "full":
        yield {"model__remat": "full"}
    for value in slots:
        yield {"rollout__slots": value}
    if o.logit_chunk > 2 * o.micro_rows:
        yield {"optim__logit_chunk": max(o.logit_chunk // 4, o.micro_rows)}
    if o.micro_rows > unit:
        yield {"optim__micro_rows": unit}
    tensor = config.mesh.tensor
    if config.mesh.fsdp == -1 and 0 < tensor < chips:
        yield {"mesh__tensor": 2 * tensor}
        if 4 * tensor <= chips:
            yield {"mesh__tensor": 4 * tensor}
    smallest = {"rollout__slots": slots[-1]} if slots else {}
    yield {"model__remat": "full", "optim__micro_rows": unit, **smallest}


def smallest_change(
    config: Any, build: Build, chip: Chip, measured: dict[str, Measured], chips: int, tries: int = 2
) -> tuple[dict[str, Any], dict[str, Measured]] | None:
    """The first change with which all programs fit, at most `tries` compiles of each program.

    What can be told without a compile is: fewer slots alone leave the other programs as they are.
    None when no change was found; a value is given only where the compiler agreed.
    """
    failing = misfits(measured, chip)
    compiles = 0
    for change in changes(config, chips):
        changed = with_fields(config, **change)
        try:
            step = build(changed)
        except ValueError:
            continue  # the model's sizes do not allow this mesh
        if _hopeless(step, chip):
            continue
        if set(change) == {"rollout__slots"} and not _saved(config, build, step, measured, chip):
            continue
        if compiles == tries:
            return None
        compiles += 1
        again = {}
        for name in failing:
            program = step.programs()[name]()
            if set(change) == {"rollout__slots"} and name not in ("insert", "decode"):
                # Slots only lie beside it: the same program.
                again[name] = replace(measured[name], beside=bytes_per_chip(program.beside))
            else:
                again[name] = measure(program)
        if not misfits(again, chip):
            return change, again
    return None


def _hopeless(step: StepPrograms, chip: Chip) -> bool:
    """Whether arguments and neighbours alone are too much."""
    held = (step.state, step.weights, step.slots())
    return bytes_per_chip(held) > limit(chip)


def _saved(config, build: Build, step: StepPrograms, measured, chip: Chip) -> bool:
    saved = bytes_per_chip(build(config).slots()) - bytes_per_chip(step.slots())
    return all(m.total - saved <= limit(chip) for m in measured.values())
