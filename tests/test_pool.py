"""The pool: what is drawn, who is let in, and that a resumed pool goes on as before."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.tasks.pool import Pool, Questions
from sage_jax.tasks.task import Task, proposed_math
from sage_jax.verify.verdict import Verdict

SHARED = Path(__file__).parents[1].parent / "shared"
THINGS = "apples pears coins cards books shells stamps boats kites bells".split()


def maths(i, question=None, **changes):
    thing = THINGS[i % len(THINGS)]
    question = question or f"Ana has {i} {thing} and buys {i + 2} more. How many {thing}?"
    return Task.from_json(
        {"id": f"m{i}", "domain": "math", "question": question, "answer": "1", **changes}
    )


def code(i):
    tests = f"assert f{i}(1) == 2\nassert f{i}(2) == 3"
    row = {"id": f"c{i}", "domain": "code", "question": f"Write f{i}, adding {i} to its input."}
    return Task.from_json({**row, "entry_point": f"f{i}", "tests": tests})


def proposal(i, step):
    question = f"Bo walks {i} miles, rests {i + 1} hours, then runs {i + 3} miles. How far is it?"
    return proposed_math(f"p{i}", question, "1", step=step, parent="m0")


def seeded(n_math=12, n_code=8, **settings):
    return Pool([*map(maths, range(n_math)), *map(code, range(n_code))], **settings)


def ids(tasks):
    return [task.id for task in tasks]


@settings(max_examples=200, deadline=None)
@given(
    n_math=st.integers(0, 6),
    n_code=st.integers(0, 6),
    n_new=st.integers(0, 6),
    n=st.integers(0, 20),
    share=st.floats(0.01, 0.99),
    seed_share=st.floats(0, 1),
    step=st.integers(0, 9),
)
def test_every_draw_keeps_its_promises(n_math, n_code, n_new, n, share, seed_share, step):
    if n_math + n_code == 0:
        return
    pool = seeded(n_math, n_code, seed_share=seed_share)
    for i in range(n_new):
        assert pool.admit(proposal(i, step=i)) == "admitted"
    if n > len(pool):
        with pytest.raises(ValueError, match=f"draw of {n} tasks from a pool of {len(pool)}"):
            pool.draw(step, n, share, seed=1)
        return
    drawn = pool.draw(step, n, share, seed=1)
    assert len(drawn) == n == len(set(ids(drawn)))
    domains = Counter(task.domain for task in drawn)
    sizes = Counter(task.domain for task in (*pool.seeds.values(), *pool.admitted.values()))
    if n >= 2 and len(sizes) == 2:
        assert len(domains) == 2
    if n >= 2 and min(sizes["math"], sizes["code"]) >= n:
        assert abs(domains["math"] - n * share) <= 1


@pytest.mark.parametrize(
    "n, share, n_math",
    [(12, 2 / 3, 8), (5, 0.5, 3), (3, 0.5, 2), (10, 0.34, 3), (10, 0.35, 4), (4, 0.01, 1)]
    + [(4, 0.99, 3), (1, 0.5, 1), (1, 0.4, 0), (0, 0.5, 0), (4, 0.0, 0), (4, 1.0, 4)],
)
def test_math_share_by_largest_remainder_with_both_domains(n, share, n_math):
    drawn = seeded().draw(step=0, n=n, math_share=share, seed=0)
    assert sum(task.domain == "math" for task in drawn) == n_math
    assert len(drawn) == n


def test_a_small_domain_is_filled_up_from_the_other():
    drawn = seeded(n_math=12, n_code=2).draw(step=0, n=10, math_share=0.5, seed=0)
    assert Counter(task.domain for task in drawn) == {"math": 8, "code": 2}


def test_draws_depend_on_seed_step_and_contents_alone():
    def draw(step=3, seed=5, order=1, extra=0):
        tasks = [*map(maths, range(12 + extra)), *map(code, range(8))]
        return ids(Pool(tasks[::order]).draw(step, 6, 0.5, seed))

    assert draw() == draw() == draw(order=-1)
    assert draw() != draw(step=4) and draw() != draw(seed=6)
    # One more task cannot move the others about.
    kept = [id for id in draw(extra=1) if id != "m12"]
    assert set(kept) <= set(draw()) and len(kept) >= 5


def test_drawing_and_judging_leave_later_draws_alone():
    pool, other = seeded(), seeded()
    for task in pool.draw(0, 6, 0.5, 0):
        pool.record(task.id, [Verdict("correct")])
    assert ids(pool.draw(1, 6, 0.5, 0)) == ids(other.draw(1, 6, 0.5, 0))


def test_every_seed_has_its_turn():
    pool = seeded(4, 4)
    seen = Counter(id for step in range(200) for id in ids(pool.draw(step, 2, 0.5, 0)))
    assert len(seen) == 8 and min(seen.values()) > 25
    assert all(task.stats.drawn == 0 for task in pool.seeds.values())


def test_seeds_keep_their_share_and_newer_tasks_come_more_often():
    pool = seeded(8, 0, seed_share=0.5, half_life=2.0)
    for i in range(8):
        pool.admit(proposal(i, step=0 if i < 4 else 4))
    seen = Counter()
    for seed in range(400):
        drawn = pool.draw(4, 3, 1.0, seed)
        assert sum(task.id in pool.seeds for task in drawn) == 2  # half of 3, rounded up
        seen.update(task.stats.born_step for task in drawn if task.id in pool.admitted)
    # Two half-lives: weights 1 to 1/4.
    assert seen[4] / seen[0] == pytest.approx(4, rel=0.35)


def test_references_repeat_only_when_the_pool_is_too_small():
    pool = seeded(3, 2)
    references = pool.references(step=0, n=12, math_share=0.5, seed=0)
    assert Counter(task.domain for task in references) == {"math": 6, "code": 6}
    assert set(Counter(ids(references)).values()) == {2, 3}
    large = seeded(12, 8).references(step=0, n=12, math_share=0.5, seed=0)
    assert len(set(ids(large))) == 12
    assert ids(large) != ids(seeded(12, 8).draw(0, 12, 0.5, 0))
    assert all(task.stats.drawn == 0 for task in pool.seeds.values())


A = "Ana has 7 red apples and buys 5 more apples at the shop. How many apples has Ana now?"


@pytest.mark.parametrize(
    "other, same",
    [
        (A, True),
        (A.upper().replace(" ", "\n  ").replace(".", " ;"), True),
        (A.replace("7", "seven"), True),
        (A.replace("7", "8"), False),  # a number differs: a new problem
        (A.replace("7", "-7"), False),
        (A.replace("7", "7.5"), False),
        (A.replace("7", "7.0"), True),
        (A.replace("has 7", "has 5").replace("buys 5", "buys 7"), False),
        (A.replace("red ", ""), False),
        (A.replace(" now", ""), True),
        ("Bo sells 7 kites, then 5 drums. What is left in his bag?", False),
        ("", False),
    ],
)
def test_near_duplicates_by_the_rule(other, same):
    questions = Questions(threshold=0.8)
    questions.add("a", A)
    assert questions.find(other) == ("a" if same else None)


@pytest.mark.parametrize(
    "one, two, same",
    [
        ("7 + 5", "7 - 5", False),
        ("7-5", "7 - 5", True),
        ("Sum [1,2,3]", "Sum [12, 3]", False),
        ("1,000 men", "1000 men", True),
        ("x = -5", "x = 5", False),
        ("", "", True),
        ("½", "1⁄2", True),
    ],
)
def test_signs_operators_and_separators(one, two, same):
    questions = Questions(threshold=0.8)
    questions.add("one", one)
    assert (questions.find(two) == "one") is same


@settings(deadline=None)
@given(st.text(), st.text(), st.floats(0.05, 1))
def test_similarity_is_reflexive_and_symmetric(one, two, threshold):
    forward, back = Questions(threshold), Questions(threshold)
    forward.add("x", one)
    back.add("x", two)
    assert forward.find(one) == "x"
    assert forward.find(two) == back.find(one)


def test_one_other_number_in_a_long_text_makes_a_new_problem():
    long = A + " Each apple weighs the same as every other apple and none of them is ever eaten."
    questions = Questions(threshold=0.5)
    questions.add("a", long)
    assert questions.find(long.replace("red", "green")) == "a"
    assert questions.find(long.replace("7 red", "8 green")) is None


def test_the_threshold_itself_counts_as_similar():
    words = [chr(97 + i) * 3 for i in range(20)]
    one, two = " ".join(words[:17]), " ".join(words[:14])  # 15 and 12 three-grams: 12/15
    questions = Questions(threshold=0.8)
    questions.add("one", one)
    assert questions.find(two) == "one"
    assert questions.find(" ".join(words[:13])) is None


def test_admission_outcomes():
    valid = [maths(99, "What is 11 times 12?")]
    pool = Pool([maths(0), maths(1)], valid, capacity=3)
    assert pool.admit(maths(5, maths(0).question.lower())) == "duplicate"
    assert pool.admit(maths(6, "what is 11 times  12 ?")) == "contaminated"
    assert pool.admit(proposal(1, step=1)) == "admitted"
    assert pool.admit(proposal(1, step=1).__class__.from_json(repeat(proposal(1, 1), "p9"))) == (
        "duplicate"
    )
    assert pool.counters == {"duplicate": 2, "contaminated": 1, "admitted": 1}
    full = Pool([maths(0), maths(1)], capacity=2)
    assert full.admit(proposal(1, step=1)) == "full" and len(full) == 2
    with pytest.raises(ValueError, match="'p1' is already in the pool"):
        pool.admit(proposal(1, step=2))


def repeat(task, id):
    return {**task.to_json(), "id": id}


def test_capacity_drops_the_oldest_admitted_and_never_a_seed():
    pool = seeded(2, 1, capacity=5)
    for i in range(6):
        assert pool.admit(proposal(i, step=i)) == "admitted"
        assert len(pool) <= 5
    assert [*pool.seeds] == ["m0", "m1", "c0"] and [*pool.admitted] == ["p4", "p5"]
    assert pool.counters["evicted"] == 4
    # A dropped task is forgotten, so it may come in again.
    assert pool.admit(Task.from_json(repeat(proposal(0, 9), "again"))) == "admitted"


def test_seeds_that_meet_the_validation_set_are_left_out_and_listed():
    pool = Pool([maths(0), maths(1)], [maths(7, maths(1).question)])
    assert [*pool.seeds] == ["m0"] and pool.refused_seeds == [("m1", "m7")]
    with pytest.raises(ValueError, match="none left"):
        Pool([maths(1)], [maths(7, maths(1).question)])


def test_masked_verdicts_are_no_attempts():
    pool = seeded()
    wrong, lost = Verdict("wrong"), Verdict("error", reason="sandbox_error")
    verdicts = [Verdict("correct"), wrong, lost, Verdict("error", reason="crash")]
    pool.record("m0", verdicts, drawn=True)
    stats = pool.seeds["m0"].stats
    assert (stats.attempts, stats.correct, stats.drawn) == (3, 1, 1)
    pool.record("gone", [wrong])


def test_a_restored_pool_goes_on_exactly_as_before():
    valid = [maths(99, "What is 11 times 12?")]
    pool = Pool([*map(maths, range(4)), *map(code, range(3)), maths(99)], valid, capacity=11)
    for i in range(6):
        pool.admit(proposal(i, step=i))
        for task in pool.draw(i, 4, 0.5, 0):
            pool.record(task.id, [Verdict("correct"), Verdict("wrong")])
    state = json.loads(json.dumps(pool.to_json(), allow_nan=False))
    restored = Pool.from_json(state, valid)
    assert restored.to_json() == pool.to_json()
    for twin in (pool, restored):
        assert twin.admit(maths(6, "what is 11 times 12?")) == "contaminated"
        assert twin.admit(Task.from_json(repeat(proposal(5, 7), "p50"))) == "duplicate"
        assert twin.admit(proposal(40, step=7)) == "admitted"
    assert ids(pool.draw(8, 6, 0.5, 0)) == ids(restored.draw(8, 6, 0.5, 0))
    assert restored.to_json() == pool.to_json()


def test_restoring_with_another_capacity_or_validation_set():
    pool = seeded(2, 1)
    for i in range(4):
        pool.admit(proposal(i, step=i))
    state = pool.to_json()
    assert [*Pool.from_json(state, capacity=4).admitted] == ["p3"]
    changed = Pool.from_json(
        state, valid=[maths(9, proposal(2, 0).question), maths(8, maths(1).question)]
    )
    assert [*changed.admitted] == ["p0", "p1", "p3"] and [*changed.seeds] == ["m0", "c0"]
    assert changed.refused_seeds == [("m1", "m8")]


def test_metrics_tell_size_and_age():
    pool = seeded(2, 1, capacity=5)
    assert "pool/age" not in pool.metrics(step=3)
    for i in range(3):
        pool.admit(proposal(i, step=i))
    assert pool.metrics(step=4) == {
        "pool/size": 5,
        "pool/size_math": 4,
        "pool/size_code": 1,
        "pool/evicted": 1,
        "pool/age": 2.5,
    }


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"capacity": 1}, "capacity is 1 for 20 seeds"),
        ({"seed_share": 1.5}, "seed_share is 1.5"),
        ({"half_life": 0}, "half_life is 0"),
        ({"half_life": float("nan")}, "half_life is nan"),
        ({"dedup_threshold": 0}, "dedup_threshold is 0"),
    ],
)
def test_settings_out_of_range_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        seeded(**changes)


def test_equal_ids_and_empty_pools_are_errors():
    with pytest.raises(ValueError, match="id 'm0' comes twice"):
        Pool([maths(0), maths(0)])
    with pytest.raises(ValueError, match="at least one seed"):
        Pool([])
    with pytest.raises(ValueError, match="math_share is 2"):
        seeded().draw(0, 2, 2, 0)


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="../shared absent")
def test_math500_as_validation_keeps_its_own_problems_out_and_the_training_set_in():
    def rows(name):
        text = (SHARED / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
        return [Task.from_json(json.loads(line)) for line in text.splitlines()]

    valid = rows("math500")
    pool = Pool(rows("gsm8k_train"), valid)
    copies = [Task.from_json(repeat(task, f"copy/{task.id}")) for task in valid]
    assert {pool.admit(task) for task in copies} == {"contaminated"}
    assert len(pool.refused_seeds) == 0
