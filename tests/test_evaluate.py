"""Held-out figures: what each counts, told apart on scripts."""

import scripted
from scripted import ScriptedEngine, ScriptedVerifier

from sage_jax.evaluate import Evaluator, first_of_each_domain, write_answers
from sage_jax.methods.measure import all_samples
from sage_jax.methods.sage import Sage
from sage_jax.roles import load_prompts
from sage_jax.tasks.pool import Pool

POOL = Pool(scripted.seeds(), capacity=100)


def evaluator(answer, judge=lambda job: ("correct", ""), **valid):
    c = scripted.config()
    c.valid.effects = 0
    for name, value in valid.items():
        c.valid[name] = value
    engine = ScriptedEngine(answer)
    method = Sage(c, load_prompts("v1"))
    return Evaluator(c, engine, ScriptedVerifier(judge), scripted.Bytes(), method), engine


def answer(row_id):
    kind = row_id.split("/")[-2]
    return {
        "answer": "<answer>1</answer>",
        "plan": "<plan>add them</plan>",
        "judge_plan": "<score>9</score>",
        "solve": "<answer>2</answer>",
    }[kind]


def figures(answer, judge=lambda job: ("correct", ""), **valid):
    made, _ = evaluator(answer, judge, **valid)
    row = made.figures(scripted.seeds(4), POOL)
    return {name: value for name, value in row.items() if value is not None}


def test_every_figure_tells_two_models_apart():
    def judge(job):
        lost = job.kind == "code" or "answer/0" in job.id and "m1" in job.id
        return ("wrong", "") if lost or job.id.endswith("answer/2") else ("correct", "")

    def sloppy(row_id):
        return "no tags" if "/m2/answer" in row_id else answer(row_id)

    good, poor = figures(answer), figures(sloppy, judge)
    assert set(good.values()) == {1.0}
    assert poor["valid/accuracy"] == 3 / 8
    assert poor["valid/accuracy_math"] == 3 / 4 and poor["valid/accuracy_code"] == 0
    assert poor["valid/accuracy_wellformed"] == 2 / 7  # m2 is right without its tags
    assert poor["valid/accuracy_planned"] == 4 / 8
    assert poor["valid/accuracy_sampled"] == (16 - 4 - 1) / 32
    assert not [name for name in good if good[name] == poor[name]]


def test_figures_that_are_switched_off_are_absent_and_cost_no_rows():
    made, engine = evaluator(answer, samples=0, planned=False)
    row = made.figures(scripted.seeds(4), POOL)
    assert "valid/accuracy_sampled" not in row and "valid/accuracy_planned" not in row
    assert len(engine.seen) == 8 and all(r.temperature == 0 for r in engine.seen)


def test_verdicts_lost_to_the_machinery_do_not_count_as_correct():
    row = figures(answer, lambda job: ("error", "sandbox_error"))
    assert row["valid/accuracy"] == 0


def test_the_limit_takes_the_first_of_each_domain():
    tasks = scripted.seeds(4)
    assert [t.id for t in first_of_each_domain(tasks, 2)] == ["m0", "m1", "c0", "c1"]
    assert first_of_each_domain(tasks, 0) == tasks


def test_answers_are_written_with_their_verdicts(tmp_path):
    made, _ = evaluator(answer)
    episodes = made.run(scripted.seeds(2), made.method.bare_graph("answer", 1), 0.0)
    write_answers(tmp_path / "answers.jsonl", episodes)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert len(lines) == len(all_samples(episodes)) == 4 and '"verdict": "correct"' in lines[0]
