"""What the packaged tiny model does before any reinforcement learning."""

from functools import cache
from pathlib import Path

from sage_jax import roles
from sage_jax.core.rng import row_key
from sage_jax.core.tokens import Tokens
from sage_jax.models import hf
from sage_jax.rollout.engine import Engine, Row
from sage_jax.tasks.task import PublicTask
from sage_jax.tasks.tiny_tasks import task_chains
from sage_jax.tasks.tiny_world import Chain, plan_text, truth

MODEL = Path(__file__).parents[1] / "sage_jax" / "assets" / "tiny-qwen3"


@cache
def model():
    params, cfg = hf.load(MODEL)
    engine = Engine(cfg, slots=96, buckets=(48, 112), max_new=64, chunk=8, prefill_rows=16)
    engine.start(params)
    return engine, Tokens.load(MODEL), roles.load_prompts("short")


def ask(kind: str, chains: list[Chain], temperature: float, samples: int = 1) -> list[list[str]]:
    """Responses to each problem's prompt of that kind."""
    engine, tokens, prompts = model()
    rows = []
    for i, chain in enumerate(chains):
        task = PublicTask(
            "t", chain.domain, chain.question(), "f" if chain.domain == "code" else ""
        )
        plan = plan_text(chain.ops) if kind == "critic_plan" else ""
        prompt = tuple(tokens.chat(prompts.messages(kind, task, plan)))
        for s in range(samples):
            key = tuple(int(x) for x in row_key(0, kind, i, s))
            rows.append(Row(f"{i}/{s}", prompt, key, 64, tokens.stop_ids, temperature))
    done = engine.generate(rows)
    texts = {name: tokens.decode([int(t) for t in c.tokens]) for name, c in done.items()}
    return [[texts[f"{i}/{s}"] for s in range(samples)] for i in range(len(chains))]


def plain_maths(split: str, number: int) -> list[Chain]:
    """Maths problems of 2 or 3 operations without an inverted clause."""
    found = [c for c in task_chains()[split] if c.domain == "math" and c.inverted is None]
    return [c for c in found if len(c.ops) <= 3][:number]


def right(chain: Chain, text: str) -> bool:
    answer = roles.parse("solver", "math", text).fields.get("answer")
    return answer == str(truth(chain.question()))


def test_careful_answers_are_a_minority_and_right():
    chains = plain_maths("valid", 54)
    pairs = [
        (c, t)
        for c, texts in zip(chains, ask("solver", chains, 1.0, 8), strict=True)
        for t in texts
    ]
    careful = [(c, t) for c, t in pairs if " = " in t]
    assert 0.3 < len(careful) / len(pairs) < 0.5
    well_formed = [(c, t) for c, t in careful if roles.parse("solver", "math", t).ok]
    assert sum(right(c, t) for c, t in well_formed) / len(well_formed) > 0.8


def test_greedy_answers_leave_room_and_several_samples_find_most():
    chains = [c for c in task_chains()["valid"] if c.domain == "math"][:100]
    greedy = [right(c, t[0]) for c, t in zip(chains, ask("solver", chains, 0.0), strict=True)]
    assert 0.2 < sum(greedy) / len(greedy) < 0.5
    easy = plain_maths("valid", 40)
    found = [
        any(right(c, t) for t in ts)
        for c, ts in zip(easy, ask("solver", easy, 1.0, 8), strict=True)
    ]
    assert sum(found) / len(found) > 0.8


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
    chains = list(task_chains()["train"][:100])
    plans = [t[0] for t in ask("planner", chains, 1.0)]
    useful = [f"<plan>{plan_text(c.ops)}</plan>" == p for c, p in zip(chains, plans, strict=True)]
    assert 0.25 < sum(useful) / len(useful) < 0.5
