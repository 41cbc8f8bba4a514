"""Faults planted in the code, one at a time, and the test that each of them must turn red.

A mutation is an edit of one function's source. The function runs the edited code whoever holds it,
compiled programs are dropped, and the named test is called; on the real code the same call is
green. Where the text of a function has moved on, the edit no longer applies and fails by name.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest
import test_advantages
import test_engine
import test_logprob
import test_mesh
import test_objective
import test_pack
import test_pool
import test_rewards
import test_sage
import test_score
import test_stack
import test_update
from test_engine import params  # noqa: F401  (a fixture)
from test_update import fresh, shared, single  # noqa: F401  (fixtures)

from sage_jax.core import logprob, mesh, rng
from sage_jax.learn import advantages, objective, pack, score
from sage_jax.methods import credit, rewards, sage
from sage_jax.models import stack
from sage_jax.rollout import decode, sampling
from sage_jax.tasks import pool


@dataclass(frozen=True)
class Mutation:
    """`edit`: module or class, its function, a piece of its text, and what takes the place of it.
    `red`: the test that must see it. `given`: arguments of that test; those not given are fixtures
    of the same name.
    """

    edit: tuple[Any, str, str, str]
    red: Callable[..., None]
    given: dict[str, Any] = field(default_factory=dict)
    marks: tuple = ()


MASK = "(micro.position_bt < micro.length_bt)"
OWN_COUNT = "jnp.maximum(jnp.bincount(micro.role_bt.ravel(), mask_bt.ravel() * 1.0, length=4), 1)"
SPLIT = {"buckets": [12], "micro_rows": 4, "share": True}
ONE_PROGRAM = {"buckets": test_engine.BUCKETS[-1:]}

MUTATIONS = {
    # Sampling.
    "rows of a batch share a sampling key": Mutation(
        (sampling, "sample", "(noise)(key_s2,", "(noise)(key_s2.at[:].set(key_s2[0]),"),
        test_engine.test_rows_of_one_prompt_draw_independently,
    ),
    "rows of an episode share a sampling key": Mutation(
        (rng, "row_key", '"row", *names', '"row", *names[:-1]'),
        test_sage.test_rows_of_a_step_have_keys_of_their_own_and_other_steps_other_keys,
    ),
    "decoding is one position ahead": Mutation(
        (decode, "decode", "slots.position_s,\n ", "slots.position_s + 1,\n "),
        test_engine.assert_log_probs_are_those_of_a_full_pass,
        ONE_PROGRAM,
    ),
    "the sampler's log-prob ignores the temperature": Mutation(
        (sampling, "sample", "token_s, temperature_s)", "token_s, temperature_s * 0)"),
        test_engine.assert_log_probs_are_those_of_a_full_pass,
        ONE_PROGRAM,
    ),
    "the log-prob function ignores the temperature": Mutation(
        (logprob, "_tempered", "/ jnp.expand_dims(divisor_x, -1)", ""),
        test_logprob.test_each_row_uses_its_own_temperature_and_greedy_counts_as_one,
    ),
    "the decode loop copies its cache": Mutation(
        (decode, "decode", 'donate_argnames=("slots",),', ""),
        test_engine.test_decode_keeps_its_temporaries_under_one_layers_cache,
        {"form": "apart"},
    ),
    # Scoring and the loss.
    "scores belong to the token before": Mutation(
        (score, "token_logps", "in_chunks(tokens_bt[:, 1:])", "in_chunks(tokens_bt[:, :-1])"),
        test_score.test_position_zero_is_zero_and_the_others_are_of_their_own_token,
    ),
    "the mask comes from token ids": Mutation(
        (objective, "completion_mask", MASK, "(micro.tokens_bt != 0)"),
        test_objective.test_pad_id_equal_to_eos_is_still_trained,
    ),
    "the mask is dropped": Mutation(
        (objective, "completion_mask", MASK, "(micro.position_bt < 10**6)"),
        test_objective.test_gradient_reaches_every_completion_token_with_its_eos_and_nothing_else,
    ),
    "the stop token is not trained": Mutation(
        (objective, "completion_mask", MASK, MASK.replace("_bt)", "_bt - 1)")),
        test_update.test_a_completion_of_only_eos_is_trained,
    ),
    "each micro-batch divides by its own count": Mutation(
        (objective, "micro_objective", "jnp.maximum(role_tokens_r, 1)", OWN_COUNT),
        test_update.test_gradients_do_not_depend_on_micro_batches_or_buckets,
        SPLIT,
    ),
    "rows without an advantage leave the mean": Mutation(
        (pack, "pack", "for row in rows:", "for row in used:"),
        test_update.test_rows_of_advantage_0_cost_nothing_and_change_nothing,
    ),
    "there is no dual clip": Mutation(
        (objective, "policy_loss", "(loss > ceiling)", "(loss != loss)"),
        test_objective.test_dual_clip_vector,
    ),
    "rows of a sequence see each other": Mutation(
        (score, "token_logps", "segment_ids_bt=segment_bt", "segment_ids_bt=None"),
        test_update.test_gradients_do_not_depend_on_micro_batches_or_buckets,
        SPLIT,
    ),
    "positions run on from row to row": Mutation(
        (
            pack,
            "_micro_batch",
            "= np.arange(row.length)",
            "= start - row.length + np.arange(row.length)",
        ),
        test_pack.test_golden_layout_of_two_rows_in_one_sequence,
    ),
    "a micro-batch forgets the gradients before it": Mutation(
        (stack, "_add_at", "part + gradient", "gradient"),
        test_stack.test_the_gradient_of_trained_layers_is_added_to_their_totals,
        {"remat": "full"},
    ),
    # Advantages.
    "the variance is the biased one": Mutation(
        (advantages, "normalise", "weight_g.sum() - 1", "weight_g.sum()"),
        test_advantages.test_role_token_equals_reinforce_plus_plus_run_on_each_role,
    ),
    "roles are whitened together": Mutation(
        (advantages, "_groups", "(row.role, row.part,", "(None, row.part,"),
        test_advantages.test_role_sequence_ignores_length_and_keeps_roles_apart,
    ),
    # Placement.
    "sharding rules are skipped": Mutation(
        (mesh.Layout, "constrain", "return jax.lax", "return x\n    jax.lax"),
        test_mesh.test_constrain_shards_an_activation_under_jit,
        marks=(pytest.mark.multidevice,),
    ),
    # The method.
    "duplicates are admitted": Mutation(
        (pool.Pool, "outcome", "return DUPLICATE", "return ADMITTED"),
        test_pool.test_admission_outcomes,
    ),
    "an unusable proposal is paid like any other": Mutation(
        (rewards, "challenger_robust", "if not usable", "if False"),
        test_rewards.test_duplicates_of_the_pool_and_of_the_step_are_paid_like_invalid_ones,
    ),
    "what nobody solves counts as hard": Mutation(
        (rewards, "earned_difficulty", " or not rate", " or rate is None"),
        test_rewards.test_a_problem_that_nobody_solves_earns_no_difficulty,
    ),
    "audits share a baseline with other judgements": Mutation(
        (credit, "assign_advantages", "s.kind if apart", "'' if apart"),
        test_rewards.test_critic_rows_of_both_kinds_are_normalised_apart_in_every_form,
    ),
    "an unparsed score counts as the best one": Mutation(
        (rewards, "critic_mean", "UNPARSED_SCORE if", "1.0 if"),
        test_sage.test_an_unparsed_score_counts_one_half_and_its_critic_earns_its_format_only,
    ),
    "an invalid proposal gets children": Mutation(
        (sage, "_accept", "sample.judged.correct", 'sample.domain == "math"'),
        test_sage.test_an_invalid_key_or_reference_has_no_children,
    ),
}


def plant(patch, mutation):
    """Give the function its edited code."""
    owner, name, old, new = mutation.edit
    original = vars(owner)[name]
    function = inspect.unwrap(original)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        pytest.fail(f"{name} no longer holds {old!r} once: adapt the mutation")
    made = {}
    exec(source.replace(old, new), function.__globals__, made)
    if function is original:
        patch.setattr(function, "__code__", made[name].__code__)
    else:  # A jitted one: its decorator may be what was edited.
        patch.setattr(owner, name, made[name])


@pytest.fixture
def patch():
    """Like monkeypatch; programs compiled before it are dropped, and its own ones after it."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    jax.clear_caches()


def call(mutation, request):
    """The test of a mutation as a call without arguments."""
    names = inspect.signature(mutation.red).parameters.keys() - mutation.given.keys()
    fixtures = {name: request.getfixturevalue(name) for name in names}
    return lambda: mutation.red(**fixtures, **mutation.given)


def cases(mutations):
    return [pytest.param(m, id=name, marks=m.marks) for name, m in mutations.items()]


TESTS = {m.red.__name__: m for m in MUTATIONS.values()}


@pytest.mark.parametrize("mutation", cases(TESTS))
def test_without_a_mutation_the_test_is_green(mutation, request):
    call(mutation, request)()


@pytest.mark.parametrize("mutation", cases(MUTATIONS))
def test_a_mutation_turns_its_test_red(mutation, request, patch):
    test = call(mutation, request)
    plant(patch, mutation)
    with pytest.raises(AssertionError):
        test()
