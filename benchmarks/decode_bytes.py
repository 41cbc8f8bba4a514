"""How many bytes one decode step moves on a TPU, against those it has to: needs libtpu, no TPU.

    python benchmarks/decode_bytes.py [--topology=v5e:2x4] [--slots=8] [--length=10240] [--chunk=16]

Compiles the program that a rollout runs, `rollout.decode.decode`, at the widths of Qwen3-4B for one
chip: in a loop over stacked layers as a TPU runs it, with 4 and with 8 of them (a loop of 2 is
unrolled), and with each layer in code of its own, 2 and 4. What a layer adds, times the model's 36,
and what is left of the first make the whole; what is done once a chunk counts by a step's share.
Bytes are those to and from HBM (`core/traffic.py`). They must not exceed 1.15 x (weights + cache up
to the read length + logits), nor may temporaries exceed one layer's cache. Exit 1 when they do, in
either form.

The compiler's own figure is printed beside: its "bytes accessed" counts what is brought into the
chip's own memory ahead of its use again where it is used there, which is no traffic of HBM.
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from sage_jax.core import chips, hlo, traffic
from sage_jax.core.mesh import DECODE_RULES, Layout, make_mesh
from sage_jax.models import cache as kv
from sage_jax.models import costs, qwen_params
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.rollout import decode

LAYERS = 36
FORMS = {"stacked, in a loop": (False, 4, 8), "each in code of its own": (True, 2, 4)}
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


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one compiled program: HBM bytes a step and, by a step's share, once a chunk; what the
    compiler counts as accessed; bytes of temporaries."""

    step: float
    once: float
    accessed: float
    temporaries: float


def weights(cfg: QwenConfig, layout: Layout, apart: bool) -> dict[str, Any]:
    """Abstract weights in bfloat16, the layers stacked or apart."""

    def array(p: qwen_params.Param, first: int) -> Any:
        at = layout.sharding(p.axes[first:], p.shape[first:])
        return jax.ShapeDtypeStruct(p.shape[first:], jnp.bfloat16, sharding=at)

    table = qwen_params.param_table(cfg)
    params = unflatten_dict({name: array(p, 0) for name, p in table.items()}, sep=".")
    if apart:
        of_layers = {n: p for n, p in table.items() if p.axes[0] == "layers"}
        one = {n.removeprefix("layers."): array(p, 1) for n, p in of_layers.items()}
        params["layers"] = (one,) * cfg.num_layers
    return params


def compiled(cfg: QwenConfig, args: argparse.Namespace, layout: Layout, apart: bool) -> Any:
    """The program of a chunk of steps."""
    placed = {"dtype": jnp.dtype(jnp.bfloat16), "layout": layout}
    placed["form"] = kv.choose("auto", cfg, args.length, placed["dtype"], layout)
    at = layout.sharding(())

    def empty() -> decode.Slots:
        return decode.empty_slots(cfg, args.slots, args.length, args.length, **placed)

    slots = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), jax.eval_shape(empty)
    )
    static = {"cfg": cfg, "steps": args.chunk, "read_length": args.length}
    return decode.decode.lower(weights(cfg, layout, apart), slots, **static, **placed).compile()


def measured(program: Any, chunk: int) -> Figures:
    step, once = traffic.step_bytes(hlo.Program(program.as_text()))
    return Figures(
        step,
        once / chunk,
        float(program.cost_analysis()["bytes accessed"]),
        program.memory_analysis().temp_size_in_bytes,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--length", type=int, default=10240, help="cache and read length")
    parser.add_argument("--chunk", type=int, default=16, help="steps")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    devices, chip = chips.find(args.topology)
    layout = Layout(make_mesh(1, 1, 1, devices[:1]), DECODE_RULES)
    cache = args.slots * args.length * costs.cache_bytes(QWEN3_4B, 2)
    parts = {
        "weights": 2 * costs.Weights.of(QWEN3_4B).total,
        f"cache, {args.slots} rows of {args.length}": cache,
        "logits": 4 * args.slots * QWEN3_4B.vocab_size,
    }
    least = sum(parts.values())
    for name, value in parts.items():
        print(f"{name:<42} {value / 1e9:9.3f} GB")
    fine = True
    for form, (apart, few, more) in FORMS.items():
        first, second = (
            measured(
                compiled(dataclasses.replace(QWEN3_4B, num_layers=n), args, layout, apart),
                args.chunk,
            )
            for n in (few, more)
        )

        def whole(name: str, *pair: Figures, few: int = few, more: int = more) -> float:
            low, high = (getattr(figures, name) for figures in pair)
            return low + (LAYERS - few) * (high - low) / (more - few)

        step, once = (whole(name, first, second) for name in ("step", "once"))
        moved, held = step + once, second.temporaries
        print(f"\nlayers {form}")
        for name, value in (
            (f"HBM bytes of a step, {LAYERS} layers", step),
            ("done once a chunk, a step's share", once),
            (f"temporaries, {more} layers", held),
            (f"temporaries, {LAYERS} layers", whole("temporaries", first, second)),
            ("cache of one layer", cache / LAYERS),
        ):
            print(f"{name:<42} {value / 1e9:9.3f} GB")
        print(f"{'moved / least':<42} {moved / least:9.3f}    at most {BOUND}")
        if apart:  # of a loop the compiler counts one layer for all
            accessed = whole("accessed", first, second)
            print(f"{'bytes accessed / least':<42} {accessed / least:9.3f}")
        seconds = 1e3 * moved / chip.hbm_rate
        print(f"{'time at the HBM rate of ' + chip.name:<42} {seconds:9.1f} ms")
        fine &= moved <= BOUND * least and held <= cache / LAYERS
    print("\nholds" if fine else "\nDOES NOT HOLD")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
