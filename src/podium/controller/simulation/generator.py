# SPDX-License-Identifier: Apache-2.0
"""A device that generates: its running sequences share it evenly.

All running sequences get tokens at the same speed, so one number says how far all of them are: `work`, the tokens that
a lane has generated since the device was empty. A sequence of n tokens that starts at work w ends at work w + n, no
matter which others start and end meanwhile. Only the sequence that ends next needs a time. Torch-free."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from podium.controller.simulation.costs import GenerationCost

Pause = Literal["publish", "recompute", "switching", "learning"]
"""Why a device generates nothing although it has sequences: new weights, a KV cache that is recomputed for them, the
change between generating and learning, or an update on this device."""

Episode = tuple[int, int, int]
"""Group, sample and attempt."""

Occupation = Literal["generating", "empty"] | Pause
"""What a generator does now. empty: it has no sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One episode of a group, before it runs. `tokens`: that it still needs."""

    group: int
    attempt: int
    sample: int
    tokens: float

    @property
    def episode(self) -> Episode:
        """Which episode it is."""
        return self.group, self.sample, self.attempt


@dataclass(slots=True)
class _Running:
    sequence: Sequence
    oldest: int  # version of its first token
    began: float  # work
    began_versions: float  # work, each token times its version


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSequence:
    """A sequence that leaves a device, with the tokens that it got there: all, or those until it moved. `version_sum`:
    over these tokens, of the versions that sampled them. Without a token, `oldest` and `newest` are -1."""

    sequence: Sequence
    oldest: int
    newest: int
    version_sum: float

    def after(self, begun: EndedSequence | None) -> EndedSequence:
        """With the tokens that it got on other devices before."""
        if begun is None or begun.oldest < 0:
            return self
        if self.oldest < 0:
            return replace(begun, sequence=replace(self.sequence, tokens=begun.sequence.tokens))
        return EndedSequence(
            sequence=replace(self.sequence, tokens=self.sequence.tokens + begun.sequence.tokens),
            oldest=min(self.oldest, begun.oldest),
            newest=max(self.newest, begun.newest),
            version_sum=self.version_sum + begun.version_sum,
        )


@dataclass(slots=True, kw_only=True)
class Generator:
    """One device. Sequences beyond its lanes wait in the order in which they came."""

    name: str
    lanes: int
    cost: GenerationCost
    version: int = 0
    is_lent: bool = False  # a device of the learner
    pause: Pause | None = None
    num_pauses: int = 0  # so that the end of a pause can tell whether another has begun meanwhile
    plan: int = 0  # rises when the time of the next end changes
    _now_s: float = 0.0
    _work: float = 0.0
    _version_work: float = 0.0  # work, each token times its version
    _began_sum: float = 0.0  # over the running sequences
    _waiting: deque[Sequence] = field(default_factory=deque)
    _running: list[tuple[float, int, _Running]] = field(default_factory=list)  # a heap by the work at their end
    _num_begun: int = 0

    @property
    def num_running(self) -> int:
        """Sequences in lanes, also while it pauses."""
        return len(self._running)

    @property
    def num_open(self) -> int:
        """Sequences in lanes, and those that wait for one."""
        return len(self._running) + len(self._waiting)

    @property
    def occupation(self) -> Occupation:
        """What it does now."""
        return self.pause or ("generating" if self._running else "empty")

    @property
    def recompute_s(self) -> float:
        """Seconds to compute the KV cache of all running sequences again. Prompts are not counted."""
        tokens = len(self._running) * self._work - self._began_sum
        return max(tokens, 0.0) / self.cost.prefill_tokens_s

    def advance(self, now_s: float) -> None:
        """Generates until now. Call it before every change."""
        if self.pause is None and self._running:
            tokens = (now_s - self._now_s) / self.cost.token_s(len(self._running))
            self._work += tokens
            self._version_work += tokens * self.version
        self._now_s = now_s

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes further sequences."""
        self._waiting.extend(sequences)
        self._fill()

    def next_end_s(self) -> float | None:
        """When the next sequence ends, if nothing changes until then; None if none does."""
        if self.pause is not None or not self._running:
            return None
        left = max(self._running[0][0] - self._work, 0.0)
        return self._now_s + left * self.cost.token_s(len(self._running))

    def end_next(self) -> EndedSequence:
        """Takes the sequence that ends now out of its lane. The next one that waits gets the lane."""
        ends, _, running = heapq.heappop(self._running)
        self._version_work += (ends - self._work) * self.version  # a rounding error
        self._work = ends
        self._began_sum -= running.began
        ended = EndedSequence(
            sequence=running.sequence,
            oldest=running.oldest,
            newest=self.version,
            version_sum=self._version_work - running.began_versions,
        )
        if not self._running:  # keeps the numbers small, and so exact
            self._work = self._version_work = self._began_sum = 0.0
        self._fill()
        return ended

    def take_out(self, episodes: Container[Episode] | None = None) -> list[EndedSequence]:
        """Takes sequences out before their end, those of these episodes or all. Lanes that are free then are filled."""
        taken = [each for each in self._running if episodes is None or each[2].sequence.episode in episodes]
        left = [each for each in self._waiting if episodes is None or each.episode in episodes]
        out = [*(self._unfinished(running) for _, _, running in taken), *map(_not_begun, left)]
        gone = {each.sequence.episode for each in out}
        self._running = [each for each in self._running if each[2].sequence.episode not in gone]
        heapq.heapify(self._running)
        self._waiting = deque(each for each in self._waiting if each.episode not in gone)
        self._began_sum -= sum(running.began for _, _, running in taken)
        if not self._running:
            self._work = self._version_work = self._began_sum = 0.0
        self._fill()
        return out

    def _unfinished(self, running: _Running) -> EndedSequence:
        """What a sequence has so far: whole tokens."""
        tokens = min(float(int(self._work - running.began)), running.sequence.tokens - 1.0)
        if tokens < 1:
            return _not_begun(running.sequence)
        share = tokens / (self._work - running.began)
        return EndedSequence(
            sequence=replace(running.sequence, tokens=tokens),
            oldest=running.oldest,
            newest=self.version,
            version_sum=(self._version_work - running.began_versions) * share,
        )

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.lanes:
            sequence = self._waiting.popleft()
            running = _Running(sequence, self.version, self._work, self._version_work)
            self._began_sum += self._work
            self._num_begun += 1
            heapq.heappush(self._running, (self._work + sequence.tokens, self._num_begun, running))


def _not_begun(sequence: Sequence) -> EndedSequence:
    return EndedSequence(sequence=replace(sequence, tokens=0.0), oldest=-1, newest=-1, version_sum=0.0)
