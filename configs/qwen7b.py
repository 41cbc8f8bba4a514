"""SAGE on Qwen2.5-7B-Instruct, the paper's recipe (arXiv 2603.15255): lr 3e-6, 200 steps.

    python -m sage_jax.main --config=configs/qwen7b.py

Hardware: a v5p:2x2x4 slice or one node of 8 x 80 GB GPUs;
parameters, gradients and optimizer state are sharded over all devices.
Full fine-tuning; the paper trains a LoRA of rank 128.
Expected: the paper reports its best validation accuracy near step 100-140. Neither time nor result
of this file has been measured yet.
"""

from sage_jax.config import base


def get_config():
    c = base()
    c.model.path = "Qwen/Qwen2.5-7B-Instruct"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.tokens.max_prompt = 2048
    c.train.steps = 200
    c.method.candidates = 128
    c.method.attempts = 5
    c.method.drawn = 128
    c.method.solutions = 1
    c.rollout.slots = 128
    c.rollout.chunk = 64
    c.rollout.prefill_rows = 16
    c.rollout.buckets = (512, 1024, 2048, 4096, 6144, 8192, 10240)
    c.rollout.max_new.challenger = 4096
    c.rollout.max_new.planner = 2048
    c.rollout.max_new.solver = 8192
    c.rollout.max_new.critic = 2048
    c.optim.micro_rows = 16
    c.optim.buckets = (512, 1024, 2048, 4096, 6144, 8192, 10240)
    c.optim.logit_chunk = 2048
    c.sandbox.workers = 16
    c.mesh.data = 1
    c.mesh.fsdp = -1
    return c
