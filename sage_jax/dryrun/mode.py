"""--mode=dryrun: does a run fit the chips of --topology, and how long would it take there?"""

import dataclasses
import json
import math
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from sage_jax.config import ROLES, ConfigError, flatten
from sage_jax.core import chips
from sage_jax.core.model_files import read_object
from sage_jax.core.places import unusable
from sage_jax.dryrun import search
from sage_jax.dryrun.measure import Measured, measure
from sage_jax.dryrun.programs import StepPrograms
from sage_jax.dryrun.timing import FULL, QUARTER, Timing, fsdp_minimum, useful_share
from sage_jax.methods.sage import Sage
from sage_jax.models import costs, hf
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.report import dryrun as report
from sage_jax.runtime import ASSETS, check_positions, make_prompts, model_path, placement
from sage_jax.spelling import hint

SIZES = ASSETS / "qwen_sizes.json"


def read_sizes(path: str) -> QwenConfig:
    """The architecture of model.path from its config.json, or from the table of known hub ids.

    No weights and no tokenizer are needed. ConfigError for an id that is neither here nor known.
    """
    known = read_object(SIZES)
    try:
        if path in known and not Path(path).is_dir():
            return QwenConfig.from_hf(known[path])
        return hf.read_config(Path(model_path(path)))
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.path={path}: {error}; give a folder with a config.json, or one of "
            f"{', '.join(known)}{hint(path, known)}"
        ) from error


def run(config: Any, topology: str, output: Path) -> int:
    """Compile, print the table and write its JSON twin; 0 when every program fits, else 1."""
    try:
        devices, chip = chips.find(topology)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    cfg = read_sizes(config.model.path)
    check_positions(config, cfg)
    make_prompts(config)  # a wrong one should not cost the minutes of the compiler
    if reason := unusable(output, folder=False):
        raise ConfigError(f"{output}: {reason}; choose another --output")

    def build(changed: Any) -> StepPrograms:
        return StepPrograms(changed, cfg, placement(changed, devices))

    try:
        step = build(config)
        if (used := math.prod(step.place.shape.values())) < len(devices):
            print(
                f"WARNING: the mesh takes {used} of {len(devices)} devices, the product of "
                "mesh.data, mesh.fsdp and mesh.tensor; -1 in one of them takes the rest",
                file=sys.stderr,
            )
        programs = step.programs()
        _try_folder(output)
        measured = {}
        for name, make in programs.items():
            print(f"compiling {name}", file=sys.stderr)
            measured[name] = measure(make())
        result = describe(config, topology, chip, step, measured) | {"present": len(devices)}
        result |= search_all(config, build, chip, step, measured)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--topology={topology}: {error}") from error
    given = _without(sys.argv[1:], ("output", "workdir"))
    result["command"] = shlex.join(["python", "-m", "sage_jax.main", *given])
    print(report.text(result))
    try:
        output.write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(output, error) from error
    print(f"wrote {output}", file=sys.stderr)
    return 0 if result["fits"] else 1


