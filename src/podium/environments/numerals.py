# SPDX-License-Identifier: Apache-2.0
"""The number that a text ends with, as people and models write numbers."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

# A model can write anything: `1e999999999` must not be computed, nor a million digits converted.
_MOST_DIGITS = 400
_LARGEST_EXPONENT = 400

# Possessive quantifiers (++) throughout: no answer can cause backtracking.
_PLAIN = r"(?:(?>\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?+|(?<!\.)\.\d++)"
_TIMES = r"\s*+(?:×|[xX*]|\\times|\\cdot)\s*+"


def _power(name: str) -> str:
    return r"10\s*+(?:\^|\*\*)\s*+\{?+\s*+(?P<" + name + r">[-+]?+\d++)\s*+\}?+"


def _braced(name: str) -> str:
    return r"\{\s*+(?P<" + name + r">[-+]?+" + _PLAIN + r")\s*+\}"


_NUMBER = re.compile(
    # A sign stands alone or before a currency; in 3-4 and (x)-4 the minus is an operation.
    r"(?P<sign>(?<![\w)\]}])[-+])?(?:\\?[$€£])?"
    # Not the 2 of x2, cm^2 and cm^{2}, and not the parts of 1.2.3.
    r"(?<![A-Za-z_\d])(?<!\d\.)(?<!\^)(?<!\^-)(?<!\^\{)(?<!\^\{-)"
    r"(?:"
    r"(?P<whole>\d++)?\\frac\s*+(?:" + _braced("upper") + r"\s*+" + _braced("lower") + r"|(?P<pair>\d\d))"
    r"|" + _power("alone") +
    # 3/4, but not the parts of the date 3/4/2025.
    r"|(?<!/)(?P<above>" + _PLAIN + r")\s?+/\s?+(?P<below>" + _PLAIN + r")(?!\s?/\s?\d)"
    r"|(?P<plain>" + _PLAIN + r")(?:[eE](?P<exponent>[-+]?+\d++)|" + _TIMES + _power("power") + r")?+"
    r")\s*+(?P<percent>%)?",
    re.ASCII,
)  # fmt: skip
_LATEX = re.compile(r"\{,\}|\\[,!;: ]|\\[dt]frac|\\%|\u2212")
_LATEX_PLAIN = {"{,}": ",", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\%": "%", "\u2212": "-"}
_BRACES = re.compile(r"\\(?:boxed|fbox)\{|\{|\}")
_MARK = "####"


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value; `percent` if a percent sign follows it, which is not applied."""

    value: Fraction
    percent: bool

    def is_near(self, other: Number, tolerance: float) -> bool:
        """Equal up to `tolerance`. If only one of them has a percent sign, 50% matches 50 and 0.5."""
        limit = Fraction(tolerance)
        if abs(self.value - other.value) <= limit:
            return True
        if self.percent == other.percent:
            return False
        mine = self.value / 100 if self.percent else self.value
        theirs = other.value / 100 if other.percent else other.value
        return abs(mine - theirs) <= limit


def final_number(text: str) -> Number | None:
    """The last number of the last \\boxed{}, else of the line behind the last ####, else of the whole text."""
    box = last_box(text)
    if box is not None:
        return _last_number(box)
    if _MARK in text:
        return _last_number(text.rpartition(_MARK)[2].strip().partition("\n")[0])
    return _last_number(text)


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{...} that is closed; braces inside it count."""
    open_at: list[int] = []  # of every brace that is open: where a box's content begins, or -1
    begin, end = -1, -1
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            if open_at and (opened := open_at.pop()) > begin:
                begin, end = opened, brace.start()
        else:
            open_at.append(-1 if brace[0] == "{" else brace.end())
    return None if begin < 0 else text[begin:end]


def _last_number(text: str) -> Number | None:
    plain = _LATEX.sub(lambda match: _LATEX_PLAIN.get(match[0], ""), text)
    last = next(iter(deque(_NUMBER.finditer(plain), maxlen=1)), None)
    if last is None or last.end() - last.start() > _MOST_DIGITS:
        return None
    value = _value(last)
    if value is None:
        return None
    return Number(-value if last["sign"] == "-" else value, last["percent"] is not None)


def _value(match: re.Match[str]) -> Fraction | None:
    if match["upper"] is not None or match["pair"] is not None:
        pair = match["pair"]
        part = _ratio(pair[0], pair[1]) if pair is not None else _ratio(match["upper"], match["lower"])
        return None if part is None else part + int(match["whole"] or 0)
    if match["above"] is not None:
        return _ratio(match["above"], match["below"])
    mantissa = "1" if match["alone"] is not None else match["plain"]
    exponent = int(match["alone"] or match["exponent"] or match["power"] or 0)
    if abs(exponent) > _LARGEST_EXPONENT:
        return None
    return _fraction(mantissa) * Fraction(10) ** exponent


def _ratio(upper: str, lower: str) -> Fraction | None:
    below = _fraction(lower)
    return None if below == 0 else _fraction(upper) / below


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
