# SPDX-License-Identifier: Apache-2.0
"""Trajectories as text: the policy's turns, and in episodes of several turns the environment's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.tokenizer import answer_text
from podium.data.trajectories import TrajectoryBlock


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpisodeText:
    """One episode. `answer` is the policy's last turn; `turns` alternate between policy and environment."""

    answer: str
    turns: tuple[tuple[bool, str], ...]  # (whether the policy said it, text)
    num_sampled: int
    tokens: NDArray[np.int32]  # that the policy sampled


class TextReader:
    """Decodes sampled tokens; special tokens are left out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read(self, block: TrajectoryBlock) -> Iterator[EpisodeText]:
        """The text of each episode of a block."""
        for begin, end in zip(block.offsets[:-1].tolist(), block.offsets[1:].tolist(), strict=True):
            yield self._one(block.tokens_T[begin:end], block.versions_T[begin:end] >= 0)

    def _one(self, tokens: NDArray[np.int32], sampled: NDArray[np.bool_]) -> EpisodeText:
        places = np.flatnonzero(sampled)
        if not len(places):
            return EpisodeText(answer="", turns=(), num_sampled=0, tokens=tokens[:0])
        behind, sampled = tokens[places[0] :], sampled[places[0] :]
        edges = [0, *(np.flatnonzero(np.diff(sampled)) + 1).tolist(), len(sampled)]
        turns = tuple((bool(sampled[first]), self._text(behind[first:last])) for first, last in pairwise(edges))
        answer = next(text for is_policy, text in reversed(turns) if is_policy)
        return EpisodeText(answer=answer, turns=turns, num_sampled=len(places), tokens=behind[sampled])

    def _text(self, tokens: NDArray[np.int32]) -> str:
        return answer_text(self._tokenizer, tokens.tolist())
