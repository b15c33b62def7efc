# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat completions: requests to ChatCalls, ChatAnswers to responses and streamed chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from podium.data.kinds import Message
from podium.data.masks import Tools
from podium.gateway.chat import ChatAnswer, ChatCall, ChatChoice, SamplingWish
from podium.gateway.conversation import Conversations, rendered_form
from podium.gateway.refusal import RequestRefusedError
from podium.observe.timing import wall_clock_s

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_CHOICES, _MOST_MESSAGES = 64, 10_000
# What changes how an answer is sent, and not the answer.
_NOT_CONTENT = ("stream", "stream_options", "user", "metadata", "store", "timeout")
# Asked for and not done: refused unless they ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0), "presence_penalty": (None, 0), "response_format": (None, {"type": "text"}),
    "functions": (None, []), "function_call": (None, "none", "auto"), "audio": (None,), "modalities": (None, ["text"]),
    "prediction": (None,), "top_logprobs": (None, 0),
}  # fmt: skip


def chat_call(body: Mapping[str, Any], *, idempotency_key: str | None = None) -> ChatCall:
    """A request as it came."""
    refuse_unsupported(body, _UNSUPPORTED)
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= _MOST_MESSAGES:
        raise RequestRefusedError(400, "messages must be a list of one message or more.", param="messages")
    parsed = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))
    return ChatCall(
        messages=parsed,
        tools=_tools(body),
        wish=sampling_wish(body, max_tokens=("max_completion_tokens", "max_tokens")),
        content=content_key(body),
        idempotency_key=idempotency_key,
    )


def content_key(body: Mapping[str, Any]) -> bytes:
    """Equal for requests that ask for the same."""
    content = {key: value for key, value in body.items() if key not in _NOT_CONTENT}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()


def refuse_unsupported(body: Mapping[str, Any], unsupported: Mapping[str, Sequence[Any]]) -> None:
    """Refuses what would be ignored silently."""
    for name, harmless in unsupported.items():
        if body.get(name) not in harmless:
            raise RequestRefusedError(400, f"{name} is not supported. Leave it out.", param=name)


def sampling_wish(body: Mapping[str, Any], *, max_tokens: Sequence[str]) -> SamplingWish:
    """The keys about sampling. `max_tokens`: names of the longest answer, the first one given counts."""
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else ()
    stops = tuple(text for text in stops if text is not None)
    if (stop is not None and not isinstance(stop, str | list)) or not all(isinstance(each, str) for each in stops):
        raise RequestRefusedError(400, "stop must be a string, or a list of strings.", param="stop")
    bias = body.get("logit_bias") or {}
    try:
        biases = tuple((int(token), float(value)) for token, value in bias.items())
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RequestRefusedError(400, "logit_bias must map token ids to numbers.", param="logit_bias") from error
    most = next((value for name in max_tokens if (value := _number(body, name, int)) is not None), None)
    n = _number(body, "n", int)
    if n is not None and not 1 <= n <= _MOST_CHOICES:
        raise RequestRefusedError(400, f"n is {n}; it lies between 1 and {_MOST_CHOICES}.", param="n")
    seed = _number(body, "seed", int)
    return SamplingWish(
        max_tokens=most,
        temperature=_number(body, "temperature", float),
        top_p=_number(body, "top_p", float),
        top_k=_number(body, "top_k", int),
        min_p=_number(body, "min_p", float),
        repetition_penalty=_number(body, "repetition_penalty", float),
        logit_bias=biases,
        stop=tuple(text for text in stops if text),
        seed=None if seed is None else seed & ((1 << 62) - 1),
        n=n or 1,
    )


def chat_completion(
    answer: ChatAnswer, conversations: Conversations, model: str, *, id: str, logprobs: bool
) -> dict[str, Any]:
    """The response of one piece."""
    choices = []
    for index, choice in enumerate(answer.choices):
        said = _said(choice)
        choices.append(
            {
                "index": index,
                "message": said,
                "finish_reason": finish_reason(choice),
                "logprobs": _logprobs(choice, conversations) if logprobs else None,
            }
        )
    frame = _frame("chat.completion", model, id) | fingerprint(answer.version)
    return {**frame, "choices": choices, "usage": usage(answer)}


