"""The tiny world: dialects, demonstrations, task files, tokenizer and the packaged model folder."""

import hashlib
import json
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from sage_jax import roles
from sage_jax.core.tokens import Tokens
from sage_jax.sft import demo_messages, encode, end_of_turn
from sage_jax.tasks import tiny_world as world
from sage_jax.tasks.audit import break_question
from sage_jax.tasks.sources import load
from sage_jax.tasks.tiny_demos import GOOD, HABITS, Demo, demonstrations
from sage_jax.tasks.tiny_tasks import task_chains, task_lines
from sage_jax.tasks.tiny_tokenizer import TAGS, write_folder

ASSETS = Path(__file__).parents[1] / "sage_jax" / "assets"
MODEL = ASSETS / "tiny-qwen3"


# What the packaged weights were made from, and the weights. When one changes, run the recipe
# (configs/tiny_sft.py) again, package its model, and write both down anew.
DEMOS_SHA256 = "4bbb41638ddcfe6d07da83164ade291da818e1d9b2877e2c7f2ac4cc123c2986"
WEIGHTS_SHA256 = "3265aaa11196df20e5fc191c4f1578e79cf9330d90eddf711530b32050cee595"


@cache
def demos(number: int = 4000) -> list[Demo]:
    return list(islice(demonstrations(1), number))


@cache
def tokens() -> Tokens:
    return Tokens.load(MODEL)


def run_program(source: str, inputs: tuple) -> list:
    """Results of a program that this repository wrote itself."""
    space: dict = {}
    exec(source, space)
    return [space["f"](x) for x in inputs]


# ---- dialects ----------------------------------------------------------------------------------


def test_an_inverted_clause_is_undone_by_the_truth_and_not_by_the_reading_order():
    chain = world.parse_question("ana has 7, doubles after finding 5, loses 3. how many?")
    assert chain is not None
    assert world.plan_text(chain.ops) == "+ 5; * 2; - 3"
    assert world.plan_text(chain.as_read) == "* 2; + 5; - 3"
    assert world.truth("ana has 7, doubles after finding 5, loses 3. how many?") == 21


def test_every_task_question_is_read_back_as_the_chain_it_was_made_from():
    chains = [c for split in task_chains().values() for c in split]
    assert len(chains) == 700
    assert [world.parse_question(c.question()) for c in chains] == chains


@pytest.mark.parametrize(
    "text",
    [
        "ana has some, finds 5. how many?",
        "ana has 7 or 9, finds 5. how many?",
        "zoe has 7, finds 5. how many?",
        "ana has 7, finds 5, finds. how many?",
        "write f(x): add 3, keep even",
        "write f(list): sum, keep even",
        "write f(x): add 3 to each, sum",
        "",
    ],
)
def test_an_unsound_question_has_no_chain(text):
    assert world.parse_question(text) is None


def test_closed_expression_has_the_value_of_the_chain():
    for chain in task_chains()["valid"]:
        if chain.domain == "math":
            value = eval(world.closed_expression(chain.start, chain.ops))
            assert value == world.values(chain.start, chain.ops)[-1]


def test_program_computes_the_chain():
    for chain in task_chains()["train"][:200]:
        if chain.domain == "code":
            expected = [world.values(x, chain.ops)[-1] for x in chain.inputs()]
            assert run_program(world.program(chain.ops), chain.inputs()) == expected


def test_broken_question_differs_in_one_number():
    rng = Random(0)
    text = "ana has 7, finds 5. how many?"
    removed = {break_question(text, "removed", rng) for _ in range(20)}
    assert removed == {"ana has some, finds 5. how many?", "ana has 7, finds some. how many?"}
    for _ in range(20):
        broken = break_question("ana has 7, doubles. how many?", "contradicted", rng)
        first, second = broken.split()[2], broken.split()[4].rstrip(",")
        assert first == "7" and second != "7"
    with pytest.raises(ValueError, match="no number"):
        break_question("how many?", "removed", rng)
    with pytest.raises(ValueError, match="removed or contradicted"):
        break_question(text, "swapped", rng)


# ---- task files --------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "valid"])
def test_packaged_task_file_is_what_the_recipe_writes(split):
    path = ASSETS / "tiny" / f"{split}.jsonl"
    assert path.read_text() == "".join(task_lines(split))


def test_task_files_load_and_hold_both_domains_and_a_hard_half():
    train, valid = (load([str(ASSETS / "tiny" / f"{s}.jsonl")]) for s in ("train", "valid"))
    assert (len(train), len(valid)) == (500, 200)
    chains = task_chains()
    assert max(len(c.ops) for c in chains["train"]) == 3
    hard = sum(len(c.ops) > 3 for c in chains["valid"])
    assert 95 <= hard <= 105
    for tasks in (train, valid):
        share = sum(t.domain == "math" for t in tasks) / len(tasks)
        assert 0.6 <= share <= 0.72


def test_corpus_seeds_and_validation_are_disjoint_by_question_and_by_operations():
    chains = task_chains()
    keys = {split: {c.key for c in chains[split]} for split in chains}
    questions = {split: {c.question() for c in chains[split]} for split in chains}
    assert len(keys["train"]) == 500 and len(keys["valid"]) == 200
    assert keys["train"].isdisjoint(keys["valid"])
    assert questions["train"].isdisjoint(questions["valid"])
    for demo in demos():
        for split in chains:
            assert keys[split].isdisjoint(demo.keys)
            assert demo.question not in questions[split]
        posed = roles.parse("challenger", demo.domain, demo.response).fields.get("question", "")
        chain = world.parse_question(posed)
        assert chain is None or all(chain.key not in keys[split] for split in keys)


