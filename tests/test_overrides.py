"""What a run says of its model goes over a config file, and under the command line."""

import json

import pytest

from sage_jax import config as schema
from sage_jax.overrides import bad_overrides, take_model_of_run, take_rank_of_adapter
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
    given = {"model.path": "moved", "model.dtype": "float32", "lora.alpha": 0.0}
    config = with_fields(given)
    assert take_model_of_run(config, given, run) == []
    assert taken(config) == OF_RUN | {"model.path": "moved", "model.dtype": "float32"}


def test_the_adapter_that_a_run_started_from_gives_way_to_its_own_aloud(run):
    given = {"lora.path": "start"}
    config = with_fields(given | OF_RUN)
    said = ["its own adapter, not that of lora.path='start'"]
    assert take_model_of_run(config, given, run) == said
    assert config.lora.path == ""


def test_an_adapter_for_a_run_that_trained_all_weights_is_refused_with_both_ways_out(run):
    edit(run, lora__rank=0, lora__alpha=0.0)
    given = {"lora.path": "mine"}
    said = "lora.path='mine': the run in .* trained all weights.*; leave lora.path out .* --workdir"
    with pytest.raises(schema.ConfigError, match=said):
        take_model_of_run(with_fields(given), given, run)


@pytest.fixture
def adapter(tmp_path):
    """A folder with what PEFT writes of an adapter's settings."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 24}')
    return folder


@pytest.mark.parametrize("fields", [{}, {"lora.rank": 8}, {"lora.alpha": 24.0}])
def test_rank_and_alpha_left_at_their_defaults_are_those_of_the_adapter(adapter, fields):
    config = with_fields({"lora.path": str(adapter), **fields})
    take_rank_of_adapter(config, {"lora.path": str(adapter), **fields})
    assert (config.lora.rank, config.lora.alpha) == (8, 24)
    assert schema.validate(config).lora.alpha == 24


def test_what_contradicts_the_adapter_is_refused_with_both_values(adapter):
    fields = {"lora.path": str(adapter), "lora.rank": 4, "lora.alpha": 8.0}
    with pytest.raises(schema.ConfigError) as error:
        take_rank_of_adapter(with_fields(fields), fields)
    for part in (
        f"lora.path={adapter}:",
        "lora.rank=4: the adapter there has r 8; give that, or 0 to take it from there",
        "lora.alpha=8.0: the adapter there has lora_alpha 24; give that",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "adapter_config.json is not JSON"),
        ('{"lora_alpha": 24}', "adapter_config.json: r is None, no rank"),
        ('{"r": "8", "lora_alpha": true}', "r is '8', no rank(.|\n)*lora_alpha is True, no alpha"),
        ('{"r": 0, "lora_alpha": 24}', "r is 0, no rank"),
    ],
)
def test_an_adapter_that_does_not_say_its_rank_is_named(adapter, content, said):
    (adapter / "adapter_config.json").write_text(content)
    fields = {"lora.path": str(adapter)}
    with pytest.raises(schema.ConfigError, match=rf"lora.path={adapter}:(.|\n)*{said}"):
        take_rank_of_adapter(with_fields(fields), fields)


def test_without_an_adapter_folder_nothing_is_looked_for(tmp_path):
    config = schema.base()
    take_rank_of_adapter(config, {})
    assert config.lora.rank == 0
    fields = {"lora.path": str(tmp_path / "absent")}
    with pytest.raises(schema.ConfigError, match="absent has no adapter_config.json"):
        take_rank_of_adapter(with_fields(fields), fields)
    off = fields | {"lora.rank": 0}  # all weights, by name
    take_rank_of_adapter(with_fields(off), off)
    with pytest.raises(schema.ConfigError, match="lora.rank=0 trains all weights"):
        schema.validate(with_fields(off))


def test_values_of_another_type_are_all_named_with_the_type_and_the_meaning():
    told = bad_overrides(
        [
            "main", "--config=x.py", "--config.train.steps=ten", "--config.optim.lr", "fast",
            "--config.valid.planned=maybe", "-config.seed=1.5", "--config.mesh.data=",
            "--config.optim.learnin_rate=1", "--config.pool=3",
        ]
    )  # fmt: skip
    assert told[:5] == [
        "train.steps='ten': give a whole number (steps: absolute total of updates)",
        "optim.lr='fast': give a number (rate: peak learning rate (paper 3e-6))",
        "valid.planned='maybe': give true or false "
        "(flag: also measure Planner, gate and Solver together)",
        "seed='1.5': give a whole number (integer: root of all randomness)",
        "mesh.data='': give a whole number (devices: data parallel; -1: all that are left)",
    ]
    assert [line.split(":")[0] for line in told[5:]] == [
        "--config.optim.learnin_rate", "--config.pool"
    ]  # fmt: skip


def test_values_of_the_right_type_pass():
    fine = ["seed=1", "optim.lr=1", "optim.lr=1e-6", "train.steps=-3", "valid.planned=false"]
    fine += ["model.path=3", "rollout.buckets=a,b", "method.prompts="]
    argv = [
        *(f"--config.{field}" for field in fine),
        "--config.valid.planned",
        "--config.seed",
        "2",
    ]
    assert bad_overrides(argv) == []


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
