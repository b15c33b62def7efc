# SPDX-License-Identifier: Apache-2.0
"""A gateway over an engine that says what it is told, and a client that speaks HTTP by hand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from podium.data.control_tokens import AS_TEXT, ControlRule
from podium.data.trajectories import TrajectoryId
from podium.errors import WeightMismatchError
from podium.gateway.backend import EngineThread
from podium.gateway.chat import ModelService
from podium.gateway.conversation import Conversations
from podium.gateway.http import HttpLimits, HttpServer
from podium.gateway.server import Gateway, SessionAccess
from podium.rollout.engine import Capacity, TokenScores
from podium.rollout.requests import Completion, PartialAnswer, Request


class ScriptedEngine:
    """Answers with `script(prompt text)`, a token a step, and its end of turn. `held`: nothing is sampled meanwhile.
    `fails_after`: answers end with an error after so many tokens."""

    def __init__(self, tokenizer: Any, script: Callable[[str], str], *, end: str = "<|im_end|>") -> None:
        self.tokenizer, self.script = tokenizer, script
        self.end = tokenizer.convert_tokens_to_ids(end)
        self.capacity = Capacity(
            vocab_size=len(tokenizer), max_length=2048, max_running=8, cache_tokens=9999, cache_bytes=0
        )
        self.held = threading.Event()
        self.requests: list[Request] = []
        self.cancelled: list[TrajectoryId] = []
        self.closed = False
        self.fails_after: int | None = None
        self.installed: list[int] = []
        self.running_at_install: list[int] = []
        self._running: dict[TrajectoryId, tuple[Request, list[int], int]] = {}
        self._done: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            text = self.script(self.tokenizer.decode(request.prompt.tolist()))
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]
            self.requests.append(request)
            self._running[request.id] = request, tokens[: request.sampling.max_new_tokens], 0

    def results(self, *, deadline_s: float, tick_s: float | None = None) -> Iterator[Completion | None]:
        while self._running or self._done:
            while self._done:
                yield self._done.pop(0)
            if self.held.is_set():
                time.sleep(0.001)
            else:
                for id, (request, tokens, said) in list(self._running.items()):
                    self._running[id] = request, tokens, said + 1
                    if self.fails_after is not None and said + 1 >= self.fails_after:
                        time.sleep(0.1)  # long enough that partial answers are shown
                        self._end(id, "error")
                    elif said + 1 >= len(tokens):
                        self._end(id, "stop" if tokens[-1] == self.end else "length")
            yield None

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        for id in ids:
            self.cancelled.append(id)
            if id in self._running:
                self._end(id, "cancelled")

    def partial_answers(self, ids: Iterable[TrajectoryId]) -> dict[TrajectoryId, PartialAnswer]:
        found = {id: self._running[id] for id in ids if id in self._running}
        return {
            id: PartialAnswer(
                tokens_L=np.array(tokens[:said], np.int32),
                logprobs_L=np.zeros(said, np.float32),
                versions_L=np.zeros(said, np.int32),
            )
            for id, (_, tokens, said) in found.items()
        }

    def score(self, tokens_T: Any) -> TokenScores:
        count = len(tokens_T) - 1
        return TokenScores(
            logprobs_T=-np.arange(1, count + 1, dtype=np.float32),
            best_T=np.asarray(tokens_T[1:], np.int32),
            best_logprobs_T=-np.arange(1, count + 1, dtype=np.float32),
        )

    def install(self, version: Any, delivery: Any) -> None:
        if delivery == "broken":
            raise WeightMismatchError("the weights are others")
        self.running_at_install.append(len(self._running))
        self.installed.append(version)

    def close(self) -> None:
        self.closed = True

    def _end(self, id: TrajectoryId, finish: Any) -> None:
        request, tokens, said = self._running.pop(id)
        tokens = tokens[: said if finish in ("cancelled", "error") else None]
        self._done.append(
            Completion(
                id=id,
                prompt=request.prompt,
                tokens_L=np.array(tokens, np.int32),
                logprobs_L=np.full(len(tokens), -0.5, np.float32),
                versions_L=np.full(len(tokens), 3, np.int32),
                finish=finish,
                stop=self.end if finish == "stop" else None,
                error="out of ideas" if finish == "error" else None,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass(slots=True, kw_only=True, eq=False)
class Served:
    """A gateway that listens, and its parts."""

    gateway: Gateway
    engine: Any
    backend: EngineThread
    port: int

    async def post(self, path: str, body: Any, *, key: str = "", **headers: str) -> Reply:
        """POST with a key."""
        return await self.send("POST", path, json.dumps(body).encode(), key=key, **headers)

    async def chat(self, session: SessionAccess | None, messages: list[Any], **body: Any) -> Reply:
        """A chat completion, in a session or outside."""
        headers = body.pop("headers", {})
        path = "/v1/chat/completions" if session is None else f"{session.path}/v1/chat/completions"
        key = "" if session is None else session.key
        return await self.post(path, {"model": "tiny", "messages": messages, **body}, key=key, **headers)

    async def send(self, method: str, path: str, body: bytes = b"", *, key: str = "", **headers: str) -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head_of(method, path, body, key, headers) + body)
            raw = await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()
        head, _, rest = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return Reply(status=int(first.split()[1]), headers=found, text=_plain(rest, found).decode())


def head_of(method: str, path: str, body: bytes, key: str = "", headers: dict[str, str] | None = None) -> bytes:
    """A request's head; the connection ends after it."""
    lines = {
        "Host": "127.0.0.1", "Connection": "close", "Content-Type": "application/json",
        "Content-Length": str(len(body)), **({"Authorization": f"Bearer {key}"} if key else {}),
        **{name.replace("_", "-"): value for name, value in (headers or {}).items()},
    }  # fmt: skip
    text = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return (text + "\r\n").encode()


@asynccontextmanager
async def serving(
    tokenizer: Any, script: Callable[[str], str], *, limits: HttpLimits | None = None, key: str | None = None,
    end: str = "<|im_end|>", rule: ControlRule = AS_TEXT,
) -> AsyncIterator[Served]:  # fmt: skip
    """A gateway over a scripted engine."""
    engine = ScriptedEngine(tokenizer, script, end=end)
    backend = EngineThread(engine)  # type: ignore[arg-type]
    service = ModelService("tiny", Conversations(tokenizer, rule=rule), backend, stop_tokens=frozenset({engine.end}))
    gateway = Gateway(service, key=key)
    server = HttpServer(gateway.handle, limits=limits, admission=gateway.admit)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield Served(gateway=gateway, engine=engine, backend=backend, port=port)
    finally:
        await server.close()
        await asyncio.to_thread(backend.close)


def _plain(data: bytes, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return data
    parts = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        parts += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return parts
