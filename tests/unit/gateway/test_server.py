# SPDX-License-Identifier: Apache-2.0
"""The gateway over HTTP: chats, sessions, streams, completions; keys, limits and clients that go away."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from scripted import CHATML, byte_tokenizer, encoded

from helpers.gateways import Served, head_of, serving
from podium.gateway.chat import ChatSession, SessionSettings
from podium.gateway.chat_wire import chat_call
from podium.gateway.http import HttpLimits
from podium.gateway.server import SessionAccess
from podium.rollout.requests import Sampling

TOKENIZER = byte_tokenizer(CHATML)
ASK = {"role": "user", "content": "2+2?"}
MORE = {"role": "user", "content": "and 3+3?"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]


def served(work: Callable[[Served], Any], script: Callable[[str], str] = lambda prompt: "four", **how: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving(TOKENIZER, script, **how) as server:
            await work(server)

    asyncio.run(run())


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.001)


def test_a_chat_is_answered_in_the_form_of_openai() -> None:
    async def work(server: Served) -> None:
        reply = await server.chat(None, [ASK], temperature=0.5, max_tokens=20, seed=7, stop=["\n"], logprobs=True)

        assert reply.status == 200
        (choice,) = reply.json["choices"]
        assert choice["message"] == {"role": "assistant", "content": "four"}
        assert choice["finish_reason"] == "stop"
        assert [each["token"] for each in choice["logprobs"]["content"]] == [*"four", "<|im_end|>"]
        prompt = len(encoded(TOKENIZER, "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"))
        usage = reply.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 5, prompt + 5)
        (request,) = server.engine.requests
        sampling = request.sampling
        assert (sampling.temperature, sampling.max_new_tokens, sampling.stop_strings) == (0.5, 20, ("\n",))
        assert (request.seed, sampling.stop_tokens) == (7, {server.engine.end})

    served(work)


def test_an_answer_that_meets_its_limit_says_so_and_several_answers_have_numbers() -> None:
    async def work(server: Served) -> None:
        reply = await server.chat(None, [ASK], max_completion_tokens=2, n=3)

        assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2]
        assert {choice["finish_reason"] for choice in reply.json["choices"]} == {"length"}
        assert [request.id.sample for request in server.engine.requests] == [0, 1, 2]

    served(work)


def test_a_session_records_what_was_sampled_and_continues_it() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        first = (await server.chat(session, [ASK])).json["choices"][0]["message"]
        await server.chat(session, [ASK, {**first, "content": " four\n"}, MORE])
        record = await server.gateway.close_session(session.id)

        one, two = server.engine.requests
        assert two.prompt.tolist()[: len(one.prompt) + 5] == [
            *one.prompt.tolist(), *encoded(TOKENIZER, "four<|im_end|>"),
        ]  # fmt: skip
        (branch,) = record.branches
        assert (record.sampled_tokens, record.trained_tokens, branch.turns) == (10, 10, (0, 1))
        assert set(branch.versions_T[branch.loss_mask_T].tolist()) == {3}
        assert (await server.chat(session, [ASK])).status == 401  # closed: its key is unknown

    served(work)


def test_a_session_can_fix_the_distribution() -> None:
    async def work(server: Served) -> None:
        sampling = Sampling(max_new_tokens=9, temperature=0.7)
        session = server.gateway.open_session(SessionSettings(sampling=sampling))
        await server.chat(session, [ASK], temperature=0.0, top_p=0.1, max_tokens=500)
        await server.chat(session, [ASK], max_tokens=3)

        found = [request.sampling for request in server.engine.requests]
        assert [(each.temperature, each.top_p, each.max_new_tokens) for each in found] == [(0.7, 1, 9), (0.7, 1, 3)]

    served(work)


def test_equal_requests_at_once_are_one_request() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        replies = await asyncio.gather(*(server.chat(session, [ASK]) for _ in range(5)))
        replies.append(await server.chat(session, [ASK], stream=True))

        assert len(server.engine.requests) == 1
        assert [reply.json["choices"] for reply in replies[:5]] == [replies[0].json["choices"]] * 5
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in replies[5].events[:-1]) == "four"
        record = await server.gateway.close_session(session.id)
        assert (record.sampled_tokens, record.repeated_requests) == (5, 5)

    served(work)


def test_another_seed_or_idempotency_key_is_another_request() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        for seed, key in ((1, "a"), (2, "b"), (2, "b"), (2, "c")):
            await server.chat(session, [ASK], seed=seed, headers={"Idempotency_Key": key})

        one, two, three = [request.seed for request in server.engine.requests]
        assert one != two == three

    served(work)


def test_a_seed_of_the_client_changes_that_of_the_session_and_does_not_replace_it() -> None:
    """An agent that always sends seed=0 would else give equal samples in all episodes of a group."""

    async def work(server: Served) -> None:
        for settings in (SessionSettings(seed=1), SessionSettings(seed=2), SessionSettings(seed=1)):
            await server.chat(server.gateway.open_session(settings), [ASK], seed=0)
        await server.chat(None, [ASK], seed=0)

        one, two, again, plain = [request.seed for request in server.engine.requests]
        assert one != two
        assert one == again
        assert plain == 0

    served(work)


def test_calls_of_tools_come_in_the_form_of_openai() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        message = (await server.chat(session, [ASK], tools=TOOLS)).json["choices"][0]
        assert message["finish_reason"] == "tool_calls"
        (call,) = message["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}

        reply = await server.chat(session, [ASK, message["message"], result], tools=TOOLS, stream=True)

        said = [event["choices"][0]["delta"] for event in reply.events[:-1]]
        assert "".join(delta.get("content", "") for delta in said) == "done"
        record = await server.gateway.close_session(session.id)
        assert [branch.turns for branch in record.branches] == [(0, 1)]

    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    served(work, lambda prompt: "done" if "tool_response" in prompt else call)


def test_a_stream_says_the_text_in_pieces_and_ends() -> None:
    text = "word " * 200

    async def work(server: Served) -> None:
        reply = await server.chat(None, [ASK], stream=True, stream_options={"include_usage": True})

        assert reply.headers["content-type"].startswith("text/event-stream")
        *events, counts, done = reply.events
        assert done == "[DONE]"
        assert counts["usage"]["completion_tokens"] == len(encoded(TOKENIZER, text)) + 1
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"

    served(work, lambda prompt: text)


def test_a_client_that_goes_away_ends_its_request() -> None:
    async def work(server: Served) -> None:
        server.engine.held.set()
        writer = await sent(server, None)
        await until(lambda: len(server.engine.requests) == 1)
        writer.close()
        await until(lambda: bool(server.engine.cancelled))

    served(work)


async def sent(server: Served, session: SessionAccess | None) -> asyncio.StreamWriter:
    """Asks and does not read."""
    body = json.dumps({"model": "tiny", "messages": [ASK]}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    path, key = ("", "") if session is None else (session.path, session.key)
    writer.write(head_of("POST", f"{path}/v1/chat/completions", body, key) + body)
    return writer


def test_a_client_that_comes_back_in_a_session_finds_the_answer_that_it_left() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        server.engine.held.set()
        for count in range(3):
            writer = await sent(server, session)
            await until(lambda: len(server.engine.requests) == 1)
            writer.close()
            await until(lambda count=count: left(server, session) == count + 1)  # type: ignore[misc]
        server.engine.held.clear()

        again = await server.chat(session, [ASK])

        assert again.json["choices"][0]["message"]["content"] == "four"
        record = await server.gateway.close_session(session.id)
        assert (len(server.engine.requests), server.engine.cancelled) == (1, [])
        assert (record.turns, record.sampled_tokens, record.discarded_tokens, record.repeated_requests) == (1, 5, 0, 3)

    def left(server: Served, session: SessionAccess) -> int:
        chat = server.gateway._sessions[session.id][1]
        (running,) = chat._running.values()
        return chat._recorder._repeats + 1 if running.waiting == 0 else 0

    served(work)


def test_a_client_whose_timeout_is_shorter_than_the_generation_gets_its_answer() -> None:
    """An ordinary client: it waits, gives up, and asks again with the same idempotency key."""

    def ask(port: int, session: SessionAccess) -> tuple[int, Any]:
        body = json.dumps({"messages": [ASK]})
        headers = {"Authorization": f"Bearer {session.key}", "Content-Type": "application/json", "Idempotency-Key": "k"}
        for attempt in range(50):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.2)
            try:
                connection.request("POST", f"{session.path}/v1/chat/completions", body, headers)
                return attempt, json.loads(connection.getresponse().read())
            except TimeoutError:
                continue
            finally:
                connection.close()
        raise AssertionError("no answer")

    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        server.engine.held.set()
        asking = asyncio.ensure_future(asyncio.to_thread(ask, server.port, session))
        chat = server.gateway._sessions[session.id][1]
        await until(lambda: chat._recorder._repeats >= 2)
        server.engine.held.clear()

        attempts, answer = await asking

        assert attempts >= 2
        assert answer["choices"][0]["message"]["content"] == "four"
        record = await server.gateway.close_session(session.id)
        assert len(server.engine.requests) == 1
        assert (record.turns, record.sampled_tokens, record.discarded_tokens) == (1, 5, 0)

    served(work)


def test_an_answer_that_nobody_collects_is_not_trained() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        server.engine.held.set()
        writer = await sent(server, session)
        await until(lambda: len(server.engine.requests) == 1)
        chat = server.gateway._sessions[session.id][1]
        (running,) = chat._running.values()
        writer.close()
        await until(lambda: running.waiting == 0)
        server.engine.held.clear()
        await until(lambda: running.task.done())
        assert chat.record().turns == 0

        record = await server.gateway.close_session(session.id)

        assert (record.branches, record.sampled_tokens, record.discarded_tokens) == ((), 0, 5)

    served(work)


def test_a_client_that_leaves_just_as_the_engine_finishes_has_not_got_its_answer() -> None:
    async def work(server: Served) -> None:
        session = ChatSession(server.gateway.service)
        call = chat_call({"messages": [ASK]})
        server.engine.held.set()
        asking = asyncio.ensure_future(session.chat(call))
        await until(lambda: len(server.engine.requests) == 1)
        (running,) = session._running.values()
        running.task.add_done_callback(lambda task: asking.cancel())  # before the client's own turn
        server.engine.held.clear()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert running.task.done()

        record = await session.close()

        assert (record.turns, record.sampled_tokens, record.discarded_tokens) == (0, 0, 5)

    served(work)


def test_nobody_who_comes_back_in_time_ends_the_generation() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session(SessionSettings(grace_s=0.05))
        server.engine.held.set()
        writer = await sent(server, session)
        await until(lambda: len(server.engine.requests) == 1)
        writer.close()
        await until(lambda: bool(server.engine.cancelled))
        server.engine.held.clear()

        again = await server.chat(session, [ASK])  # the same content: not the one that was cancelled

        assert again.json["choices"][0]["message"]["content"] == "four"
        record = await server.gateway.close_session(session.id)
        assert (record.turns, record.sampled_tokens, record.repeated_requests) == (1, 5, 0)
        assert len(server.engine.requests) == 2

    served(work)


def test_one_session_that_closes_ends_what_nobody_waits_for() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        server.engine.held.set()
        writer = await sent(server, session)
        await until(lambda: len(server.engine.requests) == 1)
        writer.close()

        record = await server.gateway.close_session(session.id)

        assert len(server.engine.cancelled) == 1
        assert (record.turns, record.discarded_tokens) == (0, 0)

    served(work)


def test_a_request_that_takes_too_long_is_ended() -> None:
    async def work(server: Served) -> None:
        server.engine.held.set()
        reply = await server.chat(None, [ASK])

        assert (reply.status, reply.json["error"]["code"]) == (504, "timeout")
        await until(lambda: bool(server.engine.cancelled))

    served(work, limits=HttpLimits(request_s=0.2))


def test_keys_are_needed_where_there_are_some() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        path, body = "/v1/chat/completions", {"messages": [ASK]}
        for where, key in (
            (path, ""), (path, "wrong"), (path, session.key), (session.path + path, "right"),
            ("/sessions/other" + path, session.key), ("/sessions/" + path, ""), ("/sessions", ""),
        ):  # fmt: skip
            reply = await server.post(where, body, key=key)
            assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key"), where
        assert (await server.post(path, body, key="right")).status == 200
        assert (await server.post(session.path + path, body, x_api_key=session.key)).status == 200

    served(work, key="right")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": ""}]}, 400, "messages[0]"),
        ("/v1/chat/completions", {"messages": [{**ASK, "content": [{"type": "image_url"}]}]}, 400, "only text"),
        ("/v1/chat/completions", {"messages": [ASK], "temperature": "hot"}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": [ASK], "temperature": -1}, 400, "temperature is -1"),
        ("/v1/chat/completions", {"messages": [ASK], "top_p": 7}, 400, "top_p is 7"),
        ("/v1/chat/completions", {"messages": [ASK], "n": 1000}, 400, "n is 1000"),
        ("/v1/chat/completions", {"messages": [ASK], "stop": 7}, 400, "stop must be"),
        ("/v1/chat/completions", {"messages": [ASK], "stop": [None, 7]}, 400, "stop must be"),
        ("/v1/chat/completions", {"messages": [ASK], "presence_penalty": 1}, 400, "presence_penalty"),
        ("/v1/chat/completions", {"messages": [ASK], "tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", {"messages": [ASK], "model": "../../etc/passwd"}, 404, "'tiny' only"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "leaves no room"),
        ("/v1/completions", {"prompt": [99999]}, 400, "below"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "echo"),
        ("/v1/../../etc/passwd", {}, 404, "no such endpoint"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_the_form_of_openai(path: str, body: Any, status: int, words: str) -> None:
    async def work(server: Served) -> None:
        reply = await server.post(path, body)

        assert reply.status == status
        assert words in reply.json["error"]["message"]
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}
        assert server.engine.requests == []

    served(work)


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9999\r\n\r\n", b"", 413),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 1x\r\n\r\n", b"", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"", 411),
        (b"nonsense\r\n\r\n", b"", 400),
        (b"POST / HTTP/1.1\r\nno colon\r\n\r\n", b"", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"", 431),
        (b"GET /v1/chat/completions HTTP/1.1\r\n\r\n", b"", 405),
        (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n", b"{}", 415),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n", b"[]", 400),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(head: bytes, body: bytes, status: int) -> None:
    async def work(server: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head + body)
        first = await reader.readline()
        writer.close()

        assert int(first.split()[1]) == status

    served(work, limits=HttpLimits(body_bytes=1000))


def test_one_connection_serves_several_requests_also_when_they_are_sent_ahead() -> None:
    async def work(server: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({"messages": [ASK]}).encode()
        head = head_of("POST", "/v1/chat/completions", body).replace(b"Connection: close\r\n", b"")
        writer.write((head + body) * 2)
        for _ in range(2):
            answer = await reader.readuntil(b"\r\n\r\n")
            size = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(size))["choices"][0]["message"]["content"] == "four"
        writer.close()

    served(work)


def test_a_page_of_another_site_cannot_reach_a_server_without_a_key() -> None:
    async def work(server: Served) -> None:
        server.gateway._host_names = frozenset({"127.0.0.1", "localhost"})

        assert (await server.send("GET", "/v1/models", Host="evil.example")).status == 421
        assert (await server.send("GET", "/v1/models")).json["data"][0]["id"] == "tiny"
        assert (await server.send("GET", "/v1/models/tiny")).json["id"] == "tiny"
        assert (await server.send("GET", "/v1/models/other")).status == 404

    served(work)


def test_completions_echo_the_prompt_with_its_log_probs() -> None:
    async def work(server: Served) -> None:
        tokens = encoded(TOKENIZER, "1+1=")
        body = {"model": "tiny", "prompt": [tokens, tokens], "max_tokens": 1, "logprobs": 1, "echo": True}
        reply = await server.post("/v1/completions", {**body, "temperature": 0, "seed": 1234})

        assert [choice["index"] for choice in reply.json["choices"]] == [0, 1]
        choice = reply.json["choices"][1]
        assert choice["text"] == "1+1=f"
        marks = choice["logprobs"]
        assert marks["tokens"] == [*"1+1=f"]
        assert marks["token_logprobs"] == [None, -1, -2, -3, -0.5]
        assert marks["top_logprobs"] == [None, {"+": -1}, {"1": -2}, {"=": -3}, {"f": -0.5}]
        assert marks["text_offset"] == [0, 1, 2, 3, 4]

    served(work)


def test_completions_of_text_stream_and_score_alone() -> None:
    async def work(server: Served) -> None:
        reply = await server.post("/v1/completions", {"prompt": "1+1=", "stream": True})
        assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == "four"
        scored = await server.post("/v1/completions", {"prompt": "1+1", "max_tokens": 0, "echo": True, "logprobs": 0})
        assert scored.json["choices"][0]["logprobs"]["token_logprobs"] == [None, -1, -2]
        assert len(server.engine.requests) == 1

    served(work)


def test_an_engine_that_fails_ends_all_requests_with_its_reason() -> None:
    async def work(server: Served) -> None:
        reply = await server.chat(None, [ASK])

        assert (reply.status, reply.json["error"]["type"]) == (503, "server_error")
        assert "out of ideas" in reply.json["error"]["message"]
        assert (await server.chat(None, [ASK])).status == 503
        assert server.engine.closed

    def script(prompt: str) -> str:
        raise RuntimeError("out of ideas")

    served(work, script)


def test_messages_are_answered_in_the_form_of_anthropic() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        tool = {"name": "add", "description": "", "input_schema": {"type": "object"}}
        body: dict[str, Any] = {"max_tokens": 99, "system": "short", "messages": [ASK], "tools": [tool]}
        first = await server.post(f"{session.path}/v1/messages", body, x_api_key=session.key)
        assert (first.json["stop_reason"], first.json["usage"]["output_tokens"]) == ("tool_use", len(call) + 1)
        (use,) = first.json["content"]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "2"}]}
        body["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

        second = await server.post(f"{session.path}/v1/messages", {**body, "stream": True}, x_api_key=session.key)

        assert [each["type"] for each in second.events] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop",
        ]  # fmt: skip
        assert second.events[2]["delta"] == {"type": "text_delta", "text": "done"}
        record = await server.gateway.close_session(session.id)
        assert [branch.turns for branch in record.branches] == [(0, 1)]
        wrong = await server.post("/v1/messages", {"messages": [ASK]})
        assert (wrong.status, wrong.json["type"], wrong.json["error"]["type"]) == (
            400,
            "error",
            "invalid_request_error",
        )

    served(work, lambda prompt: "done" if "tool_response" in prompt else call)


@pytest.mark.parametrize(
    ("field", "value"), [("thinking", {"type": "enabled", "budget_tokens": 9}), ("container", "c"), ("made_up", 1)]
)
def test_what_anthropics_clients_ask_for_and_is_not_done_is_refused_with_its_name(field: str, value: Any) -> None:
    async def work(server: Served) -> None:
        body = {"max_tokens": 9, "messages": [ASK]}
        reply = await server.post("/v1/messages", {**body, field: value})

        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
        assert field in reply.json["error"]["message"]
        assert server.engine.requests == []
        harmless = {"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}
        assert (await server.post("/v1/messages", {**body, **harmless})).status == 200

    served(work)


def test_tokens_of_messages_are_counted_without_an_answer() -> None:
    async def work(server: Served) -> None:
        body = {"system": "short", "messages": [ASK], "model": "tiny"}
        counted = await server.post("/v1/messages/count_tokens", body)
        answered = await server.post("/v1/messages", {**body, "max_tokens": 9})

        assert counted.json == {"input_tokens": answered.json["usage"]["input_tokens"]}
        assert len(server.engine.requests) == 1
        wrong = await server.post("/v1/messages/count_tokens", {"messages": 3})
        assert (wrong.status, wrong.json["type"]) == (400, "error")

    served(work)


def test_an_error_in_a_stream_of_anthropic_has_its_form() -> None:
    async def work(server: Served) -> None:
        server.engine.fails_after = 3
        body = {"max_tokens": 99, "messages": [ASK], "stream": True}
        reply = await server.post("/v1/messages", body)
        assert reply.events[0]["type"] == "message_start"
        assert reply.events[-1]["type"] == "error"
        assert reply.events[-1]["error"] == {"type": "api_error", "message": "out of ideas"}
        assert "event: error\n" in reply.text

    served(work, lambda prompt: "long " * 300)


def test_an_engine_that_cannot_answer_is_an_error_of_the_server_so_that_clients_ask_again() -> None:
    async def work(server: Served) -> None:
        server.engine.fails_after = 1
        for path, body in (
            ("/v1/chat/completions", {"messages": [ASK]}), ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", {"messages": [ASK], "max_tokens": 9}),
        ):  # fmt: skip
            reply = await server.post(path, body)
            assert reply.status == 500, path
            assert "out of ideas" in reply.json["error"]["message"]

    served(work)


def test_a_large_body_is_not_read_without_a_key() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        for path, key, status in ((session.path, "wrong", 401), ("", "", 401), (session.path, session.key, None)):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            head = head_of("POST", f"{path}/v1/chat/completions", b"x" * 1_000_000, key)
            writer.write(head)  # the body does not come
            if status is None:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.readline(), 0.2)
            else:
                assert int((await reader.readline()).split()[1]) == status
            writer.close()

    served(work, key="right")


@pytest.mark.slow
def test_a_session_keeps_memory_for_its_tokens_and_not_for_each_turns_history() -> None:
    """Each turn adds about 2000 tokens of prompt. Kept whole for every turn, prompts alone would be 5 MB after 40
    turns, and texts and requests as much again."""
    kept: list[int] = []

    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        history: list[Any] = []
        server.engine.capacity = replace(server.engine.capacity, max_length=1 << 20)
        server.backend._capacity = server.engine.capacity
        for turn in range(40):
            history.append({"role": "user", "content": f"{turn} " + "x" * 2000})
            reply = await server.chat(session, history)
            history.append(reply.json["choices"][0]["message"])
            server.engine.requests.clear()
            if turn == 3:
                tracemalloc.start()
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        record = await server.gateway.close_session(session.id)
        (branch,) = record.branches
        assert len(branch.turns) == 40

    served(work)
    assert kept[0] < 2_500_000, kept


def test_the_same_request_of_two_agents_of_a_session_is_no_repeat() -> None:
    async def work(server: Served) -> None:
        session = server.gateway.open_session()
        for agent in ("one", "two", "two"):
            await server.chat(session, [ASK], headers={"X_Session_ID": agent})
        record = await server.gateway.close_session(session.id)
        assert (record.requests, record.repeated_requests, len(server.engine.requests)) == (2, 1, 2)

    served(work)
