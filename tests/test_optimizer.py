from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.learn.optimizer import UpdateSettings, make_optimizer, make_schedule


def test_schedule_warms_up_within_the_run_and_decays_to_zero():
    settings = UpdateSettings(lr=1.0, warmup_steps=4)
    rate = make_schedule(settings, 12)
    np.testing.assert_allclose([rate(s) for s in (0, 1, 3, 4, 11)], [0.25, 0.5, 1, 1, 1])
    rate = make_schedule(replace(settings, schedule="cosine"), 12)
    np.testing.assert_allclose([rate(s) for s in (3, 4, 8, 12)], [1, 1, 0.5, 0], atol=1e-6)
    rate = make_schedule(replace(settings, schedule="linear"), 12)
    np.testing.assert_allclose([rate(s) for s in (4, 6, 12, 99)], [1, 0.75, 0, 0], atol=1e-6)
    np.testing.assert_allclose(make_schedule(UpdateSettings(), 200)(0), 3e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="optim.warmup_steps=4 exceeds train.steps=3"):
        make_schedule(settings, 3)


def test_gradients_are_clipped_by_their_global_norm_before_adam_sees_them():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    params = jax.tree.map(jnp.zeros_like, grads)
    for clip_norm, first_moment in ((1.0, 0.06), (0.0, 0.3)):
        tx = make_optimizer(UpdateSettings(clip_norm=clip_norm), 10)
        _, opt_state = tx.update(grads, tx.init(params), params)
        moments = [x for x in jax.tree.leaves(opt_state) if x.ndim]
        np.testing.assert_allclose(moments[0], [first_moment, 0], rtol=1e-5)


def test_all_bad_settings_are_reported_at_once():
    with pytest.raises(ValueError, match=r"optim.lr=-1.*optim.schedule='step'.*optim.dual_clip=1"):
        UpdateSettings(lr=-1, schedule="step", dual_clip=1.0)


def test_all_updates_of_a_step_have_its_learning_rate():
    settings = UpdateSettings(lr=1.0, schedule="linear", betas=(0.0, 0.0), clip_norm=0.0)
    tx = make_optimizer(settings, total_steps=4, updates_per_step=2)
    params = {"w": np.zeros(1, np.float32)}
    state, sizes = tx.init(params), []
    for _ in range(8):
        updates, state = tx.update({"w": np.ones(1, np.float32)}, state, params)
        sizes.append(-float(updates["w"][0]))
    np.testing.assert_allclose(sizes, [1, 1, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25], rtol=1e-5)
