# SPDX-License-Identifier: Apache-2.0
"""Keeps the first rows of a run's data as they are trained on, for people who ask which tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podium.data.documents import Document, Example
from podium.data.token_texts import TokenTexts
from podium.runs.example_files import KeptDocument, KeptExample

_MOST_EXAMPLES, _MOST_TOKENS = 32, 4096


def kept_examples(examples: Sequence[Example], sources: Sequence[str], tokenizer: Any) -> list[KeptExample]:
    """The first examples of a step, long ones cut. `sources`: their names, by position in data.train."""
    texts = TokenTexts(tokenizer)
    return [
        KeptExample(
            source=sources[example.source],
            value=float(example.value),
            documents=tuple(_kept(document, texts) for document in example.documents),
        )
        for example in examples[:_MOST_EXAMPLES]
    ]


def _kept(document: Document, texts: TokenTexts) -> KeptDocument:
    tokens = document.tokens[:_MOST_TOKENS].tolist()
    return KeptDocument(
        tokens=tuple(tokens),
        texts=tuple(texts.of(token) for token in tokens),
        loss_mask=tuple(document.trained[:_MOST_TOKENS].tolist()),
        length=len(document.tokens),
    )
