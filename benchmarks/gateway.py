# SPDX-License-Identifier: Apache-2.0
"""What the gateway adds to a request: the time of a chat over HTTP beside that of the same tokens from the engine.

    .venv/bin/python benchmarks/gateway.py MODEL [--requests 200] [--max-tokens 8] [--at-once 1 16 1000] [--turns 3]
        [--save]: for docs/benchmarks.md (`make docs-benchmarks`)

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
from dataclasses import asdict, dataclass
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
from result_tables import RESULTS, Column, save

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one turn, in milliseconds: medians over requests, and what the gateway adds to each in processor time."""

    at_once: int
    engine: float
    gateway: float
    added: float


async def turn(gateway: Gateway, port: int, at_once: int, requests: int, max_tokens: int) -> Figures:
    """Both sides, one after the other."""
    count = max(3, requests // at_once)
    over, direct = list[float](), list[float]()
    # A first round has the prompts, and leaves them in the cache for both sides.
    asked = await asyncio.gather(*(over_gateway(gateway, port, count, max_tokens, []) for _ in range(at_once)))
    conversations = gateway.service.conversations
    prompts = [[(conversations.begin(each.messages, None).tokens_T, each.seed) for each in some] for some in asked]
    before = time.process_time()
    await asyncio.gather(*(over_gateway(gateway, port, count, max_tokens, over) for _ in range(at_once)))
    over_s = time.process_time() - before
    before = time.process_time()
    await asyncio.gather(*(from_engine(gateway.service, each, max_tokens, direct) for each in prompts))
    added_s = over_s - (time.process_time() - before)
    return Figures(
        at_once=at_once, engine=statistics.median(direct) * 1e3, gateway=statistics.median(over) * 1e3,
        added=added_s / len(over) * 1e3,
    )  # fmt: skip


async def measure(engine: Any, tokenizer: Any, arguments: argparse.Namespace) -> list[Figures]:
    """All turns."""
    backend = EngineThread(engine)
    gateway = Gateway(ModelService("model", Conversations(tokenizer), backend))
    server = HttpServer(gateway.handle)
    figures: list[Figures] = []
    try:
        port = await server.listen("127.0.0.1", 0)
        await over_gateway(gateway, port, 10, arguments.max_tokens, [])  # warm
        for _ in range(arguments.turns):
            for at_once in arguments.at_once:
                each = await turn(gateway, port, at_once, arguments.requests, arguments.max_tokens)
                figures.append(each)
                print(
                    f"{at_once} at once: engine {each.engine:.1f} ms, over the gateway {each.gateway:.1f} ms, medians. "
                    f"Client and gateway add {each.added:.2f} ms of processor time to a request",
                    flush=True,
                )
    finally:
        await server.close()
        await asyncio.to_thread(backend.close)
    return figures


def save_table(figures: list[Figures], arguments: argparse.Namespace) -> None:
    """Medians and ranges of the turns."""
    ms = "{:.1f} ({:.1f} to {:.1f}) ms"
    columns = [
        Column(name="requests at once", format="{:.0f}"), Column(name="engine", format=ms),
        Column(name="over the gateway", format=ms), Column(name="processor time added to each", format=ms),
    ]  # fmt: skip
    rows = []
    for at_once in arguments.at_once:
        mine = [each for each in figures if each.at_once == at_once]
        sides = ([each.engine for each in mine], [each.gateway for each in mine], [each.added for each in mine])
        rows.append([at_once, *((statistics.median(side), min(side), max(side)) for side in sides)])
    raw = RESULTS / "gateway_overhead_turns.json"
    raw.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n", encoding="utf-8")
    command = ["python examples/calculator/make_task.py demo/calculator",
               "python benchmarks/gateway.py demo/calculator/model"]  # fmt: skip
    save("gateway_overhead", columns, rows, command=command, raw=raw.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 1000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    section = ModelSection(path=str(arguments.model))
    context = context_of(section, arguments.model) or 2048
    mesh = join(PlacementSection(), rank=0, world=1, local_rank=0)
    opened = open_engine(
        section, arguments.model, mesh, RolloutSection(), tokenizer=load_tokenizer(section),
        max_length=min(context, 2048), cpu=None,
    )  # fmt: skip
    print(opened.words, flush=True)
    figures = asyncio.run(measure(opened.engine, load_tokenizer(section), arguments))
    if arguments.save:
        save_table(figures, arguments)


if __name__ == "__main__":
    main()
