"""`--mode=generate` and `--mode=score`: JSON lines in, JSON lines out, in input order."""

import codecs
import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.core import hosts
from sage_jax.core.mesh import whole
from sage_jax.core.rng import row_key
from sage_jax.learn.score import token_logps
from sage_jax.report import jsonl
from sage_jax.rollout.admission import bucket_of
from sage_jax.rollout.decode import MAX_STOPS
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row
from sage_jax.runtime import Model, Placement, decode_weights
from sage_jax.spelling import hint

GENERATE_FIELDS = {
    "id": str,
    "prompt": str,
    "messages": list,
    "tokens": list,
    "n": int,
    "seed": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "max_new_tokens": int,
    "stop_ids": list,
}
SCORE_FIELDS = {"id": str, "tokens": list, "temperature": float}
SMALLEST_BUCKET = 32
MOST_SAMPLES = 100_000  # of one line: they are planned before the first is drawn
TEMPERATURES = (1e-6, 1e6)  # beyond them log-probabilities leave fp32
DEFAULT_NEW = 256  # tokens, fewer where the model has no room for them


@dataclasses.dataclass
class Problem:
    """A bad input line: its number from 1 and what to mend."""

    line: int
    text: str


def read_lines(path: Path, fields: dict[str, type]) -> tuple[list[tuple[int, dict]], list[Problem]]:
    """Good rows with their line numbers, and the bad ones; blank lines are passed over."""
    rows, problems, seen = [], [], {}
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = jsonl.parse(line)
        except ValueError as error:
            problems.append(Problem(number, str(error)))
            continue
        text = _row_problem(row, fields)
        if not text and row["id"] in seen:
            text = f"id {row['id']!r} was used on line {seen[row['id']]}; ids must be unique"
        if text:
            problems.append(Problem(number, text))
        else:
            seen[row["id"]] = number
            rows.append((number, row))
    return rows, problems


