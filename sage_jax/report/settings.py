"""Which runs may share a mean: those whose recorded settings differ in nothing but the seed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_jax.config import SCHEMA
from sage_jax.report.study import Rows, Study

# Fields and groups of fields that no figure of a run depends on.
IRRELEVANT = ("seed", "checkpoint.", "eval.", "lora.export", "report.", "sft.")
SHOWN_FIELDS = 3
SHOWN_CHARACTERS = 40  # of a value
MEASURED_ON = "valid/set"


@dataclass(frozen=True)
class Run:
    """One run: its rows and the fields of its config.json, None where there is no such file."""

    folder: Path
    rows: Rows
    config: Mapping[str, Any] | None


@dataclass(frozen=True)
class Group:
    """Runs of the same settings; `settings` is what sets them apart from the others drawn, "" where
    there are no others, and `label` the same, shortened."""

    label: str
    settings: str
    runs: Sequence[Run]

    @property
    def count(self) -> str:
        """Such as "3 seeds"; "3 runs" where the seeds are not known to differ."""
        seeds = {run.config["seed"] if run.config else None for run in self.runs}
        kind = "seed" if None not in seeds and len(seeds) == len(self.runs) else "run"
        return f"{len(self.runs)} {kind}{'s' if len(self.runs) > 1 else ''}"


def read_config(folder: Path) -> dict[str, Any] | None:
    """Every field as config.json has it, those that came later at their defaults; None without that
    file. ValueError when it is not what a run wrote."""
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        found = {name: row["value"] for name, row in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: is not the config of a run; bring it back, or move it"
        ) from error
    return {name: field.default for name, field in SCHEMA.items()} | found


def differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """{field: {value as text: names of the runs that have it}} of the fields in which runs, by
    name, differ."""
    fields = dict.fromkeys(name for config in configs.values() for name in config)
    found = {}
    for field in fields:
        if field.startswith(IRRELEVANT):
            continue
        values: dict[str, list[str]] = {}
        for name, config in configs.items():
            values.setdefault(_text(config.get(field)), []).append(name)
        if len(values) > 1:
            found[field] = values
    return found


def unlike(study: Study, workdir: Path) -> list[str]:
    """What finished runs of one setting differ in beside the seed, a line a field. Not by how many
    updates they have: all are read up to the same."""
    lines = []
    for setting, seeds in study.runs.items():
        found = {str(seed): read_config(workdir / setting / str(seed)) for seed in seeds}
        configs = {name: config for name, config in found.items() if config is not None}
        for field, values in differing(configs).items():
            if field != "train.steps":
                told = ", ".join(f"{_short(x)} (seed {' '.join(s)})" for x, s in values.items())
                lines.append(f"`{setting}` in {field}: {told}")
    return lines


def group(runs: Sequence[Run]) -> list[Group]:
    """The runs by settings, in order. Those without config.json are together, since what they are
    is not known."""
    configs = {str(run.folder): dict(run.config) for run in runs if run.config is not None}
    items = {str(run.folder): _items(run.rows) for run in runs}
    if None not in items.values():
        configs = {name: config | {MEASURED_ON: items[name]} for name, config in configs.items()}
    fields = _telling_first(differing(configs))
    members: dict[tuple[str, ...] | None, list[Run]] = {}
    for run in runs:
        config = configs.get(str(run.folder))
        key = None if config is None else tuple(_text(config.get(name)) for name in fields)
        members.setdefault(key, []).append(run)
    if len(members) == 1:
        return [Group("", "", runs)]
    labels = {key: _label(fields, key) for key in members}
    groups = []
    for key, those in members.items():
        alike = list(labels.values()).count(labels[key]) > 1
        label = f"{those[0].folder}: {labels[key]}" if alike else labels[key]
        told = [f"{name}={text}" for name, text in zip(fields, key or (), strict=bool(key))]
        groups.append(Group(label, ", ".join(told) or label, those))
    return groups


def _telling_first(fields: Mapping[str, Mapping[str, list[str]]]) -> list[str]:
    """The fields, those last that part the runs as one before them does."""
    seen, first, rest = set(), [], []
    for name, values in fields.items():
        parts = frozenset(frozenset(names) for names in values.values())
        (rest if parts in seen else first).append(name)
        seen.add(parts)
    return first + rest


def _items(rows: Rows) -> float | None:
    """Digest of the items that were last validated on, None in runs from before it was logged."""
    return next((row[MEASURED_ON] for row in reversed(rows) if MEASURED_ON in row), None)


def _label(fields: Sequence[str], values: Sequence[str] | None) -> str:
    if values is None:
        return "settings unknown: no config.json"
    told = [f"{name}={_short(text)}" for name, text in zip(fields, values, strict=True)]
    more = len(told) - SHOWN_FIELDS
    return ", ".join(told[:SHOWN_FIELDS]) + (f" and {more} more" if more > 0 else "")


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"...{text[3 - SHOWN_CHARACTERS :]}"
