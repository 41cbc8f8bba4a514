"""Numbers in words."""

from __future__ import annotations

_ONES = {
    word: number
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen".split()
    )
}
_TENS = {
    word: 10 * number
    for number, word in enumerate(
        "twenty thirty forty fifty sixty seventy eighty ninety".split(), start=2
    )
}
SCALES = {"thousand": 1000, "million": 10**6, "billion": 10**9}
COUNTS = {"dozen": 12, "hundred": 100} | SCALES
_PHRASES = {
    "one half": r"\frac{1}{2}", "half": r"\frac{1}{2}", "one third": r"\frac{1}{3}",
    "two thirds": r"\frac{2}{3}", "one fourth": r"\frac{1}{4}", "one quarter": r"\frac{1}{4}",
    "three fourths": r"\frac{3}{4}", "three quarters": r"\frac{3}{4}", "infinity": r"\infty",
    "negative infinity": r"-\infty",
}  # fmt: skip
# Behind a number these are no unit: they change its value, or make of it no single one.
NOT_UNITS = set(
    "squared cubed pi half halves quarter quarters third thirds fourth fourths fifth fifths sixth "
    "sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths "
    "thousandth thousandths less more fewer factorial plus minus times root and or so than to by "
    "not about over under import power mod modulo if when where unless except but else dozen "
    "dozens score twice double triple negative is isn are wrong no wait".split()
) | set(COUNTS)


def number(words: str) -> str | None:
    """``twenty-one`` as "21", ``two thirds`` as a fraction; None if the words are no number."""
    if words in _PHRASES:
        return _PHRASES[words]
    parts = words.replace("-", " ").split()
    sign = "-" if parts and parts[0] in ("negative", "minus") else ""
    value = _whole(parts[len(sign) :])
    return None if value is None else f"{sign}{value}"


def _whole(parts: list[str]) -> int | None:
    """Value of "one hundred twenty one", "two thousand five"; None for any other order."""
    total, group, last = 0, 0, 10**12
    seen = False
    for place, word in enumerate(parts):
        if word == "and" and 0 < place < len(parts) - 1 and group % 100 == 0 < group:
            continue
        if word in _ONES and (group == 0 and not seen or (group % 10 == 0 and _fits(group, word))):
            group += _ONES[word]
        elif word in _TENS and group % 100 == 0:
            group += _TENS[word]
        elif word == "hundred" and 0 < group < 10:
            group *= 100
        elif word in SCALES and 0 < group and SCALES[word] < last:
            last = SCALES[word]
            total, group = total + group * last, 0
        else:
            return None
        seen = True
    return total + group if seen else None


def _fits(group: int, word: str) -> bool:
    """Whether a word for 0 to 19 may follow: 1 to 9 after tens, 1 to 19 after hundreds."""
    tens = group % 100
    return 0 < _ONES[word] < 10 if tens >= 20 else tens == 0 < _ONES[word]
