"""The handed data sets: golds, questions and references, bounded parts of what the scripts do."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

from sage_jax.verify import Job, Verifier
from sage_jax.verify.math import judge

SHARED = Path(__file__).parents[1].parent / "shared"
DATA = SHARED / "data"
MATHS = ("gsm8k_train gsm8k_test math_train math_test math500 aime24 aime25 amc23 olympiadbench "
         "svamp").split()  # fmt: skip
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="../shared is absent")

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


def rows(name):
    return [json.loads(line) for line in open(DATA / f"{name}.jsonl", encoding="utf-8")]


@pytest.fixture(scope="module")
def verifier():
    with Verifier(workers=2, code=False) as made:
        yield made


def test_every_gold_equals_itself(verifier):
    golds = {f"{name}/{row['id']}": str(row["answer"]) for name in MATHS for row in rows(name)}
    verdicts = verifier.run(
        Job(name, "math", {"gold": gold, "prediction": f"So the answer is \\boxed{{{gold}}}."})
        for name, gold in golds.items()
    )
    wrong = [name for name, verdict in verdicts.items() if not verdict.correct]
    assert len(golds) > 4000 and len(wrong) <= 0.002 * len(golds), wrong


def test_no_formula_of_a_question_is_its_answer(verifier):
    jobs, literal = [], {}
    for row in rows("math500"):
        found = re.findall(r"\$([^$]+)\$|\\\((.+?)\\\)", row["question"])
        for number, groups in enumerate(found):
            formula = next(group for group in groups if group).strip()
            payload = {"gold": row["answer"], "prediction": f"\\boxed{{{formula}}}"}
            name = f"{row['id']}/{number}"
            literal[name] = formula.replace(" ", "") == row["answer"].replace(" ", "")
            jobs.append(Job(name, "math", {**payload, "question": row["question"]}))
    verdicts = verifier.run(jobs)
    assert len(jobs) > 1000
    assert [n for n, verdict in verdicts.items() if verdict.correct and not literal[n]] == []


def test_no_gold_in_another_spelling_counts_as_a_restated_question():
    lost = []
    for row in (row for name in MATHS for row in rows(name)[::8]):
        gold = str(row["answer"])
        for answer in (gold, f"x = {gold}", f"\\left( {gold} \\right)"):
            prediction = f"\\boxed{{{answer}}}"
            verdict, reason = judge(gold, prediction, question=row["question"])
            if reason == "restates_question" and judge(gold, prediction)[0] == "correct":
                lost.append((row["id"], answer))
    assert lost == []


def test_no_gold_equals_one_of_another_value(verifier):
    from verify_golds import by_policy, equal_pairs, pairs

    golds = sorted({str(row["answer"]) for name in ("math500", "math_test", "olympiadbench")
                    for row in rows(name)})  # fmt: skip
    golds = [gold for gold in golds if len(gold) < 60]
    found, valued = pairs(random.Random(0).sample(golds, 400), shuffles=1, seed=1)
    assert valued > 200 and len(found) > 350
    assert [pair for pair in equal_pairs(verifier, found) if not by_policy(pair)] == []


@pytest.mark.parametrize(
    "name,every", [("humaneval_plus", 24), ("mbpp_plus", 70), ("cruxeval", 100)]
)
def test_references_and_mutants_are_judged_as_a_plain_run_does(name, every):
    from verify_references import compare

    with Verifier(workers=2, cpu_limit=1, time_limit=6.0) as verifier:
        assert compare(rows(name)[::every], 1, 3, verifier) == []