# ---- demonstrations ----------------------------------------------------------------------------


def test_demonstrations_are_a_function_of_the_seed():
    again = list(islice(demonstrations(1), 300))
    assert again == demos()[:300]
    assert list(islice(demonstrations(2), 300)) != again


def test_only_broken_demonstrations_fail_to_parse():
    for demo in demos():
        parsed = roles.parse(demo.role, demo.domain, demo.response)
        assert parsed.ok == (demo.habit != "broken"), demo


def test_habits_have_the_shares_of_their_table():
    for role, shares in HABITS.items():
        of_role = [d.habit for d in demos() if d.role == role]
        for habit, share in shares.items():
            assert abs(of_role.count(habit) / len(of_role) - share) < 0.07, (role, habit)


def answer_is_right(demo: Demo) -> bool:
    chain = world.parse_question(demo.question)
    assert chain is not None
    text = roles.parse("solver", demo.domain, demo.response).fields["answer"]
    if demo.domain == "math":
        return text == str(world.values(chain.start, chain.ops)[-1])
    expected = [world.values(x, chain.ops)[-1] for x in chain.inputs()]
    return run_program(text, chain.inputs()) == expected


def test_careful_answers_to_plain_short_questions_are_right_and_careless_ones_mostly_wrong():
    def share_right(domain: str, habit: str) -> float:
        asked = [
            d
            for d in demos()
            if d.role == "solver" and d.domain == domain and d.habit == habit and d.plan is None
        ]
        chains = [world.parse_question(d.question) for d in asked]
        plain = [
            d
            for d, c in zip(asked, chains, strict=True)
            if c is not None and c.inverted is None and 2 <= len(c.ops) <= 3
        ]
        assert len(plain) > 50
        return sum(map(answer_is_right, plain)) / len(plain)

    for domain, most in (("math", 0.4), ("code", 0.6)):
        assert share_right(domain, "careful") > 0.97
        assert share_right(domain, "careless") < most


def test_a_plan_of_operations_is_followed_by_careful_answers():
    followed = [d for d in demos() if d.role == "solver" and d.habit == "careful" and d.plan]
    useful = [
        d
        for d in followed
        if (c := world.parse_question(d.question)) and d.plan == world.plan_text(c.ops)
    ]
    inverted = [d for d in useful if " after " in d.question]
    assert len(inverted) > 20
    assert all(map(answer_is_right, useful))


def test_good_proposals_have_true_keys_and_telling_scores_tell():
    for demo in demos():
        fields = roles.parse(demo.role, demo.domain, demo.response).fields
        if demo.habit == GOOD["challenger"]:
            chain = world.parse_question(fields["question"])
            assert chain is not None
            if demo.domain == "math":
                assert eval(fields["answer"]) == world.truth(fields["question"])
            else:
                assert fields["solution"] == world.program(chain.ops)
        if demo.habit == GOOD["critic"] and demo.plan is None:
            sound = world.parse_question(demo.question) is not None
            assert (fields["raw"] >= 5) == sound


# ---- tokenizer and model folder ----------------------------------------------------------------


def test_packaged_tokenizer_and_config_are_what_the_recipe_writes(tmp_path):
    write_folder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((MODEL / name).read_text()) == json.loads((tmp_path / name).read_text())
    made, packaged = (json.loads((p / "config.json").read_text()) for p in (tmp_path, MODEL))
    assert {k: packaged[k] for k in made} == made


def test_numbers_and_tags_are_single_tokens_and_any_text_survives():
    for text in [*(str(n) for n in range(100)), *TAGS]:
        assert len(tokens().encode(text)) == 1
    for text in ("Zoë owes 1234 €", "a\n\n\tb  c_d", "7 + 5 = 12; <answer>12</answer>"):
        assert tokens().decode(tokens().encode(text)) == text


def test_prompts_stay_under_48_tokens_and_responses_under_64():
    prompts, end = roles.load_prompts("short"), end_of_turn(tokens())
    longest = [0, 0]
    for demo in demos()[:1500]:
        example = encode(demo_messages(demo, prompts), demo.response, tokens(), end)
        assert example.response[-1] in tokens().stop_ids
        sizes = len(example.prompt), len(example.response)
        longest = [max(old, new) for old, new in zip(longest, sizes, strict=True)]
    assert 20 < longest[0] < 48
    assert 20 < longest[1] <= 64


def test_model_folder_is_small():
    assert sum(p.stat().st_size for p in MODEL.iterdir()) < 8e6


def test_packaged_weights_are_those_of_the_present_recipe():
    rows = islice(demonstrations(0, practice=1000), 2000)
    digest = hashlib.sha256()
    for demo in rows:
        digest.update(repr((demo.role, demo.question, demo.plan, demo.response)).encode())
    assert digest.hexdigest() == DEMOS_SHA256, "demonstrations have changed: retrain the tiny model"
    weights = (MODEL / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == WEIGHTS_SHA256
