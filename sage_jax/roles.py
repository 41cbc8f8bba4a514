"""The four roles: output grammar, total parsers and prompt sets.

Everything here reads the response alone: a tag in a prompt can never count as a tag in an answer.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_jax.spelling import hint
from sage_jax.tasks.task import DOMAINS, PublicTask, argument_tuple

CHALLENGER, PLANNER, SOLVER, CRITIC = "challenger", "planner", "solver", "critic"
ROLES = (CHALLENGER, PLANNER, SOLVER, CRITIC)

# Kinds of prompt. A set holds KIND_DOMAIN.txt, or KIND.txt for both domains.
KINDS = ("challenger", "planner", "solver", "critic_question", "critic_plan")

TAGS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (CHALLENGER, "math"): ("question", "answer"),
    (CHALLENGER, "code"): ("question", "solution", "inputs"),
    **{(PLANNER, domain): ("plan",) for domain in DOMAINS},
    **{(SOLVER, domain): ("answer",) for domain in DOMAINS},
    **{(CRITIC, domain): ("score",) for domain in DOMAINS},
}
MAX_INPUTS = 16  # tests taken from one proposal

_TAG = re.compile(r"<(/?)(question|answer|solution|inputs|plan|score)>")
_SCORE = re.compile(r"10|[1-9]")
_DEF = re.compile(r"^(?:async[ \t]+)?def[ \t]+([^\W\d]\w*)[ \t]*\(", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")
_BLANK = re.compile(r"[\s.…]*")  # an echoed "..." is no content


@dataclass(frozen=True)
class Parsed:
    """What a response says. `fields` is empty unless `ok`; `reason` names what is missing."""

    ok: bool
    fields: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def parse(role: str, domain: str, text: str) -> Parsed:
    """Reads the last well-formed group of the role's tags. Never raises on any text; linear time.

    Fields: challenger maths question, answer; challenger code question, solution, entry_point,
    inputs (texts of argument tuples); planner plan; solver answer; critic score in [0, 1] and raw,
    its integer.
    """
    wanted = TAGS[role, domain]
    contents = _last_group(wanted, text)
    if contents is None:
        return Parsed(False, reason="no <" + ">, <".join(wanted) + ">")
    blank = [tag for tag in wanted if _is_blank(contents[tag])]
    if blank:
        return Parsed(False, reason=f"<{blank[0]}> is empty")
    fields: dict[str, Any] = {tag: content.strip() for tag, content in contents.items()}
    if role == CRITIC:
        if not _SCORE.fullmatch(fields["score"]):
            return Parsed(False, reason="<score> is no integer from 1 to 10")
        raw = int(fields["score"])
        return Parsed(True, {"score": (raw - 1) / 9, "raw": raw})
    if role == CHALLENGER and domain == "code":
        fields["solution"] = _unfenced(fields["solution"])
        fields["entry_point"] = _entry_point(fields["solution"], fields["question"])
        if not fields["entry_point"]:
            return Parsed(False, reason="<solution> defines no function")
        lines = (line.strip() for line in _unfenced(fields["inputs"]).split("\n"))
        fields["inputs"] = [argument_tuple(line) for line in lines if line][:MAX_INPUTS]
        if not fields["inputs"]:
            return Parsed(False, reason="<inputs> is empty")
    return Parsed(True, fields)


def format_reward(role: str, domain: str, text: str) -> float:
    """r_f of the response: 1, 0.5 or 0.

    1: every required tag once, in order, none empty. 0.5: all there but repeated or out of order,
    or only some there. 0: none, or only empty ones.
    """
    wanted = TAGS[role, domain]
    tags = [tag for tag in _TAG.finditer(text) if tag[2] in wanted]
    filled = {
        opening[2]
        for opening, closing in zip(tags, tags[1:], strict=False)
        if _is_pair(opening, closing) and not _is_blank(text[opening.end() : closing.start()])
    }
    if not filled:
        return 0.0
    in_order = [tag[0] for tag in tags] == [t for name in wanted for t in _pair(name)]
    return 1.0 if in_order and len(filled) == len(wanted) else 0.5


def critic_score(text: str) -> float | None:
    """(s - 1) / 9 for a bare integer s of 1..10 in the score tag, else None (unparsed).

    Deviation from the paper's normalisation, which maps the worst score 1 to 1.0.
    """
    return parse(CRITIC, "math", text).fields.get("score")


def _pair(name: str) -> tuple[str, str]:
    return f"<{name}>", f"</{name}>"


def _is_blank(text: str) -> bool:
    return _BLANK.fullmatch(text) is not None


def _is_pair(opening: re.Match[str], closing: re.Match[str]) -> bool:
    return not opening[1] and closing[1] == "/" and opening[2] == closing[2]


def _last_group(wanted: tuple[str, ...], text: str) -> dict[str, str] | None:
    """Contents of the last run of all wanted tags, in order, with no other of them between."""
    tags = [tag for tag in _TAG.finditer(text) if tag[2] in wanted]
    pattern = [t for name in wanted for t in _pair(name)]
    for start in range(len(tags) - len(pattern), -1, -1):
        run = tags[start : start + len(pattern)]
        if [tag[0] for tag in run] == pattern:
            return {
                name: text[run[2 * i].end() : run[2 * i + 1].start()]
                for i, name in enumerate(wanted)
            }
    return None


def _unfenced(text: str) -> str:
    """The inside of a markdown fence around the whole text, else the text."""
    lines = text.strip().split("\n")
    if len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return text


def _entry_point(solution: str, question: str) -> str:
    """The last top-level function which the question names, else the last one, else ""."""
    functions = _DEF.findall(solution)
    words = set(re.findall(r"\w+", question))
    named = [name for name in functions if name in words]
    return (named or functions or [""])[-1]


@dataclass(frozen=True)
class PromptSet:
    """Prompt templates by (kind, domain). `digest` changes with any byte of any template."""

    name: str
    templates: Mapping[tuple[str, str], str]
    system: str
    digest: str

    def messages(self, kind: str, task: PublicTask, plan: str = "") -> list[dict[str, str]]:
        """Chat messages of one row. A line of the template whose placeholder is empty is left out,
        so that one template serves tasks with and without a hint, and Solvers with and without
        a plan. Values are inserted as they are: braces in them mean nothing.
        """
        values = {
            "question": task.question,
            "entry_point": task.entry_point,
            "hint": task.hint,
            "plan": plan,
        }
        lines = []
        for line in self.templates[kind, task.domain].splitlines():
            names = [found for found in _PLACEHOLDER.findall(line) if found]
            if all(values[name] for name in names):
                lines.append(_PLACEHOLDER.sub(lambda m: _insert(m, values), line))
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": "\n".join(lines)}]


def _insert(match: re.Match[str], values: Mapping[str, str]) -> str:
    return values[match[1]] if match[1] else match[0][0]


def load_prompts(name_or_dir: str | Path) -> PromptSet:
    """The packaged set of that name, or the set in a folder of the user's.

    Raises ValueError listing every missing file and every missing or unknown placeholder.
    """
    packaged = Path(__file__).parent / "prompts"
    names = sorted(path.name for path in packaged.iterdir() if path.is_dir())
    folder = packaged / name_or_dir if name_or_dir in names else Path(name_or_dir)
    if not folder.is_dir():
        raise ValueError(
            f"prompts {str(name_or_dir)!r}: no such folder and no packaged set; use "
            f"{', '.join(names)} or the path of a folder{hint(name_or_dir, names)}"
        )
    templates, problems = {}, []
    for kind in KINDS:
        for domain in DOMAINS:
            paths = [folder / f"{kind}_{domain}.txt", folder / f"{kind}.txt"]
            path = next((p for p in paths if p.is_file()), None)
            if path is None:
                problems.append(f"{paths[0]}: missing; write it, or {paths[1].name} for both")
                continue
            templates[kind, domain] = path.read_text(encoding="utf-8").strip()
            problems += _placeholder_problems(path, kind, domain, templates[kind, domain])
    if problems:
        problems = list(dict.fromkeys(problems))
        raise ValueError(f"prompts {folder}:\n  " + "\n  ".join(problems))
    system_path = folder / "system.txt"
    system = system_path.read_text(encoding="utf-8").strip() if system_path.is_file() else ""
    digest = hashlib.sha256(repr((sorted(templates.items()), system)).encode()).hexdigest()[:16]
    return PromptSet(str(name_or_dir), templates, system, digest)


def _placeholder_problems(path: Path, kind: str, domain: str, template: str) -> list[str]:
    required = {"question"}
    allowed = {"question"}
    if domain == "code" or not path.stem.endswith(f"_{domain}"):
        allowed |= {"entry_point", "hint"}
    if kind in ("solver", "critic_plan"):
        required |= {"plan"}
        allowed |= {"plan"}
    if kind == "solver" and domain == "code":
        required |= {"entry_point"}
    found = {name for name in _PLACEHOLDER.findall(template) if name}
    problems = [
        f"{path}: placeholder {{{name}}} is missing; add it" for name in sorted(required - found)
    ]
    problems += [
        f"{path}: unknown placeholder {{{name}}}; use {', '.join(sorted(allowed))}, "
        "and {{ }} for braces that are meant"
        for name in sorted(found - allowed)
    ]
    return problems
