"""Is this accelerator right and how fast is it? Random weights at the widths of real models.

    python benchmarks/gpu_check.py [--shapes=real|tiny] [--layers=4] [--budget=240]

For each shape: log-probs against the CPU's, the sampler's log-probs against the learner's, decode
tokens a second, attention over a long row and of new tokens over a cache of long rows, seconds an
update, peak memory. Prints a table; exit 1
when a check fails. Needs jax, flax, optax and numpy only, and no network. What the budget (seconds)
has no room for is left out and named. The accelerator is whatever JAX has; on the CPU use
--shapes=tiny.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.learn.optimizer import UpdateSettings, make_optimizer
from sage_jax.learn.pack import TrainRow, pack
from sage_jax.learn.score import token_logps
from sage_jax.learn.update import Update, host_metrics, init_state
from sage_jax.models import attention, decode_attention, qwen_params
from sage_jax.models import cache as kv
from sage_jax.models.qwen_config import QwenConfig
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row

ROLES = ("challenger", "planner", "solver", "critic")
# Largest difference of a log-prob in nats. fp32: another order of the same sums. bf16: 8 bits of
# mantissa on logits of about 1.
FP32, BF16 = 1e-3, 0.1

QWEN25_05B = QwenConfig(
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=4,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
    attention_bias=True,
)
QWEN3_4B = QwenConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=True,
    qk_norm=True,
)


@dataclasses.dataclass(frozen=True)
class Work:
    """How much each check does; token counts a row."""

    slots: int
    prompt: int
    new: int
    update_rows: int
    micro_rows: int
    update_tokens: int
    long: int  # of a row in the check of attention


REAL = Work(
    slots=64, prompt=64, new=192, update_rows=32, micro_rows=8, update_tokens=512, long=4096
)
TINY = Work(slots=4, prompt=8, new=8, update_rows=4, micro_rows=2, update_tokens=16, long=300)


def shapes(name: str, layers: int) -> dict[str, QwenConfig]:
    """The models of --shapes by the name they have in the table."""
    models = {"Qwen2.5-0.5B": QWEN25_05B, "Qwen3-4B": QWEN3_4B}
    if name == "tiny":
        small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
        small |= {"num_heads": 4, "num_kv_heads": 2}
        models = {f"{k} tiny": dataclasses.replace(v, **small) for k, v in models.items()}
    return {k: dataclasses.replace(v, num_layers=layers) for k, v in models.items()}


def parity(cfg: QwenConfig, work: Work) -> list[tuple]:
    """Log-probs on this device against the CPU's, from the same weights."""
    rng = np.random.default_rng(0)
    tokens_bt = rng.integers(0, cfg.vocab_size, (2, work.prompt)).astype(np.int32)
    temperature_b1 = np.ones((2, 1), np.float32)

    def logps(params, device, dtype):
        def score(params, tokens_bt, temperature_b1):
            return token_logps(params, cfg, tokens_bt, temperature_b1, dtype=dtype, entropy=False)[
                0
            ]

        arrays = jax.device_put((params, tokens_bt, temperature_b1), device)
        return np.asarray(jax.jit(score)(*arrays))

    cpu, here = jax.local_devices(backend="cpu")[0], jax.devices()[0]
    with jax.default_device(cpu):
        params = qwen_params.init(cfg, jax.random.key(0))
    with jax.default_matmul_precision("highest"):  # the default of a GPU is TF32
        want_bt = logps(params, cpu, jnp.float32)
        fp32 = float(np.abs(logps(params, here, jnp.float32) - want_bt).max())
    bf16 = float(np.abs(logps(params, here, jnp.bfloat16) - want_bt).max())
    return [
        ("fp32 log-probs here - CPU", f"{fp32:.1e} nats", fp32 <= FP32, f"at most {FP32:g}"),
        ("bf16 log-probs here - CPU fp32", f"{bf16:.1e} nats", bf16 <= BF16, f"at most {BF16:g}"),
    ]


