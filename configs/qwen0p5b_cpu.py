"""SAGE on a real Qwen2.5-0.5B-class checkpoint on a CPU: proof that the whole job runs.

    python -m sage_jax.main --config=configs/qwen0p5b_cpu.py \
        --config.model.path=/path/to/Qwen2.5-0.5B-Instruct \
        --config.tasks.seeds=gsm8k_train.jsonl,mbpp.jsonl#train --config.valid.path=valid.jsonl

Without --config.tasks.seeds it uses the packaged seed problems.
Hardware: 2 CPU cores, 20 GiB (15.3 GiB at the peak). Time: see README, "Real weights".
Three updates show that every part works, not that the model gets better.
"""

from sage_jax.config import base


def get_config():
    c = base()
    c.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    c.tokens.max_prompt = 384
    c.valid.every = 0
    c.valid.limit = 4
    c.valid.samples = 0
    c.valid.planned = False
    c.valid.effects = 0
    c.train.steps = 3
    c.checkpoint.every = 0
    c.method.candidates = 4
    c.method.attempts = 2
    c.method.drawn = 4
    c.method.solutions = 2
    c.rollout.slots = 8
    c.rollout.prefill_rows = 1
    c.rollout.buckets = (128, 160, 192, 224, 256, 320, 384, 576)
    for role in ("challenger", "planner", "solver", "critic"):
        c.rollout.max_new[role] = 112
    c.rollout.max_new.challenger = 160
    c.optim.lr = 1e-6
    c.optim.micro_rows = 1
    c.optim.buckets = (160, 192, 224, 256, 288, 320, 384, 576)
    c.mesh.data = 1
    return c
