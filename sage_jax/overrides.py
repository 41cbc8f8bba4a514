"""Fields on the command line: --config.a.b=value, lists comma-separated."""

import ast
import re

from absl import flags
from ml_collections import config_flags

from sage_jax.config import SCHEMA, nearest


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


def unknown_overrides(argv: list[str]) -> list[str]:
    """What is wrong with the names of --config.a.b=value arguments."""
    names = [re.match(r"--?config\.([^=]+)", arg) for arg in argv]
    return [
        f"--config.{m[1]}: unknown field{nearest(m[1])}" for m in names if m and m[1] not in SCHEMA
    ]