def decoding(cfg: QwenConfig, work: Work) -> list[tuple]:
    """Tokens a second of a full batch, and its log-probs against the learner's."""
    rng = np.random.default_rng(1)
    params = jax.jit(
        lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree), donate_argnums=0
    )(qwen_params.init(cfg, jax.random.key(0)))
    length = work.prompt + work.new
    engine = Engine(
        cfg,
        slots=work.slots,
        buckets=(work.prompt, length),
        max_new=work.new,
        prefill_rows=work.slots,
        # XLA on the CPU widens a 16-bit cache whole around each write.
        dtype=jnp.bfloat16 if jax.default_backend() != "cpu" else jnp.float32,
    )
    engine.start(params)

    def rows(tag: str) -> list[Row]:
        prompts = rng.integers(0, cfg.vocab_size, (work.slots, work.prompt)).tolist()
        keys = rng.integers(0, 2**32, (work.slots, 2), dtype=np.uint32).tolist()
        return [
            Row(f"{tag}{i}", tuple(prompt), tuple(key), work.new, ())
            for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        ]

    engine.generate(rows("warm"))
    started = time.monotonic()
    done = engine.generate(rows("timed"))
    seconds = time.monotonic() - started
    count = sum(len(c.tokens) for c in done.values())
    few = list(done.values())[:4]
    tokens_bt = np.array([[*c.row.prompt, *c.tokens] for c in few], np.int32)
    score = jax.jit(lambda p, x, t: token_logps(p, cfg, x, t, dtype=jnp.bfloat16, entropy=False)[0])
    logp_bt = np.asarray(score(params, tokens_bt, np.ones((len(few), 1), np.float32)))
    sampled = np.stack([c.logps for c in few])
    gap = float(np.abs(logp_bt[:, work.prompt :] - sampled).mean())
    return [
        ("decode", f"{count / seconds:.0f} tokens/s", count > 0, f"{work.slots} rows"),
        ("sampler - learner, bf16, mean", f"{gap:.1e} nats", gap <= BF16, f"at most {BF16:g}"),
    ]


def attending(cfg: QwenConfig, work: Work) -> list[tuple]:
    """The attention program that long rows get here against the plain one, gradients included."""
    keys = jax.random.split(jax.random.key(3), 3)
    heads = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)
    qkv = [
        jax.random.normal(key, (1, work.long, n, cfg.head_dim), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]
    kind = attention.choose("auto", work.long, packed=False, layout=None)

    def gradients(kind: str):
        def loss(*qkv):
            return jnp.sum(jnp.square(attention.attend(*qkv, kind=kind).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))

    found = {}
    for name in (kind, "xla"):
        program = gradients(name)
        jax.block_until_ready(program(*qkv))
        started = time.monotonic()
        found[name] = jax.block_until_ready(program(*qkv))
        found[name] = (time.monotonic() - started, *jax.tree.leaves(found[name]))
    (seconds, *these), (plain, *those) = found[kind], found["xla"]
    gaps = [
        float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())
        for a, b in zip(these, those, strict=True)
    ]
    times = f"{1e3 * seconds:.1f} ms, {plain / seconds:.1f} times as fast as xla"
    return [
        (f"attention {kind} - xla", f"{max(gaps):.1e}", max(gaps) <= BF16, f"relative, {times}")
    ]


