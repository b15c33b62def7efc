# SPDX-License-Identifier: Apache-2.0
"""The types of the data package: documents, the documents of one step, and packed micro-batches. NumPy only."""

# T packed tokens · D documents · S trained tokens · R examples

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from podium.data.routed_experts import Experts, aligned

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """One tokenized row. `trained[i]` says that token i is predicted and counts in the loss; token 0 never is. Nothing
    follows the last trained token: in a causal model, later tokens cannot change the loss."""

    tokens: Tokens
    trained: Mask
    experts: Experts | None = None  # to be replayed, of each token; None: routers choose

    @property
    def num_inputs(self) -> int:
        """Positions that go through the model: the last token is only a target."""
        return len(self.tokens) - 1

    @property
    def num_trained(self) -> int:
        """Tokens with a loss."""
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """The training data of one row: a document, or two that are compared (chosen, then rejected). They stay together:
    one step, one rank, one micro-batch."""

    documents: tuple[Document, ...]
    value: float = 0.0  # values of the row beside its text: a pair's margin, a score, a label (1 or 0)
    source: int = 0  # position of the row's source in data.train or data.heldout

    @property
    def num_inputs(self) -> int:
        """Input positions of all documents."""
        return sum(document.num_inputs for document in self.documents)

    @property
    def num_trained(self) -> int:
        """Tokens with a loss, of all documents."""
        return sum(document.num_trained for document in self.documents)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch: documents laid end to end, no padding. Position i of a document predicts its token i + 1."""

    tokens_T: Tokens
    positions_T: Tokens  # restart at 0 in every document
    targets_T: Tokens
    weights_T: NDArray[np.float32]  # 1 where the target is trained, else 0
    offsets: NDArray[np.int32]  # D + 1 document boundaries, from 0 to T
    experts_TLK: Experts | None = None  # that routers must choose; None: they choose themselves

    @property
    def num_tokens(self) -> int:
        """Input positions of the micro-batch."""
        return len(self.tokens_T)

    @property
    def num_trained(self) -> int:
        """Targets with a loss."""
        return int(np.count_nonzero(self.weights_T))


def pack(documents: Sequence[Document]) -> PackedBatch:
    """Concatenates documents. Without documents it returns one token of weight zero: a rank without work still joins in
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
        experts_TLK=aligned([(document.experts, document.num_inputs) for document in documents]),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedExamples:
    """Examples as one micro-batch, and the position of each of their documents in it."""

    packed: PackedBatch
    documents: tuple[Document, ...]  # in the order in which they are packed
    document_S: NDArray[np.int64]  # of each trained token
    places: NDArray[np.int64]  # [R, documents of an example]: positions in `documents`
    values_R: NDArray[np.float32]
    sources_R: NDArray[np.int64]

    @property
    def sources_S(self) -> NDArray[np.int64]:
        """The source of each trained token."""
        sources_D = np.zeros(len(self.documents), np.int64)
        sources_D[self.places] = self.sources_R[:, None]
        source_S: NDArray[np.int64] = sources_D[self.document_S]
        return source_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitExamples:
    """Examples of all ranks, in order, and those of this rank, by micro-batch. All ranks have the same number of
    micro-batches; some may be empty."""

    examples: tuple[Example, ...]
    rows: tuple[tuple[int, ...], ...]  # of each micro-batch: positions in `examples`
    sources: tuple[str, ...] = ()  # names of the data's sources, where there are several

    @property
    def parts(self) -> tuple[tuple[Example, ...], ...]:
        """The examples of each micro-batch."""
        return tuple(tuple(self.examples[row] for row in part) for part in self.rows)


def pack_examples(examples: Sequence[Example]) -> PackedExamples:
    """Sorts documents by length, so that documents of equal length are adjacent and share attention calls."""
    flat = [document for example in examples for document in example.documents]
    order = sorted(range(len(flat)), key=lambda at: flat[at].num_inputs)
    place = np.empty(len(flat), np.int64)
    place[order] = np.arange(len(flat))
    documents = tuple(flat[at] for at in order)
    return PackedExamples(
        packed=pack(documents),
        documents=documents,
        document_S=np.repeat(np.arange(len(flat)), [document.num_trained for document in documents]).astype(np.int64),
        places=place.reshape(len(examples), -1) if examples else np.empty((0, 1), np.int64),
        values_R=np.array([example.value for example in examples], np.float32),
        sources_R=np.array([example.source for example in examples], np.int64),
    )
