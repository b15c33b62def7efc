# SPDX-License-Identifier: Apache-2.0
"""Requests to a rollout engine and their completions: token ids in, token ids out. Torch-free."""

# L new tokens of one answer

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Tokens
from podium.data.routed_experts import Experts
from podium.data.trajectories import TrajectoryId
from podium.errors import RolloutError

Finish = Literal["stop", "length", "cancelled", "error"]

# Far beyond any logit, and still finite after division by a small temperature.
_LARGEST_BIAS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled. The defaults sample from the policy itself: temperature 1, no truncation."""

    max_new_tokens: int
    min_new_tokens: int = 0  # stop tokens and stop strings do not end an answer before
    temperature: float = 1.0  # 0 takes the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the most likely token
    repetition_penalty: float = 1.0  # of every token of prompt and answer so far
    stop_tokens: frozenset[int] = frozenset()  # the one that ends an answer is part of it
    stop_strings: tuple[str, ...] = ()  # an answer ends with the token that completes one
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: frozenset[int] | None = None  # None: all

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p may leave tokens out. They change nothing at temperature 0."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def changes_the_policy(self) -> bool:
        """Whether tokens come from another distribution than softmax(logits / temperature). Temperature 0 does not
        count, though it samples nothing: an update that weighs tokens by log-probs must not train on greedy ones."""
        return (
            self.is_truncated
            or self.repetition_penalty != 1.0
            or self.min_new_tokens > 0
            or bool(self.logit_bias)
            or self.allowed_tokens is not None
        )

    def problems(self, vocab_size: int) -> Iterator[str]:
        """Errors in these values for a model of this vocabulary, one sentence each."""
        if self.max_new_tokens < 1:
            yield f"max_new_tokens is {self.max_new_tokens}; at least one token must be asked for."
        if not 0 <= self.min_new_tokens <= max(self.max_new_tokens, 0):
            yield f"min_new_tokens is {self.min_new_tokens}; it lies between 0 and max_new_tokens."
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            yield f"temperature is {self.temperature}; it is 0 (the most likely token) or a positive number."
        if self.top_k < 0:
            yield f"top_k is {self.top_k}; 0 switches it off, else it is positive."
        if not 0 < self.top_p <= 1:
            yield f"top_p is {self.top_p}; it lies above 0 and at most at 1, which switches it off."
        if not 0 <= self.min_p <= 1:
            yield f"min_p is {self.min_p}; it lies between 0, which switches it off, and 1."
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            yield f"repetition_penalty is {self.repetition_penalty}; it is positive, and 1 switches it off."
        if any(not text for text in self.stop_strings):
            yield "stop_strings has an empty string, which would end every answer at once. Remove it."
        if any(math.isnan(bias) or bias > _LARGEST_BIAS for bias in self.logit_bias.values()):
            yield f"logit_bias has a value that is not a number or above {_LARGEST_BIAS:g}; -inf forbids a token."
        if self.allowed_tokens is not None and not self.allowed_tokens:
            yield "allowed_tokens is empty, so no token could be sampled. Leave it out to allow all."
        named = {"stop_tokens": self.stop_tokens, "logit_bias": self.logit_bias, "allowed_tokens": self.allowed_tokens}
        for name, tokens in named.items():
            unknown = sorted(token for token in tokens or () if not 0 <= token < vocab_size)
            if unknown:
                yield f"{name} names token {unknown[0]}, and the vocabulary ends at token {vocab_size - 1}."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialAnswer:
    """Tokens of an answer that has not ended, with the log-prob of each and the version of its weights."""

    tokens_L: NDArray[np.int32]
    logprobs_L: NDArray[np.float32]
    versions_L: NDArray[np.int32]
    experts: Experts | None = None  # of the first positions of prompt and answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A request for one answer. Its random stream is keyed by seed, id (without the attempt) and position in the
    sequence. Its batch thus has no influence, and a second attempt samples the same tokens from the same weights."""

    id: TrajectoryId
    prompt: Tokens
    sampling: Sampling
    seed: int = 0
    begun: PartialAnswer | None = None  # the answer so far: another engine has sampled it, and this one continues

    def __post_init__(self) -> None:
        if not isinstance(self.id, TrajectoryId):
            raise RolloutError(f"a request's id is a TrajectoryId (prompt_index, sample, ...), not {self.id!r}.")

    def problem(self, *, vocab_size: int, max_length: int) -> str | None:
        """Why a model of this vocabulary and context cannot serve this request, or None."""
        if not (isinstance(self.prompt, np.ndarray) and self.prompt.ndim == 1 and self.prompt.dtype.kind in "iu"):
            return "the prompt is not a one-dimensional array of integers; give token ids as np.int32."
        length = len(self.prompt)
        if length == 0:
            return "the prompt is empty; a model needs at least one token to continue (its begin token, for instance)."
        if length >= max_length:
            return (
                f"the prompt has {length} tokens and the context {max_length}, which leaves no room for an answer. "
                "Shorten the prompt, or raise the engine's max_length if the model allows it."
            )
        low, high = int(self.prompt.min()), int(self.prompt.max())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            return f"the prompt has token {wrong}, and the vocabulary ends at token {vocab_size - 1}."
        problems = list(self.sampling.problems(vocab_size))
        return " ".join(problems) if problems else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """An answer, finished or cut short. Sampled tokens are never discarded, whatever ended it."""

    id: TrajectoryId
    prompt: Tokens
    tokens_L: NDArray[np.int32]
    logprobs_L: NDArray[np.float32]  # of the distribution that each token was sampled from; temperature 0 as 1
    versions_L: NDArray[np.int32]  # of the weights that sampled each token
    finish: Finish
    stop: int | str | None = None  # the stop token or stop string that ended it
    error: str | None = None  # with finish `error`: what was wrong with this request
    reused_tokens: int = 0  # prompt tokens that were in the cache already
    experts: Experts | None = None  # of the positions of prompt and answer that were fed: not of the last token

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens_L)

    @property
    def so_far(self) -> PartialAnswer:
        """The answer as another engine continues it."""
        return PartialAnswer(
            tokens_L=self.tokens_L, logprobs_L=self.logprobs_L, versions_L=self.versions_L, experts=self.experts
        )


def given_back(request: Request) -> Completion:
    """The answer to a request that this engine does not begin: as it came."""
    begun = request.begun
    return Completion(
        id=request.id,
        prompt=request.prompt.copy(),
        tokens_L=np.empty(0, np.int32) if begun is None else begun.tokens_L,
        logprobs_L=np.empty(0, np.float32) if begun is None else begun.logprobs_L,
        versions_L=np.empty(0, np.int32) if begun is None else begun.versions_L,
        finish="cancelled",
        experts=None if begun is None else begun.experts,
    )


def failed(request: Request, error: str) -> Completion:
    """The answer to a request that cannot be served."""
    whole = isinstance(request.prompt, np.ndarray) and request.prompt.ndim == 1
    return Completion(
        id=request.id,
        prompt=request.prompt.copy() if whole else np.empty(0, np.int32),
        tokens_L=np.empty(0, np.int32),
        logprobs_L=np.empty(0, np.float32),
        versions_L=np.empty(0, np.int32),
        finish="error",
        error=error,
    )
