"""Greedy answers of the engine against transformers' (fp32) on real weights.

    python benchmarks/greedy_parity.py --model FOLDER --tasks FILE.jsonl [--items 20] [--new 64]

Needs the `parity` extra. For each problem it prints whether the tokens are equal, and where they
first differ how far apart the two best logits are there; a gap of 1e-3 or more is a failure.
"""

import argparse
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sage_jax.core.tokens import Tokens
from sage_jax.models import hf
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row
from sage_jax.tasks import sources

TOLERANCE = 1e-3


def ours(folder, prompts, stop_ids, new):
    params, cfg = hf.load(folder)
    buckets = tuple(range(64, max(map(len, prompts)) + new + 64, 64))
    engine = Engine(cfg, slots=len(prompts), buckets=buckets, max_new=new, prefill_rows=1)
    engine.start(params)
    rows = [Row(str(i), tuple(p), (0, i), new, stop_ids, 0.0) for i, p in enumerate(prompts)]
    started = time.monotonic()
    done = engine.generate(rows)
    seconds = time.monotonic() - started
    return [done[str(i)].tokens.tolist() for i in range(len(prompts))], seconds


def theirs(folder, prompts, stop_ids, new):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers, started = [], time.monotonic()
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=new,
                eos_token_id=list(stop_ids),
                pad_token_id=stop_ids[0],
            )
        answers.append(out[0, len(prompt) :].tolist())
    return model, answers, time.monotonic() - started


def gap_at(model, prefix) -> float:
    """How far apart transformers' two best logits are after `prefix`."""
    with torch.no_grad():
        logits = model(torch.tensor([prefix])).logits[0, -1]
    best = torch.topk(logits, 2).values
    return float(best[0] - best[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    tokens = Tokens.load(args.model)
    tasks = sources.load([args.tasks])[: args.items]
    prompts = [tokens.chat([{"role": "user", "content": t.question}]) for t in tasks]
    got, seconds = ours(args.model, prompts, tokens.stop_ids, args.new)
    model, want, their_seconds = theirs(args.model, prompts, tokens.stop_ids, args.new)
    failures = equal = 0
    for task, prompt, a, b in zip(tasks, prompts, got, want, strict=True):
        if a == b:
            equal += 1
            continue
        shared = int(np.argmin([x == y for x, y in zip(a, b, strict=False)] + [False]))
        gap = gap_at(model, prompt + b[:shared])
        failures += gap >= TOLERANCE
        print(f"{task.id}: differs at token {shared}, best two logits {gap:.2e} apart")
    count = sum(map(len, got))
    print(f"{equal} of {len(tasks)} equal, {failures} failures, {count} tokens")
    print(f"engine {seconds:.1f} s in one batch, transformers {their_seconds:.1f} s one by one")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
