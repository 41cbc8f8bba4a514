"""episodes.jsonl: every row of every step, for people and for later study."""

from collections.abc import Mapping
from typing import Any

from sage_jax.report.jsonl import JsonlWriter, cut
from sage_jax.roles import ROLES

__all__ = ["EpisodeWriter", "REQUIRED", "cut"]

REQUIRED = {
    "step": int,
    "id": str,
    "parents": list,  # ids of the rows this one was made from
    "role": str,
    "domain": str,
    "prompt": str,
    "response": str,
    "reward_parts": dict,  # part -> number; reward itself is one of the optional fields
}
OPTIONAL = {
    "kind": str,
    "task_id": str,
    "finish": str,  # stop or length
    "parsed": bool,
    "reason": str,
    "verdict": str,
    "verdict_reason": str,
    "score": float,
    "reward": float,
    "advantage": float,
    "tokens": int,
    "masked": bool,
    "outcome": str,  # what the pool did with a candidate
}


class EpisodeWriter(JsonlWriter):
    """Appends one row at a time; fields that are None are left out."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError naming every field that is missing, unknown or of another type."""
        row = {name: value for name, value in row.items() if value is not None}
        problems = [f"field {name!r} is missing" for name in REQUIRED if name not in row]
        known = REQUIRED | OPTIONAL
        for name, value in row.items():
            if name not in known:
                problems.append(f"unknown field {name!r}; use {', '.join(known)}")
            elif not isinstance(value, (int, float) if known[name] is float else known[name]):
                problems.append(f"field {name!r} is {value!r}; give {known[name].__name__}")
        if row.get("role", ROLES[0]) not in ROLES:
            problems.append(f"field 'role' is {row['role']!r}; use {', '.join(ROLES)}")
        if problems:
            raise ValueError(f"episode {row.get('id')!r}: " + "; ".join(problems))
        super().write(row)
