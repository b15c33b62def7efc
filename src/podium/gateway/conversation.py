# SPDX-License-Identifier: Apache-2.0
"""Messages to tokens and back, with one tokenizer: prompts, continuations, and the message that an answer is."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.masks import Tools
from podium.data.tokenizer import answer_text, special_ids
from podium.environments.call_markup import harmony_parts
from podium.environments.chat_format import ToolCall, ToolFormat
from podium.environments.transcript import Transcript, TurnTokenizer
from podium.errors import DataError
from podium.gateway.raw_prompts import RawPrompt, RawTokens
from podium.gateway.recorder import ConversationPrompt, SampledAnswer

# What begins a call in the text of an answer.
_MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "fenced": ("```tool_call",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", "{"),
    "qwen_coder": ("<tool_call>", "<function="),
    "glm": ("<tool_call>",),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    "harmony": (),  # its messages say themselves what they are
}
# Nine letters and digits: templates of Mistral refuse other ids.
_ID_BYTES, _ID_LENGTH = 5, 9


class Conversations:
    """The renderer of a gateway. Not shared between threads: tokenizers are not thread-safe."""

    def __init__(self, tokenizer: Any, tool_format: ToolFormat | None = None, *, rule: ControlRule = AS_TEXT) -> None:
        """`tool_format`: by default that of the chat template; a tokenizer with a response template parses itself.
        `rule`: what content that spells a control token becomes."""
        self.tokenizer = tokenizer
        self._turns = TurnTokenizer(tokenizer, tool_format, hidden_tools=True, rule=rule)
        self._responses = tool_format is None and getattr(tokenizer, "response_template", None) is not None
        ids = sorted(special_ids(tokenizer))
        self._special = dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))
        self._stop_ids = frozenset(ids)

    def begin(self, messages: Sequence[Message], tools: Tools) -> ConversationPrompt:
        """The prompt of a new conversation, as the chat template renders it."""
        return ConversationPrompt(state=Transcript(self._turns, messages, tools))

    def extend(
        self, prompt: ConversationPrompt, answer: SampledAnswer, messages: Sequence[Message]
    ) -> ConversationPrompt:
        """The prompt behind an answer: its tokens stay, and the template adds `messages`."""
        assert isinstance(prompt.state, Transcript)
        transcript = prompt.state.fork()
        transcript.add_answer(answer.tokens_L, answer.logprobs_L, answer.versions_L, stopped=answer.stopped)
        transcript.add_reply(transcript.reply(self._with_names(answer, messages)))
        prompt.state.forget_rendering()
        return ConversationPrompt(state=transcript)

    def _with_names(self, answer: SampledAnswer, messages: Sequence[Message]) -> Sequence[Message]:
        """Results with the names of their tools, which templates of this kind take from the calls. Clients send ids."""
        if not self.is_harmony:
            return messages
        calls = iter(self._turns.calls_of(answer.tokens_L, stopped=answer.stopped))
        names = (call.name for call in calls if isinstance(call, ToolCall))
        return [
            {**message, "name": message.get("name") or next(names, None)} if message["role"] == "tool" else message
            for message in messages
        ]

    def raw_tokens(self, given: RawPrompt) -> Tokens:
        """Tokens of raw text, with the tokenizer's begin token; token ids as they are."""
        return self._turns.text_prompt(given) if isinstance(given, str) else given

    def begin_raw(self, given: RawPrompt) -> ConversationPrompt:
        """The prompt of raw text or token ids."""
        tokens_T = self.raw_tokens(given)
        if not len(tokens_T):
            raise DataError("the prompt has no tokens, so there is nothing that an answer could follow.")
        return ConversationPrompt(state=RawTokens((tokens_T,)))

    def extend_raw(self, prompt: ConversationPrompt, answer: SampledAnswer, rest: RawPrompt) -> ConversationPrompt:
        """The prompt behind an answer, also of a chat: its tokens stay, and those of `rest` follow."""
        state = prompt.state
        if isinstance(state, Transcript):
            pieces = tuple(piece.tokens_L for piece in state.pieces)
        else:
            assert isinstance(state, RawTokens)
            pieces = state.pieces
        more = as_tokens(self._turns.encode_behind(rest)) if isinstance(rest, str) else rest
        return ConversationPrompt(state=RawTokens((*pieces, answer.tokens_L, more)))

    def text(self, tokens: Sequence[int], *, stop: int | str | None = None) -> str:
        """Text of an answer: without special tokens, and without the stop string that ended it."""
        text = answer_text(self.tokenizer, list(tokens))
        return text.partition(stop)[0] if isinstance(stop, str) else text

    def marked_text(self, tokens: Sequence[int]) -> str:
        """Tokens as text, special ones too."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def is_harmony(self) -> bool:
        """Whether an answer is several messages with channels."""
        return self._turns.tool_format == "harmony"

    @property
    def parses_responses(self) -> bool:
        """Whether the tokenizer's response template reads the answers."""
        return self._responses

    def response_parser(self, prompt: Sequence[int]) -> Any:
        """The parser of an answer under way, by the tokenizer's response template. None: it cannot read this prompt."""
        try:
            return self.tokenizer.get_response_parser(prefix=self.marked_text(prompt))
        except Exception:  # the template is not ours
            return None

    def token_text(self, token: int) -> str:
        """One token as text, special ones too."""
        return self.marked_text([token])

    def message(self, prompt_T: Tokens, answer: SampledAnswer, tools: Tools, *, stop: int | str | None) -> Message:
        """The assistant message that the sampled tokens are, with tool calls if there are tools."""
        if self._responses and not isinstance(stop, str):
            parsed = self._parsed_by_tokenizer(prompt_T, answer, tools)
            if parsed is not None:
                return parsed
        calls = self._turns.calls_of(answer.tokens_L, stopped=answer.stopped, tools=tools) if tools else ()
        good = [call for call in calls if isinstance(call, ToolCall)]
        if self.is_harmony:
            marked = self._turns.marked_text(answer.tokens_L, stopped=answer.stopped)
            thought, content = harmony_parts(marked.partition(stop)[0] if isinstance(stop, str) else marked)
        else:
            thought, content = _parted(self.text(answer.tokens_L.tolist(), stop=stop))
            if good:
                content = self._before_calls(answer)
        message: Message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if good:
            message["tool_calls"] = [_wire_call(call.name, call.arguments) for call in good]
        return message

    def _before_calls(self, answer: SampledAnswer) -> str:
        _, said = _parted(self.marked_text(answer.tokens_L.tolist()))
        begins = [at for mark in _MARKS[self._turns.tool_format] if (at := said.find(mark)) >= 0]
        said = said[: min(begins, default=0)]
        for name in self._special:
            said = said.replace(name, "")
        return said.strip()

    def _parsed_by_tokenizer(self, prompt_T: Tokens, answer: SampledAnswer, tools: Tools) -> Message | None:
        """Through the response template that comes with the tokenizer. None if it cannot read this answer."""
        tokens = answer.tokens_L.tolist()
        if answer.stopped and tokens and tokens[-1] in self._stop_ids:
            tokens.pop()
        try:
            parsed = self.tokenizer.parse_response(tokens, prefix=prompt_T.tolist(), tools=tools)
        except Exception:  # model output is untrusted, and the parser is not ours: it is text then
            return None
        if not isinstance(parsed, Mapping):
            return None
        message: Message = {"role": "assistant", "content": str(parsed.get("content") or "")}
        thought = parsed.get("reasoning_content") or parsed.get("thinking")
        if thought:
            message["reasoning_content"] = str(thought)
        if tools and parsed.get("tool_calls"):
            calls = [_parsed_call(call) for call in parsed["tool_calls"]]
            if None in calls:
                return None
            message["tool_calls"] = calls
        return message


def rendered_form(message: Message) -> Message:
    """A message as chat templates read it: the arguments of calls as objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", {}))
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                function["arguments"] = {"": function["arguments"]}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def as_tokens(values: Sequence[int]) -> Tokens:
    """Token ids as an array."""
    return np.array(values, np.int32)


def _wire_call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": secrets.token_hex(_ID_BYTES)[:_ID_LENGTH], "type": "function", "function": function}


def _parsed_call(call: Any) -> dict[str, Any] | None:
    """A call as a response template gives it. None: it is none."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        return None
    return _wire_call(function["name"], function.get("arguments") or {})


def _parted(text: str) -> tuple[str, str]:
    """(reasoning, what is said after it)."""
    thought, closed, said = text.rpartition("</think>")
    if not closed:
        return "", text
    return thought.replace("<think>", "").strip(), said.lstrip("\n")
