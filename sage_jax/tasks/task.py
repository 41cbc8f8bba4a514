"""One problem: a public part that prompts may show and a private key that only verifiers read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sage_jax.spelling import hint
from sage_jax.verify.code import Limits, code_job, extract_code, reference_tests
from sage_jax.verify.verdict import Job

DOMAINS = ("math", "code")
TEST_KINDS = {
    "check": ("code",),
    "asserts": ("asserts",),
    "io": ("args", "expected"),
    "stdio": ("stdin", "stdout"),
}
KEY_FIELDS = {
    "math": ("answer", "tolerance", "solution", "answer_type", "unit", "multiple"),
    "code": (
        *("tests", "entry_points", "canonical_solution", "stdin", "mutates_args"),
        *("determinism_probe", "time_limit", "memory_mb"),
    ),
}
SANDBOX_FIELDS = ("stdin", "mutates_args", "determinism_probe", "time_limit", "memory_mb")
LONGEST_HINT = 300  # characters: a hint is an example, not a data file


@dataclass(frozen=True)
class PublicTask:
    """All that a role prompt can reach: plain strings and no way back to the key."""

    id: str
    domain: str
    question: str
    entry_point: str = ""
    hint: str = ""


@dataclass
class Stats:
    """Counts over the life of a task; `born_step` is 0 for seeds."""

    attempts: int = 0
    correct: int = 0
    drawn: int = 0
    born_step: int = 0


@dataclass
class Task:
    """A problem with its key. Only `job` and `to_json` read the key, and it never prints."""

    public: PublicTask
    _key: dict[str, Any] = field(repr=False)
    provenance: dict[str, Any] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)

    @property
    def id(self) -> str:
        return self.public.id

    @property
    def domain(self) -> str:
        return self.public.domain

    @property
    def question(self) -> str:
        return self.public.question

    def job(self, id: str, response: str) -> Job:
        """The verifier job that judges one Solver response (its text as generated) to this task.

        Maths passes the response on unread: finding the answer in it is the verifier's business.
        """
        if self.domain == "math":
            payload = {"gold": self._key["answer"], "prediction": response}
            payload["question"] = self.question
            if "tolerance" in self._key:
                payload["tolerance"] = self._key["tolerance"]
            return Job(id, "math", payload)
        # Tests may call helpers which the problem itself defines.
        payload = {"solution": extract_code(response), "question": self.question}
        for name in ("tests", "entry_points", "canonical_solution", *SANDBOX_FIELDS):
            if name in self._key:
                payload[name] = self._key[name]
        return Job(id, "code", payload)

    def to_json(self) -> dict[str, Any]:
        """One JSONL row; `Task.from_json` gives back an equal task."""
        public = dict(vars(self.public))
        if self.domain == "math":
            del public["entry_point"], public["hint"]
        return {**public, **self._key, **self.provenance, "stats": dict(vars(self.stats))}

    @classmethod
    def from_json(cls, row: Any) -> "Task":
        """A task from one JSONL row; fields it does not know are kept as provenance.

        Raises ValueError listing everything wrong with the row (see `row_problems`).
        """
        problems = row_problems(row)
        if problems:
            raise ValueError("; ".join(problems))
        rest = {name: value for name, value in row.items() if value is not None}
        domain = rest.pop("domain")
        id, question = rest.pop("id"), rest.pop("question")
        stats = Stats(**rest.pop("stats", {}))
        key: dict[str, Any]
        if domain == "math":
            key = {"answer": str(rest.pop("answer"))}
            if "tolerance" in rest:
                key["tolerance"] = float(rest.pop("tolerance"))
        else:
            single = rest.pop("entry_point", "")
            key = {"entry_points": list(rest.pop("entry_points", [single] if single else []))}
            key["tests"] = rest.pop("tests")
            hint = rest.pop("hint", rest.get("hint_assert"))
        for name in KEY_FIELDS[domain]:
            if name in rest:
                key[name] = rest.pop(name)
        if domain == "math":
            return cls(PublicTask(id, domain, question), key, rest, stats)
        entry_point = key["entry_points"][0] if key["entry_points"] else ""
        hint = hint if hint is not None else first_example(key["tests"], entry_point)
        return cls(PublicTask(id, domain, question, entry_point, hint), key, rest, stats)


def proposed_math(id: str, question: str, answer: str, *, step: int, parent: str) -> Task:
    """A maths task written by the Challenger; `parent` is the id of its reference task.

    Raises ValueError for one that could not be read back from a checkpoint.
    """
    row = {
        "id": id,
        "domain": "math",
        "question": question,
        "answer": answer,
        "source": "challenger",
        "parent": parent,
        "stats": {"born_step": step},
    }
    return Task.from_json(row)


def proposed_code(
    id: str,
    question: str,
    *,
    entry_point: str,
    solution: str,
    inputs: list[str],
    expected: list[str],
    step: int,
    parent: str,
) -> Task:
    """A code task written by the Challenger.

    `inputs` holds one line of arguments per test; `expected` the literals which the sandbox got
    from `solution` for them, never figures from the Challenger's text.
    Raises ValueError when the two differ in length or are empty.
    """
    row = {
        "id": id,
        "domain": "code",
        "question": question,
        "entry_point": entry_point,
        "canonical_solution": solution,
        "tests": reference_tests(inputs, expected),
        "source": "challenger",
        "parent": parent,
        "stats": {"born_step": step},
    }
    return Task.from_json(row)


def argument_tuple(line: str) -> str:
    """A line of arguments as the text of one tuple: `3, [1]` and `(3, [1])` both mean two.

    Reads brackets and quotes only; text that is no Python literal stays none.
    """
    line = line.strip()
    depth, quote, escaped, commas, outside = 0, "", False, 0, not line.startswith("(")
    for position, character in enumerate(line):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            outside |= depth == 0 and position < len(line) - 1
        elif character == "," and depth == 1:
            commas += 1
    closed = depth == 0 and not quote and not outside
    if closed and (commas or not line[1:-1].strip()):
        return line
    return f"({line.rstrip(', ')},)"


def first_example(tests: Any, entry_point: str) -> str:
    """The first short public test as one line of text, or "" where showing it would be unfair.

    A test that is alone is the whole key, so it is never shown; neither are `hidden` tests.
    """
    if isinstance(tests, str):
        lines = [line for line in tests.splitlines() if line.startswith("assert ")]
        examples = lines if len(lines) > 1 else []
    elif "kind" not in tests:
        examples = tests.get("public", [])
    elif tests["kind"] == "asserts":
        examples = tests["asserts"] if len(tests["asserts"]) > 1 else []
    elif tests["kind"] == "io" and len(tests["args"]) > 1:
        examples = _io_examples(tests, entry_point)
    elif tests["kind"] == "stdio" and len(tests["stdin"]) > 1:
        pairs = zip(tests["stdin"], tests["stdout"], strict=True)
        examples = [f"input {given!r} prints {wanted!r}" for given, wanted in pairs]
    else:
        examples = []
    return next((e.strip() for e in examples if len(e) <= LONGEST_HINT), "")


def _io_examples(tests: Mapping[str, Any], entry_point: str) -> list[str]:
    form = {
        "set": "assert set({call}) == set({expected})",
        "not_none": "assert ({call} is not None) == {expected}",
    }.get(tests.get("compare", "eq"), "assert {call} == {expected}")
    examples = []
    for args, expected in zip(tests["args"], tests["expected"], strict=True):
        if tests.get("args_form") == "input":
            args = argument_tuple(args)
        inside = args if tests.get("args_are_call_text") else args.strip()[1:-1].rstrip(", ")
        examples.append(form.format(call=f"{entry_point}({inside})", expected=expected))
    return examples


def row_problems(row: Any) -> list[str]:
    """Everything wrong with one JSONL row: field, value and remedy each; empty when it is fine."""
    if not isinstance(row, dict):
        return [f"the line holds {_show(row)}: write one JSON object per line"]
    problems = []
    for name in ("id", "question"):
        problems += _text_problem(row, name, f"give every task a non-empty {name}")
    if row.get("domain") not in DOMAINS:
        near = hint(row.get("domain"), DOMAINS)
        problems.append(f"field 'domain' is {_show(row.get('domain'))}: use 'math' or 'code'{near}")
    elif row["domain"] == "math":
        problems += _math_problems(row)
    else:
        problems += _code_problems(row)
    stats = {} if row.get("stats") is None else row["stats"]
    if not isinstance(stats, dict) or not all(
        name in Stats.__dataclass_fields__ and type(value) is int and value >= 0
        for name, value in stats.items()
    ):
        names = ", ".join(Stats.__dataclass_fields__)
        problems.append(f"field 'stats' is {_show(stats)}: use counts of {names}, or leave it out")
    return problems


def _math_problems(row: Mapping[str, Any]) -> list[str]:
    problems = []
    answer = row.get("answer")
    if type(answer) is not int and not (type(answer) is float and math.isfinite(answer)):
        problems += _text_problem(row, "answer", "give the reference answer as text or a number")
    tolerance = row.get("tolerance")
    if tolerance is not None:
        try:
            usable = type(tolerance) in (int, float, str) and 0 < float(tolerance) < math.inf
        except (ValueError, OverflowError):
            usable = False
        if not usable:
            problems.append(
                f"field 'tolerance' is {_show(tolerance)}: use a positive number or leave it out"
            )
    return problems


def _code_problems(row: Mapping[str, Any]) -> list[str]:
    tests = row.get("tests")
    problems = _tests_problems(tests)
    names = row.get("entry_points")
    if names is None:
        names = [row["entry_point"]] if row.get("entry_point") is not None else []
    reads_stdin = isinstance(tests, dict) and tests.get("kind") == "stdio"
    if not isinstance(names, list) or not all(
        isinstance(name, str) and all(part.isidentifier() for part in name.split("."))
        for name in names
    ):
        problems.append(f"field 'entry_point' is {_show(names)}: give the name of a function")
    elif not names and not reads_stdin:
        problems.append("field 'entry_point' is missing: name the function which the tests call")
    for name in ("canonical_solution", "hint", "hint_assert"):
        if row.get(name) is not None and not isinstance(row[name], str):
            problems.append(f"field '{name}' is {_show(row[name])}: use text or leave it out")
    return problems or _hint_problems(row, names) or _verifier_problems(row, names)


def _hint_problems(row: Mapping[str, Any], names: list[str]) -> list[str]:
    """A hint, given or taken from the tests, stands in prompts, so a tokenizer must take it."""
    given = row.get("hint") if row.get("hint") is not None else row.get("hint_assert")
    if given is not None:
        return _half_problem("hint", given)
    return _half_problem("tests", first_example(row["tests"], names[0] if names else ""))


def _verifier_problems(row: Mapping[str, Any], names: list[str]) -> list[str]:
    """What the verifier would say of the row in the middle of a run."""
    payload = {name: row[name] for name in SANDBOX_FIELDS if row.get(name) is not None}
    try:
        code_job(
            {"solution": "", "tests": row["tests"], "entry_points": names, **payload}, Limits()
        )
    except ValueError as error:
        return [f"field {error}"]
    return []


def _tests_problems(tests: Any) -> list[str]:
    if isinstance(tests, str) and tests.strip():
        return []
    if not isinstance(tests, dict):
        return [
            f"field 'tests' is {_show(tests)}: use asserts as text, public and hidden lists, "
            f"or an object with kind {'|'.join(TEST_KINDS)}"
        ]
    if "kind" not in tests:
        lists = [tests.get(name, []) for name in ("public", "hidden")]
        if all(_texts(asserts) for asserts in lists) and any(lists):
            return []
        return ["field 'tests' has no kind: use lists of assert lines under public and hidden"]
    if not isinstance(tests["kind"], str) or tests["kind"] not in TEST_KINDS:
        near = hint(tests["kind"], TEST_KINDS)
        return [f"field 'tests.kind' is {_show(tests['kind'])}: use {'|'.join(TEST_KINDS)}{near}"]
    wanted = TEST_KINDS[tests["kind"]]
    if tests["kind"] == "check":
        if isinstance(tests.get("code"), str) and "def check" in tests["code"]:
            return []
        return ["field 'tests.code' must be Python source which defines check(candidate)"]
    lists = [tests.get(name) or [] for name in wanted]
    if all(lists) and all(map(_texts, lists)) and len(set(map(len, lists))) == 1:
        return []
    return [f"field 'tests' needs non-empty lists of text, of equal length: {', '.join(wanted)}"]


def _texts(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, str) for item in items)


def _text_problem(row: Mapping[str, Any], name: str, remedy: str) -> list[str]:
    value = row.get(name)
    if value is None:
        return [f"field '{name}' is missing: {remedy}"]
    if not isinstance(value, str) or not value.strip():
        return [f"field '{name}' is {_show(value)}: {remedy}"]
    return _half_problem(name, value)


def _half_problem(name: str, text: str) -> list[str]:
    try:
        text.encode()
    except UnicodeEncodeError:
        return [f"field '{name}' is {_show(text)}: half of a surrogate pair; write the character"]
    return []


def _show(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
