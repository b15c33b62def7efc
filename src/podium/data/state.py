# SPDX-License-Identifier: Apache-2.0
"""The position of a loader: in every source, with the packing buffer itself and counts; small enough to save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.data.documents import Document, Example
from podium.data.stream import SourcePosition, StreamPosition
from podium.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCounts:
    """How many rows were used, truncated and dropped since the run's first step."""

    read: int = 0
    trained: int = 0  # documents that were made, truncated ones included
    truncated: int = 0
    dropped_overlong: int = 0
    dropped_untrained: int = 0
    dropped_by_map: int = 0
    skipped: int = 0  # rows that cannot be used, with data.on_error skip
    first_skipped: tuple[str, ...] = ()  # what is wrong with the first of them
    drawn: tuple[int, ...] = ()  # rows by source
    epochs: tuple[int, ...] = ()  # whole passes by source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderState:
    """Enough to compose exactly the same later steps, without reading or tokenizing the buffer again."""

    position: StreamPosition
    waiting: tuple[Example, ...]
    counts: DocumentCounts
    made_in_epoch: tuple[int, ...]  # documents by source since its epoch began


def encode(state: LoaderState) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """A JSON-able part and arrays."""
    documents = [document for example in state.waiting for document in example.documents]
    lengths = [len(document.tokens) for document in documents]
    values = {
        "draw": state.position.draw,
        "sources": [[place.epoch, place.block, place.row] for place in state.position.sources],
        "counts": asdict(state.counts),
        "made_in_epoch": list(state.made_in_epoch),
    }
    arrays = {
        "tokens": np.concatenate([np.empty(0, np.int32), *(document.tokens for document in documents)]),
        "trained": np.concatenate([np.empty(0, np.bool_), *(document.trained for document in documents)]),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "sizes": np.array([len(example.documents) for example in state.waiting], np.int64),
        "values": np.array([example.value for example in state.waiting], np.float64),
        "row_sources": np.array([example.source for example in state.waiting], np.int64),
    }
    return values, arrays


def decode(values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> LoaderState:
    """The inverse of `encode`; values may have gone through JSON."""
    try:
        offsets = [int(offset) for offset in arrays["offsets"]]
        tokens, trained = arrays["tokens"].astype(np.int32), arrays["trained"].astype(np.bool_)
        if offsets[-1] != len(tokens) or len(tokens) != len(trained):
            raise ValueError(f"{len(tokens)} tokens, {len(trained)} marks and boundaries up to {offsets[-1]}")
        documents = [Document(tokens=tokens[begin:end], trained=trained[begin:end]) for begin, end in pairwise(offsets)]
        sizes, marks = arrays["sizes"].tolist(), arrays["values"].tolist()
        sources = arrays["row_sources"].tolist() if "row_sources" in arrays else [0] * len(sizes)
        if sum(sizes) != len(documents):
            raise ValueError(f"{len(documents)} documents, and examples of {sum(sizes)}")
        rest = iter(documents)
        counts = dict(values["counts"])
        tuples = ("drawn", "epochs", "first_skipped")
        counts = {**counts, **{name: tuple(counts.get(name, ())) for name in tuples}}
        return LoaderState(
            position=StreamPosition(
                draw=values["draw"],
                sources=tuple(SourcePosition(epoch=e, block=b, row=r) for e, b, r in values["sources"]),
            ),
            waiting=tuple(
                Example(documents=tuple(islice(rest, size)), value=mark, source=source)
                for size, mark, source in zip(sizes, marks, sources, strict=True)
            ),
            counts=DocumentCounts(**counts),
            made_in_epoch=tuple(values["made_in_epoch"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(
            f"the saved data position cannot be read ({type(error).__name__}: {error}). It was written by another "
            "version or is damaged; resume from another checkpoint."
        ) from error
