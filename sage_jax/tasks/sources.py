"""Where tasks come from: JSON lines, packaged assets, tfds data sets, Hugging Face folders.

    PATH.jsonl             one task a line, in the schema of `Task.from_json`
    asset:seeds/train.jsonl   a file packaged under sage_jax/assets
    tfds:NAME/SPLIT        through tfds.data_source; downloaded unless prepared; ?data_dir=DIR
    hf:FOLDER              a data set saved with save_to_disk (needs the package `datasets`)

A path may end in #SPLIT, which keeps the rows of that split, and in ?FIELD=COLUMN&..., which says
which column holds which field: `tfds:gsm8k/train?domain=math&answer=answer`. `domain` and `source`
are given literally. Where columns are mapped, an answer is what follows its last ####, or stands
in its last \\boxed{}, or all of it.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from sage_jax.spelling import hint
from sage_jax.tasks.task import KEY_FIELDS, Task, row_problems

PRINTED_PROBLEMS = 20
LITERAL_FIELDS = ("domain", "source", "licence")
MAPPED_FIELDS = (
    *("id", "question", "entry_point", "hint", "split", "level", "subject"),
    *LITERAL_FIELDS,
    *(name for fields in KEY_FIELDS.values() for name in fields),
)


class SourceError(ValueError):
    """Task sources that cannot be used; `problems` lists every place, field, value and remedy."""

    def __init__(self, problems: Sequence[str]):
        self.problems = list(problems)
        shown = self.problems[:PRINTED_PROBLEMS]
        rest = len(self.problems) - len(shown)
        more = [f"... and {rest} more"] if rest else []
        count = f"{len(self.problems)} problem" + "s" * (len(self.problems) > 1)
        super().__init__("\n  ".join([f"{count} in the task sources:", *shown, *more]))


@dataclass(frozen=True)
class _Spec:
    text: str
    kind: str
    location: str
    split: str
    columns: Mapping[str, str]


def load(specs: Iterable[str]) -> list[Task]:
    """All tasks of all sources, in order.

    Raises SourceError (a ValueError) listing at once every unusable source, every bad row and
    every id that comes twice.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    places: dict[str, str] = {}
    for text in specs:
        try:
            spec = _parse(text)
            rows = list(_READERS[spec.kind](spec, problems))
        except _Unusable as error:
            problems.append(f"{text}: {error}")
            continue
        if spec.split and spec.kind in ("jsonl", "asset"):
            rows = _of_split(spec, rows, problems)
        elif not rows:
            problems.append(f"{text}: holds no tasks; give a source with at least one")
        absent = _absent_columns(spec, rows)
        if absent:
            problems.append(f"{text}: {absent}")
            continue
        for index, (place, raw) in enumerate(rows):
            row = _mapped(spec, index, raw) if _foreign(spec) else raw
            found = row_problems(row)
            problems += [f"{place}: {problem}" for problem in found]
            if found:
                continue
            task = Task.from_json(row)
            if task.id in places:
                problems.append(
                    f"{place}: field 'id' is {task.id!r}, which {places[task.id]} has; "
                    "give every task its own id"
                )
            else:
                places[task.id] = place
                tasks.append(task)
    if problems:
        raise SourceError(problems)
    return tasks


def load_apart(groups: Iterable[Iterable[str]]) -> list[list[Task]]:
    """`load` of each group by itself, so that an id may come in several. Raises SourceError with
    the problems of all of them."""
    loaded: list[list[Task]] = []
    problems: list[str] = []
    for specs in groups:
        try:
            loaded.append(load(specs))
        except SourceError as error:
            problems += error.problems
    if problems:
        raise SourceError(list(dict.fromkeys(problems)))
    return loaded


class _Unusable(Exception):
    """A whole source that cannot be read; the text says why and what to do."""


def _parse(text: str) -> _Spec:
    location, _, query = text.partition("?")
    location, _, split = location.partition("#")
    kind, colon, rest = location.partition(":")
    if not colon or kind not in _READERS:
        kind, rest = "jsonl", location
    try:
        columns = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise _Unusable(f"cannot read ?{query}; write ?field=column&field=column") from error
    unknown = set(columns) - set(MAPPED_FIELDS) - ({"data_dir"} if kind == "tfds" else set())
    if unknown:
        raise _Unusable(
            f"unknown field {', '.join(sorted(unknown))} after '?'; use {', '.join(MAPPED_FIELDS)}"
            + "".join(hint(name, MAPPED_FIELDS) for name in sorted(unknown))
        )
    if kind == "tfds":
        rest, slash, name = rest.rpartition("/")
        if not slash or split:
            raise _Unusable("name the split as tfds:NAME/SPLIT")
        split = name
    return _Spec(text, kind, rest, split, columns)


_Rows = Iterator[tuple[str, Any]]  # (place for messages, raw row)


def _read_jsonl(spec: _Spec, problems: list[str]) -> _Rows:
    path = Path(spec.location)
    if not path.is_file():
        raise _Unusable(f"no such file (looked at {path.resolve()}); correct the path")
    yield from _lines(str(path), path.read_bytes(), problems)


