"""Outcome advantages, on the host: published estimators and the guarded training path.

`masked_whiten`, `reinforce_plus_plus`, `sequence_z_score` and `grpo` are the published formulas.
`normalise` is what training uses: the same formulas with guards, so that a group which carries no
signal (one row, or equal rewards) gives exactly 0 instead of noise divided by almost nothing.
Everything is float64: float32 residue of equal rewards would pass any test for zero spread.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

KINDS = ("role_token", "role_sequence", "grouped")
MIN_SPREAD = 1e-6  # rewards live in [-1, 1]; a smaller max - min is rounding, not signal


@dataclass(frozen=True)
class RewardRow:
    """One trained row: scalar outcome reward, completion length in tokens, baseline keys.

    Rows of another `part` of a role never share a baseline; `group` is read by kind `grouped`
    only. A row that is not `valid` (its verifier or its gold
    failed) gets advantage 0 and enters no statistic; its reward may be NaN.
    """

    id: str
    reward: float
    length: int
    role: str
    group: Hashable = None
    valid: bool = True
    part: Hashable = None


def masked_whiten(x_bt: np.ndarray, mask_bt: np.ndarray) -> np.ndarray:
    """`x_bt` whitened over its masked-in tokens, 0 elsewhere.

    (x - mean) / sqrt(var + 1e-8), var unbiased (ddof 1); the form used by token-level REINFORCE++
    in verl. ValueError with fewer than two tokens, where the unbiased variance does not exist.
    """
    mask_bt = np.asarray(mask_bt, bool)
    token_n = np.asarray(x_bt, np.float64)[mask_bt]
    if token_n.size < 2:
        raise ValueError(f"mask_bt selects {token_n.size} tokens; whitening needs at least 2")
    white_n = (token_n - token_n.mean()) / np.sqrt(token_n.var(ddof=1) + 1e-8)
    out_bt = np.zeros(mask_bt.shape)
    out_bt[mask_bt] = white_n
    return out_bt


def reinforce_plus_plus(reward_b: np.ndarray, mask_bt: np.ndarray) -> np.ndarray:
    """Token advantages [b, t] of REINFORCE++ (arXiv 2501.03262), outcome reward, gamma 1, no KL.

    Every token's return is its row's reward; returns are whitened over all tokens of the batch,
    so long rows weigh more in both the mean and the deviation.
    """
    mask_bt = np.asarray(mask_bt, bool)
    return_bt = np.broadcast_to(np.asarray(reward_b, np.float64)[:, None], mask_bt.shape)
    return masked_whiten(return_bt, mask_bt)


def sequence_z_score(reward_b: np.ndarray) -> np.ndarray:
    """(reward - mean) / std over rows, ddof 1: Task-Relative REINFORCE++ as papers write it."""
    reward_b = np.asarray(reward_b, np.float64)
    return (reward_b - reward_b.mean()) / reward_b.std(ddof=1)


def grpo(reward_b: np.ndarray, group_b: Sequence[Hashable]) -> np.ndarray:
    """Group-relative advantages (arXiv 2402.03300): (reward - mean) / (std + 1e-6) per group.

    std has ddof 1. As in verl, a group of one keeps mean 0 and std 1, so its advantage is its
    reward; `normalise` gives 0 there.
    """
    reward_b = np.asarray(reward_b, np.float64)
    advantage_b = np.zeros_like(reward_b)
    for index in _indices_by_key(group_b).values():
        member_g = reward_b[index]
        single = len(index) == 1
        mean, std = (0.0, 1.0) if single else (member_g.mean(), member_g.std(ddof=1))
        advantage_b[index] = (member_g - mean) / (std + 1e-6)
    return advantage_b


def normalise(kind: str, rows: Sequence[RewardRow]) -> np.ndarray:
    """Advantage per row [b], float32; every token of a row's completion shares it.

    `role_token`     per role, mean and std over tokens (rewards weighted by length, ddof 1)
    `role_sequence`  per role, mean and std over rows (ddof 1)
    `grouped`        per (role, group), mean and std over rows (ddof 1)
    In all of them the parts of a role are apart.
    A row alone in its group, or among equal rewards (max - min < 1e-6), gets 0; so does a row
    that is not valid. Under `role_token` rows without tokens enter no statistic and get 0.
    ValueError for an unknown kind, a valid row whose reward is not finite, a negative length.
    """
    _check(kind, rows)
    advantage_b = np.zeros(len(rows))
    for index in _groups(kind, rows).values():
        reward_g = np.array([rows[i].reward for i in index], np.float64)
        if not _has_signal(reward_g):
            continue
        weight_g = np.ones(len(index))
        if kind == "role_token":
            weight_g = np.array([rows[i].length for i in index], np.float64)
        centred_g = reward_g - np.average(reward_g, weights=weight_g)
        variance = (weight_g * centred_g**2).sum() / (weight_g.sum() - 1)
        advantage_b[index] = centred_g / np.sqrt(variance + 1e-8)
    return advantage_b.astype(np.float32)


def flat_groups(kind: str, rows: Sequence[RewardRow]) -> dict[str, tuple[int, int]]:
    """Per role (groups without signal, all groups): the reason why advantages are 0."""
    _check(kind, rows)
    counts: dict[str, tuple[int, int]] = {}
    for index in _groups(kind, rows).values():
        role = rows[index[0]].role
        flat, total = counts.get(role, (0, 0))
        has_signal = _has_signal(np.array([rows[i].reward for i in index], np.float64))
        counts[role] = (flat + (not has_signal), total + 1)
    return counts


def _has_signal(reward_g: np.ndarray) -> bool:
    return float(np.ptp(reward_g)) >= MIN_SPREAD  # of a single row it is 0


def _groups(kind: str, rows: Sequence[RewardRow]) -> dict[Hashable, list[int]]:
    keys = [(row.role, row.part, row.group if kind == "grouped" else None) for row in rows]
    used = [row.valid and (kind != "role_token" or row.length > 0) for row in rows]
    groups = {key: [i for i in index if used[i]] for key, index in _indices_by_key(keys).items()}
    return {key: index for key, index in groups.items() if index}


def _indices_by_key(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    index: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        index[key].append(i)
    return index


def _check(kind: str, rows: Sequence[RewardRow]) -> None:
    if kind not in KINDS:
        raise ValueError(f"method.advantage={kind!r} is unknown; use one of {', '.join(KINDS)}")
    for row in rows:
        if row.valid and not np.isfinite(row.reward):
            raise ValueError(
                f"row {row.id!r}: reward={row.reward} is not finite; "
                "mark the row as not valid or fix its reward"
            )
        if row.length < 0:
            raise ValueError(f"row {row.id!r}: length={row.length} is negative")
