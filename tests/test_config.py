"""The config: locked, complete, and wrong in one go."""

import importlib.util
import json
from pathlib import Path

import pytest

from sage_jax import config as schema
from sage_jax.overrides import ListParser
from sage_jax.run import update_settings

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(**fields):
    nested = schema.base().to_dict()
    for name, value in fields.items():
        *groups, leaf = name.split("__")
        node = nested
        for group in groups:
            node = node[group]
        node[leaf] = value
    return nested


def problems(**fields):
    with pytest.raises(schema.ConfigError) as error:
        schema.validate(changed(**fields))
    return str(error.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_file_is_valid_and_says_how_to_run_it(path):
    module = load(path)
    schema.validate(module.get_config())
    doc = module.__doc__
    assert f"--config=configs/{path.name}" in doc and "Hardware:" in doc


def test_there_are_under_100_fields_each_with_unit_and_meaning():
    assert len(schema.SCHEMA) < 100
    for name, field in schema.SCHEMA.items():
        assert field.unit and field.help, name
        if type(field.default) in (int, float):
            assert field.low > -schema.INF or field.choices, f"{name} has no range"


def test_a_mistyped_field_in_a_file_is_refused_with_the_nearest_name():
    with pytest.raises(AttributeError, match="learning_rate|lr"):
        schema.base().optim.lrr = 1.0
    assert "did you mean optim.lr?" in problems(optim__lrr=1.0)


def test_all_problems_are_reported_at_once():
    text = problems(optim__lr=-1.0, model__dtype="float16", valid__every="ten", mesh__data=0)
    for part in ("optim.lr=-1.0", "model.dtype='float16'", "valid.every='ten'"):
        assert part in text
    assert "[0, 1]" in text and "float32, bfloat16" in text and "expected int" in text


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"rollout__buckets": (256, 128)}, "rollout.buckets"),
        ({"rollout__buckets": ()}, "rollout.buckets"),
        ({"optim__buckets": (64,)}, "optim.buckets"),
        ({"method__train_roles": ("solvr",)}, "solvr"),
        ({"method__train_roles": ()}, "at least one role"),
        ({"method__candidates": 0, "method__drawn": 0}, "without rows"),
        ({"method__solver_weights": (0.5, 0.5)}, "3 numbers"),
        ({"method__planner_weights": (0.5, -0.5)}, "2 numbers"),
        ({"optim__betas": (0.9,)}, "optim.betas"),
        ({"optim__betas": (0.9, 1.0)}, "below 1"),
        ({"optim__warmup_steps": 300}, "never be reached"),
        ({"optim__schedule": "cosine", "train__steps": 0}, "optim.schedule"),
        ({"mesh__data": 0}, "mesh.data"),
        ({"tasks__seeds": ()}, "tasks.seeds"),
        ({"seed": True}, "expected int"),
        ({"seed": None}, "expected int"),
        ({"tokens__stop_ids": ("7",)}, "expected int members"),
        ({"tokens__stop_ids": (True,)}, "expected int members"),
        ({"tokens__stop_ids": (-1,)}, "integers from 0 up"),
        ({"tasks__seeds": (None,)}, "expected str members"),
        ({"eval__benchmarks": (["a"],)}, "expected str members"),
        ({"method__train_roles": (["solver"],)}, "expected str members"),
    ],
)
def test_fields_that_do_not_fit_together_name_a_remedy(fields, part):
    assert part in problems(**fields)


HOSTILE = [
    None, "x", -1, 0, 1, 1.5, float("nan"), float("inf"), -float("inf"), True, (), ("a",), (None,),
    ([1],), (float("inf"),) * 3, (float("nan"),) * 2, [], {}, {"a": 1}, 10**400, -(10**400), b"x",
]  # fmt: skip


def numbers(value):
    members = value if isinstance(value, tuple) else (value,)
    return [x for x in members if type(x) in (int, float)]


@pytest.mark.parametrize("name", schema.SCHEMA)
def test_what_passes_for_a_field_is_finite_and_fits_its_arrays(name):
    """Any other value is a ConfigError: neither a crash nor a run that turns to NaN."""
    for value in HOSTILE:
        try:
            config = schema.validate(changed(**{name.replace(".", "__"): value}))
        except schema.ConfigError as error:
            assert name.partition(".")[0] in str(error), value
            continue
        settings = update_settings(config)
        assert settings.lr >= 0  # its own checks agree with the ranges here
        assert all(abs(x) <= 3e38 for x in numbers(value)), (name, value)
        assert all(abs(x) < 2**31 for x in numbers(value) if type(x) is int), (name, value)


def test_whole_numbers_serve_as_floats_but_not_the_reverse():
    schema.validate(changed(optim__lr=0))
    assert "expected int" in problems(train__steps=1.5)


def test_lists_on_the_command_line_are_comma_separated():
    parse = ListParser().parse
    assert parse("a.jsonl,b.jsonl") == ("a.jsonl", "b.jsonl")
    assert parse("256,512") == (256, 512)
    assert parse("('a', 'b')") == ("a", "b")
    assert parse("one") == ("one",) and parse("") == ()


def test_the_dump_says_where_every_value_comes_from(tmp_path):
    c = changed(train__steps=7, optim__lr=1e-4)
    schema.dump(c, {"optim.lr": 1e-4}, tmp_path / "config.json")
    rows = json.loads((tmp_path / "config.json").read_text())
    assert rows["train.steps"] == {"value": 7, "source": "file"}
    assert rows["optim.lr"] == {"value": 1e-4, "source": "command line"}
    assert rows["seed"] == {"value": 0, "source": "default"}
    assert rows.keys() == schema.SCHEMA.keys()


@pytest.mark.parametrize(("rewards", "form"), [("paper", "role_token"), ("robust", "grouped")])
def test_the_reward_set_decides_the_advantages_unless_they_are_named(tmp_path, rewards, form):
    c = schema.validate(changed(method__rewards=rewards))
    assert c.method.advantage == form
    schema.dump(c, {}, tmp_path / "config.json")
    row = json.loads((tmp_path / "config.json").read_text())["method.advantage"]
    assert row == {"value": form, "source": "default"}
    named = changed(method__rewards=rewards, method__advantage="role_sequence")
    assert schema.validate(named).method.advantage == "role_sequence"
    assert schema.validate(named).train.rollback == (0.04 if rewards == "robust" else 0.0)
    assert schema.validate(changed(train__rollback=0.0)).train.rollback == 0.0


def test_a_negative_share_is_no_roll_back():
    assert "train.rollback=-0.5" in problems(train__rollback=-0.5)


def test_audits_come_in_pairs():
    assert "method.audits=3" in problems(method__audits=3)


def test_the_page_on_fields_is_fresh():
    page = Path(__file__).parent.parent / "docs" / "config.md"
    assert page.read_text() == schema.markdown(), "run python -m sage_jax.config > docs/config.md"
