"""Mistyped names: which of the known ones was meant."""

import argparse
import difflib
from collections.abc import Callable, Iterable


def hint(word: object, known: Iterable[str]) -> str:
    """A hint such as ' (did you mean solver?)' for a word that is not known; "" when no name is
    close to it."""
    # Endings and case are what is mistyped most: small letters are compared.
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=0.6)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def one_of(*known: str) -> Callable[[str], str]:
    """An argparse type: one of the names, or an error with all of them and the nearest."""

    def choose(word: str) -> str:
        if word not in known:
            raise argparse.ArgumentTypeError(
                f"{word!r}: choose one of {', '.join(known)}{hint(word, known)}"
            )
        return word

    return choose
