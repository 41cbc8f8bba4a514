"""SAGE on scripts: the row graph, its failure rules, rewards, gates, admission and figures."""

import math
import re
from pathlib import Path

import pytest
import scripted
from scripted import all_correct, good_answer, play_step, swap

from sage_jax.config import ConfigError
from sage_jax.methods import rewards
from sage_jax.methods.credit import assign_advantages, training_batches
from sage_jax.methods.graph import Cancelled, Player, play
from sage_jax.methods.measure import all_samples, episode_row, rollout_figures
from sage_jax.report.metrics import METRICS, check
from sage_jax.tasks.pool import Pool
from sage_jax.verify.verdict import REFUSALS


def kinds(episodes):
    counts = {}
    for sample in all_samples(episodes):
        counts[sample.kind] = counts.get(sample.kind, 0) + 1
    return counts


def test_a_full_step_holds_the_declared_rows_of_all_roles_in_both_domains():
    sage, _, episodes, _ = play_step()
    assert kinds(episodes) == {
        "challenge": 4, "judge_question": 8, "attempt": 8, "plan": 4, "judge_plan": 8, "solve": 8,
    }  # fmt: skip
    assert sum(sage.rows_per_step().values()) == len(all_samples(episodes))
    for role in ("challenger", "planner", "solver", "critic"):
        assert {s.domain for s in all_samples(episodes) if s.role == role} == {"math", "code"}


def test_every_row_names_the_rows_it_was_made_from():
    _, _, episodes, _ = play_step()
    known = {s.id for s in all_samples(episodes)}
    for sample in all_samples(episodes):
        assert set(sample.parents) <= known
        assert len(sample.parents) == {
            "challenge": 0, "plan": 0, "judge_question": 1, "attempt": 1, "judge_plan": 1,
            "solve": 3,
        }[sample.kind]  # fmt: skip


@pytest.mark.parametrize("width", [1, 2, 100])
@pytest.mark.parametrize("lag", [0, 3])
def test_a_slow_verifier_changes_neither_the_rows_nor_their_order(width, lag):
    _, _, want, engine = play_step(width=width)
    _, _, got, slow = play_step(width=width, lag=lag)
    assert [r.id for r in slow.seen] == [r.id for r in engine.seen]
    assert [r.key for r in slow.seen] == [r.key for r in engine.seen]
    assert [(s.id, s.reward) for s in all_samples(got)] == [
        (s.id, s.reward) for s in all_samples(want)
    ]


def test_rows_of_a_step_have_keys_of_their_own_and_other_steps_other_keys():
    _, _, _, first = play_step(step=1)
    _, _, _, second = play_step(step=2)
    keys = [r.key for r in first.seen] + [r.key for r in second.seen]
    assert len(set(keys)) == len(keys)


def test_an_unparsed_proposal_has_no_children_and_no_difficulty():
    sage, pool, episodes, _ = play_step(swap(challenge="<question>only this</question>"))
    assert kinds(episodes) == {"challenge": 4, "plan": 4, "judge_plan": 8, "solve": 8}
    for episode in episodes[:4]:
        (sample,) = episode.samples["challenge"]
        assert sample.parts["difficulty"] == 0 and sample.reward == 0.25  # r_f 0.5, nothing judged
    assert sage.admit(pool, episodes) == {"invalid": 4}


def test_an_invalid_key_or_reference_has_no_children():
    def judge(job):
        return (
            ("wrong", "constant")
            if job.kind in ("math_key", "code_reference")
            else all_correct(job)
        )

    sage, pool, episodes, _ = play_step(judge=judge)
    assert "attempt" not in kinds(episodes) and sage.admit(pool, episodes) == {"invalid": 4}


def test_a_plan_below_the_gate_is_not_shown_and_earns_the_solver_nothing():
    _, _, episodes, _ = play_step(lambda row_id: good_answer(row_id, plan_score="3"))
    for sample in [s for e in episodes for s in e.samples.get("solve", ())]:
        assert "add them" not in sample.messages[-1]["content"]
        assert sample.parts["plan_score"] == 0 and math.isclose(sample.reward, 0.8)
    _, _, episodes, _ = play_step()
    for sample in [s for e in episodes for s in e.samples.get("solve", ())]:
        assert "add them" in sample.messages[-1]["content"]
        assert math.isclose(sample.reward, 0.2 * 7 / 9 + 0.8)


def test_an_unparsed_plan_is_not_judged_and_the_solver_goes_bare():
    _, _, episodes, _ = play_step(swap(plan="add them"))
    assert "judge_plan" not in kinds(episodes) and kinds(episodes)["solve"] == 8
    for episode in episodes[4:]:
        assert episode.samples["plan"][0].reward == 0
        assert "add them" not in episode.samples["solve"][0].messages[-1]["content"]


