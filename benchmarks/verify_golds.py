"""Golds of data files against themselves and against golds of another value:

    python benchmarks/verify_golds.py DATA.jsonl ... [--shuffles 5] [--seed 0]

Each gold must equal itself. Golds whose values differ by an independent evaluation (exact
fractions for plain numbers, else latex2sympy to 50 digits) must not equal one another: neighbours
by value and ``--shuffles`` random pairings are tried. Pairs that the tolerance policy makes equal
(a percentage and its value, degrees and radians, a decimal of three digits and what it is a
rounding of) are counted apart. Exits 1 for any other.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sage_jax.verify import Job, Verifier  # noqa: E402


def value(gold: str) -> Any:
    """An independent value of a gold: exact for plain numbers, else 50 digits, None for neither."""
    plain = gold.replace(",", "").replace("\\$", "").strip()
    fraction = re.fullmatch(r"(-?)\\[dt]?frac\{?(\d+)\}?\{?(\d+)\}?", plain)
    if fraction:
        return Fraction(int(fraction[1] + fraction[2]), int(fraction[3]))
    if re.fullmatch(r"-?\d+(\.\d+)?", plain):
        return Fraction(plain)
    from latex2sympy2_extended import latex2sympy
    from sympy import Expr

    try:
        parsed = latex2sympy(gold)
        if isinstance(parsed, Expr) and not parsed.free_symbols:
            found = parsed.evalf(50)
            return found if found.is_real else None
    except Exception:  # a parser of others: what it does not read is left out
        return None
    return None


def pairs(golds: list[str], shuffles: int, seed: int) -> tuple[list[tuple[str, str]], int]:
    """Pairs of golds of clearly different values, and how many golds have one."""
    values = {gold: found for gold in golds if (found := value(gold)) is not None}
    ordered = sorted(values, key=lambda gold: float(values[gold]))
    rng = random.Random(seed)
    made = list(zip(ordered, ordered[1:], strict=False))
    for _ in range(shuffles):
        made += zip(ordered, rng.sample(ordered, len(ordered)), strict=True)
    different = [
        (a, b) for a, b in made if abs(values[a] - values[b]) > 1e-9 * max(1, abs(values[a]))
    ]
    return list(dict.fromkeys(different)), len(values)


def by_policy(pair: tuple[str, str]) -> bool:
    """Whether the policy knows a case in which such golds are equal though their values differ."""
    return any(mark in "".join(pair) for mark in ("\\%", ".", "\\circ", "degree"))


def equal_pairs(verifier: Verifier, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs judged equal, the second as an answer to the first."""
    verdicts = verifier.run(
        Job(str(number), "math", {"gold": gold, "prediction": f"\\boxed{{{other}}}"})
        for number, (gold, other) in enumerate(found)
    )
    return [pair for pair, v in zip(found, verdicts.values(), strict=True) if v.correct]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", nargs="+")
    parser.add_argument("--shuffles", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    rows = [json.loads(line) for name in options.data for line in open(name, encoding="utf-8")]
    golds = sorted({str(row["answer"]) for row in rows})
    found, valued = pairs(golds, options.shuffles, options.seed)
    with Verifier(workers=options.workers, code=False) as verifier:
        selves = [(gold, gold) for gold in golds]
        itself = equal_pairs(verifier, selves)
        equal = equal_pairs(verifier, found)
    print(f"{len(rows)} rows, {len(golds)} golds, {len(itself)} equal to themselves")
    print("\n".join(f"  not itself: {gold}" for gold, _ in set(selves) - set(itself)))
    wrong = [pair for pair in equal if not by_policy(pair)]
    print(f"{valued} with a value, {len(found)} pairs of different value:")
    print(f"  {len(wrong)} wrongly equal, {len(equal) - len(wrong)} equal by policy")
    print("\n".join(f"  {a}  =  {b}" for a, b in equal))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
