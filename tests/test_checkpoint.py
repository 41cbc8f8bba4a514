"""Checkpoints: what is kept and read back, and what a damaged one leads to."""

import asyncio
import io
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from sage_jax.config import ConfigError, base, validate
from sage_jax.core.checkpoint import CheckpointError, Checkpoints
from sage_jax.learn.update import TrainState
from sage_jax.report.progress import Progress
from sage_jax.resume import changed_fields, restore_newest, saved_parts
from sage_jax.runtime import Model


def state(value, width=50):
    # Noise, so that its file is the largest one.
    noise = np.random.default_rng(value).standard_normal((40, width), np.float32)
    params = {"layers": {"w": jnp.asarray(noise)}, "b": jnp.zeros(3)}
    return TrainState(params, {"mu": params}, jnp.int32(value), jnp.int32(0), None)


@pytest.fixture(scope="module")
def config():
    c = base()
    c.report.quiet = True
    return validate(c)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        facts = {"step": step, "config": {"model.path": "old"}}
        checkpoints.save(step, saved_parts(state(step)), facts, None)
    checkpoints.close()
    return folder


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written, tmp_path / "checkpoints")


def newest(folder, config, like=None):
    """(step, trees, host, what was said) of `restore_newest`."""
    said, like = io.StringIO(), like or state(0)
    model = Model(like.params, None, None, folder)
    checkpoints = Checkpoints(folder, keep=2)
    with Progress(9, stream=said, quiet=True, heartbeat=0) as progress:
        try:
            found = restore_newest(checkpoints, like, model, config, progress)
        finally:
            checkpoints.close()
    return *found, said.getvalue()


def largest_array(checkpoint):
    files = (p for p in (checkpoint / "params").rglob("*") if p.is_file())
    return max(files, key=lambda p: p.stat().st_size)


