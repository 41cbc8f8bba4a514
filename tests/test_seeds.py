"""The packaged seed problems: shape of the files, disjointness, keys that grade themselves."""

import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
from math_verify import parse, verify

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / "sage_jax" / "assets" / "seeds"
SHARED_DATA = ROOT.parent / "shared" / "data"
SIZES = {"train": 500, "valid": 200}
LEVEL_SHARES = {1: 0.20, 2: 0.25, 3: 0.25, 4: 0.20, 5: 0.10}
COMMON_FIELDS = {"id", "domain", "question", "level", "subject", "source", "licence", "split"}
FIELDS = {
    "math": COMMON_FIELDS | {"answer"},
    "code": COMMON_FIELDS | {"entry_point", "canonical_solution", "tests"},
}
CODE_TIME_LIMIT_S = 200

# Runs in a child process: prints one JSON list of complaints about the rows read from stdin.
RUN_CODE_ROWS = r"""
import json, sys

def passes(source, asserts):
    try:
        scope = {}
        exec(source, scope)
        for line in asserts:
            exec(line, scope)
    except Exception:
        return False
    return True

complaints = []
for row in map(json.loads, sys.stdin):
    name, asserts = row["entry_point"], row["tests"]["asserts"]
    if not passes(row["canonical_solution"], asserts):
        complaints.append(row["id"] + " reference solution fails")
    bodies = ["None", "args[0] if args else None", "[]", "0", "''", "True", "False", "{}"]
    bodies.append(asserts[0].partition(" == ")[2])
    for body in bodies:
        if passes(f"def {name}(*args):\n    return {body}\n", asserts):
            complaints.append(row["id"] + " stand-in passes: return " + body)
print(json.dumps(complaints))
"""


@cache
def rows(split):
    lines = (SEEDS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def all_rows():
    return rows("train") + rows("valid")


def words(text):
    return re.findall(r"[a-z0-9]+", text.lower())


def word_grams(tokens, size):
    return {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}


def shape(text):
    """Word 3-grams without numbers: two questions that differ in their numbers only share it."""
    return word_grams([word for word in words(text) if not word.isdigit()], 3)


def jaccard(a, b):
    return len(a & b) / len(a | b) if a and b else 0.0


def code_complaints(code_rows):
    feed = "\n".join(json.dumps(row) for row in code_rows)
    done = subprocess.run(
        [sys.executable, "-I", "-c", RUN_CODE_ROWS],
        input=feed,
        capture_output=True,
        text=True,
        timeout=CODE_TIME_LIMIT_S,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("split", SIZES)
def test_no_problem_lost_and_two_thirds_maths(split):
    share = Counter(row["domain"] for row in rows(split))
    assert share.total() == SIZES[split]
    assert share["math"] / share.total() == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize("split", SIZES)
@pytest.mark.parametrize("domain", FIELDS)
def test_difficulty_does_not_drift(split, domain):
    levels = Counter(row["level"] for row in rows(split) if row["domain"] == domain)
    shares = {level: count / levels.total() for level, count in sorted(levels.items())}
    assert shares == pytest.approx(LEVEL_SHARES, abs=0.02)


def test_every_row_has_the_documented_fields():
    for row in all_rows():
        assert set(row) == FIELDS[row["domain"]], row["id"]
        assert (row["source"], row["licence"]) == ("sage_jax", "Apache-2.0"), row["id"]
        assert re.fullmatch(r"[a-z_]+", row["subject"]), row["id"]
        assert row["question"] == row["question"].strip() and row["question"], row["id"]


def test_code_rows_name_the_function_they_test():
    for row in (row for row in all_rows() if row["domain"] == "code"):
        name, tests = row["entry_point"], row["tests"]
        assert set(tests) == {"kind", "setup", "asserts", "challenge"}, row["id"]
        assert (tests["kind"], tests["setup"], tests["challenge"]) == ("asserts", "", []), row["id"]
        assert 4 <= len(tests["asserts"]) <= 8, row["id"]
        assert all(line.startswith("assert ") and name in line for line in tests["asserts"]), row[
            "id"
        ]
        assert name in row["question"] and f"def {name}(" in row["canonical_solution"], row["id"]


@pytest.mark.parametrize("split", SIZES)
def test_ids_count_up_inside_their_split(split):
    wanted = [f"seed/{split}/{number:04d}" for number in range(1, SIZES[split] + 1)]
    assert [row["id"] for row in rows(split)] == wanted
    assert {row["split"] for row in rows(split)} == {split}


def test_no_question_and_no_function_name_twice():
    questions = Counter(" ".join(words(row["question"])) for row in all_rows())
    names = Counter(row["entry_point"] for row in all_rows() if row["domain"] == "code")
    assert max(questions.values()) == max(names.values()) == 1


def test_validation_is_no_renumbered_training():
    train = [(row["id"], shape(row["question"])) for row in rows("train")]
    for row in rows("valid"):
        mine = shape(row["question"])
        near = [other for other, theirs in train if jaccard(mine, theirs) >= 0.8]
        assert near == [], row["id"]


def test_renumbered_copy_is_recognised():
    question = "Ines planted 6 rows of tulips with 14 bulbs in each row. How many bulbs are there?"
    copy = question.replace("14", "30").replace("6", "8")
    assert jaccard(shape(question), shape(copy)) == 1.0


def test_at_most_three_problems_share_one_wording():
    shapes = {row["id"]: shape(row["question"]) for row in all_rows()}
    twins = Counter()
    for a, b in combinations(shapes, 2):
        if jaccard(shapes[a], shapes[b]) >= 0.8:
            twins.update((a, b))
    assert [key for key, count in twins.items() if count > 2] == []


def test_every_maths_key_grades_itself_correct():
    wrong = parse("$987654321$")
    for row in (row for row in all_rows() if row["domain"] == "math"):
        answer = row["answer"]
        assert not re.search(r"\$|\\boxed|\\text|\s\w{3,}", answer), row["id"]
        gold = parse(f"${answer}$")
        assert gold and not isinstance(gold[0], str), row["id"]
        assert verify(gold, parse(f"\\boxed{{{answer}}}")), row["id"]
        assert not verify(gold, wrong), row["id"]


def test_reference_solutions_pass_and_stand_ins_fail():
    assert code_complaints([row for row in all_rows() if row["domain"] == "code"]) == []


def test_weak_tests_and_broken_references_are_reported():
    row = next(row for row in rows("train") if row["domain"] == "code")
    broken = row | {"canonical_solution": f"def {row['entry_point']}(*args):\n    return 1 / 0\n"}
    asserts = [f"assert {row['entry_point']}(1) == 0"]
    weak = row | {"tests": row["tests"] | {"asserts": asserts}}
    assert f"{row['id']} reference solution fails" in code_complaints([broken])
    assert f"{row['id']} stand-in passes: return 0" in code_complaints([weak])


@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="../shared absent: no data sets to compare")
def test_no_eight_words_in_a_row_from_a_published_data_set():
    owner = {}
    for row in all_rows():
        owner |= dict.fromkeys(word_grams(words(row["question"]), 8), row["id"])
    copied = set()
    files = sorted(SHARED_DATA.glob("*.jsonl"))
    assert files
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            grams = word_grams(words(json.loads(line)["question"]), 8)
            copied |= {(owner[gram], " ".join(gram)) for gram in grams & owner.keys()}
    assert copied == set()
