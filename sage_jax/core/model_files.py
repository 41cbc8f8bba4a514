"""The small files of a model folder: JSON objects, and the tokenizer that transformers makes."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

REMEDY = "copy the file again from where the model came from"
TOKENIZER_JSON = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError, naming the file and the remedy, for anything else."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: not a Hugging Face model folder")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): {REMEDY}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {content!r:.40}, not a JSON object: {REMEDY}")
    return content


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a folder: no network, no code from there.

    ValueError naming the damaged file, or the folder that has no tokenizer.
    """
    for name in TOKENIZER_JSON:
        if (folder / name).is_file():
            read_object(folder / name)
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
