# SPDX-License-Identifier: Apache-2.0
"""What the data room hands out: documents, the documents of one step, and packed micro-batches. NumPy only."""

# T packed tokens · D documents

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One tokenized row. `trained[i]` says that token i is predicted and counts in the loss; token 0 never is.

    Nothing follows the last trained token: in a causal model what comes after it cannot change the loss.
    """

    tokens: Tokens
    trained: Mask

    @property
    def num_inputs(self) -> int:
        """Positions that go through the model: the last token is only ever a target."""
        return len(self.tokens) - 1

    @property
    def num_trained(self) -> int:
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch: documents laid end to end, no padding. Position i of a document predicts its token i + 1."""

    tokens_T: Tokens
    positions_T: Tokens  # restart at 0 in every document
    targets_T: Tokens
    weights_T: NDArray[np.float32]  # 1 where the target is trained, else 0
    offsets: NDArray[np.int32]  # D + 1 document boundaries, from 0 to T

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_trained(self) -> int:
        return int(np.count_nonzero(self.weights_T))


def pack(documents: Sequence[Document]) -> PackedBatch:
    """Lays documents end to end. None at all gives one token of weight zero: a rank without work still joins in
    every collective of the forward and backward pass."""
    if not documents:
        zero = np.zeros(1, np.int32)
        return PackedBatch(
            tokens_T=zero, positions_T=zero, targets_T=zero, weights_T=np.zeros(1, np.float32),
            offsets=np.array([0, 1], np.int32),
        )  # fmt: skip
    lengths = np.array([document.num_inputs for document in documents], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return PackedBatch(
        tokens_T=np.concatenate([document.tokens[:-1] for document in documents]),
        positions_T=(np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)).astype(np.int32),
        targets_T=np.concatenate([document.tokens[1:] for document in documents]),
        weights_T=np.concatenate([document.trained[1:] for document in documents]).astype(np.float32),
        offsets=offsets,
    )
