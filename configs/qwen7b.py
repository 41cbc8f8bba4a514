"""SAGE on Qwen2.5-7B-Instruct, the paper's recipe (arXiv 2603.15255): lr 3e-6, 200 steps.

    python -m sage_jax.main --config=configs/qwen7b.py

Hardware: a v5e:4x4 slice (LoRA), v5p:2x2x2 (all weights); both fit by dry run (docs/hardware.md),
or one node of 8 x 80 GB GPUs; parameters, gradients and optimizer state are split over all.
LoRA of rank 128 as in the paper; --config.lora.rank=0 trains all weights.
Expected: the paper reports its best validation accuracy near step 100-140. Neither time nor result
of this file has been measured yet.
"""

from sage_jax.recipes import paper


def get_config():
    c = paper("Qwen/Qwen2.5-7B-Instruct")
    c.rollout.slots = 32
    return c
