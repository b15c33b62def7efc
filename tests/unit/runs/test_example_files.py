# SPDX-License-Identifier: Apache-2.0
"""Rows of fixed data in the run folder: which tokens are trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from podium.data.documents import Document, Example
from podium.runs.example_files import KeptDocument, KeptExample, read_examples, write_examples
from podium.spmd.kept_examples import kept_examples

WORDS = {1: "▁What", 2: "▁is", 3: "?", 4: "▁42", 5: "</s>"}
TOKENIZER: Any = SimpleNamespace(
    decode=lambda tokens, **_: "".join(WORDS[token].replace("▁", " ") for token in tokens).lstrip(" "),
    convert_ids_to_tokens=lambda token: WORDS[token],
)


def document(tokens: list[int], trained: list[bool]) -> Document:
    return Document(tokens=np.array(tokens, np.int32), trained=np.array(trained))


def test_texts_and_masks_are_those_of_the_documents() -> None:
    question = document([1, 2, 3, 4, 5], [False, False, False, True, True])

    (kept,) = kept_examples([Example(documents=(question,), source=1)], ["words", "sums"], TOKENIZER)

    assert kept.source == "sums"
    assert kept.documents == (
        KeptDocument(
            tokens=(1, 2, 3, 4, 5),
            texts=(" What", " is", "?", " 42", "</s>"),
            loss_mask=(False, False, False, True, True),
            length=5,
        ),
    )


def test_a_pair_has_two_documents_and_its_margin() -> None:
    pair = Example(documents=(document([1, 4], [False, True]), document([1, 3], [False, True])), value=2.0)

    (kept,) = kept_examples([pair], ["pairs"], TOKENIZER)

    assert kept.value == 2.0
    assert [each.texts for each in kept.documents] == [(" What", " 42"), (" What", "?")]


def test_many_rows_and_long_ones_are_cut() -> None:
    long = document([1] * 5000, [False] + [True] * 4999)

    kept = kept_examples([Example(documents=(long,))] * 40, ["sums"], TOKENIZER)

    assert len(kept) == 32
    assert (len(kept[0].documents[0].tokens), kept[0].documents[0].length) == (4096, 5000)


def test_what_is_written_is_read_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    kept = [
        KeptExample(
            source="a\nb", value=0.0,
            documents=(KeptDocument(tokens=(7,), texts=("\u2028é",), loss_mask=(True,), length=1),),
        )
    ]  # fmt: skip
    write_examples(path, kept)
    assert read_examples(path) == kept
    assert [each.name for each in tmp_path.iterdir()] == ["examples.jsonl"]

    path.write_text(path.read_text() + '{"source": "x"}\nnot JSON\n[]\n')
    assert read_examples(path) == kept
    assert read_examples(tmp_path / "missing") == []
