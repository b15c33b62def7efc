# SPDX-License-Identifier: Apache-2.0
"""Whether the newest token of a sequence completes one of its stop strings. Pure but for the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podium.data.documents import Tokens

Decode = Callable[[Sequence[int]], str]

# Decoders put this where bytes are no complete character.
_NO_CHARACTER = "\ufffd"
# Most tokens of one character.
_MOST_TOKENS = 4


def completed_string(sequence: Tokens, strings: Sequence[str], decode: Decode) -> str | None:
    """The stop string that the last token completed; a string completed earlier does not count. Decodes only the end of
    the sequence: enough for the longest string and the token in which it begins."""
    longest = max(map(len, strings))
    first = max(0, len(sequence) - _MOST_TOKENS * (longest + 1))
    text = decode(sequence[first:].tolist())
    # It began inside a character, or is too short, because special tokens have no text.
    while first > 0 and (text.startswith(_NO_CHARACTER) or len(text) < longest):
        first = max(0, first - _MOST_TOKENS)
        text = decode(sequence[first:].tolist())
    before = decode(sequence[first:-1].tolist())
    return next((string for string in strings if text.count(string) > before.count(string)), None)
