# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses: requests to ChatCalls, ChatAnswers to responses and streamed events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.data.kinds import Message
from podium.gateway.chat import ChatAnswer, ChatCall
from podium.gateway.chat_wire import chat_call, content_key, event, refuse_unsupported, text_content
from podium.gateway.refusal import RequestRefusedError
from podium.observe.timing import wall_clock_s

_KNOWN = frozenset({
    "model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p", "top_k",
    "seed", "stream", "stream_options", "store", "metadata", "user", "previous_response_id", "parallel_tool_calls",
    "safety_identifier", "prompt_cache_key", "service_tier",
})  # fmt: skip
# Known and not done: refused unless they ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "text": (None, {}, {"format": {"type": "text"}}), "reasoning": (None, {}), "include": (None, []),
    "background": (None, False), "conversation": (None,), "prompt": (None,), "truncation": (None, "disabled"),
    "top_logprobs": (None, 0), "max_tool_calls": (None,),
}  # fmt: skip
_NOT_CONTENT = ("store", "safety_identifier", "prompt_cache_key", "service_tier")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseCall:
    """A request. `said`: the messages so far without instructions, to continue by `previous_response_id`."""

    call: ChatCall
    said: tuple[Message, ...]
    body: Mapping[str, Any]


def response_call(
    body: Mapping[str, Any], before: Sequence[Message] = (), *, idempotency_key: str | None = None
) -> ResponseCall:
    """A request as it came, by way of the form of chat completions. `before`: what `previous_response_id` names."""
    refuse_unsupported(body, _UNSUPPORTED)
    for name, value in body.items():
        if name not in _KNOWN and name not in _UNSUPPORTED and value is not None:
            raise RequestRefusedError(400, f"{name[:60]} is not supported. Leave it out.", param=name[:60])
    said = (*before, *_messages(body.get("input")))
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise RequestRefusedError(400, "instructions must be a text.", param="instructions")
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise RequestRefusedError(400, "tools must be a list.", param="tools")
    key = content_key({name: value for name, value in body.items() if name not in _NOT_CONTENT})
    plain: dict[str, Any] = {
        "messages": [*system, *said],
        "tools": [_tool(tool, index) for index, tool in enumerate(tools)],
        "tool_choice": body.get("tool_choice"),
        "max_tokens": body.get("max_output_tokens"),
        **{name: body.get(name) for name in ("temperature", "top_p", "top_k", "seed")},
    }
    call = chat_call({**plain, "key": key.hex()}, idempotency_key=idempotency_key)
    return ResponseCall(call=call, said=said, body=body)


