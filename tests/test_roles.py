"""Output grammar: parsers that never raise and a format reward that reads the response only."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.roles import (
    CHALLENGER,
    CRITIC,
    MAX_INPUTS,
    PLANNER,
    SOLVER,
    TAGS,
    critic_score,
    format_reward,
    parse,
)

Q, A = "<question>How many?</question>", "<answer>5</answer>"
CODE = (
    "<question>Write f(x).</question><solution>def f(x):\n    return x</solution>"
    "<inputs>1\n2</inputs>"
)


@pytest.mark.parametrize(
    "role, domain, text, fields",
    [
        (CHALLENGER, "math", f"Well.\n{Q}\n{A}", {"question": "How many?", "answer": "5"}),
        # The last complete pair, so that question and answer belong together.
        (CHALLENGER, "math", f"{Q}{A}<question>B", {"question": "How many?", "answer": "5"}),
        (
            CHALLENGER,
            "math",
            f"<question>B</question>{Q}{A}",
            {"question": "How many?", "answer": "5"},
        ),
        (
            CHALLENGER,
            "math",
            f"{Q}{A}<question>B</question><answer>6</answer>",
            {"question": "B", "answer": "6"},
        ),
        (PLANNER, "math", "<plan>\n1. add\n2. stop\n</plan>", {"plan": "1. add\n2. stop"}),
        (PLANNER, "code", "<plan>a<plan>b</plan></plan>", {"plan": "b"}),
        (SOLVER, "math", "<plan>x</plan> so <answer> 5 </answer>", {"answer": "5"}),
        (CRITIC, "math", "Fine. <score> 10\n</score>", {"score": 1.0, "raw": 10}),
        (CRITIC, "code", "<score>1</score>", {"score": 0.0, "raw": 1}),
    ],
)
def test_well_formed_responses_parse(role, domain, text, fields):
    parsed = parse(role, domain, text)
    assert parsed.ok and parsed.fields == fields and parsed.reason == ""


@pytest.mark.parametrize(
    "role, domain, text, reason",
    [
        (CHALLENGER, "math", "", "no <question>, <answer>"),
        (CHALLENGER, "math", Q, "no <question>, <answer>"),
        (CHALLENGER, "math", A + Q, "no <question>, <answer>"),
        (CHALLENGER, "math", f"<question>q{A}</question>", "no <question>, <answer>"),
        (CHALLENGER, "math", f"<question>..</question>{A}", "<question> is empty"),
        (CHALLENGER, "math", f"{Q}<answer> … </answer>", "<answer> is empty"),
        (CHALLENGER, "math", f"<question>\xa0\u3000</question>{A}", "<question> is empty"),
        (PLANNER, "math", "<plan>\u2003 ...\x1c</plan>", "<plan> is empty"),
        (CHALLENGER, "code", CODE.replace("def", "let"), "<solution> defines no function"),
        (CHALLENGER, "code", CODE.replace("1\n2", "```\n\n```"), "<inputs> is empty"),
        (PLANNER, "math", "<plan>1. add", "no <plan>"),
        (PLANNER, "math", "</plan>x<plan>", "no <plan>"),
        (PLANNER, "math", "<Plan>x</Plan>", "no <plan>"),
        (SOLVER, "math", r"\boxed{5}", "no <answer>"),
        (SOLVER, "code", "<answer></answer>", "<answer> is empty"),
    ],
)
def test_malformed_responses_say_what_is_missing(role, domain, text, reason):
    parsed = parse(role, domain, text)
    assert (parsed.ok, parsed.fields, parsed.reason) == (False, {}, reason)


@pytest.mark.parametrize("content", ["7/10", "0", "11", "7.0", "07", "+7", "-1", "٧", "7 8", "x"])
def test_only_a_bare_integer_is_a_score(content):
    text = f"<score>{content}</score>"
    assert critic_score(text) is None and not parse(CRITIC, "math", text).ok


@pytest.mark.parametrize("score", range(1, 11))
def test_scores_map_linearly_from_worst_to_best(score):
    assert critic_score(f"<score>{score}</score>") == pytest.approx((score - 1) / 9)


def test_a_score_outside_its_tag_is_unparsed():
    assert critic_score("8") is None and critic_score("<answer>8</answer>") is None


def test_code_proposals_give_program_entry_point_and_inputs():
    helper_last = "def solve(xs):\n    return help(xs)\n\ndef help(xs):\n    return xs"
    text = (
        "<question>Write solve(xs).</question>"
        f"<solution>\n```python\n{helper_last}\n```\n</solution>"
        "<inputs>\n```\n([1, 2],)\n\n  [3]\n```\n</inputs>"
    )
    fields = parse(CHALLENGER, "code", text).fields
    assert fields["solution"] == helper_last
    assert fields["entry_point"] == "solve"
    assert fields["inputs"] == ["([1, 2],)", "([3],)"]
    unnamed = parse(CHALLENGER, "code", text.replace("Write solve(xs)", "Return it"))
    assert unnamed.fields["entry_point"] == "help"
    nested = CODE.replace("def f", "class C:\n    def m(self): pass\ndef f")
    assert parse(CHALLENGER, "code", nested).fields["entry_point"] == "f"


def test_no_proposal_brings_more_tests_than_the_cap():
    text = CODE.replace("1\n2", "\n".join(map(str, range(100))))
    assert parse(CHALLENGER, "code", text).fields["inputs"] == [
        f"({i},)" for i in range(MAX_INPUTS)
    ]


@pytest.mark.parametrize(
    "role, domain, text, reward",
    [
        (CHALLENGER, "math", Q + A, 1.0),
        (CHALLENGER, "math", f"a {Q} b {A} c", 1.0),
        (CHALLENGER, "math", A + Q, 0.5),  # out of order
        (CHALLENGER, "math", Q + A + A, 0.5),  # repeated
        (CHALLENGER, "math", Q, 0.5),  # some there
        (CHALLENGER, "math", Q + "<answer></answer>", 0.5),
        (CHALLENGER, "math", Q + A + "<answer>", 0.5),
        (CHALLENGER, "math", "<question>q" + A + "</question>", 0.5),
        (CHALLENGER, "math", "<question></question><answer> </answer>", 0.0),
        (CHALLENGER, "math", "", 0.0),
        (CHALLENGER, "code", CODE, 1.0),
        (CHALLENGER, "code", Q + A, 0.5),
        (CHALLENGER, "code", A, 0.0),
        (PLANNER, "math", "<plan>x</plan>", 1.0),
        (PLANNER, "math", "<plan>x</plan><plan>y</plan>", 0.5),
        (PLANNER, "math", "<plan>x", 0.0),
        (PLANNER, "math", "<plan>...</plan>", 0.0),
        (SOLVER, "math", f"<plan>x</plan>{A}", 1.0),
        (SOLVER, "code", "5", 0.0),
        (CRITIC, "math", "<score>7</score>", 1.0),
        (CRITIC, "math", "<score>7</score><score>7</score>", 0.5),
        (CRITIC, "math", "<plan>7</plan>", 0.0),
    ],
)
def test_format_reward_by_the_rule(role, domain, text, reward):
    assert format_reward(role, domain, text) == reward


ROWS = st.sampled_from(sorted(TAGS))
PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                f"<{s}{t}>"
                for s in ("", "/")
                for t in "question answer solution inputs plan score".split()
            ]
            + ["7", "def f(x):\n", "```", "\n", "<", "</", ">"]
        ),
        st.text(max_size=8),
    ),
    max_size=30,
).map("".join)


@given(ROWS, st.one_of(PIECES, st.text(st.characters(codec=None))))
@settings(max_examples=400, deadline=None)
def test_parsers_are_total(row, text):
    role, domain = row
    parsed = parse(role, domain, text)
    assert parsed.ok == bool(parsed.fields) == (not parsed.reason)
    reward = format_reward(role, domain, text)
    assert reward in (0.0, 0.5, 1.0)
    if parsed.ok:
        assert reward > 0
    score = critic_score(text)
    assert score is None or 0 <= score <= 1


@settings(deadline=None)
@given(ROWS, PIECES)
def test_a_full_format_reward_means_a_group_to_read(row, text):
    """No text earns the full reward and yet has nothing in its tags."""
    role, domain = row
    if format_reward(role, domain, text) == 1.0:
        reason = parse(role, domain, text).reason
        assert "no <" not in reason
        assert "is empty" not in reason or reason == "<inputs> is empty"


@pytest.mark.parametrize(
    "unit",
    [
        "<",
        "</answer>",
        "<question><answer>",
        "\n",
        "```\n",
        "def f(",
        "\ndef ",
        "1\n",
        " ",
        "(",
        "'",
    ],
)
def test_a_megabyte_of_anything_parses_in_linear_time(unit):
    """A quadratic scan would take hours here, not fail an assertion."""
    text = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    inside = f"<question>q</question><solution>def f(x): {text}</solution><inputs>{text}</inputs>"
    for whole in (text, inside):
        parsed = parse(CHALLENGER, "code", whole)
        assert parsed.ok == bool(parsed.fields)
        assert format_reward(SOLVER, "code", whole) <= 1


def test_many_function_names_and_a_long_question_stay_linear():
    names = "".join(f"def f{i}(x):\n" for i in range(60_000))
    question = "word " * 200_000 + "f7"
    text = f"<question>{question}</question><solution>\n{names}</solution><inputs>1</inputs>"
    assert parse(CHALLENGER, "code", text).fields["entry_point"] == "f7"