def _read_asset(spec: _Spec, problems: list[str]) -> _Rows:
    asset = resources.files("sage_jax") / "assets" / spec.location
    if not asset.is_file():
        packaged = Path(str(resources.files("sage_jax") / "assets"))
        known = [str(path.relative_to(packaged)) for path in packaged.glob("*/*.jsonl")]
        near = hint(spec.location, known)
        raise _Unusable(f"no such packaged file; there are {', '.join(sorted(known))}{near}")
    yield from _lines(f"asset:{spec.location}", asset.read_bytes(), problems)


def _lines(name: str, content: bytes, problems: list[str]) -> _Rows:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield f"{name}:{number}", json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            problems.append(f"{name}:{number}: no JSON ({error}); mend or delete the line")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_tfds(spec: _Spec, problems: list[str]) -> _Rows:
    import tensorflow_datasets as tfds

    if spec.location.startswith("huggingface:"):
        raise _Unusable("save that data set with save_to_disk and name it as hf:FOLDER")
    name, folder = spec.location.split("/")[0], Path(tfds.__file__).parent
    try:
        # Without TensorFlow a packaged data set is known only once its own module is imported.
        for module in folder.glob(f"*/{name}/__init__.py") if name.isidentifier() else ():
            importlib.import_module(f"{tfds.__name__}.{module.parent.parent.name}.{name}")
        source: Any = tfds.data_source(
            spec.location,
            split=spec.split,
            data_dir=spec.columns.get("data_dir"),
            builder_kwargs={"file_format": "array_record"},  # others are written by TensorFlow
        )
    except ImportError as error:
        package = error.name or getattr(error.__cause__, "name", None)
        if package is None:
            raise _Unusable(f"{error}; install what is missing") from error
        raise _Unusable(f"it needs the package {package!r}: pip install {package}") from error
    except (ValueError, OSError) as error:  # unknown data set or split, nothing prepared there
        reason = str(error).strip().splitlines()[0]
        raise _Unusable(f"{reason.rstrip('.')}; name it as tfds:NAME/SPLIT") from error
    for index in range(len(source)):
        yield f"{spec.text}[{index}]", source[index]


def _read_hf(spec: _Spec, problems: list[str]) -> _Rows:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise _Unusable("needs the package 'datasets'; pip install datasets") from error
    try:
        loaded = datasets.load_from_disk(spec.location)
    except FileNotFoundError as error:
        raise _Unusable("no data set there; give a folder written by save_to_disk") from error
    if isinstance(loaded, datasets.DatasetDict):
        if spec.split not in loaded:
            near = hint(spec.split, loaded)
            raise _Unusable(f"choose a split with #: {', '.join(sorted(loaded))}{near}")
        loaded = loaded[spec.split]
    for index, row in enumerate(loaded):
        yield f"{spec.text}[{index}]", row


_READERS = {"jsonl": _read_jsonl, "asset": _read_asset, "tfds": _read_tfds, "hf": _read_hf}


def _of_split(spec: _Spec, rows: list[tuple[str, Any]], problems: list[str]) -> list:
    kept = [
        (place, row)
        for place, row in rows
        if not isinstance(row, dict) or row.get("split") == spec.split
    ]
    if not kept:
        splits = sorted({str(row.get("split")) for _, row in rows})
        problems.append(
            f"{spec.text}: no row of that split; the file has {', '.join(splits)}"
            f"{hint(spec.split, splits)}"
        )
    return kept


def _foreign(spec: _Spec) -> bool:
    return bool(spec.columns) or spec.kind in ("tfds", "hf")


def _absent_columns(spec: _Spec, rows: list[tuple[str, Any]]) -> str:
    if not rows or not isinstance(rows[0][1], Mapping):
        return ""
    there = rows[0][1]
    named = {
        column
        for field, column in spec.columns.items()
        if field not in (*LITERAL_FIELDS, "data_dir")
    }
    absent = sorted(named - set(there))
    near = "".join(hint(name, there) for name in absent)
    return (
        f"no column {', '.join(absent)}; it has {', '.join(sorted(there))}{near}" if absent else ""
    )


def _mapped(spec: _Spec, index: int, raw: Any) -> Any:
    """The row in our schema. Columns of no field are left out: they could hold the key."""
    if not isinstance(raw, Mapping):
        return raw
    name = Path(spec.location).name
    row = {
        "id": "/".join(part for part in (name, spec.split, str(index)) if part),
        "source": spec.text.partition("?")[0],
    }
    for field in MAPPED_FIELDS:
        column = spec.columns.get(field, field)
        if field in LITERAL_FIELDS and field in spec.columns:
            row[field] = column
        elif column in raw and raw[column] is not None:
            row[field] = _plain(raw[column])
    if isinstance(row.get("answer"), str):
        row["answer"] = _final_answer(row["answer"])
    row["id"] = str(row["id"])
    return row


def _plain(value: Any) -> Any:
    """tfds gives text as bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _final_answer(text: str) -> str:
    if "####" in text:
        return text.rpartition("####")[2].strip()
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1 if box else 0
    for end, character in enumerate(rest if box else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:end].strip()
    return text.strip()
