"""How many bytes one decode step moves on a TPU, against those it has to: needs libtpu, no TPU.

    python benchmarks/decode_bytes.py [--topology=v5e:2x4] [--slots=8] [--length=10240]

Compiles `qwen.decode_step` at the widths of Qwen3-4B for one chip with 2 and with 4 layers, each in
code of its own: the compiler counts the body of a loop once. What two layers add, times half the
model's 36, and what is left of the first make the whole. It must not exceed 1.15 x (weights + cache
up to the read length + logits), nor may temporaries exceed one layer's cache. Exit 1 when they do.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dataclasses

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from sage_jax.core import chips
from sage_jax.core.mesh import DECODE_RULES, Layout, make_mesh
from sage_jax.models import costs, qwen, qwen_params
from sage_jax.models.qwen_config import QwenConfig

LAYERS = 36
BOUND = 1.15
QWEN3_4B = QwenConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=LAYERS,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=True,
    qk_norm=True,
)


def arrays(cfg: QwenConfig, slots: int, length: int, layout: Layout) -> tuple[Any, ...]:
    """Abstract weights, tokens, positions and cache in bfloat16."""

    def array(shape, axes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes, shape))

    table = qwen_params.param_table(cfg)
    params = unflatten_dict(
        {n: array(p.shape, p.axes) for n, p in table.items() if p.axes[0] != "layers"}, sep="."
    )
    params["layers"] = tuple(
        {
            n.removeprefix("layers."): array(p.shape[1:], p.axes[1:])
            for n, p in table.items()
            if p.axes[0] == "layers"
        }
        for _ in range(cfg.num_layers)
    )
    shape = (cfg.num_layers, slots, length, cfg.num_kv_heads, cfg.head_dim)
    row = array((slots,), ("batch",), jnp.int32)
    return params, row, row, {name: array(shape, qwen.CACHE_AXES) for name in ("k", "v")}


def compiled(cfg: QwenConfig, slots: int, length: int, layout: Layout) -> Any:
    """One decode step with logits; the cache is donated, the layers stand one after another."""

    @partial(jax.jit, donate_argnums=3)
    def step(params, token_s, position_s, cache):
        hidden_sd, cache = qwen.decode_step(
            params,
            cfg,
            token_s,
            position_s,
            cache,
            read_length=length,
            dtype=jnp.bfloat16,
            layout=layout,
        )
        return qwen.head_logits(params, cfg, hidden_sd), cache

    return step.lower(*arrays(cfg, slots, length, layout)).compile()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--length", type=int, default=10240, help="cache and read length")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    devices, chip = chips.find(args.topology)
    layout = Layout(make_mesh(1, 1, 1, devices[:1]), DECODE_RULES)
    moved, held = {}, {}
    for layers in (2, 4):
        cfg = dataclasses.replace(QWEN3_4B, num_layers=layers)
        program = compiled(cfg, args.slots, args.length, layout)
        moved[layers] = float(program.cost_analysis()["bytes accessed"])
        held[layers] = program.memory_analysis().temp_size_in_bytes
    a_layer = (moved[4] - moved[2]) / 2
    whole = moved[2] - 2 * a_layer + LAYERS * a_layer
    cache = args.slots * args.length * costs.cache_bytes(QWEN3_4B, 2)
    weights = 2 * costs.Weights.of(QWEN3_4B).total
    logits = 4 * args.slots * QWEN3_4B.vocab_size
    least = weights + cache + logits
    rows = {
        f"bytes of a step, {LAYERS} layers": whole,
        "weights": weights,
        f"cache, {args.slots} rows of {args.length}": cache,
        "logits": logits,
        "temporaries": held[4],
        "cache of one layer": cache / LAYERS,
    }
    for name, value in rows.items():
        print(f"{name:<32} {value / 1e9:9.3f} GB")
    print(f"{'moved / least':<32} {whole / least:9.3f}    at most {BOUND}")
    seconds = 1e3 * whole / chip.hbm_rate
    print(f"{'time at the HBM rate of ' + chip.name:<32} {seconds:9.1f} ms")
    fine = whole <= BOUND * least and held[4] <= cache / LAYERS
    print("holds" if fine else "DOES NOT HOLD")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
