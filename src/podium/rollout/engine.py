# SPDX-License-Identifier: Apache-2.0
"""The protocol of rollout engines. Callers use it without knowing which engine is behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Tokens
from podium.data.trajectories import TrajectoryId
from podium.rollout.requests import Completion, PartialAnswer, Request

if TYPE_CHECKING:
    from podium.weights.transports import Delivery
    from podium.weights.versions import WeightVersion

InFlight = Literal["recompute", "keep"]
"""What an update does to running answers. `recompute`: their KV cache is computed again, so that every later token is
sampled from the new weights exactly as the learner would score it. `keep`: the cache is kept, which is cheaper but
leaves keys and values of older weights under newer tokens."""


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
    """The state of an engine; counters never decrease."""

    waiting: int
    running: int
    cache_tokens: int  # that the cache can hold
    cache_tokens_used: int  # held by running answers, a shared prompt counted once
    cache_tokens_kept: int  # of finished answers, evicted when room is needed
    finished: int
    generated_tokens: int
    prefilled_tokens: int
    reused_tokens: int  # prompt tokens that needed no prefill
    preemptions: int
    steps: int = 0
    lane_steps: int = 0  # sequences that were advanced, over all steps
    prefill_s: float = 0.0  # in steps that prefill, which may decode too
    proposed_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of these


def speculation_counts(before: Load, after: Load) -> dict[str, float]:
    """What speculation did between two looks at an engine, for metrics; empty if it has never proposed a token."""
    if not after.proposed_tokens:
        return {}
    return {
        "proposed_tokens": float(after.proposed_tokens - before.proposed_tokens),
        "accepted_tokens": float(after.accepted_tokens - before.accepted_tokens),
        "lane_steps": float(after.lane_steps - before.lane_steps),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """Memory that sleeping freed, or waking took: as the device reports it, and by the engine's own accounting."""

    measured_bytes: int  # 0 if the device does not report it (CPU)
    accounted_bytes: int


class RolloutEngine(Protocol):
    """One model that answers requests.

    `results` does the work, in the thread that iterates over it. Every other method may be called from any thread at
    the same time, and takes effect between two steps of the engine. A request that cannot be served comes back as a
    completion with `finish="error"`; the others continue."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests. It is the caller's error to submit an id that is already running."""

    @overload
    def results(self, *, deadline_s: float) -> Iterator[Completion]: ...

    @overload
    def results(self, *, deadline_s: float, tick_s: float) -> Iterator[Completion | None]: ...

    def results(self, *, deadline_s: float, tick_s: float | None = None) -> Iterator[Completion | None]:
        """Yields answers in the order in which they finish, until none is left. `deadline_s` bounds the wait for
        progress: if the engine stays paused or asleep for longer, this raises an error with the reason. With `tick_s`
        it also yields None, about that often: the caller can do something else while nothing finishes."""

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        """Ends these answers with the tokens sampled so far; ids that are not running are ignored."""

    def pause(self) -> None:
        """Samples no more tokens until `resume`. Running answers keep their place and their cache."""

    def resume(self) -> None:
        """Continues after `pause`."""

    def install(self, version: WeightVersion, delivery: Delivery | None, *, in_flight: InFlight = "recompute") -> None:
        """Takes weights of `version`, between two steps. None: they are already in place (the learner's own tensors).
        Computes the fingerprint on this side and compares it. If it differs, this raises an error that names the
        tensors, and the engine refuses to generate until correct weights are installed."""

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""

    def sleep(self) -> MemoryChange:
        """Frees the device memory that generation needs and training does not. Running answers keep their tokens and
        are recomputed after waking."""

    def wake(self) -> MemoryChange:
        """Takes the memory again."""

    @property
    def capacity(self) -> Capacity:
        """Sizes of context, vocabulary and cache."""

    def load(self) -> Load:
        """How busy the engine is."""

    def close(self) -> None:
        """Ends the engine and frees everything it holds."""


@runtime_checkable
class ShowsPartialAnswers(Protocol):
    """An engine that shows answers before they are finished, for streaming."""

    def partial_answers(self, ids: Iterable[TrajectoryId]) -> Mapping[TrajectoryId, PartialAnswer]:
        """What has been sampled for these requests so far; those that are not running are left out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Log-probs of given tokens at temperature 1, each after all tokens before it, and the most likely token there.
    The first token follows nothing and has none, so that these are one shorter than the tokens."""

    logprobs_T: NDArray[np.float32]
    best_T: Tokens
    best_logprobs_T: NDArray[np.float32]


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that scores given tokens."""

    def score(self, tokens_T: Tokens) -> TokenScores:
        """Scores a sequence, between two steps."""