def _row_problem(row: object, fields: dict[str, type]) -> str:
    if not isinstance(row, dict):
        return "not a JSON object; write {...} on one line"
    for name, value in row.items():
        if name not in fields:
            return f"unknown field {name!r}; known: {', '.join(fields)}{hint(name, fields)}"
        kind = (int, float) if fields[name] is float else fields[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{name}={value!r:.80}: expected {fields[name].__name__}"
    if not row.get("id"):
        return "id is missing or empty"
    return ""


def _temperature_problem(value: float) -> str:
    low, high = TEMPERATURES
    return "" if low <= value <= high else f"temperature={value!r:.80}: must lie in [{low}, {high}]"


def _token_problem(name: str, ids: list, vocab_size: int) -> str:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            return f"{name} holds {token!r:.80}: ids are integers in [0, {vocab_size})"
    return ""


def _output(target: Path) -> TextIO:
    """The file to write, which of several processes the first one does."""
    if not hosts.first():
        return open(os.devnull, "w")
    target.parent.mkdir(parents=True, exist_ok=True)
    return open(target, "w")


def _generate_problem(row: dict, vocab_size: int) -> str:
    given = [name for name in ("prompt", "messages", "tokens") if name in row]
    if len(given) != 1:
        return f"give exactly one of prompt, messages, tokens (here: {', '.join(given) or 'none'})"
    if not 1 <= row.get("n", 1) <= MOST_SAMPLES:
        return f"n={row['n']}: must lie in [1, {MOST_SAMPLES}]"
    if row.get("max_new_tokens", 1) < 1:
        return f"max_new_tokens={row['max_new_tokens']}: must be at least 1"
    temperature = row.get("temperature", 1.0)
    if temperature != 0 and (text := _temperature_problem(temperature)):
        return f"{text}, or be 0 (greedy)"
    if not 0 <= row.get("top_k", 0) <= vocab_size:
        return f"top_k={row['top_k']}: must lie in [0, {vocab_size}], 0 for all"
    if not 0 < row.get("top_p", 1.0) <= 1:
        return f"top_p={row['top_p']}: must lie in (0, 1]"
    if not 0 <= row.get("min_p", 0.0) <= 1:
        return f"min_p={row['min_p']}: must lie in [0, 1]"
    if len(row.get("stop_ids", ())) > MAX_STOPS:
        return f"stop_ids has {len(row['stop_ids'])} entries; at most {MAX_STOPS}"
    if row.get("messages") == []:
        return "messages is empty; give at least one"
    for message in row.get("messages", ()):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            return f"messages holds {message!r:.80}: each needs text under role and content"
    return _token_problem("tokens", row.get("tokens", []), vocab_size) or _token_problem(
        "stop_ids", row.get("stop_ids", []), vocab_size
    )


def _prompt_tokens(row: dict, model: Model) -> tuple[list[int], str]:
    """Prompt ids, and what is wrong with the row that gives none."""
    if "tokens" in row:
        ids = row["tokens"]
    elif "prompt" in row:
        ids = model.tokens.encode(row["prompt"])
    else:
        try:
            ids = model.tokens.chat(row["messages"])
        except ValueError as error:
            return [], str(error)
    return ids, "" if ids else "the prompt has no tokens; give at least one"


def _buckets(longest: int) -> tuple[int, ...]:
    sizes = [SMALLEST_BUCKET]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def _plan_rows(good, model: Model) -> tuple[list[tuple[dict, list[Row]]], list[Problem]]:
    planned, problems = [], []
    for number, row in good:
        text = _generate_problem(row, model.cfg.vocab_size)
        prompt, text = ([], text) if text else _prompt_tokens(row, model)
        room = model.cfg.max_position - len(prompt)
        new = row.get("max_new_tokens", max(1, min(DEFAULT_NEW, room)))
        if not text and new > room:
            text = (
                f"{len(prompt)} prompt tokens + max_new_tokens={new} exceed the model's "
                f"{model.cfg.max_position} positions; shorten one"
            )
        if text:
            problems.append(Problem(number, text))
            continue
        rows = []
        for sample in range(row.get("n", 1)):
            key = row_key(row.get("seed", 0), row["id"], sample)
            rows.append(
                Row(
                    id=f"{row['id']}\x1f{sample}",
                    prompt=tuple(prompt),
                    key=(int(key[0]), int(key[1])),
                    max_new=new,
                    stop_ids=tuple(row.get("stop_ids", model.tokens.stop_ids)),
                    temperature=float(row.get("temperature", 1.0)),
                    top_k=row.get("top_k", 0),
                    top_p=float(row.get("top_p", 1.0)),
                    min_p=float(row.get("min_p", 0.0)),
                )
            )
        planned.append((row, rows))
    return planned, problems


def generate(
    config, model: Model, place: Placement, source: Path, target: Path, stage: Callable
) -> list[Problem]:
    """Sample every good line of `source` into `target`; returns the bad lines."""
    good, problems = read_lines(source, GENERATE_FIELDS)
    planned, more = _plan_rows(good, model)
    problems = sorted(problems + more, key=lambda p: p.line)
    rows = [row for _, group in planned for row in group]
    with _output(target) as file:
        if not rows:
            return problems
        # Slots that no row takes would be decoded all the same.
        shares = 1 if place.decode is None else place.decode.parts("batch")
        enough = shares * -(-len(rows) // shares)
        engine = Engine(
            model.cfg,
            slots=min(config.rollout.slots, enough),
            buckets=_buckets(max(len(r.prompt) + r.max_new for r in rows)),
            max_new=max(r.max_new for r in rows),
            chunk=config.rollout.chunk,
            prefill_rows=min(config.rollout.prefill_rows, enough),
            dtype=jnp.dtype(config.model.dtype),
            layout=place.decode,
            attend=config.model.attention,
        )
        engine.start(decode_weights(model.weights, model.cfg, place, config.model.dtype))
        engine.submit(rows)
        waiting = iter([(row["id"], i, r) for row, group in planned for i, r in enumerate(group)])
        done, head = {}, next(waiting)
        while head is not None:
            stage("generate", engine.running)
            done.update((c.row.id, c) for c in engine.step())
            # Lines leave in input order as soon as those before them are finished.
            while head is not None and head[2].id in done:
                completion = done.pop(head[2].id)
                result = {
                    "id": head[0],
                    "sample": head[1],
                    "tokens": completion.tokens.tolist(),
                    "logps": [float(x) for x in completion.logps],
                    "text": model.tokens.decode(completion.tokens),
                    "finish": completion.finish,
                }
                file.write(json.dumps(result) + "\n")
                head = next(waiting, None)
            file.flush()
    return problems


def _score_problem(row: dict, model: Model) -> str:
    if not row.get("tokens"):
        return "tokens is missing or empty; give at least one id"
    if text := _temperature_problem(row.get("temperature", 1.0)):
        return text
    if len(row["tokens"]) > model.cfg.max_position:
        return (
            f"{len(row['tokens'])} tokens exceed the model's {model.cfg.max_position} positions; "
            "shorten the line"
        )
    return _token_problem("tokens", row["tokens"], model.cfg.vocab_size)


def score(
    config, model: Model, place: Placement, source: Path, target: Path, stage: Callable
) -> list[Problem]:
    """Log-probs of tokens[1:] of every good line of `source`; returns the bad lines."""
    good, problems = read_lines(source, SCORE_FIELDS)
    rows = []
    for number, row in good:
        if text := _score_problem(row, model):
            problems.append(Problem(number, text))
        else:
            rows.append(row)
    logps: dict[str, list[float]] = {}
    for batch in _score_batches(rows, config.optim.micro_rows):
        stage("score", [batch[0]["id"]].copy)
        logps.update(_score_batch(config, model, place, batch))
    with _output(target) as file:
        for row in rows:
            file.write(json.dumps({"id": row["id"], "logps": logps[row["id"]]}) + "\n")
    return sorted(problems, key=lambda p: p.line)


def _score_batches(rows: list[dict], size: int) -> Iterable[list[dict]]:
    """Rows of one length bucket at a time, so that padding stays below one bucket step."""
    ordered = sorted(rows, key=lambda row: (len(row["tokens"]), row["id"]))
    buckets = _buckets(max((len(row["tokens"]) for row in rows), default=1))
    for bucket in buckets:
        members = [row for row in ordered if bucket_of(len(row["tokens"]), buckets) == bucket]
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _score_batch(config, model: Model, place: Placement, batch: list[dict]) -> dict:
    length = _buckets(max(len(row["tokens"]) for row in batch))[-1]
    tokens_bt = np.zeros((config.optim.micro_rows, length), np.int32)
    temperature_b = np.ones(config.optim.micro_rows, np.float32)
    for i, row in enumerate(batch):
        tokens_bt[i, : len(row["tokens"])] = row["tokens"]
        temperature_b[i] = row.get("temperature", 1.0)
    logp_bt, _ = _token_logps(
        model.weights,
        model.cfg,
        tokens_bt,
        temperature_b[:, None],
        dtype=config.model.dtype,
        layout=place.update,
        attend=config.model.attention,
        chunk=config.optim.logit_chunk,
    )
    logp_bt = whole(logp_bt)
    return {
        row["id"]: [float(x) for x in logp_bt[i, 1 : len(row["tokens"])]]
        for i, row in enumerate(batch)
    }


_token_logps = jax.jit(token_logps, static_argnames=("cfg", "dtype", "layout", "attend", "chunk"))
