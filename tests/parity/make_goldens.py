"""Tiny random Qwen checkpoints with the logits and greedy tokens that transformers gives them.

Run with the 'parity' extra installed: `python tests/parity/make_goldens.py`. It rewrites
tests/data/golden_*, which the ordinary suite compares with, so that it needs no torch.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

DATA = Path(__file__).parents[1] / "data"
PROMPTS = ([5, 61, 8, 8, 40, 2, 17], [33, 9, 1])
NEW_TOKENS = 8

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 63,
    "pad_token_id": 63,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
SHORT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# name -> (family, fields, stored type, shard size)
GOLDENS = {
    "golden_qwen2": ("qwen2", {"rope_parameters": SHORT_ROPE}, torch.float32, "9KB"),
    "golden_qwen2_5": (
        "qwen2",
        {"rope_parameters": ROPE, "tie_word_embeddings": True, "num_key_value_heads": 1},
        torch.bfloat16,
        "1GB",
    ),
    "golden_qwen3": (
        "qwen3",
        {"rope_parameters": ROPE, "tie_word_embeddings": True, "head_dim": 8},
        torch.float32,
        "1GB",
    ),
}


def build(family, fields, stored=torch.float32, seed=0):
    """Random model in float32, its values exact in type `stored`, no parameter at its default."""
    configs = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
    models = {"qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
    generator = torch.Generator().manual_seed(seed)
    model = models[family](configs[family](**{**SIZES, **fields})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            value = 1 + noise if "norm" in name else noise
            parameter.copy_(value.to(stored).float())
    return model


@torch.no_grad()
def reference(model, prompts=PROMPTS, new_tokens=NEW_TOKENS):
    """Logits [b, p, v] of the prompts padded right with 0, and greedy tokens [b, new_tokens].

    The gap is the smallest one between the two best logits over all greedy steps.
    """
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([list(ids) + [0] * (longest - len(ids)) for ids in prompts])
    logits = model(padded).logits.numpy()
    greedy, gap = [], np.inf
    for ids in prompts:
        ids = list(ids)
        for _ in range(new_tokens):
            best = model(torch.tensor([ids])).logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        greedy.append(ids[-new_tokens:])
    return logits, np.asarray(greedy), gap


def main():
    for name, (family, fields, stored, shard_size) in GOLDENS.items():
        model = build(family, fields, stored)
        logits, greedy, gap = reference(model)
        if gap < 1e-2:
            raise SystemExit(f"{name}: two logits only {gap} apart, choose another seed")
        folder = DATA / name
        model.to(stored).save_pretrained(folder, max_shard_size=shard_size)
        lengths = [len(ids) for ids in PROMPTS]
        np.savez_compressed(
            folder / "golden.npz",
            prompts=np.concatenate([np.asarray(ids) for ids in PROMPTS]),
            lengths=np.asarray(lengths),
            logits=logits,
            greedy=greedy,
        )
        for file in folder.iterdir():
            file.chmod(0o644)
        print(name, sum(f.stat().st_size for f in folder.iterdir()), "bytes, gap", gap)


if __name__ == "__main__":
    main()
