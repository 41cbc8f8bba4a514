"""Seed and validation problems of the tiny world, in the documented JSONL schema.

    python -m sage_jax.tasks.tiny_tasks --output DIR      writes train.jsonl and valid.jsonl

Seeds have 2 or 3 operations; half of the validation problems have 4 or 5.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from sage_jax.tasks.tiny_world import Chain, draw_chain, program, values

# split -> domain -> list of (length, share inverted, on a list, rows)
_FILES = {
    "train": {
        "math": ((2, 0.15, False, 167), (3, 0.2, False, 167)),
        "code": ((2, 0.1, False, 56), (3, 0.2, False, 56), (2, 0.0, True, 20), (3, 0.0, True, 34)),
    },
    "valid": {
        "math": (
            (2, 0.15, False, 33),
            (3, 0.2, False, 33),
            (4, 0.25, False, 34),
            (5, 0.3, False, 34),
        ),
        "code": (
            (2, 0.1, False, 11),
            (3, 0.2, False, 11),
            (2, 0.0, True, 4),
            (3, 0.0, True, 7),
            (4, 0.25, False, 11),
            (5, 0.3, False, 11),
            (4, 0.0, True, 11),
        ),
    },
}
TASK_SEED = 20260315


def task_row(chain: Chain, split: str, number: int) -> dict:
    """One line of a task file, in the documented JSONL schema."""
    row = {
        "id": f"tiny/{split}/{number}",
        "domain": chain.domain,
        "question": chain.question(),
        "level": len(chain.ops),
        "subject": "plain" if chain.inverted is None else "inverted",
    }
    if chain.domain == "math":
        row["answer"] = str(values(chain.start, chain.ops)[-1])
    else:
        pairs = [(x, values(x, chain.ops)[-1]) for x in chain.inputs()]
        asserts = [f"assert f({x}) == {y}" for x, y in pairs]
        row["tests"] = {"kind": "asserts", "setup": "", "asserts": asserts, "challenge": []}
        row["entry_point"] = "f"
        row["canonical_solution"] = program(chain.ops)
    return row | {"source": "sage_jax tiny world", "licence": "Apache-2.0", "split": split}


@cache
def task_chains() -> dict[str, tuple[Chain, ...]]:
    """The chains of both task files, by split; no key occurs twice in all of them."""
    rng = Random(TASK_SEED)
    seen: set[tuple] = set()
    chains: dict[str, tuple[Chain, ...]] = {}
    for split, domains in _FILES.items():
        drawn: list[Chain] = []
        for domain, cells in domains.items():
            for length, inverted_share, on_list, rows in cells:
                for row in range(rows):
                    inverted = row < round(inverted_share * rows)
                    chain = draw_chain(rng, domain, length, inverted, on_list)
                    while chain.key in seen:
                        chain = draw_chain(rng, domain, length, inverted, on_list)
                    seen.add(chain.key)
                    drawn.append(chain)
        rng.shuffle(drawn)
        chains[split] = tuple(drawn)
    return chains


def task_lines(split: str) -> Iterator[str]:
    """The lines of `assets/tiny/<split>.jsonl`."""
    for number, chain in enumerate(task_chains()[split]):
        yield json.dumps(task_row(chain, split, number)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the task files of the tiny world.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    out = parser.parse_args().output
    out.mkdir(parents=True, exist_ok=True)
    for split in _FILES:
        (out / f"{split}.jsonl").write_text("".join(task_lines(split)))
    print(f"wrote {', '.join(f'{out}/{split}.jsonl' for split in _FILES)}")


if __name__ == "__main__":
    main()
