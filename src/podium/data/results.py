# SPDX-License-Identifier: Apache-2.0
"""What becomes of a row: an example, or why there is none; and many of them as a few arrays that are quick to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from podium.data.chat import Dropped
from podium.data.documents import Document, Example
from podium.data.skipping import SkippedRow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MadeExample:
    """The example of a row, and whether any of it was truncated."""

    example: Example
    truncated: bool


RowResult = MadeExample | Dropped | SkippedRow
"""The example of a row, or why there is none."""

# Kinds of results. A dropped row has the position of its reason after them.
_WHOLE, _TRUNCATED, _SKIPPED, _DROPPED = range(4)
_REASONS = tuple(Dropped)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedResults:
    """Results of rows. Some 4.2 bytes for each token."""

    kinds: NDArray[np.uint8]  # of each row
    sizes: NDArray[np.int64]  # documents of each example
    values: NDArray[np.float64]  # of each example
    lengths: NDArray[np.int64]  # tokens of each document
    tokens: NDArray[np.int32]
    trained: NDArray[np.uint8]  # one bit for each token
    skipped: tuple[SkippedRow, ...]


def encode_results(results: Sequence[RowResult]) -> EncodedResults:
    """The results as arrays. The sources of examples are left out: the receiver knows whose rows they are."""
    examples = [result.example for result in results if isinstance(result, MadeExample)]
    documents = [document for example in examples for document in example.documents]
    tokens = np.concatenate([np.empty(0, np.int32), *(document.tokens for document in documents)])
    assert tokens.dtype == np.int32
    return EncodedResults(
        kinds=np.array([_kind(result) for result in results], np.uint8),
        sizes=np.array([len(example.documents) for example in examples], np.int64),
        values=np.array([example.value for example in examples], np.float64),
        lengths=np.array([len(document.tokens) for document in documents], np.int64),
        tokens=tokens,
        trained=np.packbits(np.concatenate([np.empty(0, np.bool_), *(document.trained for document in documents)])),
        skipped=tuple(result for result in results if isinstance(result, SkippedRow)),
    )


def decode_results(encoded: EncodedResults, sources: Sequence[int]) -> list[RowResult]:
    """The inverse of `encode_results`; `sources` are those of the rows. Documents share the arrays' memory."""
    tokens = encoded.tokens
    trained = np.unpackbits(encoded.trained, count=len(tokens)).view(np.bool_)
    documents = iter(
        [
            Document(tokens=tokens[begin:end], trained=trained[begin:end])
            for begin, end in pairwise(accumulate(encoded.lengths.tolist(), initial=0))
        ]
    )
    sizes, values, skipped = iter(encoded.sizes.tolist()), iter(encoded.values.tolist()), iter(encoded.skipped)
    results: list[RowResult] = []
    for kind, source in zip(encoded.kinds.tolist(), sources, strict=True):
        if kind >= _DROPPED:
            results.append(_REASONS[kind - _DROPPED])
        elif kind == _SKIPPED:
            results.append(next(skipped))
        else:
            own = tuple(next(documents) for _ in range(next(sizes)))
            example = Example(documents=own, value=next(values), source=source)
            results.append(MadeExample(example=example, truncated=kind == _TRUNCATED))
    return results


def _kind(result: RowResult) -> int:
    match result:
        case MadeExample(truncated=truncated):
            return _TRUNCATED if truncated else _WHOLE
        case SkippedRow():
            return _SKIPPED
        case Dropped():
            return _DROPPED + _REASONS.index(result)
