# SPDX-License-Identifier: Apache-2.0
"""What the gateway adds to a request: the time of a chat over HTTP beside that of the same tokens from the engine.

    .venv/bin/python benchmarks/gateway.py MODEL [--requests 200] [--max-tokens 8] [--at-once 1 16 1000]

Both sides use one engine thread, in turns, with the same prompts and sampling. Seconds are medians over requests, and
with many at once each waits for the work of all. So processor time counts too: of the whole process, which has the
client, over all requests of a side that are made at once. A session is recorded meanwhile: every request continues the
one before it, until the context is half full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.tokenizer import load_tokenizer
from podium.engine.mesh import join
from podium.gateway.backend import EngineThread, GenerationRequest
from podium.gateway.chat import ModelService, SamplingWish
from podium.gateway.conversation import Conversations
from podium.gateway.http import HttpServer
from podium.gateway.server import Gateway, SessionAccess
from podium.recipe import ModelSection, PlacementSection, RolloutSection
from podium.rollout.checkpoints import context_of, open_engine

ASK = {"role": "user", "content": "what is 1+2?"}


async def post(port: int, access: SessionAccess, body: Any, connection: Any) -> Any:
    """One request on a connection that stays open."""
    reader, writer = connection
    data = json.dumps(body).encode()
    head = (
        f"POST {access.path}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {access.key}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    answer = await reader.readuntil(b"\r\n\r\n")
    size = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    content = json.loads(await reader.readexactly(size))
    assert answer.startswith(b"HTTP/1.1 200"), content
    return content


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that the gateway has answered."""

    messages: Sequence[Message]
    seed: int


async def over_gateway(gateway: Gateway, port: int, count: int, max_tokens: int, seconds: list[float]) -> list[Asked]:
    """Requests of one session."""
    service = gateway.service
    access = gateway.open_session()
    connection = await asyncio.open_connection("127.0.0.1", port)
    messages, asked = [ASK], list[Asked]()
    for number in range(count):
        body = {"messages": messages, "max_tokens": max_tokens, "seed": number}
        began = time.perf_counter()
        content = await post(port, access, body, connection)
        seconds.append(time.perf_counter() - began)
        asked.append(Asked(messages, number))
        used = content["usage"]["total_tokens"]
        messages = [*messages, content["choices"][0]["message"], ASK]
        if 2 * used > service.backend.capacity.max_length:
            messages = [{"role": "user", "content": f"what is {number}+2?"}]
    connection[1].close()
    record = await gateway.close_session(access.id)
    assert record.trained_tokens == record.sampled_tokens
    return asked


async def from_engine(
    service: ModelService, prompts: list[tuple[Tokens, int]], max_tokens: int, seconds: list[float]
) -> None:
    """The same prompts and seeds without the gateway."""
    for prompt, seed in prompts:
        sampling = service.sampling(SamplingWish(max_tokens=max_tokens), len(prompt))
        began = time.perf_counter()
        await service.backend.submit(GenerationRequest(prompt=prompt, sampling=sampling, seed=seed)).completion
        seconds.append(time.perf_counter() - began)


async def measure(engine: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    backend = EngineThread(engine)
    gateway = Gateway(ModelService("model", Conversations(tokenizer), backend))
    server = HttpServer(gateway.handle)
    try:
        port = await server.listen("127.0.0.1", 0)
        await over_gateway(gateway, port, 10, arguments.max_tokens, [])  # warm
        for at_once in arguments.at_once:
            count = max(3, arguments.requests // at_once)
            over, direct = list[float](), list[float]()
            # A first round has the prompts, and leaves them in the cache for both sides.
            asked = await asyncio.gather(
                *(over_gateway(gateway, port, count, arguments.max_tokens, []) for _ in range(at_once))
            )
            conversations = gateway.service.conversations
            prompts = [
                [(conversations.begin(each.messages, None).tokens_T, each.seed) for each in some] for some in asked
            ]
            before = time.process_time()
            await asyncio.gather(
                *(over_gateway(gateway, port, count, arguments.max_tokens, over) for _ in range(at_once))
            )
            over_s = time.process_time() - before
            before = time.process_time()
            await asyncio.gather(
                *(from_engine(gateway.service, each, arguments.max_tokens, direct) for each in prompts)
            )
            added_ms = (over_s - (time.process_time() - before)) / len(over) * 1e3
            over_ms, direct_ms = (statistics.median(each) * 1e3 for each in (over, direct))
            print(
                f"{at_once} at once: engine {direct_ms:.1f} ms, over the gateway {over_ms:.1f} ms (medians of "
                f"{len(over)} requests); processor time that client and gateway add to a request: {added_ms:.2f} ms",
                flush=True,
            )
    finally:
        await server.close()
        await asyncio.to_thread(backend.close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 1000])
    arguments = parser.parse_args()
    section = ModelSection(path=str(arguments.model))
    context = context_of(section, arguments.model) or 2048
    mesh = join(PlacementSection(), rank=0, world=1, local_rank=0)
    opened = open_engine(
        section, arguments.model, mesh, RolloutSection(), tokenizer=load_tokenizer(section),
        max_length=min(context, 2048), cpu=None,
    )  # fmt: skip
    print(opened.words, flush=True)
    asyncio.run(measure(opened.engine, load_tokenizer(section), arguments))


if __name__ == "__main__":
    main()
