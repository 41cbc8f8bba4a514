"""Whoever mistypes a value that is one of a few hears which was meant."""

import json
from pathlib import Path

import pytest

from sage_jax import config as schema
from sage_jax import offline, sft
from sage_jax.config import ConfigError
from sage_jax.core import chips
from sage_jax.core.tokens import Tokens
from sage_jax.dryrun.mode import read_sizes
from sage_jax.roles import load_prompts
from sage_jax.runtime import model_path
from sage_jax.spelling import hint
from sage_jax.tasks.sources import SourceError, load
from sage_jax.tasks.task import row_problems
from sage_jax.verify.__main__ import main as verify_main

CHOICES = {name: field.choices for name, field in schema.SCHEMA.items() if field.choices}
LONG = {name: known for name, known in CHOICES.items() if min(map(len, known)) > 1}


def said_of(name, value):
    config = schema.base()
    *groups, leaf = name.split(".")
    node = config
    for group in groups:
        node = node[group]
    node[leaf] = value
    with pytest.raises(ConfigError) as error:
        schema.validate(config)
    return str(error.value)


def test_a_hint_is_the_nearest_name_or_nothing():
    known = ("solver", "planner", "A")
    assert hint("solvr", known) == " (did you mean solver?)"
    assert hint("PLANNER", known) == " (did you mean planner?)" and "A?" in hint("a", known)
    assert hint("xyz", known) == hint(None, known) == hint("", known) == hint("solvr", ()) == ""


@pytest.mark.parametrize("name", LONG)
def test_every_field_with_choices_gives_the_nearest(name):
    assert len(LONG) > 8
    for choice in LONG[name]:
        swapped = choice[:-2] + choice[-1] + choice[-2]  # as in saeg
        typed = swapped if swapped not in LONG[name] else choice + "x"
        assert f"did you mean {choice}?" in said_of(name, typed), typed
    assert "did you mean" not in said_of(name, "#")


def test_levels_of_the_sandbox_are_known_in_small_letters():
    assert "did you mean B?" in said_of("sandbox.require_level", "b")


def test_members_of_a_list_are_hinted_at_too():
    text = said_of("method.train_roles", ("solvr", "planer"))
    assert "did you mean solver?" in text and "did you mean planner?" in text


def refusal(work):
    with pytest.raises(ValueError) as error:
        work()
    return str(error.value)


def test_names_of_what_is_packaged_are_hinted_at(tmp_path):
    said = {
        "asset:tiny-qwen3": refusal(lambda: model_path("asset:tiny-qwen")),
        "short": refusal(lambda: load_prompts("shrot")),
        "v5e:4x4": refusal(lambda: chips.find("v5e4x4")),
        "Qwen/Qwen3-4B": refusal(lambda: read_sizes("Qwen/Qwen-4B")),
        "tiny/train.jsonl": refusal(lambda: load(["asset:tiny/trian.jsonl"])),
    }
    tokens = Tokens.load(model_path("asset:tiny-qwen3"))
    settings = sft.SftSettings("", data="tinyworld")
    said["tiny_world"] = refusal(lambda: next(sft.stream(settings, tokens)))
    for name, text in said.items():
        assert f"did you mean {name}" in text, text


def test_fields_columns_and_splits_of_data_are_hinted_at(tmp_path):
    row = {"id": "a", "domain": "math", "question": "1?", "answer": "1", "split": "train"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    for spec, name in (
        (f"{path}#trian", "train"),
        (f"{path}?quetion=x", "question"),
        (f"{path}?domain=math&question=qestion", "question"),
    ):
        with pytest.raises(SourceError, match=rf"did you mean {name}\?"):
            load([spec])
    assert "(did you mean math?)" in row_problems(row | {"domain": "maths"})[0]
    code = row | {"domain": "code", "entry_point": "f", "tests": {"kind": "assert"}}
    assert any("(did you mean asserts?)" in text for text in row_problems(code))
    path.write_text('{"id": "a", "temprature": 1}\n')
    (problem,) = offline.read_lines(Path(path), offline.GENERATE_FIELDS)[1]
    assert "did you mean temperature?" in problem.text


@pytest.mark.parametrize(
    ("args", "name"),
    [(["maths"], "math"), (["math", "--policy=rewards"], "reward")],
)
def test_the_verifiers_command_line_hints_too(args, name, capsys):
    with pytest.raises(SystemExit) as stop:
        verify_main([*args, "--input=a", "--output=b"])
    assert stop.value.code == 2 and f"did you mean {name}?" in capsys.readouterr().err