def _try_folder(output: Path) -> None:
    """Makes the folder and a file in it that is gone again: a place that takes none should not cost
    the minutes of the compiler, nor a refused run leave a folder."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise _unwritable(output, error) from error


def _unwritable(output: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{output}: {error.strerror}; choose another --output")


def _without(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """Command-line arguments less some flags, whose values follow after '=' or as the next one."""
    kept, skip = [], False
    for argument in arguments:
        name, joined, _ = argument.lstrip("-").partition("=")
        mine = argument.startswith("-") and name in names
        if not mine and not skip:
            kept.append(argument)
        skip = mine and not joined
    return kept


def describe(
    config: Any, topology: str, chip: chips.Chip, step: StepPrograms, measured: dict[str, Measured]
) -> dict[str, Any]:
    """What was found, as plain numbers."""
    place = step.place.update
    devices = 1 if place is None else place.mesh.size
    rows = Sage(config, make_prompts(config)).rows_per_step()
    timing = Timing(step, rows, chip, devices, measured)
    steps = [timing.of(load) for load in (FULL, QUARTER)] if chip.timed else []
    limit, update = search.limit(chip), measured["update"]
    rank = config.lora.rank
    return {
        "model": config.model.path,
        "trained": f"LoRA {rank}" if rank else "all weights",
        "topology": topology,
        "chip": chip.name,
        "devices": devices,
        "hbm": chip.hbm,
        "share": search.SHARE,
        "mesh": dict(step.place.shape),
        "rows": sum(rows.values()),
        "slots": config.rollout.slots,
        "micro_rows": config.optim.micro_rows,
        "longest": config.optim.buckets[-1],
        "max_prompt": config.tokens.max_prompt,
        "max_new": max(config.rollout.max_new[role] for role in ROLES),
        "train_steps": config.train.steps,
        "versions": {"jax": jax.__version__},
        "config": flatten(config),
        "programs": [
            {
                **dataclasses.asdict(m),
                "total": m.total,
                "fits": not m.error and (m.total <= limit or not chip.hbm),
            }
            for m in measured.values()
        ],
        "update": {
            "useful_share": useful_share(step, update),
            "formula": FORMULA["adapter" if rank else "all"],
            "temporaries": update.temporaries,
            "temporaries_model": step.temporaries_model(),
            "collective_bytes": update.collective_bytes,
            "fsdp_minimum": fsdp_minimum(step),
        },
        "steps": [dataclasses.asdict(s) | {"total": s.total} for s in steps],
    }


FORMULA = {
    "all": "useful = 3 x forward; forward = 2 x matrices x tokens + 4 x layers x heads x head dim "
    "x tokens x (tokens + 1) / 2",
    "adapter": "useful = 3 x forward - 2 x frozen matrices x tokens (they have no gradient); "
    "forward = 2 x matrices x tokens + 4 x layers x heads x head dim x tokens x (tokens + 1) / 2",
}


def search_all(
    config: Any, build: search.Build, chip: chips.Chip, step: StepPrograms, measured: dict
) -> dict[str, Any]:
    """Verdict, recommendation, or the smallest change that fits."""
    found: dict[str, Any] = {"cross_check": cross_check(config, step), "recommended": []}
    if not chip.hbm:
        return found | {"fits": True, "misfits": [], "change": None}
    failing = search.misfits(measured, chip)
    found |= {"fits": not failing, "misfits": failing, "change": None}
    place = step.place
    unit = 1 if place.update is None else place.shape["data"] * place.shape["fsdp"]
    if failing:
        change = search.smallest_change(config, build, chip, measured, unit)
        if change is not None:
            found["change"] = {name.replace("__", "."): v for name, v in change[0].items()}
        return found
    rows = Sage(config, make_prompts(config)).rows_per_step()
    total = sum(rows.values())
    rows_unit = unit if place.update is None else place.update.parts("batch")
    choices = [
        search.most_slots(config, build, chip, measured, unit, total),
        search.most_micro_rows(config, build, chip, measured["update"], rows_unit, total),
    ]
    found["recommended"] = [
        {"field": c.field, "value": c.value, "confirmed": c.confirmed is not None} for c in choices
    ]
    return found


def cross_check(config: Any, step: StepPrograms) -> dict[str, float]:
    """FLOPs of a small update by formula and by the compiler's count.

    One layer, one chunk of logits and no rematerialised layer: every loop runs once, so that the
    compiler, which counts a loop's body once, leaves nothing out.
    """
    rows, length = config.optim.micro_rows, 256
    small = search.with_fields(
        config,
        model__remat="none",
        optim__buckets=(length,),
        optim__logit_chunk=rows * length,
    )
    cfg = dataclasses.replace(step.cfg, num_layers=1, vocab_size=8192)
    program = StepPrograms(small, cfg, step.place)
    found = measure(program.accumulate())
    if not found.counted_flops:
        return {}
    devices = 1 if step.place.update is None else step.place.update.mesh.size
    formula = rows * costs.update_flops(cfg, length, step.rank)
    # The backward pass asks for the logits again; TPU's compiler keeps those of a single chunk.
    if step.place.update is None or step.place.update.mesh.devices.flat[0].platform != "tpu":
        formula += rows * 2.0 * costs.Weights.of(cfg).head * length
    compiler = found.counted_flops * devices
    return {"formula": formula, "compiler": compiler, "ratio": formula / compiler}
