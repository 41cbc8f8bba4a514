"""The schema: every field with its default, unit, range and meaning, and the checks across fields.

A config file imports `base`, changes what it needs and returns the result from `get_config()`.
"""

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from sage_jax.spelling import hint

ROLES = ("challenger", "planner", "solver", "critic")
INF = float("inf")
LARGEST = {int: 2**31 - 1, float: 3e38}  # what arrays of 32 bits hold: no infinity

# What a field's default stands for with each reward set (method.rewards).
FOLLOWS_REWARDS: dict[str, dict[str, Any]] = {
    "method.advantage": {"paper": "role_token", "robust": "grouped"},
    "train.rollback": {"paper": 0.0, "robust": 0.04},
}


class ConfigError(ValueError):
    """One or more fields are wrong; the message lists all of them."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field's default, its unit, its meaning and its legal values (a closed range or choices).

    `item`: type of the members of a list."""

    default: Any
    unit: str
    help: str
    low: float = -INF
    high: float = INF
    choices: tuple = ()
    item: type = object


SCHEMA: dict[str, Field] = {
    "seed": Field(0, "integer", "root of all randomness", 0, 2**31 - 1),
    "model.path": Field("asset:tiny-qwen3", "path", "Hugging Face folder, hub id, or asset:NAME"),
    "model.dtype": Field(
        "float32",
        "dtype",
        "compute type; what is trained is fp32",
        choices=("float32", "bfloat16"),
    ),
    "model.remat": Field(
        "none",
        "policy",
        "what the backward pass recomputes: nothing, all but matrix products and attention, all "
        "but attention, or all",
        choices=("none", "dots", "attention", "full"),
    ),
    "model.attention": Field(
        "auto",
        "program",
        "of whole rows; auto: xla up to 256 tokens, then splash on TPU, cudnn on GPU where a row "
        "has its sequence to itself, else blocked; of new tokens: see docs/rollout.md",
        choices=("auto", "xla", "blocked", "splash", "cudnn"),
    ),
    "lora.rank": Field(0, "rank", "adapter on all linear layers; 0: train all weights", 0, 4096),
    "lora.alpha": Field(
        0.0, "number", "adapter output times alpha / rank; 0: twice the rank, as in TRL", 0, 1e6
    ),
    "lora.path": Field("", "folder", "PEFT adapter to start from, with its rank; empty: a new one"),
    "lora.export": Field(
        "merged", "form", "what --mode=export writes", choices=("merged", "adapter")
    ),
    "tokens.max_prompt": Field(1024, "tokens", "longest prompt, template included", 8),
    "tokens.overlong": Field(
        "shorten", "policy", "what a longer prompt does", choices=("error", "shorten", "skip")
    ),
    "tokens.enable_thinking": Field(False, "flag", "thinking mode of the chat template"),
    "tokens.stop_ids": Field((), "token ids", "joined to the model's own stop set", item=int),
    "tasks.seeds": Field(("asset:seeds/train.jsonl",), "paths", "seed problems", item=str),
    "tasks.math_share": Field(0.5, "share", "maths among the tasks of a step", 0, 1),
    "pool.capacity": Field(20000, "tasks", "most admitted tasks kept; seeds come on top", 0),
    "pool.half_life": Field(
        50.0, "steps", "age at which an admitted task is drawn half as often", 0.1
    ),
    "pool.seed_share": Field(0.5, "share", "least share of seeds in a draw", 0, 1),
    "pool.dedup": Field(0.8, "Jaccard", "word 3-gram overlap that makes a duplicate", 0.01, 1),
    "valid.path": Field("asset:seeds/valid.jsonl", "path", "held-out problems"),
    "valid.every": Field(10, "steps", "validation interval; 0: first and last step only", 0),
    "valid.limit": Field(0, "tasks", "validate on the first n of each domain; 0: all", 0),
    "valid.samples": Field(4, "samples", "samples an item for valid/accuracy_sampled; 0: off", 0),
    "valid.planned": Field(True, "flag", "also measure Planner, gate and Solver together"),
    "valid.effects": Field(
        40, "tasks", "tasks for effect/*, what each role is worth, and half as many references", 0
    ),
    "train.steps": Field(200, "steps", "absolute total of updates", 0),
    "train.rollback": Field(
        -1.0,
        "share",
        "fall of held-out accuracy at which the best checkpoint comes back and the learning rate "
        "is halved; 0: never; -1: 0 with rewards paper, 0.04 with robust",
        -1,
        1,
    ),
    "checkpoint.every": Field(20, "steps", "save interval; 0: last step only", 0),
    "checkpoint.keep": Field(2, "checkpoints", "newest ones kept, besides the best", 1),
    "method.name": Field("sage", "name", "training method", choices=("sage",)),
    "method.rewards": Field("paper", "name", "reward set", choices=("paper", "robust")),
    "method.advantage": Field(
        "auto",
        "name",
        "normalisation; auto: role_token with rewards paper, grouped with robust",
        choices=("auto", "role_token", "role_sequence", "grouped"),
    ),
    "method.train_roles": Field(ROLES, "roles", "roles whose rows are trained on", item=str),
    "method.prompts": Field("v1", "name or folder", "prompt set"),
    "method.candidates": Field(64, "rows", "Challenger proposals a step", 0),
    "method.attempts": Field(5, "rows", "Solver attempts on each valid proposal", 1),
    "method.drawn": Field(64, "tasks", "tasks drawn from the pool a step", 0),
    "method.solutions": Field(2, "rows", "Solver answers on each drawn task", 1),
    "method.probes": Field(
        2, "rows", "Solver answers that see the plan whatever its score (rewards robust only)", 1
    ),
    "method.bare": Field(2, "rows", "Solver answers that see no plan (rewards robust only)", 1),
    "method.audits": Field(
        16, "rows", "Critic rows on seeds, half of them broken (rewards robust only)", 0
    ),
    "method.critics": Field(1, "rows", "Critic judgements on each question and plan", 1),
    "method.alpha": Field(0.7, "score", "question gate (paper 0.7)", 0, 1),
    "method.beta": Field(0.3, "score", "plan gate (paper 0.3)", 0, 1),
    "method.planner_weights": Field((0.5, 0.5), "weights", "plan score, format (paper 0.5, 0.5)"),
    "method.solver_weights": Field(
        (0.2, 0.6, 0.2), "weights", "plan, verdict, format (paper 0.2, 0.6, 0.2)"
    ),
    "rollout.slots": Field(64, "rows", "rows decoded at the same time", 1),
    "rollout.chunk": Field(16, "tokens", "decode steps between two looks of the host", 1),
    "rollout.prefill_rows": Field(8, "rows", "prompts in one prefill call", 1),
    "rollout.buckets": Field((256, 512, 1024, 2048), "tokens", "prompt and cache lengths compiled"),
    "rollout.temperature": Field(1.0, "temperature", "sampling temperature in training", 0.01, 10),
    "rollout.max_new.challenger": Field(1024, "tokens", "response budget of the Challenger", 1),
    "rollout.max_new.planner": Field(512, "tokens", "response budget of the Planner", 1),
    "rollout.max_new.solver": Field(1024, "tokens", "response budget of the Solver", 1),
    "rollout.max_new.critic": Field(256, "tokens", "response budget of the Critic", 1),
    "optim.lr": Field(3e-6, "rate", "peak learning rate (paper 3e-6)", 0, 1),
    "optim.schedule": Field(
        "constant", "name", "after warm-up", choices=("constant", "cosine", "linear")
    ),
    "optim.warmup_steps": Field(0, "steps", "linear warm-up", 0),
    "optim.betas": Field((0.9, 0.999), "decay", "Adam's first and second moment"),
    "optim.eps": Field(1e-8, "number", "Adam epsilon", 1e-16, 1e-2),
    "optim.weight_decay": Field(0.0, "rate", "decoupled weight decay", 0, 1),
    "optim.clip_norm": Field(1.0, "norm", "global gradient norm limit", 1e-6),
    "optim.clip_low": Field(0.2, "ratio", "lower policy clip", 1e-6, 0.9999),
    "optim.clip_high": Field(0.28, "ratio", "upper policy clip", 1e-6),
    "optim.dual_clip": Field(3.0, "ratio", "loss bound for negative advantages", 1.0001),
    "optim.entropy_coef": Field(0.0, "weight", "entropy bonus; 0: off", 0),
    "optim.kl_coef": Field(
        0.0, "weight", "k3 KL to the starting model, with LoRA its base; 0: off, no reference", 0
    ),
    "optim.importance_cap": Field(0.0, "ratio", "cap of sampler/learner weights; 0: off", 0),
    "optim.epochs": Field(1, "passes", "passes over one rollout", 1),
    "optim.minibatches": Field(1, "updates", "updates in one pass over a rollout", 1),
    "optim.micro_rows": Field(8, "rows", "rows in one forward-backward pass", 1),
    "optim.buckets": Field((256, 512, 1024, 2048), "tokens", "row lengths compiled"),
    "optim.logit_chunk": Field(1024, "tokens", "tokens whose logits exist at one time", 1),
    "optim.max_skipped": Field(5, "updates", "non-finite updates in a row before stopping", 1),
    "optim.role_weights.challenger": Field(1.0, "weight", "of the Challenger's loss", 0),
    "optim.role_weights.planner": Field(1.0, "weight", "of the Planner's loss", 0),
    "optim.role_weights.solver": Field(1.0, "weight", "of the Solver's loss", 0),
    "optim.role_weights.critic": Field(1.0, "weight", "of the Critic's loss", 0),
    "mesh.data": Field(-1, "devices", "data parallel; -1: all that are left", -1),
    "mesh.fsdp": Field(1, "devices", "parameters sharded over this many", -1),
    "mesh.tensor": Field(1, "devices", "heads and feed-forward sharded over this many", -1),
    "sandbox.require_level": Field(
        "B", "level", "weakest isolation accepted", choices=("A", "B", "C", "none")
    ),
    "sandbox.workers": Field(2, "processes", "verifier workers", 1, 256),
    "sandbox.time_limit": Field(6.0, "seconds", "wall time of one program", 0.1, 600),
    "sandbox.cpu_limit": Field(3, "seconds", "CPU time of one program", 1, 600),
    "sandbox.memory_mb": Field(512, "MiB", "address space of one program", 64),
    "sandbox.math_time_limit": Field(2.0, "seconds", "one maths comparison", 0.1, 60),
    "sandbox.max_error_share": Field(
        0.2, "share", "verdicts lost to the machinery before the run stops", 0, 1
    ),
    "eval.benchmarks": Field(
        (), "paths", "problem files for --mode=eval; empty: valid.path", item=str
    ),
    "sft.data": Field(
        "tiny_world", "name or path", "JSONL of messages and response, or tiny_world"
    ),
    "sft.from_scratch": Field(False, "flag", "random weights instead of those of model.path"),
    "sft.practice": Field(
        0.0, "share", "of the updates that show mostly good habits; then the rate falls", 0, 1
    ),
    "sft.steps": Field(3000, "steps", "supervised updates", 1),
    "sft.batch": Field(128, "rows", "demonstrations an update", 1),
    "sft.length": Field(128, "tokens", "longest demonstration, prompt included", 8),
    "sft.lr": Field(3e-3, "rate", "peak learning rate", 0, 1),
    "sft.warmup_steps": Field(100, "steps", "linear warm-up, then cosine to a tenth", 0),
    "report.heartbeat": Field(20.0, "seconds", "silence after which the stage is named", 0.1),
    "report.quiet": Field(False, "flag", "no progress lines"),
}


