# SPDX-License-Identifier: Apache-2.0
"""Many agents at once: one step of a run whose episodes are played by an async agent with tools that take 0.2 s.

    .venv/bin/python examples/calculator/make_task.py demo/calculator
    .venv/bin/python benchmarks/agents.py demo/calculator/model [--episodes 1000] [--turns 3] [--tool-s 0.2]

All episodes are under way at the same time, in one process of agents and one gateway. The script fails if one is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import podium
from podium.observe import read_metrics

SAMPLES = 8


async def play(task: Any, base_url: str, api_key: str) -> float:
    """The agent: turns with a tool behind each, on one connection."""
    url = urlsplit(base_url)
    messages = [dict(message) for message in task.messages]
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        for _ in range(task.row["turns"]):
            message = await answer_to(messages, url.path, f"{url.hostname}:{url.port}", api_key, reader, writer)
            await asyncio.sleep(task.row["tool_s"])
            messages += [message, {"role": "user", "content": "go on"}]
    finally:
        writer.close()
    return float(len(message["content"] or "") % 3)


async def answer_to(
    messages: list[Any], path: str, host: str, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> dict[str, Any]:
    """One chat completion."""
    data = json.dumps({"messages": messages, "max_tokens": 8}).encode()
    head = (
        f"POST {path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    answer = await reader.readuntil(b"\r\n\r\n")
    size = int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    content = json.loads(await reader.readexactly(size))
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(str(content))
    return dict(content["choices"][0]["message"])


def recipe(model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One step of so many episodes."""
    row = {"turns": arguments.turns, "tool_s": arguments.tool_s}
    count = arguments.episodes // SAMPLES
    rows = [{"messages": [{"role": "user", "content": f"{number}+1?"}], **row} for number in range(count)]
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return {
        "program": "grpo", "model": {"path": str(model.resolve())},
        "data": {"train": [{"path": str(folder / "train.jsonl")}]},
        "environment": {
            "agent": f"{Path(__file__).resolve()}:play", "concurrency": arguments.episodes,
            "max_turns": arguments.turns,
        },
        "rollout": {"prompts_per_step": count, "samples_per_prompt": SAMPLES, "max_new_tokens": 8},
        "optimizer": {"lr": 1e-6}, "steps": 1, "placement": {"launcher": "inline", "device": "cpu"},
        "run": {"name": "agents", "folder": str(folder / "runs")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tool-s", type=float, default=0.2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = podium.train(recipe(arguments.model, Path(folder), arguments))
        seconds = time.perf_counter() - began
        values: dict[str, float] = {}
        for line in read_metrics(result.folder / "metrics.jsonl"):
            values |= line.values
    assert values["episodes"] == arguments.episodes // SAMPLES * SAMPLES, values["episodes"]
    assert values["episodes/failed"] == 0, values["episodes/failed"]
    assert values["environment/trained_tokens"] == values["environment/sampled_tokens"]
    requests = values["episodes"] * values["environment/requests"]
    print(
        f"{values['episodes']:.0f} episodes, none lost; {requests:.0f} requests in {values['time/rollout_s']:.1f} s of "
        f"rollout ({requests / values['time/rollout_s']:.0f} per second), {seconds:.1f} s in all; "
        f"{os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
