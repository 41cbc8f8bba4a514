"""How the packaged tiny model is made: supervised from random weights on scripted demonstrations.

    python -m sage_jax.main --mode=sft --config=configs/tiny_sft.py

Hardware: 2 CPU cores, 1 GiB; about 25 CPU-minutes. WORKDIR/model is what is packaged as
`sage_jax/assets/tiny-qwen3`: habits good and bad in every role, over facts that it knows.
"""

from sage_jax.config import base


def get_config():
    c = base()
    c.model.path = "asset:tiny-qwen3"  # its tokenizer and config.json; the weights start random
    c.model.remat = "full"  # less memory traffic: faster on a CPU too
    c.method.prompts = "short"
    c.sft.data = "tiny_world"
    c.sft.from_scratch = True
    c.sft.practice = 0.65
    c.sft.steps = 7000
    c.sft.batch = 64
    c.sft.length = 128
    c.sft.lr = 3e-3
    c.sft.warmup_steps = 100
    c.optim.micro_rows = 16
    c.optim.weight_decay = 0.01
    c.checkpoint.every = 500
    c.mesh.data = 1
    return c