def base() -> ml_collections.ConfigDict:
    """Every field at its default, locked: a mistyped name raises with the nearest one."""
    config = ml_collections.ConfigDict()
    for name, field in SCHEMA.items():
        *groups, leaf = name.split(".")
        node: Any = config
        for group in groups:
            if group not in node:
                node[group] = ml_collections.ConfigDict()
            node = node[group]
        node[leaf] = field.default
    return config.lock()


get_config = base


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested config as {dotted name: value}."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, (Mapping, ml_collections.ConfigDict)):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def recorded(flat: dict[str, Any]) -> dict[str, Any]:
    """`flat` as a run records it: a local folder in model.path is absolute, found from anywhere."""
    path = flat.get("model.path", "")
    local = not path.startswith("asset:") and os.path.isdir(path)
    return flat | {"model.path": str(Path(path).absolute())} if local else flat


def nearest(name: str) -> str:
    """A hint such as ' (did you mean optim.lr?)', empty when nothing is close."""
    group, _, leaf = name.rpartition(".")

    def likeness(known: str) -> float:
        # The words of the meaning count too: learning_rate finds lr.
        known_group, _, known_leaf = known.rpartition(".")
        meaning = SCHEMA[known].help.split("(")[0].strip().replace(" ", "_")
        ratios = [difflib.SequenceMatcher(None, leaf, x).ratio() for x in (known_leaf, meaning)]
        return max(ratios) + 0.2 * (known_group == group)

    best = max(SCHEMA, key=likeness)
    return f" (did you mean {best}?)" if likeness(best) > 0.6 else ""


