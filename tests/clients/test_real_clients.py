# SPDX-License-Identifier: Apache-2.0
"""The gateway with OpenAI's and Anthropic's own clients, unchanged from PyPI, which have an environment of their own:
`make test-clients`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("openai") is None or importlib.util.find_spec("anthropic") is None:
    pytest.skip("the clients are not installed in this environment: run `make test-clients`", allow_module_level=True)

import anthropic
import openai

from helpers.gateways import Served, serving

sys.path.append(str(Path(__file__).parents[1] / "unit" / "environments"))
from scripted import CHATML, byte_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(120)]

TOKENIZER = byte_tokenizer(CHATML)
ASK: Any = {"role": "user", "content": "2+2?"}
MORE: Any = {"role": "user", "content": "and 3+3?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
CALL = '<think>I add</think>\nI call.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def script(prompt: str) -> str:
    if "tool_response" in prompt:
        return "it is 2"
    return CALL if "Tools as" in prompt else "four words are here"


@contextmanager
def running(key: str | None = None) -> Iterator[tuple[Served, asyncio.AbstractEventLoop, str]]:
    """A gateway whose event loop runs in another thread, and its address."""
    loop, ready, end = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[Served] = []

    async def run() -> None:
        async with serving(TOKENIZER, script, key=key) as server:
            found.append(server)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    try:
        assert ready.wait(30)
        yield found[0], loop, f"http://127.0.0.1:{found[0].port}"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(30)
        loop.close()


def closed(server: Served, loop: asyncio.AbstractEventLoop, id: str) -> Any:
    return asyncio.run_coroutine_threadsafe(server.gateway.close_session(id), loop).result(30)


def test_openai_chats_with_tools_in_a_session_and_its_tokens_are_recorded() -> None:
    with running() as (server, loop, url):
        session = server.gateway.open_session()
        with openai.OpenAI(base_url=f"{url}{session.path}/v1", api_key=session.key) as client:
            first = client.chat.completions.create(model="any", messages=[ASK], tools=[TOOL])
            message = first.choices[0].message
            (call,) = message.tool_calls
            assert (message.content, call.function.name, first.choices[0].finish_reason) == (
                "I call.", "add", "tool_calls",
            )  # fmt: skip
            returned = message.model_dump(include={"role", "content", "tool_calls"})
            returned["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": 1}, indent=2)
            result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            second = client.chat.completions.create(model="any", messages=[ASK, returned, result], tools=[TOOL])
            assert second.choices[0].message.content == "it is 2"
        record = closed(server, loop, session.id)

    assert [branch.turns for branch in record.branches] == [(0, 1)]
    used = first.usage.completion_tokens + second.usage.completion_tokens
    assert record.sampled_tokens == record.trained_tokens == used


def test_openai_streams_text_and_calls() -> None:
    with running() as (_, _, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        options: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(model="tiny", messages=[ASK], stream=True, stream_options=options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "four words are here"
        assert chunks[-1].usage.completion_tokens == len("four words are here") + 1
        with client.chat.completions.stream(model="tiny", messages=[ASK], tools=[TOOL]) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.parsed_arguments in (None, {"a": 1})
        assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"a": 1}


def test_openai_lists_models_completes_text_and_reads_log_probs() -> None:
    with running() as (_, _, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(model="tiny", messages=[ASK], logprobs=True, n=2, max_tokens=4)
        assert [choice.finish_reason for choice in chat.choices] == ["length", "length"]
        assert [each.logprob for each in chat.choices[1].logprobs.content] == [-0.5] * 4
        done = client.completions.create(model="tiny", prompt="1+1", echo=True, logprobs=1, max_tokens=1)
        assert done.choices[0].text == "1+1f"
        assert done.choices[0].logprobs.token_logprobs == [None, -1, -2, -0.5]
        pieces = client.completions.create(model="tiny", prompt="1+1", stream=True, max_tokens=6)
        assert "".join(piece.choices[0].text for piece in pieces) == "four w"


def test_openai_raises_its_own_errors() -> None:
    with running(key="right-key") as (_, _, url):
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="unknown"),
        ):
            client.models.list()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="right-key", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(model="tiny", messages=[ASK], temperature=-1)
            with pytest.raises(openai.NotFoundError, match="'tiny' only"):
                client.chat.completions.create(model="gpt", messages=[ASK])


def test_many_async_clients_are_answered_at_once() -> None:
    async def ask(url: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            calls = (client.chat.completions.create(model="tiny", messages=[ASK], seed=seed) for seed in range(64))
            return [done.choices[0].message.content for done in await asyncio.gather(*calls)]

    with running() as (_, _, url):
        assert asyncio.run(ask(url)) == ["four words are here"] * 64


def test_anthropic_chats_with_tools_in_a_session_and_its_tokens_are_recorded() -> None:
    tool: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    with running() as (server, loop, url):
        session = server.gateway.open_session()
        with anthropic.Anthropic(base_url=f"{url}{session.path}", api_key=session.key) as client:
            first = client.messages.create(
                model="any", max_tokens=200, system="Be short.", messages=[ASK], tools=[tool]
            )
            assert first.stop_reason == "tool_use"
            text, use = first.content
            assert (text.text, use.name, use.input) == ("I call.", "add", {"a": 1})
            said: Any = {"role": "assistant", "content": first.content}
            result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "2"}]}
            second = client.messages.create(
                model="any", max_tokens=200, system="Be short.", messages=[ASK, said, result], tools=[tool]
            )
            assert (second.content[0].text, second.stop_reason) == ("it is 2", "end_turn")
        record = closed(server, loop, session.id)

    assert [branch.turns for branch in record.branches] == [(0, 1)]
    assert record.sampled_tokens == first.usage.output_tokens + second.usage.output_tokens


def test_anthropic_streams() -> None:
    with running() as (_, _, url), anthropic.Anthropic(base_url=url, api_key="none") as client:
        with client.messages.stream(model="tiny", max_tokens=100, messages=[ASK]) as stream:
            assert "".join(stream.text_stream) == "four words are here"
            assert stream.get_final_message().stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(model="tiny", max_tokens=-1, messages=[ASK])


def test_openai_responses_with_tools_continue_in_a_session_by_id() -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    with running() as (server, loop, url):
        session = server.gateway.open_session()
        with openai.OpenAI(base_url=f"{url}{session.path}/v1", api_key=session.key) as client:
            first = client.responses.create(model="any", input=[ASK], tools=[tool])
            assert first.output_text == "I call."
            call = first.output[-1]
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
            second = client.responses.create(model="any", input=[result], tools=[tool], previous_response_id=first.id)
            assert second.output_text == "it is 2"
        record = closed(server, loop, session.id)

    assert [branch.turns for branch in record.branches] == [(0, 1)]


def test_openai_streams_responses() -> None:
    with running() as (_, _, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        with client.responses.stream(model="tiny", input="2+2?") as stream:
            deltas = [each.delta for each in stream if each.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output_text == "four words are here"


def test_a_client_of_openai_with_a_short_timeout_gets_the_answer_that_it_asked_for_first() -> None:
    with running() as (server, loop, url):
        session = server.gateway.open_session()
        server.engine.held.set()
        threading.Timer(1.5, server.engine.held.clear).start()
        with openai.OpenAI(
            base_url=f"{url}{session.path}/v1", api_key=session.key, timeout=0.5, max_retries=20
        ) as client:
            message = client.chat.completions.create(model="any", messages=[ASK]).choices[0].message
        record = closed(server, loop, session.id)

    assert message.content == "four words are here"
    assert (record.turns, record.requests, record.discarded_tokens) == (1, 1, 0)
    assert record.repeated_requests >= 1


def test_anthropic_counts_tokens_and_raises_its_own_errors() -> None:
    with running() as (_, _, url), anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model="tiny", messages=[ASK])
        message = client.messages.create(model="tiny", max_tokens=99, messages=[ASK])
        assert counted.input_tokens == message.usage.input_tokens
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            client.messages.create(model="tiny", max_tokens=2000, messages=[ASK], thinking=thinking)
