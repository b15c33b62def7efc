# SPDX-License-Identifier: Apache-2.0
"""The text of single tokens, as people read them beside each other."""

from __future__ import annotations

from typing import Any

_METASPACE = "▁"


class TokenTexts:
    """Decodes every token once, by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of a token, with the space before it."""
        if token not in self._texts:
            options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            text = str(self._tokenizer.decode([token], **options))
            # Decoders of whole texts drop the space before the first word.
            if str(self._tokenizer.convert_ids_to_tokens(token)).startswith(_METASPACE) and not text.startswith(" "):
                text = f" {text}"
            self._texts[token] = text
        return self._texts[token]
