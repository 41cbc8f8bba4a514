"""SAGE on the packaged tiny model: four roles, two domains, a few minutes on a laptop.

    python -m sage_jax.main --config=configs/tiny.py

Hardware: 2 CPU cores, 1.5 GiB. Time and result: see the table in README.
"""

from sage_jax.config import base


def get_config():
    c = base()
    c.model.path = "asset:tiny-qwen3"
    c.model.remat = "full"  # less memory traffic: faster on a CPU too
    c.tokens.max_prompt = 96
    c.tasks.seeds = ("asset:tiny/train.jsonl",)
    c.tasks.math_share = 0.6
    c.valid.path = "asset:tiny/valid.jsonl"
    c.valid.every = 10
    c.valid.effects = 200
    c.train.steps = 60
    c.checkpoint.every = 10
    c.method.prompts = "short"
    c.method.rewards = "robust"
    c.method.candidates = 16
    c.method.attempts = 4
    c.method.drawn = 16
    c.method.solutions = 2
    c.method.probes = 2
    c.method.bare = 2
    c.method.audits = 16
    c.rollout.slots = 24
    c.rollout.chunk = 4
    c.rollout.prefill_rows = 8
    c.rollout.buckets = (24, 40, 64, 160)
    for role in ("challenger", "planner", "solver", "critic"):
        c.rollout.max_new[role] = 64
    c.optim.lr = 5e-4
    c.optim.micro_rows = 16
    c.optim.buckets = (24, 32, 40, 48, 56, 64, 72, 96, 160)
    c.mesh.data = 1
    return c