def test_no_prompt_of_any_role_shows_a_key():
    _, _, episodes, _ = play_step()
    for episode in episodes:
        key = episode.task._key
        secret = key["answer"] if "answer" in key else key["canonical_solution"]
        for sample in all_samples([episode]):
            assert secret not in sample.messages[-1]["content"]
    for episode in episodes[:4]:
        candidate = episode.facts["candidate"]
        if candidate.domain == "math":
            for sample in [*episode.samples["attempt"], *episode.samples["judge_question"]]:
                assert candidate._key["answer"] not in sample.messages[-1]["content"]


def test_proposals_enter_the_pool_only_through_the_question_gate():
    sage, pool, episodes, _ = play_step()
    before = len(pool)
    assert sage.admit(pool, episodes) == {"admitted": 4} and len(pool) == before + 4
    _, _, again, _ = play_step(step=2)
    assert sage.admit(pool, again)["duplicate"] == 4
    low = lambda row_id: good_answer(row_id, score="7")  # noqa: E731  (7-1)/9 = 0.667 < alpha
    sage, pool, episodes, _ = play_step(low)
    assert sage.admit(pool, episodes) == {"gated_out": 4}


def test_names_of_tasks_do_not_grow_with_their_generation():
    """A proposal named after its reference would carry the names of all its ancestors."""
    sage, pool, episodes, _ = play_step(step=7)
    sage.admit(pool, episodes)
    assert set(pool.admitted) == {f"7/new/{i}" for i in range(4)}
    assert all(task.provenance["parent"] in pool.seeds for task in pool.admitted.values())


@pytest.mark.parametrize("blank", ["\xa0", "\u3000", "\x1c"])
def test_a_blank_proposal_neither_ends_the_run_nor_spoils_the_pool(blank):
    def answer(row_id):
        text = good_answer(row_id)
        return re.sub("<question>.*</question>", f"<question>{blank}</question>", text)

    sage, pool, episodes, _ = play_step(answer)
    assert sage.admit(pool, episodes) == {"invalid": 4}
    assert Pool.from_json(pool.to_json()).to_json() == pool.to_json()


def test_an_admitted_code_task_is_judged_by_values_from_the_sandbox():
    sage, pool, episodes, _ = play_step()
    sage.admit(pool, episodes)
    task = next(t for t in pool.admitted.values() if t.domain == "code")
    tests = task.job("j", "<answer>def bump(x): return 0</answer>").payload["tests"]
    assert tests["expected"] == ["2", "3"] and len(tests["args"]) == 2
    assert task.stats.born_step == 1


def test_a_stop_request_ends_the_rollout_between_two_chunks():
    sage, pool, _, _ = play_step()
    engine = scripted.ScriptedEngine(good_answer)
    verifier = scripted.ScriptedVerifier(all_correct)
    with pytest.raises(Cancelled):
        play(
            engine,
            verifier,
            sage.episodes(pool, 2),
            Player(sage.config, scripted.Bytes(), 2, 1.0),
            stop=lambda: len(engine.seen) - len(engine.queue) > 4,
        )


@pytest.mark.parametrize(
    ("s_q", "r_d", "r_f", "valid", "want"),
    [
        (0.69, 0.3, 1, True, 0.845),
        (0.70, 0.0, 1, True, 1.7 / 3),
        (0.70, 0.5, 1, True, 2.2 / 3),
        (1.0, 0.0, 1, False, 1.0),
        (1.0, 1.0, 1, True, 1.0),
    ],
)
def test_challenger_reward_follows_the_published_rule(s_q, r_d, r_f, valid, want):
    assert math.isclose(rewards.challenger_paper(s_q, r_d, r_f, valid, 0.7), want)


def test_planner_and_solver_rewards_follow_the_published_weights():
    assert math.isclose(rewards.planner_paper(0.4, 1.0, (0.5, 0.5)), 0.7)
    assert math.isclose(rewards.solver_paper(0.5, 1.0, 0.5, (0.2, 0.6, 0.2)), 0.8)


def test_difficulty_is_one_minus_the_solve_rate_of_the_attempts():
    def judge(job):
        lost = job.id.endswith("attempt/0")
        return ("wrong", "") if lost else all_correct(job)

    _, _, episodes, _ = play_step(judge=judge)
    for episode in episodes[:4]:
        (sample,) = episode.samples["challenge"]
        assert sample.parts["difficulty"] == 0.5
        assert math.isclose(sample.reward, (7 / 9 + 0.5 + 1) / 3)


def test_an_unparsed_score_counts_one_half_and_its_critic_earns_its_format_only():
    _, _, episodes, _ = play_step(swap(judge_question="<score>7/10</score>", judge_plan="none"))
    for episode in episodes[:4]:
        assert episode.samples["challenge"][0].parts["question_score"] == 0.5
    for episode in episodes[4:]:
        assert episode.samples["plan"][0].parts["plan_score"] == 0.5
        assert all(s.reward == 0 for s in episode.samples["judge_plan"])


