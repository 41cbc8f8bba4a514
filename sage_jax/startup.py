"""The start-up table: what will run, on what, and about how much memory it takes."""

import importlib.metadata
import math
import platform
from pathlib import Path

import jax
import numpy as np

from sage_jax.config import ROLES
from sage_jax.learn.optimizer import make_schedule
from sage_jax.run import Run

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "transformers", "sympy", "numpy")


def versions() -> str:
    """Python and package versions in one line."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return ", ".join([f"python {platform.python_version()}", *found])


def estimated_memory(run: Run) -> dict[str, float]:
    """GiB over all devices by part: weights, gradient, optimizer, rollout copy and cache."""
    c, cfg = run.config, run.model.cfg
    trained = sum(x.size for x in jax.tree.leaves(run.state.params))
    count = sum(x.size for x in jax.tree.leaves((run.state.params, run.state.frozen)))
    width = np.dtype(c.model.dtype).itemsize if c.model.dtype == "float32" else 2
    # On one accelerator the sampler shares what is in compute type already: all, or the base.
    shared = (
        run.place.decode is None
        and not run.place.apart
        and (c.model.dtype == "float32" or c.lora.rank > 0)
    )
    copy = (trained if c.lora.rank and width < 4 else 0) if shared else count
    frozen = sum(x.nbytes for x in jax.tree.leaves(run.state.frozen))
    cache = 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * width
    cache *= c.rollout.slots * c.rollout.buckets[-1]
    optimizer = sum(x.nbytes for x in jax.tree.leaves(run.state.opt_state))
    parts = {
        "weights": 4 * trained + frozen,
        "gradient": 2 * 4 * trained,
        "optimizer": optimizer,
        "rollout copy": copy * width,
        "cache": cache,
    }
    return {name: size / 2**30 for name, size in parts.items()}


def table(run: Run, workdir: Path) -> str:
    """The table as text, one fact a line."""
    c, rows = run.config, run.method.rows_per_step()
    trained = sum(x.size for x in jax.tree.leaves(run.state.params))
    params = sum(x.size for x in jax.tree.leaves((run.state.params, run.state.frozen)))
    adapter = (
        f", of them {trained / 1e6:.2f} M trained: LoRA of rank {c.lora.rank}, "
        f"alpha {c.lora.alpha:g}"
        if c.lora.rank
        else ""
    )
    idle = jax.device_count() - math.prod(run.place.shape.values())
    unused = f"; {idle} devices are not used, see mesh.*" if idle else ""
    memory = estimated_memory(run)
    # The sampler's part is given back before the update takes its own.
    rolling = memory["rollout copy"] + memory["cache"]
    peak = sum(memory.values()) - min(memory["gradient"], rolling)
    budget = sum(rows[role] * c.rollout.max_new[role] for role in ROLES)
    mesh = " x ".join(f"{axis} {size}" for axis, size in run.place.shape.items())
    schedule = make_schedule(run.update.settings, max(c.train.steps, 1))
    lr = [float(schedule(int(c.train.steps * share))) for share in (0, 0.1, 0.5, 1)]
    lines = {
        "run": f"{workdir}, step {run.step} of {c.train.steps}",
        "model": f"{c.model.path}: {run.model.cfg.model_type}, {params / 1e6:.2f} M parameters"
        + adapter,
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}, mesh {mesh}{unused}",
        "memory": f"about {peak:.2f} GiB ("
        + ", ".join(f"{name} {size:.2f}" for name, size in memory.items())
        + ") and activations",
        "rows a step": ", ".join(f"{role} {rows[role]}" for role in ROLES)
        + f", at most {sum(rows.values())}",
        "tokens a step": f"at most {budget} new ones",
        "trained roles": ", ".join(c.method.train_roles),
        "rewards": f"{c.method.rewards}, advantages {c.method.advantage}",
        "learning rate": " ".join(f"{x:.2g}" for x in lr) + " at 0, 10, 50, 100 % of the steps",
        "stop ids": ", ".join(map(str, run.model.tokens.stop_ids)),
        "prompts": f"{c.method.prompts} ({run.method.prompts.digest})",
        "tasks": f"{len(run.pool.seeds)} seeds, {len(run.pool.admitted)} admitted, "
        f"{len(run.valid_items)} for validation"
        + (f", {len(run.pool.refused_seeds)} seeds refused" if run.pool.refused_seeds else ""),
        "sandbox": run.verifier.isolation_report,
        "versions": versions(),
    }
    return "\n".join(f"{name:>14}  {text}" for name, text in lines.items())
