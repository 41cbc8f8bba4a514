"""Other samplers on the same weights: transformers' generate (torch) and google-tunix's sampler."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Prompts = Sequence[Sequence[int]]
Sampler = Callable[[Prompts, int], Any]  # prompts, new tokens each; greedy, never stopping early


def transformers_sampler(folder: Path) -> Sampler:
    """`generate` in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def sample(prompts: Prompts, new: int):
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                padded,
                attention_mask=mask,
                do_sample=False,
                repetition_penalty=1.0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        return out[:, width:].tolist()

    return sample


class _Ids:
    """A tokenizer for texts that are ids already, since tunix takes texts only. The last two ids of
    the vocabulary pad and stop: no prompt holds them, and no answer here."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, **_) -> list[int]:
        return [int(t) for t in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self.vocab_size - 2

    def pad_id(self) -> int:
        return self.vocab_size - 1


def tunix_sampler(folder: Path, cache_size: int) -> Sampler:
    """tunix's own sampler, its cache `cache_size` tokens long, in float32."""
    import jax.numpy as jnp
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen2 import params as qwen2_params

    c = json.loads((folder / "config.json").read_text())
    heads = c["num_attention_heads"]
    config = qwen2.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=heads,
        head_dim=c["hidden_size"] // heads,
        num_kv_heads=c["num_key_value_heads"],
        rope_theta=int(c.get("rope_theta") or c["rope_parameters"]["rope_theta"]),
        norm_eps=c["rms_norm_eps"],
        use_tied_embedding=c["tie_word_embeddings"],
    )
    model = qwen2_params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)
    cache = CacheConfig(
        cache_size=cache_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )

    sampler = Sampler(model, _Ids(config.vocab_size), cache)

    def sample(prompts: Prompts, new: int):
        texts = [" ".join(map(str, p)) for p in prompts]
        return [ids.tolist() for ids in sampler(texts, new).tokens]

    return sample
