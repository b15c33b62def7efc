# SPDX-License-Identifier: Apache-2.0
"""Which experts of a mixture each token went to, as small integers: recorded while sampling, replayed by the learner.
NumPy only."""

# T tokens · L layers with a router · K experts of a token

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.integer[Any]]
"""[T, L, K], uint8 or int16. The largest value of its dtype is no expert: the position was never fed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShape:
    """Sizes of the routers of one model."""

    num_layers: int  # that have one
    num_experts: int
    per_token: int

    @property
    def dtype(self) -> type[np.integer[Any]]:
        """The smallest that has a value beside those of the experts."""
        return np.uint8 if self.num_experts < np.iinfo(np.uint8).max else np.int16

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the choices of one token take."""
        return self.num_layers * self.per_token * np.dtype(self.dtype).itemsize


def unrecorded(num_tokens: int, like: Experts) -> Experts:
    """Positions whose experts are not known, in the format of others."""
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def num_recorded(experts_TLK: Experts) -> int:
    """Number of leading positions that are recorded."""
    missing = np.flatnonzero(experts_TLK[:, 0, 0] == np.iinfo(experts_TLK.dtype).max)
    return int(missing[0]) if len(missing) else len(experts_TLK)


def continued(before: Experts | None, after: Experts | None) -> Experts | None:
    """The choices of a sequence that was fed twice: those of the first time, and those of later positions. Both begin
    with its first token."""
    if before is None or after is None:
        return after if before is None else before
    return before if len(after) <= len(before) else np.concatenate([before, after[len(before) :]])


def aligned(parts: Sequence[tuple[Experts | None, int]]) -> Experts | None:
    """Joins the choices of several sequences, given with the number of tokens of each. Positions without a record are
    marked. None: none has any."""
    like = next((experts for experts, _ in parts if experts is not None), None)
    if like is None:
        return None
    pieces = []
    for experts, num_tokens in parts:
        known = unrecorded(0, like) if experts is None else experts[:num_tokens]
        pieces += [known, unrecorded(num_tokens - len(known), like)]
    return np.concatenate(pieces)
