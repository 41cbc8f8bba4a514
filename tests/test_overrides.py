"""What a run says of its model goes over a config file, and under the command line."""

import json

import pytest

from sage_jax import config as schema
from sage_jax.overrides import take_model_of_run

OF_RUN = {"lora.rank": 4, "lora.alpha": 8.0, "model.path": "mine", "model.dtype": "bfloat16"}


def with_fields(fields):
    c = schema.base()
    for name, value in fields.items():
        group, leaf = name.split(".")
        c[group][leaf] = value
    return c


@pytest.fixture
def run(tmp_path):
    """A run of OF_RUN with one checkpoint."""
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    schema.dump(with_fields({**OF_RUN, "optim.lr": 0.5}), {}, tmp_path / "config.json")
    return tmp_path


def taken(config):
    return {name: value for name, value in schema.flatten(config).items() if name in OF_RUN}


def test_the_model_of_a_run_is_its_own_and_nothing_else_is_taken(run):
    config = with_fields({"optim.lr": 0.25, "lora.path": "where/it/started"})
    assert take_model_of_run(config, {}, run) == []
    assert taken(config) == OF_RUN
    assert config.optim.lr == 0.25 and config.lora.path == ""
    assert schema.validate(config).lora.alpha == 8.0


def test_what_a_config_file_has_otherwise_is_set_aside_aloud(run):
    config = with_fields({"lora.rank": 128, "model.path": "other"})
    said = take_model_of_run(config, {}, run)
    assert said == ["lora.rank=4, not 128", "model.path='mine', not 'other'"]
    assert taken(config) == OF_RUN


def test_the_command_line_may_name_the_place_and_the_type_of_the_model(run):
    given = {"model.path": "moved", "model.dtype": "float32", "lora.alpha": 0.0, "lora.path": "x"}
    config = with_fields(given)
    assert take_model_of_run(config, given, run) == []
    assert taken(config) == OF_RUN | {"model.path": "moved", "model.dtype": "float32"}
    assert config.lora.path == "x"


def test_what_contradicts_the_checkpoints_is_an_error_with_all_values(run):
    given = {"lora.rank": 8, "lora.alpha": 4.0}
    with pytest.raises(schema.ConfigError) as error:
        take_model_of_run(with_fields(given), given, run)
    for part in ("lora.rank=8: ", "has 4", "lora.alpha=4.0: ", "has 8.0", "leave lora.rank and"):
        assert part in str(error.value)


def test_without_a_checkpoint_or_a_recorded_config_nothing_is_taken(run):
    (run / "checkpoints" / "3").rmdir()
    config = schema.base()
    assert take_model_of_run(config, {}, run) == [] and config.lora.rank == 0
    (run / "checkpoints" / "3").mkdir()
    (run / "config.json").unlink()
    assert take_model_of_run(config, {}, run) == [] and config.lora.rank == 0


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"lora.rank": 4}), "{}"])
def test_a_damaged_record_is_named(run, content):
    (run / "config.json").write_text(content)
    with pytest.raises(schema.ConfigError, match="config.json: is not the config of a run"):
        take_model_of_run(schema.base(), {}, run)
