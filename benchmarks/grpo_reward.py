# SPDX-License-Identifier: Apache-2.0
"""The reward of the GRPO benchmark, in TRL's signature, which Podium takes as it is."""

from __future__ import annotations

from typing import Any


def small_digits(completions: list[str], **_: Any) -> list[float]:
    """The share of words that end in a digit below 5."""
    return [_share(text.split()) for text in completions]


def _share(words: list[str]) -> float:
    return sum(word[-1] in "01234" for word in words) / max(1, len(words))
