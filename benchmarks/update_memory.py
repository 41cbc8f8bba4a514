"""Memory and matrix products of the compiled update, beside what they have to be.

    python benchmarks/update_memory.py --model=qwen3-4b --topology=v5e:4x4 [--lora=128]
    python benchmarks/update_memory.py --model=qwen3-4b --topology=cpu --layers=4 --vocab=32768

Peak temporaries of a micro-batch are compared with 1.3 times the sum of: what the remat policy
keeps of every layer, what one layer keeps for its backward pass without remat, and one chunk of
logits. Useful products are those of a forward pass and of the gradients asked for, with what remat
computes again left out. Chips that are not here are compiled for through libtpu (pip install
libtpu). Exits 1 where temporaries exceed the bound.
"""

import argparse
import dataclasses
import math
import os
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax.traverse_util import unflatten_dict  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.extend.core import jaxprs_in_params  # noqa: E402

from sage_jax.core.mesh import UPDATE_RULES, Layout, make_mesh  # noqa: E402
from sage_jax.learn.optimizer import UpdateSettings, make_optimizer  # noqa: E402
from sage_jax.learn.pack import MicroBatch  # noqa: E402
from sage_jax.learn.update import TrainState, Update  # noqa: E402
from sage_jax.models import lora, qwen, qwen_params  # noqa: E402

ROLES = ("challenger", "planner", "solver", "critic")
GIB = 2**30
QWEN2 = {"model_type": "qwen2", "attention_bias": True, "head_dim": 128}
QWEN3 = {"model_type": "qwen3", "qk_norm": True, "head_dim": 128}
SIZES = {  # vocab, hidden, ffn, layers, query heads, key/value heads
    "qwen3-4b": (QWEN3 | {"tie_embeddings": True}, (151936, 2560, 9728, 36, 32, 8)),
    "qwen2.5-3b": (QWEN2 | {"tie_embeddings": True}, (151936, 2048, 11008, 36, 16, 2)),
    "qwen2.5-7b": (QWEN2, (152064, 3584, 18944, 28, 28, 4)),
}
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")


def config(name: str, layers: int, vocab: int) -> qwen.QwenConfig:
    family, sizes = SIZES[name]
    cfg = qwen.QwenConfig(**family, **dict(zip((*NAMES, "num_kv_heads"), sizes, strict=True)))
    return dataclasses.replace(
        cfg, num_layers=layers or cfg.num_layers, vocab_size=vocab or cfg.vocab_size
    )


def abstract(table: dict[str, qwen_params.Param], dtype, layout: Layout):
    flat = {
        name: jax.ShapeDtypeStruct(p.shape, dtype, sharding=layout.sharding(p.axes, p.shape))
        for name, p in table.items()
    }
    return unflatten_dict(flat, sep=".")


def abstract_state(cfg: qwen.QwenConfig, rank: int, tx, layout: Layout) -> TrainState:
    replicated = layout.sharding(())
    weights = abstract(qwen_params.param_table(cfg), jnp.bfloat16 if rank else jnp.float32, layout)
    frozen = weights if rank else None
    if rank:
        weights = abstract(lora.adapter_table(cfg, rank), jnp.float32, layout)
    opt_state = jax.eval_shape(tx.init, weights)
    placed = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(weights)}
    opt_state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=placed.get(x.shape, replicated) if x.ndim else replicated
        ),
        opt_state,
    )
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return TrainState(weights, opt_state, count, count, frozen=frozen)


def abstract_micro(rows: int, length: int, layout: Layout) -> MicroBatch:
    def array(dtype):
        sharding = layout.sharding(("batch", "seq"))
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)

    whole, real = array(jnp.int32), array(jnp.float32)
    return MicroBatch(whole, whole, whole, whole, whole, real, whole, real, real)


def kept(cfg: qwen.QwenConfig, state: TrainState, micro: MicroBatch, settings, layout) -> int:
    """Bytes of all layers that wait for the backward pass, over all devices."""

    def forward(totals, params, micro):
        hidden_btd = qwen.forward(
            params,
            cfg,
            micro.tokens_bt,
            dtype=jnp.dtype(settings.dtype),
            layout=layout,
            remat=settings.remat,
            position_bt=micro.position_bt,
            segment_ids_bt=micro.segment_bt,
            totals=totals,
        )
        return jnp.sum(hidden_btd.astype(jnp.float32))

    params = state.params if state.frozen is None else lora.attach(state.frozen, state.params)
    jaxpr = jax.make_jaxpr(jax.grad(forward))(state.params["layers"], params, micro)
    loop = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    arrays = [v.aval for v in loop.outvars[1:] if v.aval.shape[0] == cfg.num_layers]
    return sum(a.size * a.dtype.itemsize for a in arrays if a.size > cfg.num_layers * 10**5)