def test_what_the_response_caused_earns_nothing_without_being_masked():
    for verdict in ("wrong", "unparsable", "timeout", "error"):
        _, _, episodes, _ = play_step(
            judge=lambda job, v=verdict: (
                (v, "x") if job.kind in ("math", "code") else ("correct", "")
            )
        )
        solved = [s for s in all_samples(episodes) if s.role == "solver"]
        assert all(s.parts["correct"] == 0 and not s.masked for s in solved)


# Two rollouts as unlike as can be: every figure of a rollout must tell them apart.
def mixed(row_id):
    number = sum(map(ord, row_id)) % 7
    kind = row_id.split("/")[-2]
    if number == 0 or kind == "plan" and number == 2:
        return "no tags at all..."
    if kind == "plan":
        return "<plan>add them in turn</plan>"
    if kind == "judge_plan" and number > 4:
        return "it is vague: <score>5</score>"
    if number == 1 and kind in ("attempt", "solve"):
        return "some thoughts first <answer>3</answer>"
    return good_answer(row_id, score=str(4 + number), plan_score=str(number))


def mixed_judge(job):
    number = sum(map(ord, job.id)) % 11
    if job.kind in ("math_key", "code_reference"):
        return ("wrong", "constant") if number == 3 else ("correct", "")
    outcomes = ("wrong", "unparsable", "timeout", "error", "correct", "correct")
    verdict = outcomes[number % 6]
    return verdict, "verifier_error" if number == 9 else "x"


def test_every_figure_of_a_rollout_tells_two_rollouts_apart():
    sizes = {"candidates": 24, "drawn": 12}
    figures = []
    for answer, judge in ((good_answer, all_correct), (mixed, mixed_judge)):
        _, _, episodes, _ = play_step(answer, judge, **sizes)
        samples = all_samples(episodes)
        row = rollout_figures(episodes, scripted.config().method)
        row |= assign_advantages(samples, scripted.config(advantage="grouped"))
        check({name: value for name, value in row.items() if value is not None})
        figures.append(row)
    plain, rich = figures
    same = [name for name in plain if plain[name] == rich.get(name)]
    assert not [name for name in same if not name.endswith("_mean")], same
    for name in rich:
        assert name in METRICS


def test_every_refusal_of_a_proposal_is_counted_under_its_reason():
    def judge(job):
        if job.kind == "code_reference":
            return "error", "raised_ValueError"
        return ("unparsable", "not_definite") if job.kind == "math_key" else ("correct", "")

    c = scripted.config()
    _, _, episodes, _ = play_step(judge=judge)
    row = rollout_figures(episodes, c.method)
    shares = {name: v for name, v in row.items() if name.startswith("refused/")}
    assert shares == {"refused/raised": 0.5, "refused/not_definite": 0.5}
    check(shares)
    _, _, episodes, _ = play_step(swap(challenge="no tags"))
    assert rollout_figures(episodes, c.method)["refused/unparsed"] == 1.0
    strange = play_step(judge=lambda job: ("wrong", "never_heard_of"))[2]
    assert rollout_figures(strange, c.method)["refused/other"] == 1.0


def test_the_page_on_verifiers_lists_every_refusal():
    page = (Path(__file__).parent.parent / "docs" / "verifiers.md").read_text()
    table = page.split("**References.**")[1].split("Banned effects")[0]
    named = {name.removesuffix("_*") for name in re.findall(r"`([a-z_*]+)`", table)}
    assert named - {"code_reference", "math_key"} == set(REFUSALS)


def test_an_episode_row_holds_what_a_reader_needs():
    _, _, episodes, _ = play_step()
    row = episode_row(3, episodes[-1].samples["solve"][0], "prompt text")
    assert row["step"] == 3 and row["role"] == "solver" and row["verdict"] == "correct"
    assert row["prompt"] == "prompt text" and row["response"] == "<answer>2</answer>"
    assert row["reward_parts"].keys() == {"plan_score", "correct", "format"}
    assert len(row["parents"]) == 3


def test_an_over_long_prompt_is_skipped_or_stops_the_run_by_name():
    class Strict(scripted.Bytes):
        def chat_fit(self, messages, max_tokens, policy):
            if policy == "skip":
                return None
            raise ValueError("prompt of 99 tokens")

    sage, pool, _, _ = play_step()
    c = scripted.config()
    engine, verifier = scripted.ScriptedEngine(good_answer), scripted.ScriptedVerifier(all_correct)
    c.tokens.overlong = "error"
    with pytest.raises(ConfigError, match="tokens.max_prompt=1024.*99 tokens"):
        play(engine, verifier, sage.episodes(pool, 3), Player(c, Strict(), 3, 1.0))
    c.tokens.overlong = "skip"
    episodes = sage.episodes(pool, 3)
    play(engine, verifier, episodes, Player(c, Strict(), 3, 1.0))
    sage.reward(episodes, pool)
    assert all_samples(episodes) == [] and sage.admit(pool, episodes) == {}
    figures = rollout_figures(episodes, c.method)
    assert figures["solve_rate"] is None and figures["tokens/generated"] == 0
    assert training_batches([], c) == []
