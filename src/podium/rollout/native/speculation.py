# SPDX-License-Identifier: Apache-2.0
"""Speculation from history: proposes tokens that earlier answers to the same prompt had at the same place, and decides
how many proposals pay. Torch-free.

The engine feeds proposed tokens and samples at each of them with the random number of its position. A proposal counts
if it is the token sampled there. So tokens are those of a run without speculation, whatever is proposed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from podium.data.documents import Tokens
from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError
from podium.rollout.native.answer_history import AnswerHistory, prompt_key
from podium.rollout.native.rows import Rows, Sequence
from podium.rollout.native.suffix_index import CONTEXT, SuffixIndex

# A step with proposals must be this much faster by estimate.
_LEAST_GAIN = 1.05
# Acceptance that is assumed before any is measured, in proposals; and the number at which older ones count half.
_PRIOR_ACCEPTED, _PRIOR_TESTED = 8.0, 10.0
_MEMORY = 2048.0
# Steps without proposals, because few were accepted, until it is tried again.
_RETRY_STEPS = 64
# Of a prompt, the last so many tokens are searched too.
_PROMPT_TOKENS = 4096
# Proposals of a sequence at first. Later as many as were accepted, and more.
_FIRST_ALLOWANCE = 4


def require_speculation(device_kind: str, tokens: int) -> None:
    """Raises an error where a recipe asks for proposals and the engine's device has none yet."""
    if tokens and device_kind != "cpu":
        raise RolloutError(
            f"rollout.speculation.tokens: {tokens} proposals are asked for on {device_kind}, where verifying them has "
            "not been seen to work on hardware yet. Set it to 0, or placement.device to cpu."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Time of a step, in units of a row of its forward."""

    fixed_rows: float  # what a step takes whatever it feeds
    row_multiple: int  # rows are padded to it
    lane_rows: float  # what a sequence with proposals takes beside its rows

    def of(self, rows: int, lanes: int) -> float:
        """A step of so many rows, with proposals for so many sequences."""
        return self.fixed_rows + -(-rows // self.row_multiple) * self.row_multiple + self.lane_rows * lanes


# One thread of a CPU; graphs of one H200. See docs/decisions/033-speculation.md.
CPU_STEP = StepCost(fixed_rows=24.0, row_multiple=16, lane_rows=3.0)
CUDA_STEP = StepCost(fixed_rows=128.0, row_multiple=8, lane_rows=0.0)


def proposals_per_lane(
    lanes: int, *, acceptance: float, most: int, most_rows: int, cost: StepCost, least_gain: float = _LEAST_GAIN
) -> int:
    """How many tokens to propose for each of `lanes` sequences; 0: plain decoding is faster. `acceptance`: chance that
    a proposal is right if those before it are. `most_rows`: of one forward."""
    if lanes < 1:
        return 0
    best, rate = 0, least_gain / cost.of(lanes, 0)
    tokens = 1.0  # that a step yields for each sequence
    for count in range(1, min(most, most_rows // lanes - 1) + 1):
        tokens += acceptance**count
        if tokens / cost.of(lanes * (1 + count), lanes) > rate:
            best, rate = count, tokens / cost.of(lanes * (1 + count), lanes)
    return best


@dataclass(slots=True, eq=False)
class _Live:
    """A sequence that has not ended."""

    key: bytes
    prompt: Tokens
    text: int = -1  # in the index of its prompt
    filed: int = 0  # its tokens that are in that text, prompt included
    allowance: int = _FIRST_ALLOWANCE
    is_stopped: bool = False


@dataclass(slots=True, eq=False)
class _Group:
    """The sequences of one prompt that have not ended."""

    num_live: int = 0
    index: SuffixIndex | None = None  # built when first searched


class Speculation:
    """The history of an engine, and the proposals for its sequences. A prompt without running sequences costs 4 bytes
    for each token of its answers; an index is built when one of its sequences first asks for proposals."""

    def __init__(self, *, most: int, history_tokens: int, most_rows: int, cost: StepCost) -> None:
        """`most`: proposals for a sequence in a step. `most_rows`: rows of a forward."""
        self._most, self.most_rows, self._cost = most, most_rows, cost
        self._history = AnswerHistory(history_tokens)
        self._live: dict[TrajectoryId, _Live] = {}
        self._groups: dict[bytes, _Group] = {}
        self._accepted, self._tested = _PRIOR_ACCEPTED, _PRIOR_TESTED
        self._steps_without = 0
        self.per_lane = 0  # in this step
        self.num_proposed = self.num_accepted = 0

    @property
    def acceptance(self) -> float:
        """Measured chance that a proposal is right if those before it are."""
        return self._accepted / self._tested

    def begin_step(self, lanes: int) -> int:
        """Decides how many tokens are proposed for a sequence in the next step."""
        self.per_lane = self._pays(lanes, self.acceptance)
        if self.per_lane == 0 and self._pays(lanes, _PRIOR_ACCEPTED / _PRIOR_TESTED):
            self._steps_without += 1
            if self._steps_without >= _RETRY_STEPS:
                self._accepted, self._tested = _PRIOR_ACCEPTED, _PRIOR_TESTED
        if self.per_lane:
            self._steps_without = 0
        return self.per_lane

    def _pays(self, lanes: int, acceptance: float) -> int:
        return proposals_per_lane(
            lanes, acceptance=acceptance, most=self._most, most_rows=self.most_rows, cost=self._cost
        )

    def begin(self, sequence: Sequence) -> None:
        """A sequence has arrived."""
        key = prompt_key(sequence.request.prompt)
        self._live[sequence.id] = _Live(key, sequence.request.prompt)
        self._groups.setdefault(key, _Group()).num_live += 1

    def end(self, id: TrajectoryId, answer: Tokens) -> None:
        """A sequence has ended with these tokens; they are remembered."""
        live = self._live.pop(id, None)
        if live is None:  # it was refused
            return
        group = self._groups[live.key]
        self._history.add(live.key, answer)
        group.num_live -= 1
        if not group.num_live:
            del self._groups[live.key]
        elif group.index is not None:
            self._file(live, group.index, np.concatenate([live.prompt, answer]))

    def propose(self, sequence: Sequence, tokens: Tokens, most: int) -> list[int]:
        """At most `most` tokens that may follow the tokens of a sequence."""
        live = self._live[sequence.id]
        if live.is_stopped:
            return []
        index = self._index(live)
        self._file(live, index, tokens)
        return index.propose(live.text, min(most, self.per_lane, live.allowance))

    def note(self, id: TrajectoryId, *, proposed: int, accepted: int) -> None:
        """So many of the tokens proposed for a sequence were right."""
        self.num_proposed += proposed
        self.num_accepted += accepted
        is_wrong = accepted < proposed
        self._accepted += accepted
        self._tested += accepted + is_wrong
        if self._tested > _MEMORY:
            self._accepted, self._tested = self._accepted / 2, self._tested / 2
        live = self._live.get(id)
        if live is not None:
            live.allowance = accepted + 1 if is_wrong else min(2 * max(live.allowance, proposed), self._most)

    def stop(self, id: TrajectoryId) -> None:
        """Proposes nothing more for a sequence."""
        self._live[id].is_stopped = True

    @staticmethod
    def _file(live: _Live, index: SuffixIndex, tokens: Tokens) -> None:
        """Brings the text of a sequence up to its tokens, prompt included."""
        if live.text < 0:
            live.text, live.filed = index.add(()), max(0, len(live.prompt) - CONTEXT)
        index.extend(live.text, tokens[live.filed :].tolist())
        live.filed = len(tokens)

    def _index(self, live: _Live) -> SuffixIndex:
        group = self._groups[live.key]
        if group.index is None:
            group.index = SuffixIndex()
            group.index.add(live.prompt[-_PROMPT_TOKENS:].tolist())
            context = live.prompt[-CONTEXT:].tolist()
            for answer in self._history.answers(live.key):
                group.index.add([*context, *answer.tolist()])
        return group.index


def rounds(proposed_B: Rows, tokens_B: Tokens) -> list[Rows]:
    """Which samples of a step count, in the order in which they are appended: the first of every row, then those behind
    one right proposal, behind two, and so on. `proposed_B`: see `StepPlan`."""
    at_B = np.arange(len(proposed_B))
    first_B = np.maximum.accumulate(np.where(proposed_B < 0, at_B, -1))
    is_wrong_B = (proposed_B >= 0) & (proposed_B != np.roll(tokens_B, 1))
    counts_B = np.maximum.accumulate(np.where(is_wrong_B, at_B, -1)) < first_B
    ahead_B = at_B - first_B
    most = int(ahead_B[counts_B].max(initial=0))
    return [np.flatnonzero(counts_B & (ahead_B == number)) for number in range(most + 1)]