def products(jaxpr) -> int:
    """FLOPs of the matrix products of a jaxpr, loops counted as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += 2 * inner * eqn.outvars[0].aval.size
        if eqn.primitive.name in ("pallas_call", "shard_map", "while"):
            continue  # attention: see `attention_products`
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner_jaxpr in jaxprs_in_params(eqn.params):
            total += times * products(inner_jaxpr)
    return total


def useful_products(cfg: qwen.QwenConfig, tokens: int, rank: int) -> int:
    """Forward pass, gradients of activations, and of the weights that are trained."""
    d, n, k, h = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    layer = d * h * (2 * n + 2 * k) + 3 * d * cfg.intermediate_size
    base = cfg.num_layers * layer + d * cfg.vocab_size
    sides = (d + n * h) * 2 + (d + k * h) * 2 + (d + cfg.intermediate_size) * 3
    adapter = cfg.num_layers * rank * sides
    return 2 * tokens * ((2 if rank else 3) * base + 3 * adapter)


def attention_products(cfg: qwen.QwenConfig, rows: int, length: int, remat: str) -> tuple[int, int]:
    """Useful and all FLOPs: 2 products forward and 4 backward, each over half of all pairs.

    Run: the two again with remat full, then 3 for dq and 4 for dk and dv (Pallas splash).
    """
    one = rows * cfg.num_layers * length**2 * cfg.num_heads * cfg.head_dim
    return 6 * one, (2 + 2 * (remat == "full") + 7) * one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="qwen3-4b")
    parser.add_argument("--topology", default="v5e:4x4", help="NAME:SHAPE of a TPU slice, or cpu")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0, help="0: as the model has")
    parser.add_argument("--vocab", type=int, default=0, help="0: as the model has")
    parser.add_argument("--length", type=int, default=10240)
    parser.add_argument("--rows", type=int, default=0, help="0: one for each group of chips")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--remat", choices=qwen.REMAT, default="attention")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights are trained")
    args = parser.parse_args()
    if args.topology == "cpu":
        devices = jax.devices()
    else:
        devices = topologies.get_topology_desc(args.topology, "tpu").devices
    layout = Layout(make_mesh(1, -1, args.tensor, devices), UPDATE_RULES)
    groups = len(devices) // args.tensor
    rows = args.rows or groups
    cfg = config(args.model, args.layers, args.vocab)
    scale = 2.0 if args.lora else 0.0
    settings = UpdateSettings(
        dtype="bfloat16", remat=args.remat, chunk=args.chunk, lora_scale=scale
    )
    tx = make_optimizer(settings, 100)
    state = abstract_state(cfg, args.lora, tx, layout)
    micro = abstract_micro(rows, args.length, layout)
    update = Update(cfg, settings, ROLES, tx, state, layout)
    acc = jax.eval_shape(update.zeros, state)
    counts = jax.ShapeDtypeStruct((len(ROLES),), jnp.float32, sharding=layout.sharding(()))
    start = time.perf_counter()
    traced = update.accumulate.trace(state, acc, micro, counts)
    memory = traced.lower().compile().memory_analysis()
    seconds = time.perf_counter() - start
    finish = update.finish.lower(state._replace(frozen=None), acc).compile().memory_analysis()

    plain = dataclasses.replace(settings, remat="none")
    parts = {
        "kept of all layers": kept(cfg, state, micro, settings, layout) / len(devices),
        "one layer, nothing remade": kept(cfg, state, micro, plain, layout)
        / cfg.num_layers
        / len(devices),
        "one chunk of logits": 4 * args.chunk * cfg.vocab_size / len(devices),
    }
    bound = 1.3 * sum(parts.values())
    done = products(traced.jaxpr.jaxpr)
    useful = useful_products(cfg, rows * args.length, args.lora)
    useful_pairs, pairs = attention_products(cfg, rows, args.length, args.remat)
    figures = {name: f"{size / GIB:.3f} GiB" for name, size in parts.items()} | {
        "1.3 x their sum": f"{bound / GIB:.3f} GiB",
        "temporaries of accumulate": f"{memory.temp_size_in_bytes / GIB:.3f} GiB",
        "temporaries of finish": f"{finish.temp_size_in_bytes / GIB:.3f} GiB",
        "arguments": f"{memory.argument_size_in_bytes / GIB:.3f} GiB",
        "of them given back in place": f"{memory.alias_size_in_bytes / GIB:.3f} GiB",
        "useful / all products": f"{(useful + useful_pairs) / (done + pairs):.3f}",
        "compiled in": f"{seconds:.0f} s",
    }
    print(f"{args.model}, {cfg.num_layers} layers, {rows} x {args.length} tokens, {args.topology}")
    print(f"remat {args.remat}, {'LoRA ' + str(args.lora) if args.lora else 'all weights'}")
    for name, value in figures.items():
        print(f"{name:>28}  {value}")
    return int(memory.temp_size_in_bytes > bound)


if __name__ == "__main__":
    raise SystemExit(main())
