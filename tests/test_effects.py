"""What each role is worth: effects told apart on scripts of known worth."""

from scripted import good_answer, seeds
from test_evaluate import evaluator

from sage_jax.evaluate import harder_than_seeds, spread
from sage_jax.methods import effects
from sage_jax.tasks.pool import Pool
from sage_jax.tasks.task import Task


def answer(row_id):
    kind = row_id.split("/")[-2]
    return "<answer>4</answer>" if kind in ("answer", "probe") else good_answer(row_id)


def figures(answer=answer, judge=lambda job: ("correct", ""), pool=None, **method):
    made, _ = evaluator(answer, judge, effects=8)
    for name, value in method.items():
        made.config.method[name] = value
    return made.figures(seeds(4), pool or Pool(seeds(), capacity=100))


def test_the_planner_is_worth_what_its_plan_adds():
    def judge(job):
        lost = "/bare/" in job.id and job.kind == "math"
        return ("wrong", "") if lost else ("correct", "")

    assert figures(judge=judge)["effect/planner"] == 0.5
    assert figures()["effect/planner"] == 0.0
    misled = figures(judge=lambda j: ("wrong", "") if "/probe/" in j.id else ("correct", ""))
    assert misled["effect/planner"] == -1.0


def test_a_plan_is_shown_whatever_its_score_when_the_planner_is_measured():
    made, engine = evaluator(answer, effects=4)
    episodes = made.run(seeds(4), effects.uplift_graph(made.method), 1.0)
    for episode in episodes:
        assert "add them" in episode.samples["probe"][0].messages[-1]["content"]
        assert "add them" not in episode.samples["bare"][0].messages[-1]["content"]


def test_roc_area_by_hand():
    assert effects.roc_auc([1.0, 0.5], [0.5, 0.0]) == (1 + 1 + 0.5 + 1) / 4
    assert effects.roc_auc([], [0.1]) is None


def test_the_critic_is_worth_how_well_it_ranks():
    blind = lambda r: "<score>7</score>" if "/audit/" in r else answer(r)  # noqa: E731
    turned = lambda r: (  # noqa: E731
        f"<score>{3 if 'a/' in r else 8}</score>" if "/audit/" in r else answer(r)
    )
    assert figures()["effect/critic"] == 1.0
    assert figures(blind)["effect/critic"] == 0.5
    assert figures(turned)["effect/critic"] == 0.0
    mute = lambda r: "no" if "/audit/" in r else answer(r)  # noqa: E731
    assert figures(mute)["effect/critic"] is None


def test_the_challenger_is_worth_its_new_and_sometimes_solved_problems():
    def some(job):
        return ("wrong", "") if job.id.endswith("attempt/0") else ("correct", "")

    row = figures(judge=some)
    assert row["effect/challenger"] == 1.0 and row["effect/challenger_yield"] == 1.0
    solved = figures()
    assert solved["effect/challenger"] == 0.0 and solved["effect/challenger_yield"] == 0.0

    def halved(row_id):  # every second proposal has no key
        odd = row_id.split("/")[-2] == "challenge" and int(row_id.split("/")[2]) % 2
        return "<question>q</question>" if odd else answer(row_id)

    row = figures(halved, some)
    assert row["effect/challenger"] == 1.0 and row["effect/challenger_yield"] == 0.5
    gated = figures(lambda r: good_answer(r, score="3") if "judge_q" in r else answer(r), some)
    assert gated["effect/challenger"] is None and gated["effect/challenger_yield"] == 0.0


def test_measuring_leaves_the_pool_as_it_was():
    pool = Pool(seeds(), capacity=100)
    before = pool.to_json()
    figures(pool=pool)
    assert pool.to_json() == before


def test_key_truth_asks_the_proposals_own_verifier_about_the_true_answer():
    question = "ana has 7, finds 5, doubles. how many?"
    made, _ = evaluator(answer, effects=4)
    task = Task.from_json({"id": "p", "domain": "math", "question": question, "answer": "7+5*2"})
    episodes = effects.proposals(made.method, [task])
    episodes[0].facts["candidate"] = task
    (job,) = effects.key_jobs(episodes)
    assert job.payload["gold"] == "7+5*2" and job.payload["prediction"] == "<answer>24</answer>"
    episodes[0].facts["candidate"] = Task.from_json(
        {"id": "p", "domain": "math", "question": "What is 1+1?", "answer": "2"}
    )
    assert effects.key_jobs(episodes) == []


def test_hard_items_are_those_above_every_seed():
    rows = [
        {"id": f"t{n}", "domain": "math", "question": f"q{n} {n}", "answer": "1", "level": n}
        for n in (2, 3, 4, 5)
    ]
    tasks = [Task.from_json(row) for row in rows]
    assert [t.id for t in harder_than_seeds(tasks, Pool(tasks[:2]))] == ["t4", "t5"]
    assert harder_than_seeds(tasks, Pool(tasks)) == []
    assert harder_than_seeds(seeds(2), Pool(seeds(3))) == []


def test_spread_takes_even_distances():
    tasks = seeds(4)
    assert [t.id for t in spread(tasks, 4)] == ["m0", "m2", "c0", "c2"]
    assert spread(tasks, 100) == tasks and spread(tasks, 0) == []


def test_effects_can_be_switched_off():
    made, engine = evaluator(answer, effects=0, samples=0, planned=False)
    row = made.figures(seeds(2), Pool(seeds(), capacity=100))
    assert not [name for name in row if name.startswith(("effect", "audit"))]
    assert len(engine.seen) == 4
