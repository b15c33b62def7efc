# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced while a gateway answers: each request has one version, and is told which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted import CHATML, byte_tokenizer

from helpers.gateways import Served, serving
from podium.errors import WeightMismatchError
from podium.gateway.refusal import RequestRefusedError
from podium.gateway.version_gate import VersionGate

TOKENIZER = byte_tokenizer(CHATML)
ASK = {"role": "user", "content": "2+2?"}


def served(work: Callable[[Served], Any]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30), serving(TOKENIZER, lambda prompt: "four") as server:
            server.gateway.service.gate = VersionGate("step-1")
            await work(server)

    asyncio.run(run())


async def replace(server: Served, number: int, delivery: Any = None) -> None:
    async with server.gateway.service.gate.replace(f"step-{number}"):
        await server.backend.install(number, delivery)  # type: ignore[arg-type]


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.001)


def test_a_request_under_way_ends_on_its_version_and_the_next_one_gets_the_new_one() -> None:
    async def work(server: Served) -> None:
        server.engine.held.set()
        first = asyncio.ensure_future(server.chat(None, [ASK]))
        await until(lambda: len(server.engine.requests) == 1)
        swap = asyncio.ensure_future(replace(server, 2))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(server.chat(None, [ASK]))
        await asyncio.sleep(0.05)
        assert not swap.done()
        assert len(server.engine.requests) == 1  # the second waits for the new weights
        server.engine.held.clear()

        assert (await first).json["system_fingerprint"] == "step-1"
        assert (await second).json["system_fingerprint"] == "step-2"
        await swap
        assert server.engine.installed == [2]
        assert server.engine.running_at_install == [0]

    served(work)


@pytest.mark.parametrize("stream", [False, True])
def test_every_endpoint_says_the_version(stream: bool) -> None:
    async def work(server: Served) -> None:
        await replace(server, 7)
        chat = await server.chat(None, [ASK], stream=stream)
        text = await server.post(
            "/v1/completions", {"model": "tiny", "prompt": "2+2", "max_tokens": 4, "stream": stream}
        )
        for reply in (chat, text):
            last = reply.json if not stream else [each for each in reply.events if each != "[DONE]"][-1]
            assert last["system_fingerprint"] == "step-7"
        for path, body in (
            ("/v1/messages", {"model": "tiny", "messages": [ASK], "max_tokens": 4}),
            ("/v1/responses", {"model": "tiny", "input": "2+2?"}),
        ):
            if not stream:
                assert (await server.post(path, body)).headers["x-podium-version"] == "step-7"
        (model,) = (await server.send("GET", "/v1/models")).json["data"]
        assert model["version"] == "step-7"

    served(work)


def test_weights_that_the_engine_refuses_leave_the_version_and_the_gate_open() -> None:
    async def work(server: Served) -> None:
        with pytest.raises(WeightMismatchError, match="others"):
            await replace(server, 2, "broken")
        reply = await server.chat(None, [ASK])
        assert (reply.status, reply.json["system_fingerprint"]) == (200, "step-1")

    served(work)


def test_a_client_that_goes_away_does_not_keep_new_weights_out() -> None:
    async def work(server: Served) -> None:
        server.engine.held.set()
        leaving = asyncio.ensure_future(server.gateway.service.chat(_call()))
        await until(lambda: len(server.engine.requests) == 1)
        leaving.cancel()
        await replace(server, 2)
        assert server.engine.installed == [2]
        assert len(server.engine.cancelled) == 1

    served(work)


def test_an_install_ends_with_an_error_when_the_engine_ends() -> None:
    async def work(server: Served) -> None:
        server.engine.held.set()
        reply = asyncio.ensure_future(server.chat(None, [ASK]))
        await until(lambda: len(server.engine.requests) == 1)
        await asyncio.to_thread(server.backend.close)
        with pytest.raises(RequestRefusedError, match="it was closed"):
            await server.backend.install(2, None)  # type: ignore[arg-type]
        assert (await reply).status == 503

    served(work)


def _call() -> Any:
    from podium.gateway.chat_wire import chat_call

    return chat_call({"model": "tiny", "messages": [ASK]})
