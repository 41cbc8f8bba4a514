"""Reward set `robust`: its formulas, and the promises that the published set does not keep."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import all_correct, config, good_answer, play_step

from sage_jax.methods import rewards
from sage_jax.methods.credit import assign_advantages
from sage_jax.methods.measure import all_samples
from sage_jax.tasks.pool import Pool
from sage_jax.tasks.task import Task

shares = st.floats(0, 1)
FORMATS = st.sampled_from((0.0, 0.5, 1.0))
PARSED = st.sampled_from((0.5, 1.0))  # what a proposal that parses can have
ALPHA = 0.7


def challenger(s_q, rate, r_f, usable=True, alpha=ALPHA):
    difficulty = rewards.earned_difficulty(s_q, rate, alpha)
    return rewards.challenger_robust(s_q or 0.0, difficulty, r_f, usable)


@pytest.mark.parametrize(
    ("s_q", "rate", "r_f", "usable", "want"),
    [
        (0.8, 0.5, 1, True, 2.3 / 3),
        (0.8, 0.25, 0.5, True, 2.05 / 3),
        (0.6, 0.25, 1, True, 1.6 / 3),  # below the gate: no difficulty
        (0.9, 0.0, 1, True, 1.9 / 3),  # no attempt succeeded: no difficulty
        (1.0, 0.5, 1, False, 0.0),
        (1.0, 0.5, 0.5, False, 0.5 / 3 - 1 / 3),
        (None, 0.5, 1, True, 1 / 3),  # no score at all
    ],
)
def test_challenger_formula(s_q, rate, r_f, usable, want):
    assert math.isclose(challenger(s_q, rate, r_f, usable), want)


@given(shares, shares, shares, FORMATS)
def test_a_better_score_never_earns_less_across_the_gate(a, b, rate, r_f):
    low, high = sorted((a, b))
    assert challenger(low, rate, r_f) <= challenger(high, rate, r_f) + 1e-12


@given(shares, shares, PARSED, shares, shares, FORMATS)
def test_an_unusable_proposal_earns_strictly_less_than_any_usable_one(s, p, r_f, s2, p2, r_f2):
    assert challenger(s2, p2, r_f2, usable=False) < challenger(s, p, r_f)


@given(shares, FORMATS)
def test_a_problem_that_nobody_solves_earns_no_difficulty(s_q, r_f):
    assert challenger(s_q, 0.0, r_f) == challenger(s_q, None, r_f) == challenger(s_q, 1.0, r_f)


@pytest.mark.parametrize(
    ("s_p", "r_f", "u", "want"), [(1, 1, 1, 1.0), (0.8, 1, -1, 0.45), (0, 0, 0, 0.25)]
)
def test_planner_formula(s_p, r_f, u, want):
    assert math.isclose(rewards.planner_robust(s_p, r_f, u), want)


def test_solver_and_critic_formulas():
    assert math.isclose(rewards.solver_robust(1, 0.5), 0.9)
    assert math.isclose(rewards.critic_robust(1, rewards.agreement(7 / 9, 1.0)), 0.5 + 0.5 * 7 / 9)
    assert math.isclose(rewards.critic_robust(1, rewards.agreement(7 / 9, 0.0)), 0.5 + 0.5 * 2 / 9)
    assert rewards.critic_robust(0.5, rewards.agreement(None, 1.0)) == 0.25


def swap(**answers):
    return lambda row_id: answers.get(row_id.split("/")[-2]) or good_answer(row_id)


def of_kind(episodes, *kinds):
    return [s for s in all_samples(episodes) if s.kind in kinds]


def test_a_grounded_step_adds_unplanned_answers_and_audits():
    sage, _, episodes, _ = play_step(rewards="robust", bare=3)
    counts = {}
    for sample in all_samples(episodes):
        counts[sample.kind] = counts.get(sample.kind, 0) + 1
    assert counts == {
        "challenge": 4, "judge_question": 8, "attempt": 8, "plan": 4, "judge_plan": 8, "solve": 8,
        "probe": 8, "bare": 12, "audit": 4,
    }  # fmt: skip
    assert sum(sage.rows_per_step().values()) == len(all_samples(episodes))
    for sample in of_kind(episodes, "bare", "probe"):
        shown = "add them" in sample.messages[-1]["content"]
        assert shown == (sample.kind == "probe")


def test_audits_hold_a_seed_whole_and_broken_and_pay_agreement_with_the_label():
    _, pool, episodes, _ = play_step(rewards="robust", audits=4)
    audits = [e for e in episodes if "label" in e.facts]
    assert [e.facts["label"] for e in audits] == [1, 0, 1, 0]
    for whole, broken in zip(audits[::2], audits[1::2], strict=True):
        assert whole.task.id == broken.task.id and whole.task.id in pool.seeds
        assert whole.facts["question"] == whole.task.question != broken.facts["question"]
        assert broken.facts["question"] in broken.samples["audit"][0].messages[-1]["content"]
        assert math.isclose(whole.samples["audit"][0].reward, 0.5 + 0.5 * 8 / 9)
        assert math.isclose(broken.samples["audit"][0].reward, 0.5 + 0.5 * 8 / 9)
        assert whole.samples["audit"][0].parts["agreement"] == 8 / 9


def test_seeds_without_a_number_are_not_audited():
    row = {"id": "x", "domain": "math", "question": "Add one and two?", "answer": "3"}
    other = {"id": "y", "domain": "math", "question": "Add 1 and 2 and 4?", "answer": "7"}
    pool = Pool(map(Task.from_json, (row, other)))
    assert [t.id for t in pool.draw_seeds(1, 4, 1.0, 0)] == ["y"]


def test_critic_rows_of_both_kinds_are_normalised_apart_in_every_form():
    for form in ("role_token", "role_sequence", "grouped"):
        # All judgements alike: their format reward has no spread, while audits differ.
        _, _, episodes, _ = play_step(
            lambda r: good_answer(r) if "/1a/" not in r else "<score>1</score>",
            rewards="robust",
            advantage=form,
        )
        c = config(rewards="robust", advantage=form)
        assign_advantages(all_samples(episodes), c)
        assert all(s.advantage == 0 for s in of_kind(episodes, "judge_question", "judge_plan"))
        assert {s.reward for s in of_kind(episodes, "judge_question")} == {1.0}
        audits = [s.advantage for s in of_kind(episodes, "audit")]
        assert min(audits) < -0.5 and max(audits) > 0.3 and abs(sum(audits)) < 1e-5


def test_a_plan_is_paid_for_what_it_adds():
    def judge(job):
        return ("wrong", "") if "/bare/" in job.id else all_correct(job)

    _, _, episodes, _ = play_step(rewards="robust", judge=judge)
    for sample in of_kind(episodes, "plan"):
        assert sample.parts["uplift"] == 1.0
        assert math.isclose(sample.reward, 0.25 * 7 / 9 + 0.25 + 0.5)

    def misled(job):
        return ("wrong", "") if "/solve/" in job.id or "/probe/" in job.id else all_correct(job)

    _, _, episodes, _ = play_step(rewards="robust", judge=misled)
    assert all(s.parts["uplift"] == -1.0 for s in of_kind(episodes, "plan"))


def test_a_closed_gate_hides_no_plan_from_the_measurement():
    """Answers behind the gate went bare: they count as answers without the plan."""
    low = lambda row_id: good_answer(row_id, plan_score="2")  # noqa: E731
    _, _, episodes, _ = play_step(
        low,
        rewards="robust",
        judge=lambda j: ("wrong", "") if "/bare/" in j.id else ("correct", ""),
    )
    for sample in of_kind(episodes, "plan"):
        assert sample.parts["uplift"] == 0.5  # 2 of 2 with it, 2 of 4 without
        assert math.isclose(sample.reward, 0.25 / 9 + 0.25 + 0.375)


def test_scores_of_plans_are_paid_for_agreeing_with_what_the_plan_led_to():
    def judge(job):
        return ("wrong", "") if "/probe/" in job.id or "/solve/0" in job.id else all_correct(job)

    _, _, episodes, _ = play_step(rewards="robust", judge=judge)
    for sample in of_kind(episodes, "judge_plan"):
        assert math.isclose(sample.parts["agreement"], 1 - abs(7 / 9 - 1 / 4))
        assert math.isclose(sample.reward, 0.5 + 0.5 * sample.parts["agreement"])

    def lost(job):
        return ("error", "sandbox_error") if "/probe/" in job.id else all_correct(job)

    low = lambda row_id: good_answer(row_id, plan_score="2")  # noqa: E731
    _, _, episodes, _ = play_step(low, lost, rewards="robust")
    assert all(s.masked for s in of_kind(episodes, "judge_plan"))


def test_an_unparsed_plan_has_no_probes_and_no_uplift():
    _, _, episodes, _ = play_step(swap(plan="no tags"), rewards="robust")
    assert not of_kind(episodes, "probe", "judge_plan")
    assert all(s.parts["uplift"] == 0 and s.reward == 0.25 for s in of_kind(episodes, "plan"))


def test_unparsed_scores_are_left_out_of_means_and_close_the_gate_when_there_is_no_other():
    def half(row_id):
        return "no score" if row_id.endswith("judge_question/0") else good_answer(row_id)

    sage, pool, episodes, _ = play_step(half, rewards="robust")
    for sample in of_kind(episodes, "challenge"):
        assert sample.parts["question_score"] == 7 / 9
    assert sage.admit(pool, episodes) == {"admitted": 4}

    none = swap(judge_question="no score", judge_plan="no score")
    sage, pool, episodes, _ = play_step(none, rewards="robust", alpha=0.0, beta=0.0)
    assert sage.admit(pool, episodes) == {"gated_out": 4}
    for sample in of_kind(episodes, "challenge"):
        assert sample.parts["question_score"] == 0 and sample.parts["difficulty"] == 0
    for sample in of_kind(episodes, "solve"):
        assert "add them" not in sample.messages[-1]["content"]


def test_duplicates_of_the_pool_and_of_the_step_are_paid_like_invalid_ones():
    sage, pool, episodes, _ = play_step(rewards="robust")
    sage.admit(pool, episodes)
    _, _, again, _ = play_step(rewards="robust", step=2, pool=pool)
    assert all(s.reward <= 0 for s in of_kind(again, "challenge"))

    same = swap(challenge="<question>What is 5 plus 6?</question><answer>5+6</answer>")
    _, _, twins, _ = play_step(same, rewards="robust")
    paid = [s.reward > 0 for s in of_kind(twins, "challenge") if s.domain == "math"]
    assert paid == [True, False]  # the first is new, its twin is not


def test_the_order_of_samples_changes_no_reward():
    def judge(job):
        return ("wrong", "") if sum(map(ord, job.id)) % 3 == 0 else all_correct(job)

    def answer(row_id):
        score = str(1 + sum(map(ord, row_id)) % 10)
        return good_answer(row_id, score=score, plan_score=score)

    for name in rewards.REWARD_SETS:
        sage, pool, episodes, _ = play_step(answer, judge, rewards=name)
        want = {s.id: s.reward for s in all_samples(episodes)}
        assert len(set(want.values())) > 5
        for episode in episodes:
            for samples in episode.samples.values():
                Random(7).shuffle(samples)
        Random(8).shuffle(episodes)
        sage.reward(episodes, pool)
        got = {s.id: s.reward for s in all_samples(episodes)}
        assert all(math.isclose(got[i], want[i]) for i in want)


def test_lost_attempts_mask_the_proposal_in_both_sets():
    def judge(job):
        return ("error", "sandbox_error") if "/attempt/" in job.id else all_correct(job)

    for name in rewards.REWARD_SETS:
        _, _, episodes, _ = play_step(judge=judge, rewards=name)
        assert all(s.masked for s in of_kind(episodes, "challenge", "attempt"))
