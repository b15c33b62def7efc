# SPDX-License-Identifier: Apache-2.0
"""Whether the newest token of a sequence completes one of its stop strings. Pure but for the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podium.data.documents import Tokens

Decode = Callable[[Sequence[int]], str]

# What decoders put where bytes are no whole character.
_NO_CHARACTER = "\ufffd"
# A character is at most so many tokens.
_MOST_TOKENS = 4


def completed_string(sequence: Tokens, strings: Sequence[str], decode: Decode) -> str | None:
    """The string that the last token has completed; one that was there before does not count. Only the end of the
    sequence is decoded: as much as holds the longest string and what it begins in."""
    longest = max(map(len, strings))
    first = max(0, len(sequence) - _MOST_TOKENS * (longest + 1))
    text = decode(sequence[first:].tolist())
    # Begun inside a character, or too short, because special tokens have no text.
    while first > 0 and (text.startswith(_NO_CHARACTER) or len(text) < longest):
        first = max(0, first - _MOST_TOKENS)
        text = decode(sequence[first:].tolist())
    before = decode(sequence[first:-1].tolist())
    return next((string for string in strings if text.count(string) > before.count(string)), None)
