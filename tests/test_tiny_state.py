"""What the packaged tiny model does before any reinforcement learning."""

from functools import cache
from pathlib import Path
from random import Random

from sage_jax import roles
from sage_jax.core.rng import row_key
from sage_jax.core.tokens import Tokens
from sage_jax.models import hf
from sage_jax.rollout.engine import Engine
from sage_jax.rollout.row import Row
from sage_jax.tasks.audit import break_question
from sage_jax.tasks.task import PublicTask, Task
from sage_jax.tasks.tiny_tasks import task_chains, task_row
from sage_jax.tasks.tiny_world import Chain, plan_text
from sage_jax.verify import Verifier

MODEL = Path(__file__).parents[1] / "sage_jax" / "assets" / "tiny-qwen3"


@cache
def model():
    params, cfg = hf.load(MODEL)
    engine = Engine(cfg, slots=96, buckets=(48, 112), max_new=64, chunk=8, prefill_rows=16)
    engine.start(params)
    return engine, Tokens.load(MODEL), roles.load_prompts("short")


def ask(
    kind: str,
    chains: list[Chain],
    temperature: float,
    samples: int = 1,
    questions: list[str] | None = None,
) -> list[list[str]]:
    """Responses to each problem's prompt of that kind; `questions` replaces their texts."""
    engine, tokens, prompts = model()
    rows = []
    for i, chain in enumerate(chains):
        question = questions[i] if questions else chain.question()
        task = PublicTask("t", chain.domain, question, "f" if chain.domain == "code" else "")
        plan = plan_text(chain.ops) if kind == "critic_plan" else ""
        prompt = tuple(tokens.chat(prompts.messages(kind, task, plan)))
        for s in range(samples):
            key = tuple(int(x) for x in row_key(0, kind, i, s))
            rows.append(Row(f"{i}/{s}", prompt, key, 64, tokens.stop_ids, temperature))
    done = engine.generate(rows)
    texts = {name: tokens.decode([int(t) for t in c.tokens]) for name, c in done.items()}
    return [[texts[f"{i}/{s}"] for s in range(samples)] for i in range(len(chains))]


@cache
def solver_samples() -> tuple[list[Chain], list[list[str]], list[list[bool]]]:
    """Validation problems, 8 sampled answers to each, and whether the verifier takes them."""
    chains = list(task_chains()["valid"])
    texts = ask("solver", chains, 1.0, 8)
    return chains, texts, judged(chains, texts)


def judged(chains: list[Chain], texts: list[list[str]]) -> list[list[bool]]:
    tasks = [Task.from_json(task_row(c, "valid", i)) for i, c in enumerate(chains)]
    jobs = [task.job(f"{i}/{s}", t) for i, task in enumerate(tasks) for s, t in enumerate(texts[i])]
    with Verifier(workers=2, require_level="none") as verifier:
        verdicts = verifier.run(jobs)
    return [
        [verdicts[f"{i}/{s}"].verdict == "correct" for s in range(len(texts[i]))]
        for i in range(len(chains))
    ]


def careful(chain: Chain, text: str) -> bool:
    return (" = " if chain.domain == "math" else "\n    return x") in text


def test_careful_answers_are_a_minority_and_mostly_right_where_the_order_is_plain():
    chains, texts, rights = solver_samples()
    rows = [
        (c, careful(c, t), right, roles.parse("solver", c.domain, t).ok)
        for c, ts, verdicts in zip(chains, texts, rights, strict=True)
        for t, right in zip(ts, verdicts, strict=True)
    ]
    assert 0.35 < sum(c for _, c, *_ in rows) / len(rows) < 0.45
    short = [
        right
        for chain, by_steps, right, parses in rows
        if by_steps and parses and len(chain.ops) <= 3 and chain.inverted is None
    ]
    assert sum(short) / len(short) > 0.85


def test_greedy_answers_leave_room_and_several_samples_find_most():
    chains, _, rights = solver_samples()
    greedy = judged(chains, ask("solver", chains, 0.0))
    assert 0.25 < sum(r for (r,) in greedy) / len(chains) < 0.45
    assert sum(map(any, rights)) / len(chains) > 0.75


def test_every_role_mostly_writes_what_its_parser_reads():
    chains = list(task_chains()["train"][:60])
    for kind in roles.KINDS:
        role = kind.split("_")[0]
        parsed = [
            roles.parse(role, c.domain, text).ok
            for c, texts in zip(chains, ask(kind, chains, 1.0), strict=True)
            for text in texts
        ]
        assert sum(parsed) / len(parsed) > 0.7, kind


def test_useful_plans_are_a_minority():
    chains = list(task_chains()["train"][:200])
    plans = [t[0] for t in ask("planner", chains, 1.0)]
    useful = [f"<plan>{plan_text(c.ops)}</plan>" == p for c, p in zip(chains, plans, strict=True)]
    assert 0.35 < sum(useful) / len(useful) < 0.45


def test_scores_that_tell_a_broken_question_are_a_minority():
    """The flat habit never scores below 5, so that a low score is a telling one."""
    chains = list(task_chains()["train"][:200])
    rng = Random(0)
    broken = [
        break_question(c.question(), rng.choice(("removed", "contradicted")), rng) for c in chains
    ]
    replies = ask("critic_question", chains, 1.0, questions=broken)
    scores = [roles.parse("critic", "math", t[0]).fields.get("raw") for t in replies]
    assert 0.35 < sum(s is not None and s <= 3 for s in scores) / len(scores) < 0.45
