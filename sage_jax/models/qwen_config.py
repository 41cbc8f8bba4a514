"""Architecture of dense Qwen2, Qwen2.5 and Qwen3 models, from and to a Hugging Face config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_LARGEST = 2**31 - 1
# Sizes: the largest that can be meant. One layer more is some 20 more tensors to look for.
_REQUIRED = {
    "vocab_size": _LARGEST,
    "hidden_size": _LARGEST,
    "intermediate_size": _LARGEST,
    "num_hidden_layers": 1000,
    "num_attention_heads": _LARGEST,
    "num_key_value_heads": _LARGEST,
}
_OPTIONAL = {"head_dim": _LARGEST, "max_position_embeddings": _LARGEST}
_FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias")
_OBJECTS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class QwenConfig:
    """Architecture of one dense Qwen model; sizes in elements, `max_position` in tokens."""

    model_type: Literal["qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    max_position: int = 32768

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "QwenConfig":
        """Config from the contents of a Hugging Face config.json.

        ValueError listing every field that is missing or holds what cannot be, or else that would
        change the mathematics in a way this model does not follow.
        """
        if problems := _impossible(config):
            raise ValueError("config.json: " + "; ".join(problems))
        problems = _unsupported(config)
        problems += [f"{field} is missing" for field in _REQUIRED if config.get(field) is None]
        theta = _rope_theta(config)
        if theta is None:
            problems.append("rope_theta is missing: give the base of the rotary embedding")
        if problems or theta is None:
            raise ValueError("config.json: " + "; ".join(problems))
        qwen3 = config["model_type"] == "qwen3"
        heads = int(config["num_attention_heads"])
        return cls(
            model_type=config["model_type"],
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config["num_key_value_heads"]),
            # Absent, transformers takes 128 for Qwen3 whatever the other sizes are.
            head_dim=int(
                config.get("head_dim") or (128 if qwen3 else config["hidden_size"] // heads)
            ),
            rope_theta=float(theta),
            rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=not qwen3,
            qk_norm=qwen3,
            max_position=int(config.get("max_position_embeddings") or 32768),
        )

    def to_hf(self) -> dict[str, Any]:
        """Contents of a config.json that transformers (4 and 5) and `from_hf` read back."""
        family = {"qwen2": "Qwen2", "qwen3": "Qwen3"}[self.model_type]
        return {
            "architectures": [f"{family}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "use_sliding_window": False,
        } | ({"attention_bias": False} if self.model_type == "qwen3" else {})


def _rope_theta(config: Mapping[str, Any]) -> Any:
    nested = (config.get("rope_parameters") or {}).get("rope_theta")
    return config.get("rope_theta") if nested is None else nested


def _impossible(config: Mapping[str, Any]) -> list[str]:
    """Fields of a wrong type, or with a value that no model can have; null counts as absent."""
    given = {name: value for name, value in config.items() if value is not None}
    found = [
        f"{name} is {given[name]!r:.40}: give an object"
        for name in _OBJECTS
        if not isinstance(given.get(name, {}), Mapping)
    ]
    if found:
        return found
    found = [
        f"{name} is {given[name]!r:.40}: give an integer from 1 to {largest}"
        for name, largest in (_REQUIRED | _OPTIONAL).items()
        if name in given and not (type(given[name]) is int and 1 <= given[name] <= largest)
    ]
    found += [
        f"{name} is {given[name]!r:.40}: give true or false"
        for name in _FLAGS
        if type(given.get(name, False)) is not bool
    ]
    numbers = {
        "rms_norm_eps": (given.get("rms_norm_eps"), 1),
        "rope_theta": (_rope_theta(given), 1e30),
    }
    found += [
        f"{name} is {value!r:.40}: give a number between 0 and {limit:g}"
        for name, (value, limit) in numbers.items()
        if value is not None and not (type(value) in (int, float) and 0 < value < limit)
    ]
    layer_types = given.get("layer_types", [])
    if not isinstance(layer_types, list) or not all(isinstance(x, str) for x in layer_types):
        found.append(f"layer_types is {layer_types!r:.40}: give a list of names")
    if not found and "head_dim" not in given and given.get("model_type") == "qwen2":
        size, heads = given.get("hidden_size", 0), given.get("num_attention_heads", 1)
        if size % heads:
            found.append(
                f"hidden_size {size} is not a multiple of num_attention_heads {heads}: correct "
                "one, or give head_dim"
            )
    return found


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json, with their values, that ask for other mathematics."""
    found = []
    if config.get("model_type") not in ("qwen2", "qwen3"):
        found.append(f"model_type {config.get('model_type')!r} is not 'qwen2' or 'qwen3'")
    if config.get("use_sliding_window"):
        found.append("use_sliding_window true is not supported")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        found.append(f"layer_types {config['layer_types']!r:.80} has other than 'full_attention'")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act {config['hidden_act']!r} is not 'silu'")
    if config.get("attention_dropout"):
        found.append(f"attention_dropout {config['attention_dropout']} is not 0")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        found.append(f"partial_rotary_factor {config['partial_rotary_factor']} is not 1")
    if config.get("quantization_config"):
        found.append("quantization_config is set: use a checkpoint in bf16, fp16 or fp32")
    if config.get("model_type") == "qwen3" and config.get("attention_bias"):
        found.append("attention_bias true is not supported for qwen3")
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            found.append(f"{field} type {kind!r} is not 'default'")
        others = sorted(set(rope) - {"rope_type", "type", "rope_theta"})
        if others and kind == "default":
            found.append(f"{field} has unknown entries {others}")
    top, nested = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if None not in (top, nested) and top != nested:
        found.append(f"rope_theta {top} and rope_parameters.rope_theta {nested} differ")
    return found
