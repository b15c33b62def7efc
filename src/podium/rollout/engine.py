# SPDX-License-Identifier: Apache-2.0
"""The protocol of rollout engines. Callers talk to this and do not know which engine is behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from podium.data.trajectories import TrajectoryId
from podium.rollout.requests import Completion, Request

if TYPE_CHECKING:
    from podium.weights.transports import Delivery
    from podium.weights.versions import WeightVersion

InFlight = Literal["recompute", "keep"]
"""What an update does to answers under way. `recompute`: their cache is computed anew, so that every later token is
sampled from the new weights exactly as the learner would score it. `keep`: it is kept, which is cheaper and leaves keys
and values of older weights under newer tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What an engine can hold."""

    vocab_size: int
    max_length: int  # prompt and answer together
    max_running: int  # answers that are sampled at the same time
    cache_tokens: int
    cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine is doing; counters only ever grow."""

    waiting: int
    running: int
    cache_tokens_used: int  # held by answers under way, a shared prompt counted once
    cache_tokens_kept: int  # of finished ones, given up when room is needed
    finished: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int  # prompt tokens that needed no prefill
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """What falling asleep gave back, or waking took: as the device says, and as the engine's own accounting says."""

    measured_bytes: int  # 0 where the device cannot tell (CPU)
    accounted_bytes: int


class RolloutEngine(Protocol):
    """One model that answers requests.

    `results` does the work, in the thread that iterates over it; every other method may be called from any thread at
    the same time and takes effect between two steps of the engine. A request that cannot be served comes back as a
    completion with `finish="error"`; the others go on.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests. An id that is already under way is an error of the caller."""

    def results(self, *, deadline_s: float) -> Iterator[Completion]:
        """Answers as they finish, in that order, until none is left. `deadline_s` bounds the wait for progress: an
        engine that is paused or asleep and stays so for longer raises, and says why."""

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        """Ends these answers with what has been sampled so far; ids that are not under way are left alone."""

    def pause(self) -> None:
        """Samples no more tokens until `resume`. What is under way keeps its place and its cache."""

    def resume(self) -> None:
        """Continues after `pause`."""

    def install(self, version: WeightVersion, delivery: Delivery | None, *, in_flight: InFlight = "recompute") -> None:
        """Takes weights of `version`, between two steps. None: they are in place already (the learner's own tensors).
        The fingerprint is computed on this side and compared; where it differs this raises, names the tensors, and the
        engine refuses to generate until weights are installed that are right."""

    @property
    def version(self) -> int:
        """Number of the weights that sample now."""

    def sleep(self) -> MemoryChange:
        """Frees the device memory that generation needs and training does not. Answers under way keep their tokens and
        are computed anew after waking."""

    def wake(self) -> MemoryChange:
        """Takes it back."""

    @property
    def capacity(self) -> Capacity:
        """Sizes of context, vocabulary and cache."""

    def load(self) -> Load:
        """How busy the engine is."""

    def close(self) -> None:
        """Ends the engine and frees all it holds."""