def field_problems(name: str, value: Any) -> list[str]:
    """What is wrong with the value of one field by itself; [] when nothing is."""
    field, kind = SCHEMA[name], type(SCHEMA[name].default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        return [f"{name}={value!r}: expected {kind.__name__} ({field.unit}: {field.help})"]
    if field.choices and value not in field.choices:
        known = ", ".join(field.choices)
        return [f"{name}={value!r}: choose one of {known}{hint(value, field.choices)}"]
    members: Any = value if kind is tuple else ()
    if any(not isinstance(x, field.item) or type(x) is bool for x in members):
        return [f"{name}={value!r}: expected {field.item.__name__} members ({field.unit})"]
    if kind in LARGEST:
        low, high = max(field.low, -LARGEST[kind]), min(field.high, LARGEST[kind])
        if not low <= value <= high:
            return [f"{name}={value!r} {field.unit}: must lie in [{low:g}, {high:g}]"]
    return []


def _increasing(name: str, buckets: tuple) -> list[str]:
    ok = buckets and all(type(b) is int and 0 < b <= LARGEST[int] for b in buckets)
    if ok and all(a < b for a, b in zip(buckets, buckets[1:], strict=False)):
        return []
    return [f"{name}={buckets!r}: give increasing positive token counts, such as 256,512,1024"]


def _cross_problems(c: Any) -> list[str]:
    problems = _increasing("rollout.buckets", c.rollout.buckets)
    problems += _increasing("optim.buckets", c.optim.buckets)
    if problems:
        return problems
    longest = c.tokens.max_prompt + max(c.rollout.max_new[role] for role in ROLES)
    for name, buckets in (
        ("rollout.buckets", c.rollout.buckets),
        ("optim.buckets", c.optim.buckets),
    ):
        if buckets[-1] < longest:
            problems.append(
                f"{name}={buckets!r}: the last must hold tokens.max_prompt + the largest "
                f"rollout.max_new = {longest} tokens; raise it or lower those"
            )
    if bad := [i for i in c.tokens.stop_ids if not 0 <= i <= LARGEST[int]]:
        problems.append(f"tokens.stop_ids={bad!r}: give token ids, integers from 0 up")
    if unknown := [r for r in c.method.train_roles if r not in ROLES]:
        problems.append(
            f"method.train_roles={unknown!r}: choose among {', '.join(ROLES)}"
            + "".join(hint(role, ROLES) for role in unknown)
        )
    if not c.method.train_roles:
        problems.append("method.train_roles=(): nothing would be trained; name at least one role")
    if not c.tasks.seeds:
        problems.append("tasks.seeds=(): no seed problems; name at least one file")
    if c.method.candidates + c.method.drawn == 0:
        problems.append("method.candidates=0, method.drawn=0: a step without rows; raise one")
    if -1 < c.train.rollback < 0:
        problems.append(
            f"train.rollback={c.train.rollback}: give a share from 0 to 1, or -1 for the default"
        )
    if c.method.audits % 2:
        problems.append(
            f"method.audits={c.method.audits}: an audited seed gives two rows, whole and broken; "
            "give an even number"
        )
    for name, size in (("planner_weights", 2), ("solver_weights", 3)):
        weights = c.method[name]
        if len(weights) != size or not all(
            type(w) in (int, float) and 0 <= w <= LARGEST[float] for w in weights
        ):
            problems.append(f"method.{name}={weights!r}: give {size} numbers >= 0")
    betas = c.optim.betas
    if len(betas) != 2 or not all(type(b) in (int, float) and 0 <= b < 1 for b in betas):
        problems.append(f"optim.betas={betas!r}: give 2 numbers from 0 up and below 1")
    if c.optim.warmup_steps > c.train.steps > 0:
        problems.append(
            f"optim.warmup_steps={c.optim.warmup_steps}: longer than train.steps="
            f"{c.train.steps}, the peak rate would never be reached; lower it"
        )
    if c.optim.schedule != "constant" and c.train.steps <= c.optim.warmup_steps:
        problems.append("optim.schedule: nothing is left to decay after warm-up; use constant")
    if not c.lora.rank:
        for name, off in (("alpha", 0), ("path", ""), ("export", "merged")):
            if c.lora[name] != off:
                problems.append(
                    f"lora.{name}={c.lora[name]!r}: lora.rank=0 trains all weights and has no "
                    f"adapter; give a rank, such as 128, or leave lora.{name} out"
                )
    elif c.mesh.fsdp > 0 and c.lora.rank % c.mesh.fsdp:
        problems.append(
            f"lora.rank={c.lora.rank}: must be a multiple of mesh.fsdp={c.mesh.fsdp}, over which "
            f"the factors are split; for example {c.mesh.fsdp * -(-c.lora.rank // c.mesh.fsdp)}"
        )
    sizes = {f"mesh.{axis}": c.mesh[axis] for axis in ("data", "fsdp", "tensor")}
    for name in [name for name, size in sizes.items() if size == 0]:
        problems.append(f"{name}=0: give a device count or -1 for all that are left")
    if list(sizes.values()).count(-1) > 1:
        problems.append("mesh: only one of data, fsdp and tensor can be -1")
    return problems


def validate(config: Mapping) -> ml_collections.FrozenConfigDict:
    """The config, frozen, `auto` resolved. Raises ConfigError listing every problem at once."""
    flat = flatten(config)
    problems = [f"{name}: unknown field{nearest(name)}" for name in flat if name not in SCHEMA]
    problems += [
        f"{name}: missing; start from sage_jax.config.base()" for name in SCHEMA if name not in flat
    ]
    for name in SCHEMA:
        if name in flat:
            problems += field_problems(name, flat[name])
    if not problems:
        problems = _cross_problems(ml_collections.ConfigDict(config))
    if problems:
        raise ConfigError("config:\n  " + "\n  ".join(problems))
    resolved: Any = ml_collections.ConfigDict(config)
    for name, values in FOLLOWS_REWARDS.items():
        if flat[name] == SCHEMA[name].default:
            group, leaf = name.split(".")
            with resolved[group].ignore_type():  # -1 may have been written without its point
                resolved[group][leaf] = values[resolved.method.rewards]
    with resolved.lora.ignore_type():
        resolved.lora.alpha = resolved.lora.alpha or 2.0 * resolved.lora.rank
    return ml_collections.FrozenConfigDict(resolved)


def dump(config: Mapping, overrides: Mapping[str, Any], path: Path) -> None:
    """Write {field: {value, source}}; source is default, file or command line."""
    flat, rows = recorded(flatten(config)), {}
    resolved = {n: values[flat["method.rewards"]] for n, values in FOLLOWS_REWARDS.items()}
    resolved["lora.alpha"] = 2.0 * flat["lora.rank"]
    for name, value in flat.items():
        source = "command line" if name in overrides else "default"
        if source == "default" and value not in (SCHEMA[name].default, resolved.get(name)):
            source = "file"
        rows[name] = {"value": value, "source": source}
    path.write_text(json.dumps(rows, indent=1) + "\n")


def markdown() -> str:
    """Every field as the page docs/config.md."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m sage_jax.config > docs/config.md`; do not edit.",
        "Change a field in a config file or with `--config.NAME=VALUE`; lists are comma-separated.",
        "",
        "| field | default | unit | legal | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, field in SCHEMA.items():
        legal = ", ".join(map(str, field.choices))
        if not legal and type(field.default) in (int, float):
            legal = f"{field.low:g} to {field.high:g}".replace(" to inf", " and up")
        default = field.default
        if isinstance(default, tuple):
            default = ", ".join(map(str, default))
        lines.append(f"| `{name}` | `{default}` | {field.unit} | {legal} | {field.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
