"""SAGE on Qwen3-4B-Base, the paper's recipe (arXiv 2603.15255): lr 3e-6, 200 steps.

    python -m sage_jax.main --config=configs/qwen4b.py

Hardware: a v5e:4x4 slice, LoRA or all weights, by dry run (docs/hardware.md),
or one node of 8 x 80 GB GPUs; parameters, gradients and optimizer state are split over all.
LoRA of rank 128 as in the paper; --config.lora.rank=0 trains all weights.
Expected: the paper reports its best validation accuracy near step 100-140. Neither time nor result
of this file has been measured yet.
"""

from sage_jax.recipes import paper


def get_config():
    c = paper("Qwen/Qwen3-4B-Base")
    # The base model never saw the empty think block that the template would add.
    c.tokens.enable_thinking = True
    return c
