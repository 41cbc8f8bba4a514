"""Settings that several config files share."""

from typing import Any

import ml_collections

from sage_jax.config import base


def paper(model_path: str) -> ml_collections.ConfigDict:
    """SAGE as published (arXiv 2603.15255): LoRA of rank 128, lr 3e-6, 200 steps; rows, lengths, K
    and alpha follow the systems it builds on where the paper is silent. Four devices
    decode with one copy of the weights; rows and parameters of an update are split over all.
    lora.rank=0 trains all weights."""
    c: Any = base()  # the stubs of ConfigDict give a field the types of all fields
    c.model.path = model_path
    c.model.dtype = "bfloat16"
    c.model.remat = "attention"
    c.lora.rank = 128
    c.tokens.max_prompt = 2048
    c.train.steps = 200
    c.method.candidates = 128
    c.method.attempts = 5
    c.method.drawn = 128
    c.method.solutions = 1
    c.rollout.slots = 64
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
    c.mesh.tensor = 4
    return c
