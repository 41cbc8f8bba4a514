"""What goes over a config file: --config.a.b=value on the command line, lists comma-separated, and
what a run says of the model in its checkpoints."""

import ast
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from sage_jax.config import SCHEMA, ConfigError, field_problems, flatten, nearest, recorded
from sage_jax.core.model_files import REMEDY, read_object

# Of a run, what its checkpoints cannot be read without, and the two that may be given otherwise:
# its model may have moved, its compute type is free.
MADE_WITH = ("lora.rank", "lora.alpha")
MODEL_OF_RUN = (*MADE_WITH, "model.path", "model.dtype")
# Fields of an adapter folder's adapter_config.json.
OF_ADAPTER = {"lora.rank": "r", "lora.alpha": "lora_alpha"}
PARSERS: dict[type, tuple[flags.ArgumentParser, str]] = {
    int: (flags.IntegerParser(), "a whole number"),
    float: (flags.FloatParser(), "a number"),
    bool: (flags.BooleanParser(), "true or false"),
}


class ListParser(flags.ArgumentParser):
    """Comma-separated values, with or without brackets: a,b or 256,512."""

    def parse(self, argument):
        if isinstance(argument, (tuple, list)):
            return tuple(argument)
        text = argument.strip()
        if text[:1] + text[-1:] in ("()", "[]"):  # only as a pair: train[:500] ends in one too
            text = text[1:-1]
        items = [item.strip().strip("'\"") for item in text.split(",")]
        return tuple(self._value(item) for item in items if item)

    @staticmethod
    def _value(item: str):
        try:
            value = ast.literal_eval(item)
        except (ValueError, SyntaxError):
            return item
        return value if isinstance(value, (int, float)) else item

    def flag_type(self):
        return "comma-separated list"


def register_list_parser() -> None:
    """Let list fields be written comma-separated on the command line."""
    config_flags.register_flag_parser_for_type(tuple, ListParser())


def bad_overrides(argv: list[str]) -> list[str]:
    """What is wrong with the names of --config.a.b=value arguments, and with the types of their
    values."""
    problems = []
    for arg, following in zip(argv, [*argv[1:], ""], strict=True):
        if not (found := re.fullmatch(r"--?config\.([^=]+)(=(.*))?", arg, re.DOTALL)):
            continue
        name, joined, value = found.groups()
        if name not in SCHEMA:
            problems.append(f"--config.{name}: unknown field{nearest(name)}")
        elif joined or not isinstance(SCHEMA[name].default, bool):  # a flag alone is true
            problems += _type_problems(name, value if joined else following)
    return problems


def _type_problems(name: str, text: str) -> list[str]:
    field = SCHEMA[name]
    if type(field.default) not in PARSERS:  # any text will do
        return []
    parser, wanted = PARSERS[type(field.default)]
    try:
        parser.parse(text)
    except (TypeError, ValueError):
        return [f"{name}={text!r:.80}: give {wanted} ({field.unit}: {field.help})"]
    return []


def names_model(given: Mapping[str, Any]) -> bool:
    """Whether the command line says which model is meant: it wins over a run that it does not."""
    return "model.path" in given or bool(given.get("lora.path"))


def take_rank_of_adapter(config: Any, given: Mapping[str, Any]) -> None:
    """Set lora.rank and lora.alpha, where they are left at their defaults, to those of the adapter
    in lora.path. ConfigError when they contradict it, or it cannot be read."""
    path, problems = config.lora.path, []
    if not path or given.get("lora.rank") == 0:  # all weights: refused with the other problems
        return
    try:
        content = read_object(Path(path) / "adapter_config.json")
    except ValueError as error:
        raise ConfigError(f"lora.path={path}: {error}") from error
    for name, key in OF_ADAPTER.items():
        leaf: str = name.partition(".")[2]
        value: Any = content.get(key)
        if type(value) not in (int, float) or value <= 0:
            problems.append(f"adapter_config.json: {key} is {value!r:.80}, no {leaf}; {REMEDY}")
        elif not config.lora[leaf]:
            with config.lora.ignore_type():  # whether it is one is checked with all others
                config.lora[leaf] = value
        elif config.lora[leaf] != value:
            problems.append(
                f"{name}={config.lora[leaf]!r}: the adapter there has {key} {value!r}; give that, "
                "or 0 to take it from there"
            )
    if problems:
        raise ConfigError(f"lora.path={path}:\n  " + "\n  ".join(problems))


