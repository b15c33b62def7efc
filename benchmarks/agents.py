# SPDX-License-Identifier: Apache-2.0
"""Many agents at once: one step of a run whose episodes are played by an async agent with tools that take 0.2 s.

    .venv/bin/python examples/calculator/make_task.py demo/calculator
    .venv/bin/python benchmarks/agents.py demo/calculator/model [--episodes 1000] [--turns 3] [--tool-s 0.2]
        [--repeats 3] [--save]: for docs/benchmarks.md (`make docs-benchmarks`)

All episodes are under way at the same time, in one process of agents and one gateway. The script fails if one is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run."""

    episodes: int
    requests: int
    rollout_s: float
    all_s: float


def run(arguments: argparse.Namespace) -> Figures:
    """One run of one step. Fails if an episode or a token is lost."""
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
    return Figures(
        episodes=round(values["episodes"]), requests=round(values["episodes"] * values["environment/requests"]),
        rollout_s=values["time/rollout_s"], all_s=seconds,
    )  # fmt: skip


def save_table(figures: list[Figures], arguments: argparse.Namespace) -> None:
    """Medians and ranges of the repeats."""
    from result_tables import RESULTS, Column, save  # processes of agents import this file too, from elsewhere

    columns = [
        Column(name="episodes at once", format="{:,.0f}"), Column(name="lost", format="{:.0f}"),
        Column(name="requests", format="{:,.0f}"), Column(name="rollout", format="{:.1f} ({:.1f} to {:.1f}) s"),
        Column(name="requests/s", format="{:.0f} ({:.0f} to {:.0f})"),
    ]  # fmt: skip
    seconds = [each.rollout_s for each in figures]
    rates = [each.requests / each.rollout_s for each in figures]
    spread = [(statistics.median(each), min(each), max(each)) for each in (seconds, rates)]
    raw = RESULTS / "agents_turns.json"
    raw.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n", encoding="utf-8")
    command = ["python examples/calculator/make_task.py demo/calculator",
               "python benchmarks/agents.py demo/calculator/model"]  # fmt: skip
    row = [figures[0].episodes, 0, figures[0].requests, *spread]
    save("agents", columns, [row], command=command, raw=raw.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tool-s", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    figures: list[Figures] = []
    for _ in range(arguments.repeats):
        each = run(arguments)
        figures.append(each)
        print(
            f"{each.episodes} episodes, none lost; {each.requests} requests in {each.rollout_s:.1f} s of rollout "
            f"({each.requests / each.rollout_s:.0f} per second), {each.all_s:.1f} s in all; {os.cpu_count()} cores"
        )
    if arguments.save:
        save_table(figures, arguments)


if __name__ == "__main__":
    main()
