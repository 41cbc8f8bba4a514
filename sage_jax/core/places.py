"""Places on disk: can something be made there, and what a refused start takes away again."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def unusable(path: Path, folder: bool) -> str:
    """Why no file (or folder) can be made or written there; "" when it can."""
    try:
        if path.exists() and path.is_dir() != folder:
            return "is a file, not a folder" if folder else "is a folder, not a file"
        there = next(p for p in (path, *path.absolute().parents) if p.exists())
        if there != path and not there.is_dir():
            return f"{there} is a file"
    except OSError as error:
        return str(error)
    return "" if os.access(there, os.W_OK) else f"{there} is not writable"


def misplaced(paths: Mapping[Path, bool]) -> str:
    """Which of the `paths` (folders where True, else files) cannot be made or written, and why; ""
    when all can."""
    reasons = {path: unusable(path, folder) for path, folder in paths.items()}
    return "; ".join(f"{path}: {reason}" for path, reason in reasons.items() if reason)


def missing(folder: Path, names: Iterable[str] = ()) -> list[Path]:
    """What is not there of the `names` in `folder`, itself and its parents; the deepest first."""
    wanted = [*(folder / name for name in names), folder, *folder.absolute().parents]
    return [path for path in wanted if not path.exists()]


def remove_empty(paths: Iterable[Path]) -> None:
    """Delete those of `paths`, the deepest first, that are empty files or empty folders."""
    for path in paths:
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif path.is_file() and not path.stat().st_size:
            path.unlink()
