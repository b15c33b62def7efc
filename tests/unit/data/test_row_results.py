# SPDX-License-Identifier: Apache-2.0
"""Results of rows as arrays: what is sent between ranks is what was made."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from podium.data.chat import Dropped
from podium.data.documents import Document, Example
from podium.data.results import MadeExample, RowResult, decode_results, encode_results
from podium.data.skipping import SkippedRow


def plain(result: RowResult) -> object:
    if not isinstance(result, MadeExample):
        return result
    example = result.example
    documents = [
        (each.tokens.tolist(), each.tokens.dtype, each.trained.tolist(), each.trained.dtype)
        for each in example.documents
    ]
    return documents, example.value, example.source, result.truncated


@st.composite
def documents(draw: st.DrawFn) -> Document:
    marks = draw(st.lists(st.booleans(), min_size=1, max_size=20))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(marks), max_size=len(marks)))
    return Document(tokens=np.array(tokens, np.int32), trained=np.array(marks, np.bool_))


made = st.builds(
    lambda own, value, source, truncated: MadeExample(
        example=Example(documents=tuple(own), value=value, source=source), truncated=truncated
    ),
    st.lists(documents(), min_size=1, max_size=2), st.floats(allow_nan=False), st.integers(0, 3), st.booleans(),
)  # fmt: skip
skipped = st.builds(SkippedRow, source=st.text(max_size=5), place=st.text(max_size=5), problem=st.text(max_size=5))


@given(st.lists(made | skipped | st.sampled_from(Dropped), max_size=8))
def test_what_is_decoded_is_what_was_encoded(results: list[RowResult]) -> None:
    sources = [result.example.source if isinstance(result, MadeExample) else 9 for result in results]
    sent = pickle.loads(pickle.dumps(encode_results(results), protocol=5))
    assert [plain(each) for each in decode_results(sent, sources)] == [plain(each) for each in results]


def test_a_token_takes_little_more_than_four_bytes() -> None:
    document = Document(tokens=np.arange(8000, dtype=np.int32), trained=np.ones(8000, np.bool_))
    results: list[RowResult] = [MadeExample(example=Example(documents=(document,)), truncated=False)] * 8
    assert len(pickle.dumps(encode_results(results), protocol=5)) < 4.2 * 8 * 8000
