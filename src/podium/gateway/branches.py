# SPDX-License-Identifier: Apache-2.0
"""A tree of turns as branches to train on: one token sequence for each last turn, and each token's share."""

# T tokens of one branch · L tokens of one answer

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Mask, Tokens
from podium.errors import InvariantError

if TYPE_CHECKING:
    from podium.gateway.recorder import RecordedTurn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """The tokens from a root to a turn that nothing followed.

    `weights_T` is 1 / (branches with this sampled token), 0 where nothing was sampled: over all branches, every sampled
    token weighs 1. `fraction` is one number for the whole branch: a turn's share, divided equally among those that
    follow it. The fractions of the branches with a common prefix add up to 1."""

    tokens_T: Tokens
    loss_mask_T: Mask  # sampled
    behavior_logprobs_T: NDArray[np.float32]  # 0 where not sampled
    versions_T: Tokens  # -1 where not sampled
    weights_T: NDArray[np.float32]
    fraction: Fraction
    turns: tuple[int, ...]  # numbers of its turns
    turn_ends: tuple[int, ...]  # position of each answer's last token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRecord:
    """What one episode has sampled."""

    branches: tuple[Branch, ...]
    sampled_tokens: int  # of all answers
    discarded_tokens: int  # of requests that were cancelled: nobody has seen them
    turns: int
    last_turns_from: int  # no request came after the answer of this turn or of a later one
    requests: int  # without repeated ones
    repeated_requests: int  # answered from the record
    rerendered_requests: int  # the template rewrites earlier turns, so a history that extends began a new root
    answered: tuple[tuple[int, ...], ...] = ()  # turns of each answered request, in the order of the requests
    turns_by_id: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by the id that the client got

    @property
    def trained_tokens(self) -> int:
        """Sampled tokens of all branches, those of a shared prefix once."""
        seen = set()
        for branch in self.branches:
            begin = 0
            for turn, end in zip(branch.turns, branch.turn_ends, strict=True):
                seen.add((turn, int(branch.loss_mask_T[begin : end + 1].sum())))
                begin = end + 1
        return sum(count for _, count in seen)

    def counted(self) -> Self:
        """This record. Raises an InvariantError unless its branches train exactly what was sampled."""
        if self.trained_tokens != self.sampled_tokens:
            raise InvariantError(
                f"the branches of a session train {self.trained_tokens} tokens, and {self.sampled_tokens} were sampled."
            )
        return self


def branches_of(roots: Sequence[RecordedTurn]) -> tuple[Branch, ...]:
    """One branch for each turn that nothing followed, in the order of the tree."""
    return tuple(branch for root in roots for branch in _below([root], Fraction(1)))


def _below(root: list[RecordedTurn], share: Fraction) -> Iterator[Branch]:
    """Without recursion: an episode may have thousands of turns."""
    leaves: dict[int, int] = {}
    for turn in reversed(list(_walk(root[0]))):
        leaves[turn.number] = sum(leaves[child.number] for child in turn.children) or 1
    waiting: list[tuple[tuple[RecordedTurn, ...], Fraction]] = [((root[0],), share)]
    while waiting:
        path, fraction = waiting.pop()
        children = path[-1].children
        if not children:
            yield _branch(path, fraction, leaves)
        waiting += [((*path, child), fraction / len(children)) for child in reversed(children)]


def _walk(root: RecordedTurn) -> Iterator[RecordedTurn]:
    """Parents before their children."""
    waiting = [root]
    while waiting:
        turn = waiting.pop()
        yield turn
        waiting += turn.children


def _branch(path: Sequence[RecordedTurn], fraction: Fraction, leaves: dict[int, int]) -> Branch:
    last = path[-1]
    tokens_T = np.concatenate([last.prompt.tokens_T, last.answer.tokens_L])
    loss_mask_T = np.zeros(len(tokens_T), np.bool_)
    logprobs_T, weights_T = np.zeros(len(tokens_T), np.float32), np.zeros(len(tokens_T), np.float32)
    versions_T = np.full(len(tokens_T), -1, np.int32)
    ends = []
    for turn in path:
        begin = len(turn.prompt)
        sampled = slice(begin, begin + len(turn.answer.tokens_L))
        if not np.array_equal(tokens_T[sampled], turn.answer.tokens_L):
            raise InvariantError(f"turn {turn.number} of a session is not in its branch as it was sampled.")
        loss_mask_T[sampled] = True
        logprobs_T[sampled] = turn.answer.logprobs_L
        versions_T[sampled] = turn.answer.versions_L
        weights_T[sampled] = 1 / leaves[turn.number]
        ends.append(sampled.stop - 1)
    return Branch(
        tokens_T=tokens_T,
        loss_mask_T=loss_mask_T,
        behavior_logprobs_T=logprobs_T,
        versions_T=versions_T,
        weights_T=weights_T,
        fraction=fraction,
        turns=tuple(turn.number for turn in path),
        turn_ends=tuple(ends),
    )
