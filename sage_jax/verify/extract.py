"""Where the answer is in a response. Text only, one pass, linear in its length.

Order: nothing before the last ``</think>``; the last ``<answer>`` tag; the last box, with boxes
next to it as one list; the text after the last ``####``; the line after the last "answer is";
and, in policy ``eval`` only, the last formula, then the last number.
"""

from __future__ import annotations

import re
from collections import deque

MAX_ANSWER = 2000
NEAR = 10  # boxes closer than this form one list

_PHRASE = re.compile(
    r"(?:final\s+answer|\banswer)\s*(?:\*{1,2}\s*)?(?:is|are|[:=\uff1a])|\u7b54\u6848\s*(?:\u662f|\u4e3a|[:\uff1a])",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOIN = re.compile(r"[\s$.,;]*(?:\\text\{)?\s*(?:and|or|,|;)?\s*\}?[\s$.,;]*", re.IGNORECASE)
FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
# Not part of a longer expression, word or list index.
_NUMBER = re.compile(
    r"(?<![\w.^*/\\{(])(?P<n>-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:/\d+)?\s?\\?%?)"
    r"(?![\w^*({/\\])"
)


def extract(text: str, policy: str = "reward") -> str | None:
    """The answer part of ``text``, None when there is none under ``policy``."""
    head, mark, rest = text.rpartition("</think>")
    text = rest if mark else text
    if "<think>" in text:
        return None
    start = text.rfind("<answer>")
    if start >= 0:
        end = text.find("</answer>", start)
        if end >= 0:
            text = text[start + len("<answer>") : end].strip()
            boxed, found = _last_boxes(text)
            return found if boxed else _after_phrase(text) or _nonempty(text)
    boxed, found = _last_boxes(text)
    if boxed:
        return found
    if "####" in text:
        line = text.rpartition("####")[2].strip().split("\n", 1)[0]
        return _nonempty(line)
    found = _after_phrase(text)
    if found is not None or policy != "eval":
        return found
    return _last_formula(text) or _last_number(text)


def _nonempty(text: str) -> str | None:
    return text.strip() or None


def _last_boxes(text: str) -> tuple[bool, str | None]:
    """Whether there is any box, and the content of the last one or group of neighbours."""
    boxes: list[tuple[int, int, str]] = []
    end_of_outer = -1
    last_is_complete = True
    ends = _groups(text)
    for match in _BOX.finditer(text):
        if match.start() < end_of_outer:  # a box in a box belongs to the outer one
            continue
        body = ends.get(match.end())
        if body is None:
            last_is_complete = False
            if match.end() < len(text) and text[match.end()] != "{":
                word = re.match(r"[^\s$]+", text[match.end() :])
                if word:
                    content = word.group().rstrip(".,;")
                    boxes.append((match.start(), match.end() + word.end(), content))
                    end_of_outer, last_is_complete = match.end() + word.end(), True
            continue
        boxes.append((match.start(), body, text[match.end() + 1 : body - 1]))
        end_of_outer, last_is_complete = body, True
    if not boxes or not last_is_complete:
        return bool(boxes) or not last_is_complete, None
    group = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : group[-1][0]]
        if len(between) >= NEAR and not (len(between) < 40 and _JOIN.fullmatch(between)):
            break
        group.append(box)
    contents = list(dict.fromkeys(content.strip() for _, _, content in reversed(group)))
    if not contents[-1]:
        return True, None
    return True, ", ".join(content for content in contents if content)


def _groups(text: str) -> dict[int, int]:
    """Where the group that opens at each brace ends; in one pass, whatever the text holds."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.end()
    return ends


def _after_phrase(text: str) -> str | None:
    found = deque(_PHRASE.finditer(text), maxlen=1)
    if not found:
        return None
    last = found[0]
    rest = text[last.end() : last.end() + 2 * MAX_ANSWER].strip(" \t*:\uff1a\n")
    line = rest.split("\n", 1)[0]
    line = re.sub(r"\s*I hope it is correct\.?\s*$", "", line).strip(" \t*")
    formulas = FORMULA.findall(line)
    if formulas:
        outside = FORMULA.sub(" ", line)
        if len(outside.strip(" .,;:")) < 40 and len(formulas) == 1:
            extra = re.match(r"^\s*([a-zA-Z ]{2,30})?[.,;]?\s*$", outside)
            unit = (extra.group(1) or "").strip() if extra else ""
            body = "".join(formulas[0]).strip()
            return _nonempty(f"{body} {unit}" if unit and line.startswith(("$", "\\(")) else body)
        return _nonempty(", ".join("".join(parts).strip() for parts in formulas))
    line = re.split(r"(?<=[\w)}%])\.\s+[A-Z]", line, maxsplit=1)[0]
    return _nonempty(line.rstrip(" .*"))


def _last_formula(text: str) -> str | None:
    """The last formula; formulas joined by "and", "or" or a comma are one list."""
    window = text[-2 * MAX_ANSWER :]
    found = list(FORMULA.finditer(window))
    if not found:
        return None
    group = [found[-1]]
    for match in reversed(found[:-1]):
        between = window[match.end() : group[-1].start()]
        if not re.fullmatch(r"\s*(?:,|and|or|,\s*and|,\s*or)\s*", between):
            break
        group.append(match)
    parts = ["".join(p or "" for p in match.groups()).strip() for match in reversed(group)]
    return _nonempty(", ".join(part for part in parts if part))


def _last_number(text: str) -> str | None:
    found = deque((m["n"] for m in _NUMBER.finditer(text) if re.search(r"\d", m[0])), maxlen=1)
    return found[0].replace("$", "").strip() if found else None
