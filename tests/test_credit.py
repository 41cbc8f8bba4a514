"""From what was rolled out to what the update sees: advantages, masks and batches."""

import math

import numpy as np
import pytest
import scripted
from scripted import all_correct, good_answer, play_step, swap

from sage_jax.methods.credit import assign_advantages, training_batches
from sage_jax.methods.graph import Player, play
from sage_jax.methods.measure import all_samples, error_share, rollout_figures


def batches(samples, config):
    """The training batches of samples that all have an advantage."""
    for sample in samples:
        sample.advantage = 1.0
    return training_batches(samples, config)


def test_truncated_rows_are_trained_with_the_reward_they_parse_to():
    _, _, episodes, _ = play_step(swap(solve="<answer>2</answer> and so on..."))
    row = episodes[-1].samples["solve"][0]
    assert row.completion.finish == "length" and not row.masked and row.reward > 0.7
    (batch,) = batches(all_samples(episodes), scripted.config())
    assert row.id in [i for ids in batch.ids for i in ids]


def test_a_machine_fault_masks_the_row_and_is_counted():
    def judge(job):
        return ("error", "sandbox_error") if job.kind == "code" else all_correct(job)

    _, _, episodes, _ = play_step(judge=judge)
    masked = [s for s in all_samples(episodes) if s.masked]
    # The solver's code rows, and the proposals whose attempts were all lost.
    assert {(s.role, s.domain) for s in masked} == {("solver", "code"), ("challenger", "code")}
    figures = rollout_figures(episodes, scripted.config().method)
    assert figures["masked"] == len(masked) / len(all_samples(episodes))
    assert error_share(all_samples(episodes)) == 8 / 20
    assign_advantages(all_samples(episodes), scripted.config())
    assert all(s.advantage == 0 for s in masked)
    (batch,) = batches(all_samples(episodes), scripted.config())
    assert not {s.id for s in masked} & {i for ids in batch.ids for i in ids}


@pytest.mark.parametrize("roles", [("solver",), ("critic", "planner"), ("challenger",)])
def test_switching_a_roles_training_off_keeps_its_rows_out_of_the_update(roles):
    _, _, episodes, _ = play_step()
    samples = all_samples(episodes)
    (batch,) = batches(samples, scripted.config(train_roles=roles))
    trained = {i for ids in batch.ids for i in ids}
    assert trained == {s.id for s in samples if s.role in roles}


@pytest.mark.parametrize("term", ["entropy_coef", "kl_coef"])
def test_rows_without_an_advantage_are_in_the_update_for_what_pulls_at_every_row(term):
    _, _, episodes, _ = play_step()
    samples = all_samples(episodes)
    samples[0].advantage = 0.5
    c = scripted.config()
    (batch,) = training_batches(samples, c)
    assert batch.ids == [[samples[0].id]]
    c.optim[term] = 0.1
    (whole,) = training_batches(samples, c)
    assert len([i for ids in whole.ids for i in ids]) == len(samples)
    assert (whole.role_tokens == batch.role_tokens).all()


def test_minibatches_share_out_every_role():
    c = scripted.config()
    c.optim.minibatches = 2
    _, _, episodes, _ = play_step()
    parts = batches(all_samples(episodes), c)
    assert len(parts) == 2
    role_of = {s.id: s.role for s in all_samples(episodes)}
    counts = [
        [sum(role_of[i] == role for ids in part.ids for i in ids) for role in c.method.train_roles]
        for part in parts
    ]
    assert all(abs(a - b) <= 1 for a, b in zip(*counts, strict=True))


def test_advantages_group_solvers_by_prompt_and_the_rest_by_role():
    def judge(job):
        return (
            ("wrong", "")
            if job.id.endswith("/0") and job.kind in ("math", "code")
            else all_correct(job)
        )

    _, _, episodes, _ = play_step(judge=judge)
    samples = all_samples(episodes)
    c = scripted.config(advantage="grouped")
    assign_advantages(samples, c)
    for episode in episodes[4:]:
        first, second = episode.samples["solve"]
        assert math.isclose(first.advantage, -second.advantage, abs_tol=1e-5)
        assert second.advantage > 0.7
    assert all(s.advantage == 0 for s in samples if s.role == "critic")


def test_the_update_sees_the_sampled_ids_never_a_second_encoding():
    class Lossy(scripted.Bytes):
        def decode(self, ids):
            return super().decode(ids).upper()

    sage, pool, _, _ = play_step()
    engine, verifier = scripted.ScriptedEngine(good_answer), scripted.ScriptedVerifier(all_correct)
    episodes = sage.episodes(pool, 5)
    play(engine, verifier, episodes, Player(sage.config, Lossy(), 5, 1.0))
    samples = {s.id: s for s in all_samples(episodes)}
    (batch,) = batches(list(samples.values()), sage.config)
    checked = 0
    for micro, ids in zip(batch.micros, batch.ids, strict=True):
        starts = np.argwhere((micro.position_bt == 0) & (micro.length_bt > 0))
        for (b, start), name in zip(starts, ids, strict=True):
            sample, end = samples[name], start + micro.length_bt[b, start]
            tokens = micro.tokens_bt[b, start:end].tolist()
            assert tokens == [*sample.prompt, *sample.completion.tokens]
            assert tokens[-1] == scripted.STOP
            checked += 1
    assert checked == len(samples) > 10