def finish_reason(choice: ChatChoice) -> str:
    """In OpenAI's words."""
    if choice.message.get("tool_calls"):
        return "tool_calls"
    return "length" if choice.completion.finish == "length" else "stop"


def fingerprint(version: str | None) -> dict[str, str]:
    """The field that names the weights, where they have a name."""
    return {} if version is None else {"system_fingerprint": version}


def usage(answer: ChatAnswer) -> dict[str, Any]:
    """Counts of tokens."""
    prompt, sampled = answer.prompt_tokens, answer.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.reused_tokens},
    }


class ChatChunks:
    """The chunks of one streamed response, as events."""

    def __init__(self, model: str, conversations: Conversations, *, id: str, with_usage: bool, logprobs: bool) -> None:
        self._frame, self._conversations = _frame("chat.completion.chunk", model, id), conversations
        self._with_usage, self._logprobs = with_usage, logprobs
        self._sent = ""

    def first(self) -> str:
        """Says who speaks."""
        return self._event(0, {"role": "assistant", "content": ""})

    def more(self, text: str) -> str | None:
        """What is new in the text so far, if there is something."""
        if not text.startswith(self._sent) or len(text) == len(self._sent):
            return None
        delta, self._sent = text[len(self._sent) :], text
        return self._event(0, {"content": delta})

    def last(self, answer: ChatAnswer) -> list[str]:
        """The rest of the answer, how it ended, and the end of the stream."""
        self._frame |= fingerprint(answer.version)
        events = []
        for index, choice in enumerate(answer.choices):
            said = dict(_said(choice))
            content = str(said.pop("content") or "")
            sent = self._sent if index == 0 else ""
            rest = content[len(sent) :] if content.startswith(sent) else ""
            delta = {**said, **({"content": rest} if rest else {})}
            if "tool_calls" in delta:
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
            marks = _logprobs(choice, self._conversations) if self._logprobs else None
            events.append(self._event(index, delta, logprobs=marks))
            events.append(self._event(index, {}, finish=finish_reason(choice)))
        if self._with_usage:
            events.append(event({**self._frame, "choices": [], "usage": usage(answer)}))
        return [*events, "data: [DONE]\n\n"]

    def _event(self, index: int, delta: Mapping[str, Any], *, finish: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return event({**self._frame, "choices": [choice]})


def event(content: Any, name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


def text_content(content: Any, where: str) -> str:
    """The text of a message's content: a string, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            raise RequestRefusedError(400, f"{where}.content: only text is read.", param=f"{where}.content")
        texts.append(str(part.get("refusal" if part["type"] == "refusal" else "text") or ""))
    return "".join(texts)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise RequestRefusedError(400, f"{where}: a message has a role, one of {', '.join(_ROLES)}.", param=where)
    role = "system" if message["role"] == "developer" else message["role"]
    parsed: Message = {"role": role, "content": text_content(message.get("content"), where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(name), str):
            parsed[name] = message[name]
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
            raise RequestRefusedError(
                400, f"{where}.tool_calls: a call has an id and a function with name and arguments.", param=where
            )
        parsed["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": dict(call["function"])} for call in calls
        ]
    return rendered_form(parsed)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _tools(body: Mapping[str, Any]) -> Tools:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RequestRefusedError(400, "tool_choice can be auto or none: no call is forced.", param="tool_choice")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list) or not all(_is_call(tool) for tool in tools):
        raise RequestRefusedError(400, "tools: a tool is {type: function, function: {name, ...}}.", param="tools")
    return [{"type": "function", "function": dict(tool["function"])} for tool in tools]


def _number(body: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> Any:
    value = body.get(name)
    if value is None:
        return None
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise RequestRefusedError(400, f"{name} must be a number, not {json.dumps(value)[:60]}.", param=name)
    return kind(value)


def _said(choice: ChatChoice) -> Message:
    return {
        **choice.message,
        "content": choice.message["content"] or (None if choice.message.get("tool_calls") else ""),
    }


def _logprobs(choice: ChatChoice, conversations: Conversations) -> dict[str, Any]:
    content = []
    for token, logprob in zip(choice.answer.tokens_L.tolist(), choice.answer.logprobs_L.tolist(), strict=True):
        text = conversations.token_text(token)
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _frame(kind: str, model: str, id: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{id}", "object": kind, "created": int(wall_clock_s()), "model": model}
