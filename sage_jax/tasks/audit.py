"""Questions of known worth, for checking a Critic: a sound one and the same one broken."""

import re
from random import Random


def audit_questions(question: str, name: str) -> tuple[str, ...]:
    """(question, broken question), or () where there is no number to break.

    `name` is the stream of randomness: equal names break equal questions alike.
    """
    if not re.search(r"\d", question):
        return ()
    rng = Random(name)
    return question, break_question(question, rng.choice(("removed", "contradicted")), rng)


def break_question(text: str, kind: str, rng: Random) -> str:
    """`text` made unsound: one number "removed" (`some`) or "contradicted" (`7 or 9`).

    Works on any text with a number; raises ValueError where there is none, or for another kind.
    """
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        raise ValueError(f"question has no number to break: {text!r}")
    hit = rng.choice(numbers)
    if kind == "removed":
        new = "some"
    elif kind == "contradicted":
        new = f"{hit[0]} or {(int(hit[0]) + rng.randrange(1, 9)) % 10}"
    else:
        raise ValueError(f"kind must be removed or contradicted, got {kind!r}")
    return text[: hit.start()] + new + text[hit.end() :]