DAMAGES = {
    "no host": lambda c: shutil.rmtree(c / "host"),
    "half a host": lambda c: (c / "host" / "metadata").write_bytes(b'{"step": 2, "pool": {"se'),
    "no array": lambda c: largest_array(c).unlink(),
    "half an array": lambda c: os.truncate(largest_array(c), largest_array(c).stat().st_size // 2),
    "empty array": lambda c: os.truncate(largest_array(c), 0),
    "no manifest": lambda c: (c / "params" / "manifest.ocdbt").unlink(),
    "no parameters": lambda c: shutil.rmtree(c / "params"),
    "no optimizer": lambda c: shutil.rmtree(c / "rest"),
}


def test_an_undamaged_checkpoint_is_read_back_in_silence(copy, config):
    step, arrays, host, said = newest(copy, config)
    assert (step, host["step"], said) == (2, 2, "")
    jax.tree.map(np.testing.assert_array_equal, arrays["params"], state(2).params)
    assert int(arrays["rest"]["step"]) == 2


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_aloud_for_the_one_before(copy, config, damage):
    damage(copy / "2")
    step, arrays, host, said = newest(copy, config)
    assert (step, host["step"]) == (1, 1)
    jax.tree.map(np.testing.assert_array_equal, arrays["params"], state(1).params)
    moved = copy.parent / "checkpoints_damaged" / "2"
    assert moved.is_dir() and f"set aside in {moved}; continues from step 1" in said
    assert said.startswith(f"WARNING: {copy}/2 is damaged (") and said.count("\n") == 1
    checkpoints = Checkpoints(copy, keep=2)  # and its step can be saved again
    checkpoints.save(2, saved_parts(state(2)), {}, None)
    assert checkpoints.steps == [2, 1]
    checkpoints.close()


def test_a_second_damaged_checkpoint_of_a_step_does_not_replace_the_first(copy):
    checkpoints = Checkpoints(copy, keep=2)
    places = [checkpoints.set_aside(2)]
    checkpoints.save(2, saved_parts(state(2)), {}, None)
    places.append(checkpoints.set_aside(2))
    checkpoints.close()
    assert len(set(places)) == 2 and all(place.is_dir() for place in places)


def freed_unfinished(file):
    """A coroutine of `file` that fails as it is freed before its end."""
    source = (
        "async def read(pause):\n"
        "    try:\n        await pause\n"
        "    except BaseException as error:\n        raise ValueError('unfinished') from error\n"
    )
    names = {}
    exec(compile(source, file, "exec"), names)
    coroutine = names["read"](asyncio.Future(loop=SimpleNamespace(get_debug=bool)))
    coroutine.send(None)


def test_readers_that_orbax_leaves_unfinished_end_in_silence_and_others_aloud(copy, monkeypatch):
    told = []

    def note(it):
        told.append(it.object.cr_code.co_filename if it.object else str(it.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", note)
    here, orbax = __file__, f"{Path(ocp.__file__).parent}/_src/reader.py"
    freed_unfinished(orbax)
    assert told == [orbax]
    DAMAGES["half an array"](copy / "2")
    checkpoints = Checkpoints(copy, keep=2)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="/2 is damaged"):
            checkpoints.restore(2, saved_parts(state(0)))
    checkpoints.close()
    told.clear()
    freed_unfinished(orbax)
    freed_unfinished(here)
    for words in ("Event loop is closed", "another"):
        sys.unraisablehook(SimpleNamespace(object=None, exc_value=RuntimeError(words)))
    assert told == [here, "another"]


def test_when_no_checkpoint_can_be_read_all_are_named_and_none_is_moved(copy, config):
    for step in (1, 2):
        DAMAGES["half an array"](copy / str(step))
    with pytest.raises(ConfigError) as error:
        newest(copy, config)
    for part in (f"{copy}/2 is damaged", f"{copy}/1 is damaged", "another --workdir"):
        assert part in str(error.value)
    assert (copy / "2").is_dir() and not (copy.parent / "checkpoints_damaged").exists()


def test_parameters_of_another_shape_are_refused_and_nothing_is_moved(copy, config):
    with pytest.raises(ConfigError) as error:
        newest(copy, config, like=state(0, width=60))
    for part in (
        "model.path='asset:tiny-qwen3'",
        f"{copy}/2",
        "layers.w is (40, 50) there and (40, 60) here",
        "written with model.path='old'",
    ):
        assert part in str(error.value)
    assert (copy / "2").is_dir()


def test_a_folder_that_changed_under_its_name_is_told_apart(copy):
    c = base()
    c.model.path = "old"
    with pytest.raises(ConfigError, match="the folder has changed since"):
        newest(copy, validate(c), like=state(0, width=60))


def test_damage_is_a_checkpoint_error_for_those_who_only_read(copy):
    DAMAGES["no array"](copy / "2")
    checkpoints = Checkpoints(copy, keep=2)
    with pytest.raises(CheckpointError, match="/2 is damaged"):
        checkpoints.restore(2, {"params": state(0).params})
    assert checkpoints.restore(1, {"params": state(0).params})
    checkpoints.close()


def test_another_model_path_says_whose_weights_are_used(config):
    before = {"model.path": "old"}
    line = next(x for x in changed_fields(before, config) if x.startswith("model.path"))
    assert line == (
        "model.path: 'asset:tiny-qwen3', not 'old'; the weights are those of the checkpoint, only "
        "the tokenizer comes from there"
    )


def test_the_best_checkpoint_is_one_that_was_measured_on_the_present_items(tmp_path):
    folder, trees = tmp_path / "checkpoints", saved_parts(state(0))

    def saved(measured_on, *accuracies):
        checkpoints = Checkpoints(folder, keep=1, measured_on=measured_on)
        start = (checkpoints.latest or 0) + 1
        bests = [checkpoints.best]
        for step, accuracy in enumerate(accuracies, start):
            checkpoints.save(step, trees, {}, accuracy)
            bests.append(checkpoints.best)
        kept = checkpoints.steps
        checkpoints.close()
        return bests, kept

    assert saved(7, 0.9, 0.8) == ([None, 1, 1], [2, 1])
    # Of other items: 0.9 there says nothing about 0.5 here, and no longer takes its place.
    assert saved(8, 0.5, 0.4, None) == ([None, 3, 3, 3], [5, 3])
    assert saved(8) == ([3], [5, 3]) and saved(7) == ([None], [5, 3])
