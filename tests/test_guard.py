"""The roll-back of a run whose held-out accuracy falls."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import optax
import pytest

from sage_jax import run as run_module
from sage_jax.core.checkpoint import Checkpoints
from sage_jax.learn.optimizer import UpdateSettings, lr_factor, make_optimizer
from sage_jax.learn.update import TrainState
from sage_jax.run import guard


@pytest.fixture
def drifting(tmp_path):
    """A run on one parameter, with a checkpoint of step 10 at accuracy 0.8."""
    tx = make_optimizer(UpdateSettings(lr=0.5), 100)
    params = {"w": jnp.zeros(3)}
    state = TrainState(params, tx.init(params), jnp.int32(10), jnp.int32(0))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(rollback=0.04)),
        checkpoints=checkpoints,
        state=state,
        progress=SimpleNamespace(note=lambda text, quiet=True: said.append(text)),
    )
    said: list[str] = []
    checkpoints.save(10, run_module.saved_parts(state), {}, 0.8)

    def move():
        """One update of gradient 1."""
        updates, opt_state = tx.update({"w": jnp.ones(3)}, run.state.opt_state, run.state.params)
        moved = optax.apply_updates(run.state.params, updates)
        run.state = run.state._replace(params=moved, opt_state=opt_state, step=run.state.step + 1)

    yield run, move, said
    checkpoints.close()


def test_a_fall_of_accuracy_brings_the_best_weights_back_at_half_the_rate(drifting):
    run, move, said = drifting
    move()
    full_step = float(run.state.params["w"][0])
    guard(run, 0.75)
    assert run.state.params["w"].tolist() == [0, 0, 0] and "step 10" in said[0]
    assert int(run.state.step) == 11  # the randomness goes on: another way is taken
    assert lr_factor(run.state.opt_state) == 0.5
    move()
    assert float(run.state.params["w"][0]) == pytest.approx(full_step / 2)
    guard(run, 0.5)
    assert lr_factor(run.state.opt_state) == 0.25  # not reset by the checkpoint's own factor


@pytest.mark.parametrize("accuracy", [0.9, 0.8, 0.77, None])
def test_a_small_fall_changes_nothing(drifting, accuracy):
    run, move, said = drifting
    move()
    before = run.state
    guard(run, accuracy)
    assert run.state is before and not said


def test_no_roll_back_where_it_is_switched_off_or_nothing_was_saved(drifting, tmp_path):
    run, move, _ = drifting
    move()
    before = run.state
    run.config.train.rollback = 0.0
    guard(run, 0.1)
    run.config.train.rollback = 0.04
    empty = Checkpoints(tmp_path / "none", keep=2)
    run.checkpoints = empty
    guard(run, 0.1)
    empty.close()
    assert run.state is before
