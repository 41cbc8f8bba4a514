"""The parameters of dense Qwen models: one table of shapes, sharding, start values and names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike

from sage_jax.core.mesh import Layout
from sage_jax.models.qwen_config import QwenConfig

Params = dict[str, Any]
Transform = Literal["linear", "reshape"]

# The factors of an adapter stand beside the weight `name` as name + LORA_A and name + LORA_B.
LORA_A, LORA_B = "_lora_a", "_lora_b"

_NORMAL = jax.nn.initializers.normal(0.02)
_ONES = jax.nn.initializers.ones
_ZEROS = jax.nn.initializers.zeros


@dataclass(frozen=True)
class Param:
    """One parameter: how it is shaped, sharded, initialised, and named and stored by Hugging Face.

    `hf_name` holds '{layer}' where each layer is a tensor of its own; `hf_shape` is the shape of
    that tensor. `transform` 'linear' stores [out, in] there, 'reshape' only another shape. Norm
    vectors stay whole on every device (axis None): to gather them costs more than they take.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]
    hf_name: str
    hf_shape: tuple[int, ...]
    transform: Transform

    def from_hf(self, tensor: np.ndarray, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """View of one Hugging Face tensor in the shape used here (of one layer if stacked), or of
        a block of it in the `shape` of a shard."""
        if shape is None:
            shape = self.shape[1:] if self.axes[0] == "layers" else self.shape
        return (tensor.T if self.transform == "linear" else tensor).reshape(shape)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """Inverse of `from_hf`."""
        if self.transform == "linear":
            return array.reshape(self.hf_shape[::-1]).T
        return array.reshape(self.hf_shape)


def param_table(cfg: QwenConfig) -> dict[str, Param]:
    """Every parameter of the model by its path in the params pytree, '.' between levels.

    Parameters of the layers are stacked on a leading axis for `lax.scan`.
    """
    d, f, v, num_layers = cfg.hidden_size, cfg.intermediate_size, cfg.vocab_size, cfg.num_layers
    n, k, h = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim

    def layer(axes, sizes, init, hf_name, hf_shape, transform: Transform = "reshape"):
        return Param(
            (num_layers, *sizes),
            ("layers", *axes),
            init,
            "model.layers.{layer}." + hf_name,
            hf_shape,
            transform,
        )

    def linear(axes, sizes, hf_name, hf_shape):
        return layer(axes, sizes, _NORMAL, hf_name + ".weight", hf_shape, "linear")

    q, kv = ("q_heads", "head_dim"), ("kv_heads", "head_dim")
    table = {
        "embed": Param(
            (v, d), ("vocab", "embed"), _NORMAL, "model.embed_tokens.weight", (v, d), "reshape"
        ),
        "layers.attn_norm": layer((None,), (d,), _ONES, "input_layernorm.weight", (d,)),
        "layers.q_proj": linear(("embed", *q), (d, n, h), "self_attn.q_proj", (n * h, d)),
        "layers.k_proj": linear(("embed", *kv), (d, k, h), "self_attn.k_proj", (k * h, d)),
        "layers.v_proj": linear(("embed", *kv), (d, k, h), "self_attn.v_proj", (k * h, d)),
        "layers.o_proj": linear((*q, "embed"), (n, h, d), "self_attn.o_proj", (d, n * h)),
        "layers.mlp_norm": layer((None,), (d,), _ONES, "post_attention_layernorm.weight", (d,)),
        "layers.gate_proj": linear(("embed", "mlp"), (d, f), "mlp.gate_proj", (f, d)),
        "layers.up_proj": linear(("embed", "mlp"), (d, f), "mlp.up_proj", (f, d)),
        "layers.down_proj": linear(("mlp", "embed"), (f, d), "mlp.down_proj", (d, f)),
        "final_norm": Param((d,), (None,), _ONES, "model.norm.weight", (d,), "reshape"),
    }
    if cfg.attention_bias:
        table |= {
            "layers.q_bias": layer(q, (n, h), _ZEROS, "self_attn.q_proj.bias", (n * h,)),
            "layers.k_bias": layer(kv, (k, h), _ZEROS, "self_attn.k_proj.bias", (k * h,)),
            "layers.v_bias": layer(kv, (k, h), _ZEROS, "self_attn.v_proj.bias", (k * h,)),
        }
    if cfg.qk_norm:
        table |= {
            "layers.q_norm": layer(("head_dim",), (h,), _ONES, "self_attn.q_norm.weight", (h,)),
            "layers.k_norm": layer(("head_dim",), (h,), _ONES, "self_attn.k_norm.weight", (h,)),
        }
    if not cfg.tie_embeddings:
        table["lm_head"] = Param(
            (v, d), ("vocab", "embed"), _NORMAL, "lm_head.weight", (v, d), "reshape"
        )
    return table


@partial(jax.jit, static_argnames=("cfg", "dtype", "layout"))
def init(
    cfg: QwenConfig,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> Params:
    """Random params (normal, standard deviation 0.02), made shard by shard in place."""
    table = param_table(cfg)
    keys = jax.random.split(key, len(table))
    flat = {
        name: p.init(k, p.shape, dtype) for k, (name, p) in zip(keys, table.items(), strict=True)
    }
    if layout is not None:
        flat = {name: layout.constrain(x, *table[name].axes) for name, x in flat.items()}
    return unflatten_dict(flat, sep=".")
