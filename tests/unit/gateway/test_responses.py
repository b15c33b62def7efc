# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses over HTTP: without state, continued by id in a session, with tools, as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted import CHATML, byte_tokenizer

from helpers.gateways import Reply, Served, serving
from podium.gateway.server import SessionAccess

TOKENIZER = byte_tokenizer(CHATML)
TOOL = {"type": "function", "name": "add", "description": "", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def served(work: Callable[[Served], Any], script: Callable[[str], str] = lambda prompt: "four") -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving(TOKENIZER, script) as server:
            await work(server)

    asyncio.run(run())


async def respond(server: Served, session: SessionAccess | None, given: Any, **body: Any) -> Reply:
    path, key = ("", "") if session is None else (session.path, session.key)
    return await server.post(f"{path}/v1/responses", {"model": "tiny", "input": given, **body}, key=key)


def test_a_text_is_answered_without_state() -> None:
    async def work(server: Served) -> None:
        reply = await respond(server, None, "2+2?", instructions="short", max_output_tokens=9, temperature=0.5)

        assert (reply.status, reply.json["status"], reply.json["object"]) == (200, "completed", "response")
        (item,) = reply.json["output"]
        assert (item["type"], item["role"]) == ("message", "assistant")
        assert item["content"] == [{"type": "output_text", "text": "four", "annotations": [], "logprobs": []}]
        assert reply.json["usage"]["output_tokens"] == 5
        (request,) = server.engine.requests
        assert (request.sampling.max_new_tokens, request.sampling.temperature) == (9, 0.5)
        assert TOKENIZER.decode(request.prompt.tolist()).startswith("<|im_start|>system\nshort<|im_end|>")
        cut = await respond(server, None, [{"role": "user", "content": "2+2?"}], max_output_tokens=2)
        assert (cut.json["status"], cut.json["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})

    served(work)


def test_tools_in_a_session_continue_the_sampled_tokens() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        question = {"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}
        first = await respond(server, session, [question], tools=[TOOL])
        text, call = first.json["output"]
        assert text["content"][0]["text"] == "I add."
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 1}')
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}

        second = await respond(server, session, [question, text, call, result], tools=[TOOL])

        assert second.json["output"][0]["content"][0]["text"] == "done"
        record = await server.gateway.close_session(session.id)
        assert [branch.turns for branch in record.branches] == [(0, 1)]

    served(work, lambda prompt: "done" if "tool_response" in prompt else "I add. " + CALL)


def test_a_session_continues_a_response_by_its_id() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        first = (await respond(server, session, "2+2?")).json
        left = await respond(server, session, "sure?", previous_response_id=first["id"])
        await respond(server, session, "and 3+3?", previous_response_id=first["id"], stream=True)
        third = await respond(server, session, "why?", previous_response_id=left.json["id"])
        assert third.json["previous_response_id"] == left.json["id"]

        record = await server.gateway.close_session(session.id)

        assert sorted(branch.turns for branch in record.branches) == [(0, 1, 3), (0, 2)]
        for where, id in ((None, first["id"]), (server.gateway.open_session(), first["id"])):
            unknown = await respond(server, where, "x", previous_response_id=id)
            assert (unknown.status, unknown.json["error"]["code"]) == (404, "previous_response_not_found")

    served(work)


def test_a_stream_has_the_events_of_openai() -> None:
    async def work(server: Served) -> None:
        events = (await respond(server, None, "2+2?", stream=True)).events

        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert set(kinds[4:-4]) == {"output_text.delta"}
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"] == "word " * 200
        assert len(deltas) > 1
        assert len({event["item_id"] for event in events if "item_id" in event}) == 1

    served(work, lambda prompt: "word " * 200)


def test_a_stream_says_calls_and_reasoning_as_items() -> None:
    async def work(server: Served) -> None:
        events = (await respond(server, None, "2+2?", stream=True, tools=[TOOL])).events

        added = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert added == ["reasoning", "function_call"]
        assert done == events[-1]["response"]["output"]
        assert done[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        (arguments,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert arguments["arguments"] == '{"a": 1}'

    served(work, lambda prompt: "<think>hm</think>" + CALL)


def test_a_repeated_request_is_answered_from_the_record() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        replies = [await respond(server, session, "2+2?") for _ in range(2)]

        assert len(server.engine.requests) == 1
        assert replies[0].json["id"] != replies[1].json["id"]
        await respond(server, session, "why?", previous_response_id=replies[1].json["id"])
        record = await server.gateway.close_session(session.id)
        assert [branch.turns for branch in record.branches] == [(0, 1)]

    served(work)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"reasoning": {"effort": "high"}}, "reasoning"), ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "only functions"), ({"made_up": 1}, "made_up"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"), ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"instructions": 3}, "instructions"), ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "messages"), ({"input": [3]}, "input[0]"), ({"tools": 3}, "tools"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "tool_calls"),
    ],
)  # fmt: skip
def test_what_is_not_done_is_refused_with_its_name(body: dict[str, Any], words: str) -> None:
    async def work(server: Served) -> None:
        reply = await respond(server, None, **{"given": "2+2?", **body})
        assert reply.status == 400, reply.text
        assert words in reply.json["error"]["message"]
        assert server.engine.requests == []

    served(work)


def test_an_error_in_a_stream_is_an_event() -> None:
    async def work(server: Served) -> None:
        server.engine.fails_after = 3
        events = (await respond(server, None, "2+2?", stream=True)).events
        assert (events[-1]["type"], events[-1]["message"]) == ("error", "out of ideas")

    served(work, lambda prompt: "long " * 300)
