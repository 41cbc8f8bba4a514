"""What goes into the rollout engine and what comes out."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One completion to sample. `key` uint32 [2] from core.rng.row_key; temperature 0 is greedy;
    top_k 0, top_p 1 and min_p 0 are off. Rows of a higher rank start first."""

    id: str
    prompt: tuple[int, ...]
    key: tuple[int, int]
    max_new: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    rank: int = 0


@dataclass(frozen=True)
class Completion:
    """Sampled tokens int32 [c] with the stop token, their log-probs fp32 [c] of the untruncated
    distribution at the row's temperature, and why it ended: 'stop' or 'length'."""

    row: Row
    tokens: np.ndarray
    logps: np.ndarray
    finish: str
