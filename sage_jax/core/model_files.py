"""The small files of a model folder: JSON objects, and the tokenizer that transformers makes."""

import json
import os
from pathlib import Path
from typing import Any

REMEDY = "copy the file again from where the model came from"
TEMPLATE = "chat_template.jinja"
TOKENIZER_JSON = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def is_there(path: Path) -> bool:
    """Whether a file is there. ValueError, naming the remedy, for something else of that name: a
    folder or a link to nothing would pass for an optional file that is absent."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        kind = "a folder, not a file" if path.is_dir() else "a link that leads to no file"
        raise ValueError(f"{path} is {kind}: {REMEDY}")
    return False


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, naming the file and the remedy, for anything else."""
    if not is_there(path):
        kind = "adapter" if path.name.startswith("adapter") else "model"
        raise ValueError(f"{path.parent} has no {path.name}: not a Hugging Face {kind} folder")
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): {REMEDY}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {content!r:.40}, not a JSON object: {REMEDY}")
    return content


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a folder: no network, no code from there.

    ValueError naming the damaged file, or the folder that has no tokenizer.
    """
    from transformers import AutoTokenizer  # takes seconds, which no mistyped flag should cost

    for name in TOKENIZER_JSON:
        if is_there(folder / name):
            read_object(folder / name)
    is_there(folder / TEMPLATE)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.encode("a", add_special_tokens=False)  # uses fields that loading only stores
    except Exception as error:
        if not isinstance(error, MemoryError):  # transformers takes many fields on trust
            raise ValueError(f"no usable tokenizer in {folder}: {_reason(error)}") from error
        raise
    return tokenizer


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error)
    if type(error) is Exception:  # the Rust library behind it has no class of its own
        return f"tokenizer.json is damaged ({error}): {REMEDY}"
    kind = type(error).__name__
    return f"its tokenizer files hold a value that cannot be ({kind}: {error}): {REMEDY}"
