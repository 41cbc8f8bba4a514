"""Dense Qwen2, Qwen2.5 and Qwen3 as functions over a params pytree.

Shape suffixes: b rows, t positions (p of a prompt), d model, n query heads, k key/value heads,
h head dim, f ffn, v vocab, l layers, s decode slots, x any leading dimensions.
The parts follow arXiv 2309.16609 (Qwen), 2407.10671 (Qwen2) and 2505.09388 (Qwen3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.typing import DTypeLike

from sage_jax.core.mesh import Layout
from sage_jax.models import attention
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.models.stack import over_layers, run_layers

Params = dict[str, Any]
Cache = dict[str, jax.Array]
Transform = Literal["linear", "reshape"]

CACHE_AXES = ("layers", "batch", "seq", "kv_heads", "head_dim")
# One (layer, position) a row, rows as a batch dimension: nothing moves between devices.
_ROW_WRITE = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2),
    inserted_window_dims=(0, 2),
    scatter_dims_to_operand_dims=(0, 2),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
)

# The factors of an adapter stand beside the weight `name` as name + LORA_A and name + LORA_B.
LORA_A, LORA_B = "_lora_a", "_lora_b"

_KEEP_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(attention.SAVED),
)

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
        name: _constrain(layout, p.init(k, p.shape, dtype), *p.axes)
        for k, (name, p) in zip(keys, table.items(), strict=True)
    }
    return unflatten_dict(flat, sep=".")


def _constrain(layout: Layout | None, x: jax.Array, *axes: str | None) -> jax.Array:
    return x if layout is None else layout.constrain(x, *axes)


def _rms_norm(x_xd: jax.Array, scale_d: jax.Array, eps: float) -> jax.Array:
    x32 = x_xd.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = scale_d.astype(jnp.float32).reshape((1,) * (x32.ndim - 1) + (-1,))
    return (x32 * scale).astype(x_xd.dtype)


def rope_angles(cfg: QwenConfig, position_bt: jax.Array) -> jax.Array:
    """Rotary phases [b, t, h/2] in radians, float32: position * theta^(-2i/h) (arXiv 2104.09864).

    In bfloat16 a phase of some thousand radians would be off by whole turns.
    """
    pairs = np.arange(0, cfg.head_dim, 2, dtype=np.float64)
    frequency = jnp.asarray(cfg.rope_theta ** (-pairs / cfg.head_dim), jnp.float32)
    return position_bt[..., None].astype(jnp.float32) * frequency[None, None, :]


def _rotate(x_btnh: jax.Array, angles: jax.Array) -> jax.Array:
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    x1, x2 = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_btnh.dtype)


def _embed(params: Params, tokens_bt: jax.Array, dtype: DTypeLike, layout: Layout | None):
    with jax.named_scope("embed"):
        # Each device looks up its part of every row; then parts are changed for whole rows.
        tokens_bt = _constrain(layout, tokens_bt, "outer_batch", "seq")
        x_btd = params["embed"][tokens_bt].astype(dtype)
        x_btd = _constrain(layout, x_btd, "outer_batch", "seq", "embed")
        return _constrain(layout, x_btd, "batch", "seq", None)


def _linear(
    w: Params, layout: Layout | None, name: str, x: jax.Array, inputs: str, outputs: str
) -> jax.Array:
    """x W with axes b, t and `outputs`; plus (x A) B where an adapter is attached."""
    heads = "kv_heads" if name in ("k_proj", "v_proj") else "q_heads"
    axes = {"d": None, "n": heads, "h": "head_dim", "f": "mlp", "r": None}

    def whole(name: str, letters: str) -> jax.Array:
        # Gathered over fsdp once where it is used: left to itself, XLA gathers for each product.
        return _constrain(layout, w[name], *(axes[letter] for letter in letters))

    def flat(weight: jax.Array) -> jax.Array:
        # One contracted dimension: with two, XLA transposes the weights on a CPU at every call.
        return weight.reshape(-1, *weight.shape[len(inputs) :])

    x_bti = x.reshape(*x.shape[:2], -1)
    z = jnp.einsum(f"bti,i{outputs}->bt{outputs}", x_bti, flat(whole(name, inputs + outputs)))
    if name + LORA_A not in w:
        return z
    a, b = whole(name + LORA_A, inputs + "r"), whole(name + LORA_B, "r" + outputs)
    x_btr = jnp.einsum("bti,ir->btr", x_bti, flat(a))
    x_btr = _constrain(layout, x_btr, "batch", "seq", None)
    return z + jnp.einsum(f"btr,r{outputs}->bt{outputs}", x_btr, b)


def _layer(
    x_btd: jax.Array,
    weights: Params,
    angles: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    cfg: QwenConfig,
    layout: Layout | None,
) -> tuple[jax.Array, Any]:
    """One transformer layer; `attend(q, k, v)` gives the attention output and what to keep."""
    w = {name: value.astype(x_btd.dtype) for name, value in weights.items()}
    linear = partial(_linear, w, layout)

    def heads(y_btd: jax.Array, name: str, axis: str) -> jax.Array:
        z = linear(f"{name}_proj", y_btd, "d", "nh")
        if f"{name}_bias" in w:
            z += w[f"{name}_bias"][None, None]
        if f"{name}_norm" in w:
            z = _rms_norm(z, w[f"{name}_norm"], cfg.rms_norm_eps)
        return _constrain(layout, z, "batch", "seq", axis, "head_dim")

    with jax.named_scope("attention"):
        y_btd = _rms_norm(x_btd, w["attn_norm"], cfg.rms_norm_eps)
        q_btnh = _rotate(heads(y_btd, "q", "q_heads"), angles)
        k_btkh = _rotate(heads(y_btd, "k", "kv_heads"), angles)
        v_btkh = heads(y_btd, "v", "kv_heads")
        z_btnh, kept = attend(q_btnh, k_btkh, v_btkh)
        z_btnh = _constrain(layout, z_btnh, "batch", "seq", "q_heads", "head_dim")
        x_btd = x_btd + linear("o_proj", z_btnh, "nh", "d")
        x_btd = _constrain(layout, x_btd, "batch", "seq", None)
    with jax.named_scope("mlp"):
        y_btd = _rms_norm(x_btd, w["mlp_norm"], cfg.rms_norm_eps)
        gate_btf = jax.nn.silu(linear("gate_proj", y_btd, "d", "f"))
        z_btf = gate_btf * linear("up_proj", y_btd, "d", "f")
        z_btf = _constrain(layout, z_btf, "batch", "seq", "mlp")
        x_btd = x_btd + linear("down_proj", z_btf, "f", "d")
    return _constrain(layout, x_btd, "batch", "seq", None), kept


def forward(
    params: Params,
    cfg: QwenConfig,
    tokens_bt: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    remat: str = "none",
    attend: str = "auto",
    position_bt: jax.Array | None = None,
    segment_ids_bt: jax.Array | None = None,
    totals: Params | None = None,
) -> jax.Array:
    """Hidden states [b, t, d] after the final norm, in `dtype`.

    Causal, so what stands right of a row's end changes nothing before it. Several rows packed into
    one have `segment_ids_bt` (see `attention.attend`) and each its own `position_bt` from 0.
    `remat` is what the backward pass computes again: 'none', 'dots' (all but the matrix products
    and what attention gave) or 'full' (each layer). `attend` is one of attention.KINDS.
    ValueError on another value of either. With `totals` the gradient of the layers is added to
    these, see `run_layers`.
    """

    def body(x_btd, weights, context):
        angles, segment_bt = context
        program = partial(attention.attend, segment_bt=segment_bt, kind=attend, layout=layout)
        return _layer(x_btd, weights, angles, lambda *qkv: (program(*qkv), None), cfg, layout)[0]

    if remat not in ("none", "full", "dots"):
        raise ValueError(f"remat {remat!r}: choose 'none', 'full' or 'dots'")
    if remat != "none":
        policy = _KEEP_PRODUCTS if remat == "dots" else None
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    if position_bt is None:
        position_bt = jnp.arange(tokens_bt.shape[1])[None]
    context = rope_angles(cfg, position_bt), segment_ids_bt
    x_btd = _embed(params, tokens_bt, dtype, layout)
    x_btd = run_layers(body, x_btd, params["layers"], context, totals)
    return _rms_norm(x_btd, params["final_norm"], cfg.rms_norm_eps)


def prefill(
    params: Params,
    cfg: QwenConfig,
    tokens_bp: jax.Array,
    lengths_b: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    attend: str = "auto",
) -> tuple[jax.Array, Cache]:
    """Hidden state [b, d] of each row's last prompt token, and the cache {k, v: [l, b, p, k, h]}.

    Rows are right padded; cache entries past a row's length hold what the padding gave, and are
    overwritten by decoding before any position sees them.
    """

    def attend_and_keep(q, k, v):
        z = attention.attend(q, k, v, kind=attend, layout=layout)
        return z, {"k": k, "v": v}

    def body(x_bpd, layer):
        return _layer(x_bpd, layer[1], angles, attend_and_keep, cfg, layout)

    angles = rope_angles(cfg, jnp.arange(tokens_bp.shape[1])[None])
    x_bpd = _embed(params, tokens_bp, dtype, layout)
    x_bpd, cache = over_layers(body, x_bpd, params["layers"])
    hidden_bpd = _rms_norm(x_bpd, params["final_norm"], cfg.rms_norm_eps)
    last_b = jnp.maximum(lengths_b - 1, 0)
    last_bd = jnp.take_along_axis(hidden_bpd, last_b[:, None, None], axis=1)[:, 0]
    cache = {name: _constrain(layout, c, *CACHE_AXES) for name, c in cache.items()}
    return _constrain(layout, last_bd, "batch", None), cache


def init_cache(
    cfg: QwenConfig,
    slots: int,
    length: int,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> Cache:
    """Empty cache {k, v: [l, s, t, k, h]} for `slots` rows of `length` tokens, placed in shards."""
    shape = (cfg.num_layers, slots, length, cfg.num_kv_heads, cfg.head_dim)
    sharding = None if layout is None else layout.sharding(CACHE_AXES, shape)
    return {name: jnp.zeros(shape, dtype, device=sharding) for name in ("k", "v")}


def decode_step(
    params: Params,
    cfg: QwenConfig,
    token_s: jax.Array,
    position_s: jax.Array,
    cache: Cache,
    *,
    read_length: int,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
) -> tuple[jax.Array, Cache]:
    """Hidden state [s, d] of one new token a row, and the cache with its keys and values.

    Row s writes at `position_s[s]` (nothing when that lies past the cache) and attends to cache
    positions 0..position_s[s] below the static `read_length`, which must exceed every live
    position. Donate the cache: it is updated in place, one layer's slice at a time. On CPU make it
    float32 whatever `dtype` is: XLA there widens a 16-bit cache whole around each write.
    """
    _, slots, length, *head = cache["k"].shape
    if read_length > length:
        raise ValueError(f"read_length {read_length} exceeds the cache of {length} positions")
    mask_snqr = (jnp.arange(read_length)[None] <= position_s[:, None])[:, None, None, :]
    angles = rope_angles(cfg, position_s[:, None])

    def body(carry, layer):
        x_s1d, cache = carry
        index, weights = layer

        def attend(q_s1nh, k_s1kh, v_s1kh):
            new = {"k": k_s1kh[:, 0], "v": v_s1kh[:, 0]}
            where_s2 = jnp.stack([jnp.full_like(position_s, index), position_s], axis=1)
            updated = {
                name: jax.lax.scatter(c, where_s2, new[name].astype(c.dtype), _ROW_WRITE)
                for name, c in cache.items()
            }
            updated = {name: _constrain(layout, c, *CACHE_AXES) for name, c in updated.items()}
            size = (1, slots, read_length, *head)
            read = {
                name: jax.lax.dynamic_slice(c, (index, 0, 0, 0, 0), size)[0].astype(x_s1d.dtype)
                for name, c in updated.items()
            }
            z = jax.nn.dot_product_attention(q_s1nh, read["k"], read["v"], mask=mask_snqr)
            return z, updated

        x_s1d, cache = _layer(x_s1d, weights, angles, attend, cfg, layout)
        return (x_s1d, cache), None

    x_s1d = _embed(params, token_s[:, None], dtype, layout)
    (x_s1d, cache), _ = over_layers(body, (x_s1d, cache), params["layers"])
    return _rms_norm(x_s1d[:, 0], params["final_norm"], cfg.rms_norm_eps), cache


def head_name(cfg: QwenConfig) -> str:
    """Which of the params is the head [v, d]."""
    return "embed" if cfg.tie_embeddings else "lm_head"


def head_logits(params: Params, cfg: QwenConfig, hidden_xd: jax.Array) -> jax.Array:
    """Logits [x, v] in float32: a product in the dtype of `hidden_xd`, accumulated in float32."""
    # `stack.apart` has turned it.
    head, axes = (params["head"], "dv") if "head" in params else (params[head_name(cfg)], "vd")
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    with jax.named_scope("head"):
        return product(f"...d,{axes}->...v", hidden_xd, head.astype(hidden_xd.dtype))


class Qwen(nn.Module):
    """Flax module over the functions of this file; its params are the same pytree."""

    config: QwenConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens_bt: jax.Array) -> jax.Array:
        """Logits [b, t, v] in float32."""
        groups = dict.fromkeys(name.split(".")[0] for name in param_table(self.config))
        params = {
            group: self.param(group, lambda key, g=group: init(self.config, key)[g])
            for group in groups
        }
        hidden_btd = forward(params, self.config, tokens_bt, dtype=self.dtype)
        return head_logits(params, self.config, hidden_btd)