class ResponseWriter:
    """One response, of one piece or as events."""

    def __init__(self, wanted: ResponseCall, model: str) -> None:
        self.id = f"resp_{wanted.call.id}"
        body = wanted.body
        self._frame: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": int(wall_clock_s()), "model": model, "error": None,
            "incomplete_details": None, "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "max_output_tokens": body.get("max_output_tokens"), "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"), "temperature": body.get("temperature"),
            "top_p": body.get("top_p"), "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [], "text": {"format": {"type": "text"}}, "truncation": "disabled",
        }  # fmt: skip
        self._message_id, self._sent, self._number = _id("msg"), "", -1

    def response(self, answer: ChatAnswer) -> dict[str, Any]:
        """The response of one piece."""
        return self._whole(answer, self._items(answer))

    def first(self) -> str:
        """Says that the response has begun."""
        begun = {**self._frame, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def more(self, text: str) -> str | None:
        """What is new in the text so far, if there is something. Reasoning is not streamed: the message is item 0."""
        if not text.startswith(self._sent) or len(text) == len(self._sent):
            return None
        begin = "" if self._sent else self._open_message(0)
        delta, self._sent = text[len(self._sent) :], text
        return begin + self._text_event("delta", 0, delta=delta)

    def last(self, answer: ChatAnswer) -> list[str]:
        """The rest of the answer, and the whole response."""
        items = self._items(answer)
        if self._sent:  # its place is taken: reasoning comes behind it
            items.sort(key=lambda item: item["type"] != "message")
        events: list[str] = []
        for index, item in enumerate(items):
            events += self._message_events(index, item) if item["type"] == "message" else self._item_events(index, item)
        whole = self._whole(answer, items)
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def _whole(self, answer: ChatAnswer, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        is_cut = answer.choices[0].completion.finish == "length"
        sampled = answer.completion_tokens
        return {
            **self._frame,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(items),
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.reused_tokens},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + sampled,
            },
        }

    def _items(self, answer: ChatAnswer) -> list[dict[str, Any]]:
        message = answer.choices[0].message
        calls = message.get("tool_calls") or ()
        items: list[dict[str, Any]] = []
        if message.get("reasoning_content"):
            part = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [part]})
        if message["content"] or not calls:
            items.append(
                {
                    "type": "message", "id": self._message_id, "role": "assistant", "status": "completed",
                    "content": [_output_text(message["content"])],
                }
            )  # fmt: skip
        items += [
            {
                "type": "function_call", "id": _id("fc"), "call_id": call["id"], "name": call["function"]["name"],
                "arguments": call["function"]["arguments"], "status": "completed",
            }
            for call in calls
        ]  # fmt: skip
        return items

    def _open_message(self, index: int) -> str:
        item = {"type": "message", "id": self._message_id, "role": "assistant", "status": "in_progress", "content": []}
        return self._event("response.output_item.added", output_index=index, item=item) + self._event(
            "response.content_part.added", item_id=self._message_id, output_index=index, content_index=0,
            part=_output_text(""),
        )  # fmt: skip

    def _message_events(self, index: int, item: Mapping[str, Any]) -> Iterator[str]:
        text = item["content"][0]["text"]
        if not self._sent:
            yield self._open_message(index)
        rest = text[len(self._sent) :] if text.startswith(self._sent) else ""
        if rest:
            yield self._text_event("delta", index, delta=rest)
        yield self._text_event("done", index, text=text)
        yield self._event(
            "response.content_part.done", item_id=self._message_id, output_index=index, content_index=0,
            part=item["content"][0],
        )  # fmt: skip
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _item_events(self, index: int, item: Mapping[str, Any]) -> Iterator[str]:
        is_call = item["type"] == "function_call"
        begun = {**item, "arguments": "", "status": "in_progress"} if is_call else {**item, "content": []}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        if is_call:
            where = {"item_id": item["id"], "output_index": index}
            yield self._event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            yield self._event("response.function_call_arguments.done", **where, arguments=item["arguments"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _text_event(self, kind: str, index: int, **content: Any) -> str:
        where = {"item_id": self._message_id, "output_index": index, "content_index": 0, "logprobs": []}
        return self._event(f"response.output_text.{kind}", **where, **content)

    def _event(self, kind: str, **content: Any) -> str:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **content}, kind)


def response_error_event(error: RequestRefusedError) -> str:
    """A refusal as the last event of a stream."""
    return event({"type": "error", "code": error.code, "message": str(error), "param": error.param}, "error")


def _messages(given: Any) -> Iterator[Message]:
    """Items as messages: calls belong to the message of the assistant before them. Reasoning is left out: it is
    recorded as it was sampled."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestRefusedError(400, "input must be a text, or a list of items.", param="input")
    answer: Message | None = None
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":
            continue
        if kind == "function_call":
            answer = {"role": "assistant", "content": ""} if answer is None else answer
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
            continue
        if answer is not None:
            yield answer
            answer = None
        if kind == "function_call_output":
            output = item.get("output")
            yield {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text_content(output, where)}
        elif kind == "message":
            message = {"role": item.get("role"), "content": text_content(item.get("content"), where)}
            if message["role"] == "assistant":
                answer = message
            else:
                yield message
        else:
            raise RequestRefusedError(
                400,
                f"{where}: an item is a message, a function_call, a function_call_output or reasoning.",
                param=where,
            )
    if answer is not None:
        yield answer


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RequestRefusedError(400, f"tools[{index}]: only functions with a name are tools here.", param="tools")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
