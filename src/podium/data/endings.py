# SPDX-License-Identifier: Apache-2.0
"""Checks whether trained documents end with a stop token; otherwise a model learns answers without an end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from podium.data.documents import Document
from podium.data.tokenizer import special_ids

# How much of a document's end a message shows.
_SHOWN_TOKENS = 12


def missing_stop_token(documents: Sequence[Document], tokenizer: Any, stops: Collection[int]) -> str | None:
    """None if some document ends with one of `stops`, the tokens that generation stops at; white space after it is
    ignored. Otherwise a warning that says what they end with, and what to do. A document ends with its last trained
    token, so it ends with the last trained turn of a chat."""
    ends = [_end(document, tokenizer) for document in documents]
    if not ends or any(end in stops for end in ends):
        return None
    last, tail = ends[0], documents[0].tokens[-_SHOWN_TOKENS:].tolist()
    names = ", ".join(repr(str(tokenizer.decode([stop]))) for stop in sorted(stops)) or "none"
    text = (
        f"none of {len(ends)} trained documents ends with a token that generation stops at ({names}); the first ends "
        f"with {str(tokenizer.decode(tail))!r}. The model would not learn to end its answers. "
    )
    if last in special_ids(tokenizer):
        return text + (
            f"Let generation stop at {str(tokenizer.decode([last]))!r}: add its id, {last}, to eos_token_id in the "
            "model's generation_config.json, or make it the tokenizer's eos_token."
        )
    return text + (
        "Chat templates whose turns end where the next one begins do this. In a copy of the template, write a stop "
        "token at the end of an assistant turn, put {% generation %} ... {% endgeneration %} around the turn and the "
        "token, and name the copy in model.chat_template."
    )


def _end(document: Document, tokenizer: Any) -> int:
    """The last trained token that is not white space."""
    trained = document.tokens[document.trained].tolist()
    for token in reversed(trained):
        if str(tokenizer.decode([token])).strip():
            return int(token)
    return int(trained[-1])
