"""What a run says of its model goes over a config file, and under the command line."""

import json

import pytest

from sage_jax import config as schema
from sage_jax.overrides import take_model_of_run
from sage_jax.resume import changed_fields

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


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({"lora.rank": 4}), "{}", "null", "[" * 100_000]
)
def test_a_damaged_record_is_named(run, content):
    (run / "config.json").write_text(content)
    with pytest.raises(schema.ConfigError, match="config.json: is not the config of a run"):
        take_model_of_run(schema.base(), {}, run)


def edit(run, **changes):
    rows = json.loads((run / "config.json").read_text())
    for name, value in changes.items():
        rows[name.replace("__", ".")] = {"value": value, "source": "file"}
    (run / "config.json").write_text(json.dumps(rows))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora__rank": "4"}, "lora.rank='4': expected int"),
        ({"lora__rank": -1}, "lora.rank=-1 .*: must lie in"),
        ({"lora__alpha": float("nan")}, "lora.alpha=nan .*: must lie in"),
        ({"model__path": {"a": 1}}, "model.path={'a': 1}: expected str"),
        ({"model__dtype": "float128"}, "model.dtype='float128': choose one of"),
    ],
)
def test_a_value_that_no_run_wrote_is_named_with_the_file(run, changes, said):
    edit(run, **changes)
    with pytest.raises(schema.ConfigError, match=rf"{run}/config.json: is not what (.|\n)*{said}"):
        take_model_of_run(schema.base(), {}, run)


def test_a_record_without_adapter_fields_is_of_a_run_that_trained_all_weights(run):
    rows = json.loads((run / "config.json").read_text())
    del rows["lora.rank"], rows["lora.alpha"]
    (run / "config.json").write_text(json.dumps(rows))
    config = with_fields({"lora.rank": 128})
    assert take_model_of_run(config, {}, run) == ["lora.rank=0, not 128"]
    assert taken(config) == OF_RUN | {"lora.rank": 0, "lora.alpha": 0.0}


def test_a_record_that_is_a_folder_or_a_dangling_link_is_named(run):
    path = run / "config.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(schema.ConfigError, match=f"{path}: cannot be read"):
        take_model_of_run(schema.base(), {}, run)
    path.rmdir()
    for target in ("absent", "config.json"):
        path.symlink_to(target)
        with pytest.raises(schema.ConfigError, match=f"{path}: cannot be read"):
            take_model_of_run(schema.base(), {}, run)
        path.unlink()


def test_a_local_model_is_recorded_so_that_it_is_found_from_anywhere(run, monkeypatch):
    (run / "models" / "mine").mkdir(parents=True)
    (run / "asset:mine").mkdir()
    monkeypatch.chdir(run)
    own = with_fields(OF_RUN | {"model.path": "models/mine"})
    schema.dump(own, {}, run / "config.json")
    assert take_model_of_run(own, {}, run) == []  # the same folder: nothing is set aside
    monkeypatch.chdir(run.parent)
    config = schema.base()
    take_model_of_run(config, {}, run)
    assert config.model.path == str(run / "models" / "mine")
    monkeypatch.chdir(run)
    for path in ("asset:mine", "Qwen/Qwen3-4B", "", "/" + "a" * 300):
        assert schema.recorded({"model.path": path}) == {"model.path": path}
    before = schema.flatten(schema.base()) | {"model.path": "models/mine"}
    now = with_fields({"model.path": str(run / "models" / "mine")})
    assert not [line for line in changed_fields(before, now) if line.startswith("model.path")]
