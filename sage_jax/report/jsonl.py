"""JSON lines: files that only grow, survive a kill and are cut back on resume; and users' lines."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonlWriter:
    """Appends one JSON object a line. Each row reaches the operating system at once, the disk at
    `sync` (call it before a checkpoint is committed) and at `close`. A context manager.

    NaN and Infinity never reach the file: `write` raises ValueError. With `mute` rows are checked
    and written nowhere: the same file is another process's to write.
    """

    def __init__(self, path: str | Path, mute: bool = False):
        self.path = Path(path)
        self._file = None
        if mute:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Half a surrogate pair, which models do produce, becomes its JSON escape.
        self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"
        if self._file is not None:
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def parse(line: bytes) -> Any:
    """What one line of a user's file holds.

    ValueError where it is no JSON in UTF-8, or holds half of a surrogate pair, which JSON can write
    and no tokenizer takes.
    """
    try:
        value = json.loads(line.decode("utf-8"))
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object ({error})") from error
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"holds {ascii(half[0])}, half of a surrogate pair; write the character")
    return value


def cut(path: str | Path, step: int) -> int:
    """Drops rows of later steps and a torn last line; returns how many lines were dropped.

    Rows that stay keep their bytes. The file is replaced in one move, so a kill leaves either
    the old or the new one. Raises ValueError naming the line when an earlier line is damaged.
    """
    path = Path(path)
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            row_step = int(json.loads(line)["step"])
            whole = line.endswith(b"\n")
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}:{number}: not a JSON row with a step; mend or delete that line"
                ) from error
            whole = False
        if whole and row_step <= step:
            kept.append(line)
    if len(kept) < len(lines):
        temporary = path.with_name(path.name + ".cut")
        with temporary.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return len(lines) - len(kept)
