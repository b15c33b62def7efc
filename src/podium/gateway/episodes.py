# SPDX-License-Identifier: Apache-2.0
"""The record of a session as the tokens of an episode: one sequence for each branch, each sampled token trained once.

A turn that several branches continue is sampled in the first of them and context in the others. That is the same as to
train it in each of n branches with weight 1 / n, because its log-probs depend only on what stands before it."""

# T tokens of all sequences, one after the other

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Mask, Tokens
from podium.errors import InvariantError
from podium.gateway.branches import Branch, SessionRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionSequences:
    """The token sequences of one episode."""

    tokens_T: Tokens
    sampled_T: Mask  # in the first sequence that has the token
    behavior_logprobs_T: NDArray[np.float32]  # 0 where not sampled
    versions_T: Tokens  # -1 where not sampled
    starts: tuple[int, ...]  # of all sequences but the first
    turns: tuple[int, ...]  # numbers of the session's turns, once for each
    turn_ends: tuple[int, ...]  # where the last token of each of them is
    parents: tuple[int, ...]  # the turn that each one continues, by its place here; -1: it begins a conversation
    num_prompt_tokens: int  # before the first answer


def sequences_of(record: SessionRecord) -> SessionSequences:
    """The sequences of a session. The one with the last answer comes last. Otherwise, and of several last answers that
    were sampled at the same time, tokens decide the order, so that it does not depend on time. Raises an InvariantError
    unless exactly the sampled tokens are trained."""
    branches = sorted(
        record.branches, key=lambda each: (each.turns[-1] >= record.last_turns_from, each.tokens_T.tobytes())
    )
    turns = _Turns()
    masks: list[Mask] = []
    starts: list[int] = []
    first = 0
    for branch in branches:
        masks.append(turns.new_tokens(branch, first))
        starts.append(first)
        first += len(branch.tokens_T)
    sampled_T = np.concatenate([*masks, np.zeros(0, np.bool_)])
    if int(sampled_T.sum()) != record.sampled_tokens:
        raise InvariantError(f"{int(sampled_T.sum())} tokens are trained and {record.sampled_tokens} were sampled.")
    logprobs_T = np.concatenate([*(branch.behavior_logprobs_T for branch in branches), np.empty(0, np.float32)])
    versions_T = np.concatenate([*(branch.versions_T for branch in branches), np.empty(0, np.int32)])
    return SessionSequences(
        tokens_T=np.concatenate([*(branch.tokens_T for branch in branches), np.empty(0, np.int32)]),
        sampled_T=sampled_T,
        behavior_logprobs_T=np.where(sampled_T, logprobs_T, 0).astype(np.float32),
        versions_T=np.where(sampled_T, versions_T, -1).astype(np.int32),
        starts=tuple(starts[1:]),
        turns=tuple(turns.places),
        turn_ends=tuple(turns.ends),
        parents=tuple(turns.parents),
        num_prompt_tokens=int(np.argmax(sampled_T)) if len(sampled_T) else 0,
    )


class _Turns:
    """The turns of all branches so far, each once, in the order of their tokens."""

    def __init__(self) -> None:
        self.places: dict[int, int] = {}  # by number
        self.ends: list[int] = []
        self.parents: list[int] = []

    def new_tokens(self, branch: Branch, first: int) -> Mask:
        """Mask of a branch's sampled tokens that no branch before has. Adds its turns. `first`: where it begins."""
        mask_T, begin, parent = branch.loss_mask_T.copy(), 0, -1
        for turn, end in zip(branch.turns, branch.turn_ends, strict=True):
            if turn in self.places:
                mask_T[begin : end + 1] = False
            else:
                self.places[turn] = len(self.places)
                self.ends.append(first + end)
                self.parents.append(parent)
            begin, parent = end + 1, self.places[turn]
        return mask_T
