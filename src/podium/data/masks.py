# SPDX-License-Identifier: Apache-2.0
"""Finds the tokens of a chat that the assistant wrote: exactly, from the chat template, or not at all."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from podium.data.content import ContentEncoder, ControlTextError
from podium.data.control_tokens import AS_TEXT, ControlNames, ControlRule, ControlSearch
from podium.data.kinds import Message
from podium.data.rows import Row
from podium.data.tokenizer import special_ids
from podium.data.tool_probes import ToolProbe
from podium.errors import BadRowError, DataError

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WAYS_OUT = (
    "Put {% generation %} ... {% endgeneration %} around what the assistant writes in a copy of the template and name "
    "it in model.chat_template, or set data.trained to last_turn or everything."
)

# transformers keeps one compiled template for the whole process, and in it the spans of the chat being rendered. So the
# loader's thread and the evaluation share a lock.
_RENDERING = threading.Lock()

Tools = list[dict[str, Any]] | None


class ChatTemplateError(Exception):
    """The template refuses a chat, or cannot mark its assistant turns; the caller adds the row."""


class HiddenToolsError(ChatTemplateError):
    """The template leaves tool calls or tools out. Other rows would fare the same: such a row is never skipped."""


def template_error(row: Row, error: ChatTemplateError) -> DataError:
    """The error about a row that the template refuses."""
    kind = DataError if isinstance(error, HiddenToolsError) else BadRowError
    return kind(f"{row.where}: {error}")


@dataclass(frozen=True, slots=True)
class MarkedChat:
    """A rendered chat; `trained[i]` says that an assistant turn that is trained wrote token i."""

    tokens: list[int]
    trained: list[bool]


class ChatRenderer:
    """A tokenizer's chat template, which alone defines how a chat becomes tokens. Control tokens are those that the
    template writes: content that spells one is text, if the `rule` does not say otherwise."""

    def __init__(self, tokenizer: Any, rule: ControlRule = AS_TEXT) -> None:
        self._tokenizer, self._rule = tokenizer, rule
        self._probe = ToolProbe(self._probed_text)
        self.special_ids = special_ids(tokenizer)

    def require_tools_shown(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises a HiddenToolsError if the template says nothing about the chat's tools."""
        if self._probe.hides_tools(messages, tools):
            raise HiddenToolsError(
                "the chat template does not show `tools` to the model: with other tools the prompt is the same. Name a "
                "template that writes them in model.chat_template, or describe the tools by name in a message."
            )

    def require_tools_rendered(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises a HiddenToolsError if the template leaves out tool calls, or says nothing about the chat's tools."""
        part = self._probe.hidden_calls(messages, tools)
        if part is not None:
            raise HiddenToolsError(
                f"the chat template leaves out `tool_calls`: with another {part} of a call the text is the same, so "
                "the call would not be trained. Name a template that writes tool calls in model.chat_template, or "
                "write the calls into `content` with the source's `map`."
            )
        self.require_tools_shown(messages, tools)

    def _probed_text(self, messages: Sequence[Message], tools: Tools) -> str | None:
        try:
            return self.text(messages, tools, generation_prompt=False)
        except ChatTemplateError:
            return None

    def tokens(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> list[int]:
        """The tokens of the rendered chat."""
        self.require_tools_rendered(messages, tools)
        return self.encode(self.text(messages, tools, generation_prompt=generation_prompt))

    def mark(self, messages: Sequence[Message], tools: Tools, turns: Sequence[int]) -> MarkedChat:
        """The chat up to the last of `turns` (positions of assistant messages, in order, no later one left out)."""
        chat = messages[: turns[-1] + 1]
        self.require_tools_rendered(chat, tools)
        if self._tokenizer.is_fast and _GENERATION.search(self.template(tools)):
            return self._marked_by_template(chat, tools, turns)
        return self._marked_by_prefixes(chat, tools, turns)

    def _marked_by_template(self, chat: Sequence[Message], tools: Tools, turns: Sequence[int]) -> MarkedChat:
        text = self._with_content_marked(chat, tools)
        if text is not None:
            tokens, trained = self._spans_of_marked(text, chat, tools)
        else:
            try:
                with _RENDERING:
                    encoded = self._tokenizer.apply_chat_template(
                        list(chat), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
                        tokenizer_kwargs={"verbose": False},
                    )  # fmt: skip
            except Exception as error:  # the template is the user's code
                raise _refused(error) from error
            tokens = list(encoded["input_ids"])
            trained = [bool(mark) for mark in encoded["assistant_masks"]]
        if any(message["role"] == "assistant" for message in chat[: turns[0]]):
            begin = self._length_of_prefix(chat, tools, turns[0], tokens, generation_prompt=True)
            trained[:begin] = [False] * begin
        return MarkedChat(tokens, trained)

    def _marked_by_prefixes(self, chat: Sequence[Message], tools: Tools, turns: Sequence[int]) -> MarkedChat:
        """A turn is the text between the chat before it (with the generation prompt) and the chat after it. Both are
        rendered and must be exact prefixes, token by token, of the whole. So the trained tokens are exactly those that
        the model will generate, and nothing is guessed."""
        tokens = self.tokens(chat, tools, generation_prompt=False)
        trained = [False] * len(tokens)
        for turn in turns:
            begin = self._length_of_prefix(chat, tools, turn, tokens, generation_prompt=True)
            end = len(tokens)
            if turn < len(chat) - 1:
                end = self._length_of_prefix(chat, tools, turn + 1, tokens, generation_prompt=False)
            end = self._without_trailing_space(tokens, begin, end)
            trained[begin:end] = [True] * (end - begin)
        return MarkedChat(tokens, trained)

    def _without_trailing_space(self, tokens: list[int], begin: int, end: int) -> int:
        """The end of a turn: after its end-of-turn token, without the template's white space behind it (the model stops
        there and never writes it). A turn without such a token is kept whole."""
        last = end
        while last > begin and tokens[last - 1] not in self.special_ids:
            if self._tokenizer.decode([tokens[last - 1]]).strip():
                return end
            last -= 1
        return last if last > begin else end

    def _length_of_prefix(
        self, chat: Sequence[Message], tools: Tools, count: int, tokens: list[int], *, generation_prompt: bool
    ) -> int:
        """Number of tokens of the first `count` messages, verified to be a prefix of the whole chat's `tokens`."""
        if count == 0:
            raise ChatTemplateError(
                "messages[0]: the chat begins with an assistant turn, so there is no prompt that the turn answers. "
                f"Begin with a system or user turn. Or: {_WAYS_OUT}"
            )
        text = self.text(chat[:count], tools, generation_prompt=generation_prompt)
        prefix = self.encode(text)
        if tokens[: len(prefix)] == prefix:
            return len(prefix)
        if self.text(chat, tools, generation_prompt=False).startswith(text):
            raise ChatTemplateError(
                f"messages[{count}]: the first characters of the turn melt into one token with what the template "
                "writes before them, so where the turn begins is unknown. Strip leading white space from the "
                f"content with the source's `map`. Or: {_WAYS_OUT}"
            )
        raise ChatTemplateError(
            f"the chat template cannot mark assistant turns: the first {count} messages rendered alone are not the "
            "beginning of the whole chat (templates that drop earlier reasoning do this), so which tokens the "
            f"assistant wrote is not exactly known. {_WAYS_OUT}"
        )

    def text(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        """The rendered chat as text for `encode`; around content that spells a control token it has marks."""
        rendered = self._rendered(messages, tools, generation_prompt=generation_prompt)
        if self._content is None or not self._content.search.in_chat(messages, tools):
            return rendered
        with _refusing_control_text():
            marked_messages, marked_tools = self._content.marked_chat(messages, tools)
            for _ in range(2):  # a template that writes the time changes between two renderings
                marked = self._rendered(marked_messages, marked_tools, generation_prompt=generation_prompt)
                if self._content.unmarked(marked) == rendered:
                    return marked
                rendered = self._rendered(messages, tools, generation_prompt=generation_prompt)
            raise ControlTextError("the chat template changes it")

    def content_text(self, text: str) -> str:
        """A text that is content, beside any template, for `encode`."""
        if self._content is None or not self._content.search.in_text(text):
            return text
        with _refusing_control_text():
            return self._content.marked_text(text)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Text as tokens. `special`: with the tokens that the tokenizer adds to a text by itself."""
        if self._content is not None and self._content.is_marked(text):
            with _refusing_control_text():
                return self._content.encode(text, special=special)
        # The template writes its own special tokens; the tokenizer must not add them again.
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _rendered(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool) -> str:
        self.template(tools)
        try:
            with _RENDERING:
                return str(
                    self._tokenizer.apply_chat_template(
                        list(messages), tools=tools, tokenize=False, add_generation_prompt=generation_prompt
                    )
                )
        except Exception as error:  # the template is the user's code
            raise _refused(error) from error

    def _with_content_marked(self, chat: Sequence[Message], tools: Tools) -> str | None:
        """The rendered chat if it has marks."""
        if self._content is None or not self._content.search.in_chat(chat, tools):
            return None
        text = self.text(chat, tools, generation_prompt=False)
        return text if self._content.is_marked(text) else None

    def _spans_of_marked(self, text: str, chat: Sequence[Message], tools: Tools) -> tuple[list[int], list[bool]]:
        """The tokens of a chat with marks, and which of them the template says that the assistant writes."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert self._content is not None
        with _refusing_control_text():
            marked, marked_tools = self._content.marked_chat(chat, tools)
            try:
                with _RENDERING:
                    rendered, spans = render_jinja_template(
                        conversations=[marked], tools=marked_tools, chat_template=self.template(tools),
                        return_assistant_tokens_mask=True, **self._tokenizer.special_tokens_map,
                    )  # fmt: skip
            except Exception as error:  # the template is the user's code
                raise _refused(error) from error
            if rendered != [text]:
                raise ControlTextError("the chat template renders the same chat differently each time")
            return self._content.encode_spans(text, spans[0])

    @cached_property
    def _content(self) -> ContentEncoder | None:
        """None if content may write control tokens."""
        if not self._rule.as_text:
            return None
        return ContentEncoder(self._tokenizer, self.control_search)

    @cached_property
    def control_search(self) -> ControlSearch:
        """Finds control tokens in content."""

        def render(messages: Sequence[Message], generation_prompt: bool) -> str | None:
            try:
                return self._rendered(messages, None, generation_prompt=generation_prompt)
            except ChatTemplateError:
                return None

        return ControlSearch(self._tokenizer, ControlNames.of(self._tokenizer, self._rule, render))

    def template(self, tools: Tools) -> str:
        """The chat template's source."""
        if not self._tokenizer.chat_template:
            raise ChatTemplateError(
                "the row is a chat, and the tokenizer has no chat template. Name a Jinja file in model.chat_template, "
                "or use `prompt`/`completion` or `text` rows."
            )
        return str(self._tokenizer.get_chat_template(None, tools))


def _refused(error: Exception) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template refuses this chat ({type(error).__name__}: {error}). Change the row with the source's "
        "`map`, or the template with model.chat_template."
    )


@contextmanager
def _refusing_control_text() -> Iterator[None]:
    try:
        yield
    except ControlTextError as error:
        raise ChatTemplateError(
            f"the content spells a control token, which is to be encoded as text, and {error}. Take it out of the "
            "content (`podium check --deep` names it), or set model.control_tokens_in_content to control."
        ) from error