def reading(cfg: QwenConfig, work: Work) -> list[tuple]:
    """The programs by which new tokens attend to a cache here against the plain one."""
    rng, slots = np.random.default_rng(4), 8
    heads = (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)

    def numbers(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    qkv = tuple(numbers(slots, 1, n, cfg.head_dim) for n in heads)
    plain = {n: numbers(1, slots, work.long, cfg.num_kv_heads, cfg.head_dim) for n in "kv"}
    position_s = jnp.linspace(0, work.long - 1, slots).astype(jnp.int32)

    def answer(form: str) -> tuple[float, jax.Array]:
        order = [kv.AXES["scatter"].index(axis) for axis in kv.AXES[form]]
        cache = {name: jnp.transpose(x, order) for name, x in plain.items()}

        @jax.jit
        def program(cache: kv.Cache) -> jax.Array:
            held = kv.open_chunk(cache, position_s, 1, None) if form == "aside" else cache
            return decode_attention.attend(form, held, 0, qkv, position_s, work.long, None)[0]

        jax.block_until_ready(program(cache))
        started = time.monotonic()
        z = jax.block_until_ready(program(cache))
        return time.monotonic() - started, z.astype(jnp.float32)

    seconds, want = answer("scatter")
    lines = []
    for form in ("aside", "cudnn") if jax.default_backend() == "gpu" else ("aside",):
        own, got = answer(form)
        gap = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        times = f"{1e3 * own:.1f} ms, {seconds / own:.1f} times as fast as scatter"
        lines.append((f"decode {form} - scatter", f"{gap:.1e}", gap <= BF16, f"relative, {times}"))
    return lines


def updating(cfg: QwenConfig, work: Work) -> list[tuple]:
    """Seconds of a warm update with fp32 master weights and bf16 products."""
    rng = np.random.default_rng(2)
    half = work.update_tokens // 2
    ids = rng.integers(0, cfg.vocab_size, (work.update_rows, 2, half)).tolist()
    rows = [
        TrainRow(f"row{i}", ROLES[i % 4], prompt, completion, np.full(half, -10.0), (-1.0) ** i)
        for i, (prompt, completion) in enumerate(ids)
    ]
    packed = pack(rows, ROLES, (work.update_tokens,), work.micro_rows)
    settings = UpdateSettings(dtype="bfloat16", remat="full", lr=1e-5)
    tx = make_optimizer(settings, 10)
    state = init_state(qwen_params.init(cfg, jax.random.key(0)), tx)
    size = sum(x.size for x in jax.tree.leaves(state.params))
    update = Update(cfg, settings, ROLES, tx, state)
    seconds, figures = 0.0, {}
    for _ in range(3):
        started = time.monotonic()
        state, metrics = update.step(state, packed)
        figures = host_metrics(metrics)
        seconds = time.monotonic() - started
    tokens = work.update_rows * work.update_tokens
    fine = not figures["skipped_updates"] and figures.get("grad_norm", 0) > 0
    rate = f"{tokens / seconds:.0f} tokens/s, {6 * size * tokens / seconds / 1e12:.2f} TFLOP/s"
    return [("update", f"{seconds:.3f} s", fine, f"{tokens} tokens, {rate}")]


def memory() -> list[tuple]:
    """Peak device memory of the process so far."""
    stats = jax.devices()[0].memory_stats() or {}
    peak, limit = stats.get("peak_bytes_in_use"), stats.get("bytes_limit")
    if peak is None:
        return [("peak memory so far", "not reported", True, "this backend keeps no count")]
    of = f"of {limit / 2**30:.1f} GiB given to JAX" if limit else ""
    return [("peak memory so far", f"{peak / 2**30:.1f} GiB", True, of)]


def run(models: dict[str, QwenConfig], work: Work, budget: float, show: Callable) -> bool:
    """All checks of all models, each line shown as it comes; False when one failed."""
    started, fine = time.monotonic(), True
    for name, cfg in models.items():
        for check in (parity, decoding, attending, reading, updating):
            if time.monotonic() - started > budget:
                show(name, check.__name__, "left out", True, f"past --budget={budget:g} s")
                continue
            for what, value, good, remark in check(cfg, work):
                fine &= bool(good)
                show(name, what, value, good, remark)
        for line in memory():
            show(name, *line)
    return fine


def show(name: str, what: str, value: str, good: bool, remark: str) -> None:
    """One line of the table."""
    verdict = "" if good else "FAILED"
    print(f"{name:<18} {what:<32} {value:>18}  {verdict:<6} {remark}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", choices=("real", "tiny"), default="real")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"JAX {jax.__version__}, {jax.device_count()} x {device.device_kind}, {args.shapes}")
    work = REAL if args.shapes == "real" else TINY
    fine = run(shapes(args.shapes, args.layers), work, args.budget, show)
    print("what was checked holds" if fine else "some checks FAILED")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