def take_model_of_run(config: Any, given: Mapping[str, Any], workdir: Path) -> list[str]:
    """Set the fields of the model in `config` to what the run in `workdir` recorded, but for those
    `given` on the command line; nothing where it has no checkpoint or no config.json.

    Returns what of the config file was set aside, as "field=value, not value". ConfigError naming
    both values when a given one contradicts the checkpoints, or config.json when it cannot be
    taken.
    """
    path = workdir / "config.json"
    refuse_fine_tuned(workdir)
    if not os.path.lexists(path) or not any((workdir / "checkpoints").glob("[0-9]*")):
        return []
    of_run = _model_of_run(path)
    if not given.get("lora.alpha"):  # 0 stands for twice the rank
        given = {name: value for name, value in given.items() if name != "lora.alpha"}
    if wrong := [n for n in MADE_WITH if n in given and given[n] != of_run[n]]:
        told = "\n  ".join(f"{n}={given[n]!r}: {path} has {of_run[n]!r}" for n in wrong)
        raise ConfigError(f"{told}\n  leave {' and '.join(wrong)} out: the run's own are taken")
    if "lora.path" in given and not of_run["lora.rank"]:
        raise ConfigError(
            f"lora.path={given['lora.path']!r}: the run in {workdir} trained all weights and takes "
            "no adapter; leave lora.path out to read the run, or --workdir to read the adapter"
        )
    before, aside = recorded(flatten(config)), []
    for name, value in of_run.items():
        if name in given:
            continue
        if before[name] not in (value, SCHEMA[name].default):
            aside.append(f"{name}={value!r}, not {before[name]!r}")
        group, leaf = name.split(".")
        with config[group].ignore_type():  # whether it is one is checked with all others
            config[group][leaf] = value
    if given.get("lora.path"):
        aside.append(f"its own adapter, not that of lora.path={given['lora.path']!r}")
    config.lora.path = ""  # where it started from: the adapter is that of the checkpoint
    return aside


def _model_of_run(path: Path) -> dict[str, Any]:
    """MODEL_OF_RUN as a run's config.json has it. ConfigError naming the file.

    Runs from before there were adapters have no lora fields: they trained all weights.
    """
    try:
        rows = json.loads(path.read_bytes())
        absent = {name: {"value": SCHEMA[name].default} for name in MADE_WITH if name not in rows}
        of_run = {name: (rows | absent)[name]["value"] for name in MODEL_OF_RUN}
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); bring it back, or move it"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: is not the config of a run; bring it back, or move it"
        ) from error
    if problems := [line for name in of_run for line in field_problems(name, of_run[name])]:
        told = "\n  ".join(problems)
        raise ConfigError(f"{path}: is not what a run wrote; bring it back, or move it:\n  {told}")
    return of_run


def refuse_fine_tuned(workdir: Path) -> None:
    """ConfigError when the checkpoints in `workdir` are those of --mode=sft, each one tree named
    `state`: no run can go on from them, but its model can be loaded."""
    if not any((workdir / "checkpoints").glob("[0-9]*/state")):
        return
    model = workdir / "model"
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{workdir} holds checkpoints of --mode=sft, which has not finished; run it to its end "
            f"and give {model} as --config.model.path"
        )
    raise ConfigError(
        f"{workdir} holds checkpoints of --mode=sft; its model is {model}, give it as "
        "--config.model.path, with another --workdir"
    )
