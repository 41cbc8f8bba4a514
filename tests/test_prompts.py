"""Prompt sets: what each role is told, and errors that name file and field."""

import shutil
from pathlib import Path

import pytest

import sage_jax.roles
from sage_jax.roles import KINDS, TAGS, load_prompts
from sage_jax.tasks.task import PublicTask

PACKAGED = Path(sage_jax.roles.__file__).parent / "prompts"
MATHS = PublicTask("m", "math", "What is 2 + 3?")
CODE = PublicTask("c", "code", "Write a doubler.", "double_it", "assert double_it(2) == 4")


def text(prompts, kind, task, plan=""):
    *system, message = prompts.messages(kind, task, plan=plan)
    assert all(m["role"] == "system" for m in system)
    assert message["role"] == "user"
    return message["content"]


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(PACKAGED / "v1", tmp_path / "mine"))


@pytest.mark.parametrize("name", ["v1", "short"])
@pytest.mark.parametrize("task", [MATHS, CODE], ids=["math", "code"])
def test_packaged_sets_serve_every_kind(name, task):
    prompts = load_prompts(name)
    for kind in KINDS:
        content = text(prompts, kind, task, plan="first this")
        assert task.question in content
        assert ("first this" in content) == (kind in ("solver", "critic_plan"))
        assert "{" not in content


@pytest.mark.parametrize("task", [MATHS, CODE], ids=["math", "code"])
def test_real_models_are_told_their_tags(task):
    prompts = load_prompts("v1")
    for kind in KINDS:
        content = text(prompts, kind, task, plan="p")
        role = kind.partition("_")[0]
        for tag in TAGS[role, task.domain]:
            assert f"<{tag}>" in content and f"</{tag}>" in content


def test_the_solver_of_code_is_told_the_entry_point_and_the_example():
    for name in ("v1", "short"):
        assert "double_it" in text(load_prompts(name), "solver", CODE)
    assert CODE.hint in text(load_prompts("v1"), "solver", CODE)


def test_lines_without_a_value_are_left_out():
    prompts = load_prompts("v1")
    without = text(prompts, "solver", MATHS)
    assert "plan" not in without
    assert len(text(prompts, "solver", MATHS, plan="p").splitlines()) == 1 + len(
        without.splitlines()
    )
    bare = PublicTask("c", "code", "Read two numbers.")
    assert "Example" not in text(prompts, "solver", bare)
    assert "Function" not in text(prompts, "planner", MATHS)


def test_kinds_differ_in_every_set():
    """A copied file would give two roles the same job."""
    for name in ("v1", "short"):
        for task in (MATHS, CODE):
            contents = {text(load_prompts(name), kind, task, plan="p") for kind in KINDS}
            assert len(contents) == len(KINDS)


@pytest.mark.parametrize("name, words", [("v1", 120), ("short", 8)])
def test_prompts_stay_compact(name, words):
    for path in (PACKAGED / name).glob("*.txt"):
        assert len(path.read_text().split()) <= words, path.name


def test_values_are_inserted_as_they_are():
    """Model text with braces neither expands nor fails."""
    task = PublicTask("m", "math", r"Simplify \frac{plan}{question} {} {0} {{x}}.")
    content = text(load_prompts("v1"), "solver", task, plan="{hint} {question}")
    assert task.question in content and "{hint} {question}" in content


def test_a_users_folder_replaces_the_packaged_set(folder):
    before = load_prompts(folder)
    assert before.digest == load_prompts("v1").digest
    (folder / "planner_math.txt").write_text("Plan {question} as {{1: 2}}")
    after = load_prompts(folder)
    assert text(after, "planner", MATHS) == "Plan What is 2 + 3? as {1: 2}"
    assert text(after, "planner", CODE) == text(before, "planner", CODE)
    assert after.digest != before.digest


def test_a_system_message_is_optional(folder):
    (folder / "system.txt").write_text("Be brief.\n")
    messages = load_prompts(folder).messages("planner", MATHS)
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert load_prompts(folder).digest != load_prompts("v1").digest


def test_all_faults_of_a_set_are_listed_with_file_and_field(folder):
    (folder / "planner.txt").unlink()
    (folder / "solver_code.txt").write_text("Solve {question} {answer} {plan}")
    (folder / "critic_plan.txt").write_text("Judge {question}")
    (folder / "challenger_math.txt").write_text("New one like {question} {hint}")
    with pytest.raises(ValueError) as caught:
        load_prompts(folder)
    lines = str(caught.value).splitlines()
    assert any("planner_math.txt: missing" in line for line in lines)
    assert any("solver_code.txt: unknown placeholder {answer}" in line for line in lines)
    assert any("solver_code.txt: placeholder {entry_point} is missing" in line for line in lines)
    assert any("critic_plan.txt: placeholder {plan} is missing" in line for line in lines)
    assert any("challenger_math.txt: unknown placeholder {hint}" in line for line in lines)
    assert len(lines) == len(set(lines))


def test_an_unknown_set_names_those_there_are():
    with pytest.raises(ValueError, match="short, v1"):
        load_prompts("v0")
