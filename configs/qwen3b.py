"""SAGE on Qwen2.5-3B-Instruct, the paper's recipe (arXiv 2603.15255): lr 3e-6, 200 steps.

    python -m sage_jax.main --config=configs/qwen3b.py

Hardware: a v5e:2x4 slice (fits by dry run, docs/hardware.md),
or one node of 8 x 80 GB GPUs; parameters, gradients and optimizer state are split over all.
LoRA of rank 128 as in the paper; --config.lora.rank=0 trains all weights.
Expected: the paper reports its best validation accuracy near step 100-140. Neither time nor result
of this file has been measured yet.
"""

from sage_jax.recipes import paper


def get_config():
    c = paper("Qwen/Qwen2.5-3B-Instruct")
    c.mesh.tensor = 2  # it has 2 key/value heads
    c.optim.micro_rows = 8  # one on each chip
    return c
