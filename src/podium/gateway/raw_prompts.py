# SPDX-License-Identifier: Apache-2.0
"""Prompts of raw text or token ids: what a session has recorded of them, and which recorded turn one extends."""

# T tokens of a prompt

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Generic, TypeVar

import numpy as np

from podium.data.documents import Tokens

RawPrompt = str | Tokens
"""A text, or token ids."""

T = TypeVar("T")


class RawTokens:
    """The tokens of raw text so far. Its pieces are shared with the prompts that continue it."""

    def __init__(self, pieces: tuple[Tokens, ...]) -> None:
        self.pieces = tuple(piece for piece in pieces if len(piece))
        self._length = sum(map(len, self.pieces))

    @property
    def tokens_T(self) -> Tokens:
        """All of them."""
        return np.concatenate(self.pieces)

    def __len__(self) -> int:
        return self._length


class PrefixIndex(Generic[T]):
    """Values by what a prompt begins with. Keeps digests, and not what they are of."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, T] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, data: bytes, value: T) -> None:
        """The newest value of equal data counts."""
        digest = hashlib.sha256(data).digest()
        if digest not in self._by_digest:
            self._lengths[len(data)] += 1
        self._by_digest[digest] = value

    def longest(self, data: bytes) -> tuple[T, int] | None:
        """The value of the longest beginning that is known, and its length."""
        hashed, at, found = hashlib.sha256(), 0, None
        for length in sorted(self._lengths):
            if length > len(data):
                break
            hashed.update(data[at:length])
            at = length
            value = self._by_digest.get(hashed.copy().digest())
            if value is not None:
                found = value, length
        return found


def text_bytes(text: str) -> bytes:
    """A text as the key of an index. The beginning of a text is that of its bytes."""
    return text.encode("utf-8", "surrogatepass")


def token_bytes(tokens_T: Tokens) -> bytes:
    """Tokens as the key of an index."""
    return np.ascontiguousarray(tokens_T, np.int32).tobytes()
