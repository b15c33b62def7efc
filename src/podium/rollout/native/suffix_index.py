# SPDX-License-Identifier: Apache-2.0
"""Finds where the end of a sequence has occurred before, in texts that share a prompt, and what followed there. Pure.

Every position of every text is filed under the three tokens that end there, linked to the position that was filed there
before. A search walks these links, newest first, and takes the place where most tokens before it agree."""

from __future__ import annotations

from collections.abc import Iterable

# Tokens that must agree at least: with fewer, most continuations are wrong.
GRAM = 3
# Tokens of the prompt in front of an answer, so that its first tokens can be found too.
CONTEXT = 8
# Most places and most tokens before each that a search compares.
_CANDIDATES = 32
_LONGEST = 64
# A place is text * 2^32 + position; a gram is three tokens of 21 bits.
_TEXT_BITS = 32
_TOKEN_BITS = 21
_NO_PLACE = -1


class SuffixIndex:
    """Some growing texts of one prompt."""

    def __init__(self, *, candidates: int = _CANDIDATES, longest: int = _LONGEST) -> None:
        """`candidates`, `longest`: see the constants; larger ones search more thoroughly."""
        self._candidates, self._longest = candidates, longest
        self._texts: list[list[int]] = []
        self._earlier: list[list[int]] = []  # of each position: the place filed under the same gram before
        self._latest: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self._texts))

    def add(self, tokens: Iterable[int]) -> int:
        """Adds a text and returns its number."""
        self._texts.append([])
        self._earlier.append([])
        text = len(self._texts) - 1
        self.extend(text, tokens)
        return text

    def extend(self, text: int, tokens: Iterable[int]) -> None:
        """Appends tokens to a text."""
        own, earlier, latest = self._texts[text], self._earlier[text], self._latest
        first = len(own)
        own.extend(tokens)
        base = text << _TEXT_BITS
        for at in range(first, len(own)):
            if at < GRAM - 1:
                earlier.append(_NO_PLACE)
                continue
            gram = _gram(own, at)
            earlier.append(latest.get(gram, _NO_PLACE))
            latest[gram] = base + at

    def propose(self, text: int, most: int) -> list[int]:
        """At most `most` tokens that may follow a text: those after the longest earlier occurrence of its end, the
        newest of equally long ones. Where that continuation runs into the end of the text itself, it is repeated."""
        own = self._texts[text]
        if len(own) < GRAM or most < 1:
            return []
        place, best, best_length = self._latest[_gram(own, len(own) - 1)], _NO_PLACE, GRAM - 1
        for _ in range(self._candidates):
            if place == _NO_PLACE:
                break
            other, at = place >> _TEXT_BITS, place & ((1 << _TEXT_BITS) - 1)
            if at + 1 < len(self._texts[other]):  # something follows
                length = self._agreeing(own, self._texts[other], at)
                if length > best_length:
                    best, best_length = place, length
                    if length >= self._longest:
                        break
            place = self._earlier[other][at]
        return [] if best == _NO_PLACE else self._continuation(text, best, most)

    def _agreeing(self, own: list[int], other: list[int], at: int) -> int:
        """How many tokens that end a text are those that end at a position of another, or of itself."""
        most = min(self._longest, at + 1, len(own))
        end, length = len(own) - 1, 0
        while length < most and own[end - length] == other[at - length]:
            length += 1
        return length

    def _continuation(self, text: int, place: int, most: int) -> list[int]:
        other, at = place >> _TEXT_BITS, place & ((1 << _TEXT_BITS) - 1)
        tokens = self._texts[other][at + 1 : at + 1 + most]
        if other == text:  # a loop: what is proposed continues the text that it is read from
            while len(tokens) < most:
                tokens.append(tokens[len(tokens) - (len(self._texts[text]) - at - 1)])
        return tokens


def _gram(tokens: list[int], at: int) -> int:
    return (((tokens[at - 2] << _TOKEN_BITS) | tokens[at - 1]) << _TOKEN_BITS) | tokens[at]
