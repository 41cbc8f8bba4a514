"""Randomness as a pure function of names: nothing random is stored, nothing depends on layout."""

import hashlib

import numpy as np


def digest(*names: object) -> bytes:
    """32 bytes that depend on the names and their order only."""
    text = "\x1f".join(f"{type(n).__name__}:{n}" for n in names)
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def row_key(*names: object) -> np.ndarray:
    """Threefry key uint32 [2] of one row, from (seed, step, task id, role, sample index)."""
    return np.frombuffer(digest("row", *names)[:8], np.uint32).copy()


def host_rng(*names: object) -> np.random.Generator:
    """Generator for host decisions such as a draw from the pool."""
    return np.random.default_rng(np.frombuffer(digest("host", *names), np.uint32))
