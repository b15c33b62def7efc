# SPDX-License-Identifier: Apache-2.0
"""What the gateway adds to a request: the time of a chat over HTTP beside that of the same tokens from the engine.

    .venv/bin/python benchmarks/gateway.py MODEL [--requests 200] [--max-tokens 8] [--at-once 1 16]

Both sides use one engine thread, in turns, with the same prompt and sampling; figures are medians over requests. A
session is recorded meanwhile: every request continues the one before it, until the context is half full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

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


async def episode(gateway: Gateway, port: int, count: int, max_tokens: int, seconds: dict[str, list[float]]) -> None:
    """Requests of one session, each beside the same generation without the gateway."""
    service = gateway.service
    access = gateway.open_session()
    connection = await asyncio.open_connection("127.0.0.1", port)
    messages = [ASK]
    for number in range(count):
        prompt = service.conversations.begin(messages, None).tokens_T
        sampling = service.sampling(SamplingWish(max_tokens=max_tokens), len(prompt))
        body = {"messages": messages, "max_tokens": max_tokens, "seed": number}
        content: Any = None
        for side in ("engine", "gateway") if number % 2 else ("gateway", "engine"):  # the second finds a warm cache
            began = time.perf_counter()
            if side == "gateway":
                content = await post(port, access, body, connection)
            else:
                wanted = GenerationRequest(prompt=prompt, sampling=sampling, seed=number)
                await service.backend.submit(wanted).completion
            seconds[side].append(time.perf_counter() - began)
        used = content["usage"]["total_tokens"]
        messages = [*messages, content["choices"][0]["message"], ASK]
        if 2 * used > service.backend.capacity.max_length:
            messages = [{"role": "user", "content": f"what is {number}+2?"}]
    connection[1].close()
    record = await gateway.close_session(access.id)
    assert record.trained_tokens == record.sampled_tokens


async def measure(engine: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    backend = EngineThread(engine)
    gateway = Gateway(ModelService("model", Conversations(tokenizer), backend))
    server = HttpServer(gateway.handle)
    try:
        port = await server.listen("127.0.0.1", 0)
        await episode(gateway, port, 10, arguments.max_tokens, {"engine": [], "gateway": []})  # warm
        for at_once in arguments.at_once:
            seconds: dict[str, list[float]] = {"engine": [], "gateway": []}
            count = max(1, arguments.requests // at_once)
            work = (episode(gateway, port, count, arguments.max_tokens, seconds) for _ in range(at_once))
            await asyncio.gather(*work)
            direct, over = (statistics.median(seconds[side]) * 1e3 for side in ("engine", "gateway"))
            print(
                f"{at_once} at once: engine {direct:.2f} ms, over the gateway {over:.2f} ms, overhead "
                f"{over - direct:.2f} ms (medians of {len(seconds['engine'])} requests)",
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
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16])
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
