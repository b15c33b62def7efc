# SPDX-License-Identifier: Apache-2.0
"""Keeps finished answers by their prompt, as plain tokens, within a bound. Pure."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from podium.data.documents import Tokens

# Of one prompt: a few epochs of a group.
_MOST_ANSWERS = 32


def prompt_key(prompt: Tokens) -> bytes:
    """Stands for a prompt: a hash of its tokens."""
    return blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=16).digest()


class AnswerHistory:
    """The newest different answers of each prompt. Beyond `most_tokens` the prompts that were answered longest ago are
    forgotten."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._answers: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()
        self.num_tokens = 0

    def add(self, key: bytes, answer: Tokens) -> None:
        """Remembers an answer as the newest of its prompt."""
        if len(answer) == 0 or len(answer) > self._most_tokens:
            return
        known = self._answers.setdefault(key, OrderedDict())
        self._answers.move_to_end(key)
        packed = np.ascontiguousarray(answer, np.int32).tobytes()
        if packed in known:
            known.move_to_end(packed)
            return
        known[packed] = None
        self.num_tokens += len(answer)
        if len(known) > _MOST_ANSWERS:
            self._count_out(known.popitem(last=False)[0])
        while self.num_tokens > self._most_tokens:
            oldest = next(iter(self._answers))
            self._count_out(self._answers[oldest].popitem(last=False)[0])
            if not self._answers[oldest]:
                del self._answers[oldest]

    def answers(self, key: bytes) -> list[Tokens]:
        """Answers to a prompt, the oldest first."""
        return [np.frombuffer(packed, np.int32) for packed in self._answers.get(key, ())]

    def _count_out(self, packed: bytes) -> None:
        self.num_tokens -= len(packed) // np.dtype(np.int32).itemsize
