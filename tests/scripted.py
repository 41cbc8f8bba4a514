"""A model that says what a script tells it, and a verifier with known verdicts."""

import numpy as np

from sage_jax.config import base
from sage_jax.methods.graph import Player, play
from sage_jax.methods.sage import Sage
from sage_jax.roles import load_prompts
from sage_jax.rollout.row import Completion
from sage_jax.tasks.pool import Pool
from sage_jax.tasks.task import Task
from sage_jax.verify import Verdict

STOP = 0
MATH_PROPOSAL = "<question>What is {n} plus {n}?</question><answer>{n}+{n}</answer>"
CODE_PROPOSAL = (
    "<question>Write bump(x) which adds {n}.</question>"
    "<solution>def bump(x):\n    return x + {n}</solution><inputs>1\n2</inputs>"
)


class Bytes:
    """A tokenizer of bytes; id 0 stops."""

    stop_ids = (STOP,)

    def chat_fit(self, messages, max_tokens, policy):
        return [b + 1 for b in messages[-1]["content"].encode()] or [1]

    def decode(self, ids):
        return bytes(int(i) - 1 for i in ids if i != STOP).decode()


class ScriptedEngine:
    """Answers `width` rows a step, in the order they came; `answer(row id)` is the text."""

    def __init__(self, answer, width=3):
        self.answer, self.width = answer, width
        self.queue, self.seen = [], []

    @property
    def busy(self):
        return bool(self.queue)

    @property
    def hungry(self):
        return len(self.queue) < self.width

    def running(self):
        return [row.id for row in self.queue[: self.width]]

    def submit(self, rows):
        self.queue += rows
        self.seen += rows

    def step(self, meanwhile=lambda: None):
        now, self.queue = self.queue[: self.width], self.queue[self.width :]
        done = []
        meanwhile()
        for row in now:
            text = self.answer(row.id)
            finish = "length" if text.endswith("...") else "stop"
            ids = [b + 1 for b in text.encode()] + [STOP] * (finish == "stop")
            logps = -0.01 * np.array(ids, np.float32)
            done.append(Completion(row, np.array(ids, np.int32), logps, finish))
        return done


class ScriptedVerifier:
    """`judge(job)` gives (verdict, reason); answers come `lag` polls late, newest first."""

    def __init__(self, judge, lag=0):
        self.judge, self.lag, self.jobs = judge, lag, []
        self.polls = 0

    def submit(self, job):
        self.jobs.append(job)

    def poll(self, timeout=0.0):
        self.polls += 1
        if self.polls <= self.lag:
            return []
        self.polls = 0
        jobs, self.jobs = self.jobs[::-1], []
        return [(job.id, self._verdict(job)) for job in jobs]

    def waiting(self):
        return {job.id: 1.0 for job in self.jobs}

    def run(self, jobs):
        return {job.id: self._verdict(job) for job in jobs}

    def _verdict(self, job):
        verdict, reason = self.judge(job)
        expected = None
        if job.kind == "code_reference" and verdict == "correct":
            expected = ["2", "3"]
        return Verdict(verdict, reason, 1.0, expected=expected)


def seeds(count=6):
    math = [
        {"id": f"m{i}", "domain": "math", "question": f"Add {i} to 700?", "answer": f"{700 + i}"}
        for i in range(count)
    ]
    code = [
        {
            "id": f"c{i}",
            "domain": "code",
            "question": f"Write shift{i}(x) which adds {i + 500}.",
            "entry_point": f"shift{i}",
            "tests": {
                "kind": "asserts",
                "setup": "",
                "asserts": [f"assert shift{i}(1) == {501 + i}", f"assert shift{i}(2) == {502 + i}"],
                "challenge": [],
            },
            "canonical_solution": f"def shift{i}(x):\n    return x + {i + 500}\n",
        }
        for i in range(count)
    ]
    return [Task.from_json(row) for row in math + code]


def config(**method):
    c = base()
    c.method.candidates, c.method.attempts, c.method.critics = 4, 2, 2
    c.method.drawn, c.method.solutions = 4, 2
    c.method.audits, c.method.advantage = 4, "role_token"
    for name, value in method.items():
        c.method[name] = value
    return c


def good_answer(row_id, *, score="8", plan_score="8"):
    """Every role well-formed; proposals differ, so that the pool takes them all."""
    kind = row_id.split("/")[-2]
    if kind == "challenge":
        number = int(row_id.split("/")[2]) + 11
        proposal = MATH_PROPOSAL if "/m" in row_id else CODE_PROPOSAL
        return proposal.format(n=number)
    return {
        "judge_question": f"<score>{score}</score>",
        "judge_plan": f"<score>{plan_score}</score>",
        "plan": "<plan>add them</plan>",
        "attempt": "<answer>1</answer>",
        "solve": "<answer>2</answer>",
        "probe": "<answer>4</answer>",
        "bare": "<answer>3</answer>",
        "audit": f"<score>{'9' if 'a/' in row_id else '2'}</score>",
    }[kind]


def all_correct(job):
    return "correct", ""


def play_step(
    answer=good_answer, judge=all_correct, *, lag=0, width=3, step=1, pool=None, **method
):
    """One step of SAGE on scripts: (method, pool, episodes, engine)."""
    c = config(**method)
    sage = Sage(c, load_prompts("v1"))
    pool = pool or Pool(seeds(), capacity=100)
    engine, verifier = ScriptedEngine(answer, width), ScriptedVerifier(judge, lag)
    episodes = sage.episodes(pool, step)
    play(engine, verifier, episodes, Player(c, Bytes(), step, 1.0))
    sage.reward(episodes, pool)
    return sage, pool, episodes, engine


def swap(**answers):
    """good_answer with the answers of some kinds replaced."""
    return lambda row_id: answers.get(row_id.split("/")[-2]) or good_answer(row_id)
