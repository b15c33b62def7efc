# SPDX-License-Identifier: Apache-2.0
"""Texts that a sequence classifier scores: whole conversations, scored at their last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podium.data.chat import Dropped, Made, Overlong, unreadable
from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Document
from podium.data.kinds import Message, kind_of, parse_messages, parse_prompt_completion, parse_text, parse_tools
from podium.data.masks import ChatRenderer, ChatTemplateError, Tools, template_error
from podium.data.rows import Row
from podium.errors import DataError


class ConversationEncoder:
    """Turns conversations into tokens for a reward model, in the same way for its training and for grading episodes."""

    def __init__(self, tokenizer: Any, rule: ControlRule = AS_TEXT) -> None:
        self._renderer = ChatRenderer(tokenizer, rule)

    def chat(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The tokens of a chat."""
        return self._renderer.tokens(messages, tools, generation_prompt=False)

    def text(self, text: str, said: str = "") -> list[int]:
        """The tokens of a plain text, and of what a model and an environment `said` behind it."""
        return self._renderer.encode(text + self._renderer.content_text(said), special=True)


def scored_document(tokens: Sequence[int], longest: int | None) -> Document:
    """The last `longest` tokens (None: all). The score is read at the last of them, so one more token, which the model
    never sees, follows it."""
    kept_tokens = list(tokens if longest is None else tokens[-longest:])
    trained = np.zeros(len(kept_tokens) + 1, np.bool_)
    trained[-1] = True
    return Document(tokens=np.array([*kept_tokens, 0], np.int32), trained=trained)


class ConversationMaker:
    """Turns values of rows into documents that end in a score. Documents that are too long lose their beginning."""

    def __init__(self, tokenizer: Any, max_length: int, overlong: Overlong, rule: ControlRule = AS_TEXT) -> None:
        self._encoder = ConversationEncoder(tokenizer, rule)
        self._max_length = max_length
        self._overlong = overlong

    def document(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> Made | Dropped:
        """The document of values after renaming. Invalid values raise a BadRowError that names the row."""
        try:
            tokens = self._tokens(values, columns, row)
        except ChatTemplateError as error:
            raise template_error(row, error) from error
        except (TypeError, UnicodeError) as error:
            raise unreadable(row, error) from error
        if not tokens:
            return Dropped.UNTRAINED
        if len(tokens) > self._max_length:
            match self._overlong:
                case "drop":
                    return Dropped.OVERLONG
                case "error":
                    raise DataError(
                        f"{row.where}: {len(tokens)} tokens, more than the longest allowed {self._max_length}. Raise "
                        "data.max_length, or set data.overlong to truncate or drop."
                    )
                case "truncate":
                    pass
        document = scored_document(tokens, self._max_length)
        return Made(document=document, truncated=len(tokens) > self._max_length)

    def _tokens(self, values: Mapping[str, Any], columns: Mapping[str, str], row: Row) -> list[int]:
        match kind_of(values, columns, row):
            case "messages":
                return self._encoder.chat(parse_messages(values["messages"], "messages", row), parse_tools(values, row))
            case "prompt_completion":
                prompt, completion = parse_prompt_completion(values, row)
                if isinstance(prompt, str):
                    return self._encoder.text(f"{prompt}{completion}")
                assert not isinstance(completion, str)
                return self._encoder.chat([*prompt, *completion], parse_tools(values, row))
            case "text":
                return self._encoder.text(parse_text(values, "text", row))
