"""Dense Qwen2, Qwen2.5 and Qwen3 as functions over a params pytree.

Shape suffixes: b rows, t positions (p of a prompt), d model, n query heads, k key/value heads,
h head dim, f ffn, v vocab, l layers, s decode slots, x any leading dimensions.
The parts follow arXiv 2309.16609 (Qwen), 2407.10671 (Qwen2) and 2505.09388 (Qwen3).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.typing import DTypeLike

from sage_jax.core.mesh import Layout
from sage_jax.models import attention, decode_attention
from sage_jax.models import cache as kv
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.models.qwen_params import LORA_A, LORA_B, Params, init, param_table
from sage_jax.models.stack import over_layers, run_layers

_KEEP_ATTENTION = jax.checkpoint_policies.save_only_these_names(attention.SAVED)
# What of a layer waits for the backward pass beside its input, by remat policy; the rest is
# computed again. In long rows a byte of what attention gave saves more FLOPs than one of a product.
_KEPT = {
    "full": None,
    "attention": _KEEP_ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KEEP_ATTENTION
    ),
}
REMAT = ("none", *reversed(_KEPT))


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


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _cast(weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The weight of one layer in another `dtype`, as `astype` gives it.

    A cast alone the TPU compiler moves out of the loop over layers, barrier or not, and so holds a
    second copy of the whole stack while it runs; a rounding it leaves in place.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(weight, info.nexp, info.nmant).astype(dtype)


@_cast.defjvp
def _cast_jvp(dtype: DTypeLike, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # The gradient is not rounded once more: XLA may have kept it wider than `dtype`.
    (weight,), (tangent,) = primals, tangents
    return _cast(weight, dtype), tangent.astype(dtype)


def _layer(
    x_btd: jax.Array,
    weights: Params,
    angles: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    cfg: QwenConfig,
    layout: Layout | None,
) -> tuple[jax.Array, Any]:
    """One transformer layer; `attend(q, k, v)` gives the attention output and what to keep."""
    dtype = x_btd.dtype
    w = {name: x if x.dtype == dtype else _cast(x, dtype) for name, x in weights.items()}
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
    and what attention gave), 'attention' (all but what attention gave, of the programs blocked and
    splash) or 'full' (each layer). `attend` is one of attention.KINDS. ValueError on another value
    of either. With `totals` the gradient of the layers is added to these, see `run_layers`.
    """

    def body(x_btd, weights, context):
        angles, segment_bt = context
        program = partial(attention.attend, segment_bt=segment_bt, kind=attend, layout=layout)
        return _layer(x_btd, weights, angles, lambda *qkv: (program(*qkv), None), cfg, layout)[0]

    if remat not in REMAT:
        raise ValueError(f"remat {remat!r}: choose one of {', '.join(REMAT)}")
    if remat != "none":
        body = jax.checkpoint(body, policy=_KEPT[remat], prevent_cse=False)
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
) -> tuple[jax.Array, kv.Cache]:
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
    cache = {name: _constrain(layout, c, *kv.PREFIX_AXES) for name, c in cache.items()}
    return _constrain(layout, last_bd, "batch", None), cache


def _as_stored(weights: Params, layout: Layout | None) -> Params:
    """The weights of a layer, those of heads held to the order in memory that they have: left to
    itself XLA turns their whole stacks around before a loop of steps, and holds them twice."""

    def held(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, MemoryLayout(tuple(range(x.ndim))))

    found = dict(weights)
    for name, axis in (("q_proj", "q_heads"), ("k_proj", "kv_heads"), ("v_proj", "kv_heads")):
        program = held
        if layout is not None:
            spec = layout.sharding((None, axis, "head_dim")).spec
            # The constraint is nothing that XLA could split: it would gather the weight for it.
            program = jax.shard_map(held, mesh=layout.mesh, in_specs=spec, out_specs=spec)
        found[name] = program(weights[name])
    return found


def decode_step(
    params: Params,
    cfg: QwenConfig,
    token_s: jax.Array,
    position_s: jax.Array,
    cache: Any,
    *,
    read_length: int,
    dtype: DTypeLike = jnp.float32,
    layout: Layout | None = None,
    form: str = "scatter",
) -> tuple[jax.Array, Any]:
    """Hidden state [s, d] of one new token a row, and the cache with its keys and values.

    Row s writes at `position_s[s]` (nothing when that lies past the cache) and attends to cache
    positions 0..position_s[s] below the static `read_length`, which must exceed every live
    position. Donate the cache: it is updated in place, one layer's slice at a time. In the `form`
    aside it is a `kv.Chunk` with room for a step more, and `position_s[s]` its start_s[s] + step in
    each row that counts.
    """
    length = kv.length_of(cache, form)
    if read_length > length:
        raise ValueError(f"read_length {read_length} exceeds the cache of {length} positions")
    angles = rope_angles(cfg, position_s[:, None])

    def body(carry, layer):
        x_s1d, cache = carry
        index, weights = layer
        if attention.platform(layout) == "tpu":
            weights = _as_stored(weights, layout)

        def attend(*qkv):
            return decode_attention.attend(form, cache, index, qkv, position_s, read_length, layout)

        x_s1d, cache = _layer(x_s1d, weights, angles, attend, cfg, layout)
        return (x_s1d, cache), None

    x_s1d = _embed(params, token_s[:, None], dtype, layout)
    (x_s1d, cache), _ = over_layers(body, (x_s1d, cache), params["layers"])
    if form == "aside":
        cache = cache._replace(step=cache.step + 1)
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
