"""The handed code cases: every right program passes, every cheat and hostile one is held."""

import json
import sys
from pathlib import Path

import pytest

from sage_jax.verify import Job, Verifier

sys.path.insert(0, str(Path(__file__).parent))

SHARED = Path(__file__).parents[1].parent / "shared"


@pytest.fixture(scope="module")
def verifier():
    # Wall time enough for one CPU second on a machine that is busy with other tests.
    with Verifier(workers=2, cpu_limit=1, time_limit=6.0) as made:
        yield made


@pytest.mark.skipif(not SHARED.exists(), reason="../shared is absent")
def test_shared_code_tasks(verifier):
    jobs, expected = [], {}
    for row in map(json.loads, open(SHARED / "cases" / "code_tasks_public.jsonl")):
        programs = [("right", row["solution"])] + [(w["kind"], w["code"]) for w in row["wrong"]]
        for number, (kind, code) in enumerate(programs):
            name = f"{row['id']}/{number}/{kind}"
            expected[name] = number == 0
            tests = {part: row["tests"][part] for part in ("public", "hidden")}
            payload = {"solution": code, "tests": tests, "entry_point": row["entry_point"]}
            jobs.append(Job(name, "code", payload))
    verdicts = verifier.run(jobs)
    assert [n for n, right in expected.items() if verdicts[n].correct != right] == []


@pytest.mark.skipif(not SHARED.exists(), reason="../shared is absent")
def test_shared_hostile_programs():
    """All but the slow ones; the whole file runs with tests/verify_hostile.py as a script."""
    from verify_hostile import run_cases

    rows = map(json.loads, open(SHARED / "cases" / "hostile_public.jsonl"))
    cases = [row for row in rows if row["category"] != "time"]
    assert len(cases) > 50
    assert run_cases(cases) == {}
