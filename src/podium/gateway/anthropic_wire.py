# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages: requests to ChatCalls, ChatAnswers to responses and streamed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from podium.data.kinds import Message
from podium.gateway.chat import ChatAnswer, ChatCall
from podium.gateway.chat_wire import chat_call, content_key, event, refuse_unsupported, text_content
from podium.gateway.refusal import RequestRefusedError

_KNOWN = frozenset({
    "model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "temperature", "top_p",
    "top_k", "stream", "metadata", "service_tier", "seed",
})  # fmt: skip
# Known and not done: refused unless they ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}), "container": (None,), "mcp_servers": (None, []),
    "context_management": (None,),
}  # fmt: skip


def messages_call(body: Mapping[str, Any], *, idempotency_key: str | None = None) -> ChatCall:
    """A request as it came, by way of OpenAI's form."""
    refuse_unsupported(body, _UNSUPPORTED)
    for name, value in body.items():
        if name not in _KNOWN and name not in _UNSUPPORTED and value is not None:
            raise RequestRefusedError(400, f"{name[:60]} is not supported. Leave it out.", param=name[:60])
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        raise RequestRefusedError(400, "max_tokens must be a number of tokens.", param="max_tokens")
    choice = body.get("tool_choice")
    plain: dict[str, Any] = {
        "messages": list(_messages(body)),
        "tools": [_tool(tool, index) for index, tool in enumerate(body.get("tools") or ())],
        "max_tokens": body["max_tokens"],
        "stop": body.get("stop_sequences"),
        "tool_choice": choice.get("type") if isinstance(choice, Mapping) else choice,
        **{name: body.get(name) for name in ("temperature", "top_p", "top_k", "seed")},
    }
    return chat_call({**plain, "key": content_key(body).hex()}, idempotency_key=idempotency_key)


def anthropic_message(answer: ChatAnswer, model: str, *, id: str) -> dict[str, Any]:
    """The response of one piece."""
    return {**_frame(model, id, answer.prompt_tokens), "content": _blocks(answer), **_end(answer)}


class MessageEvents:
    """The events of one streamed response."""

    def __init__(self, model: str, *, id: str) -> None:
        self._model, self._id, self._sent, self._begun = model, id, "", False

    def more(self, text: str) -> str | None:
        """What is new in the text so far, if there is something."""
        if not text.startswith(self._sent) or len(text) == len(self._sent):
            return None
        delta, self._sent = text[len(self._sent) :], text
        block = {"type": "text_delta", "text": delta}
        change = _named("content_block_delta", {"index": 0, "delta": block})
        if self._begun:
            return change
        self._begun = True
        # The number of prompt tokens is not known yet; the end of the stream says it.
        return self._start(0) + _named("content_block_start", {"index": 0, "content_block": _text("")}) + change

    def last(self, answer: ChatAnswer) -> list[str]:
        """The rest of the answer, and how it ended."""
        events = [] if self._begun else [self._start(answer.prompt_tokens)]
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                rest = block["text"].removeprefix(self._sent)
                if not self._begun:
                    events.append(_named("content_block_start", {"index": index, "content_block": _text("")}))
                delta = {"type": "text_delta", "text": rest}
            else:
                empty = {**block, "input": {}}
                events.append(_named("content_block_start", {"index": index, "content_block": empty}))
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append(_named("content_block_delta", {"index": index, "delta": delta}))
            events.append(_named("content_block_stop", {"index": index}))
        end = _end(answer)
        change = {"stop_reason": end["stop_reason"], "stop_sequence": end["stop_sequence"]}
        events.append(_named("message_delta", {"delta": change, "usage": end["usage"]}))
        return [*events, _named("message_stop", {})]

    def _start(self, prompt_tokens: int) -> str:
        return _named("message_start", {"message": _frame(self._model, self._id, prompt_tokens)})


def anthropic_error(error: RequestRefusedError) -> dict[str, Any]:
    """A refusal in Anthropic's form."""
    kinds = {
        401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
        503: "overloaded_error",
    }  # fmt: skip
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def anthropic_error_event(error: RequestRefusedError) -> str:
    """A refusal as the last event of a stream."""
    return event(anthropic_error(error), "error")


def _messages(body: Mapping[str, Any]) -> Iterator[Message]:
    if body.get("system"):
        yield {"role": "system", "content": text_content(body["system"], "system")}
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RequestRefusedError(400, "messages must be a list.", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            raise RequestRefusedError(400, f"{where}: a message has a role, user or assistant.", param=where)
        content = message.get("content")
        blocks = content if isinstance(content, list) else [_text(content if isinstance(content, str) else "")]
        if not all(isinstance(block, Mapping) for block in blocks):
            raise RequestRefusedError(400, f"{where}.content: a block is an object with a type.", param=where)
        yield from (_said(blocks, where) if message["role"] == "assistant" else _asked(blocks, where))


def _said(blocks: list[Any], where: str) -> Iterator[Message]:
    """Thoughts are left out: they are recorded as they were sampled."""
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    silent = ("tool_use", "thinking", "redacted_thinking")
    text = text_content([block for block in blocks if block.get("type") not in silent], where)
    yield {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _asked(blocks: list[Any], where: str) -> Iterator[Message]:
    """Results of tools are messages of their own, before what the user says beside them."""
    for block in blocks:
        if block.get("type") == "tool_result":
            content = text_content(block.get("content"), where)
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content}
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if rest:
        yield {"role": "user", "content": text_content(rest, where)}


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise RequestRefusedError(400, f"tools[{index}]: a tool has a name and an input_schema.", param="tools")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    message = answer.choices[0].message
    calls = message.get("tool_calls") or ()
    blocks = [_text(message["content"])] if message["content"] or not calls else []
    for call in calls:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            arguments = {}
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _end(answer: ChatAnswer) -> dict[str, Any]:
    choice = answer.choices[0]
    stop = choice.completion.stop if isinstance(choice.completion.stop, str) else None
    reason = "stop_sequence" if stop else "max_tokens" if choice.completion.finish == "length" else "end_turn"
    return {
        "stop_reason": "tool_use" if choice.message.get("tool_calls") else reason,
        "stop_sequence": stop,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


def _frame(model: str, id: str, prompt_tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{id}", "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }  # fmt: skip


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _named(name: str, content: Mapping[str, Any]) -> str:
    return event({"type": name, **content}, name)
