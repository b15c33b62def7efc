# SPDX-License-Identifier: Apache-2.0
"""A generator without a model: its tokens are a function of seed, episode and position, and of nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from podium.cluster import WorkerContext
from podium.data.splitmix import signed
from podium.data.trajectories import TrajectoryId
from podium.roles.engine_summaries import EngineSummaries
from podium.roles.generator import GeneratorRank
from podium.roles.mailboxes import Mailboxes
from podium.rollout.engine import Load
from podium.rollout.randomness import stream_key, uniforms_on_host
from podium.rollout.requests import Completion, Request


class ScriptedGenerator(GeneratorRank):
    """Only what episode runners ask of a generator."""

    def __init__(self, context: WorkerContext, letters: tuple[int, ...], end: int) -> None:
        self._context = context
        self._engine: Any = ScriptedEngine(letters, end)
        self._spec: Any = SimpleNamespace(deadline_s=60.0)
        self._peak_tokens = 0
        self._mailboxes = Mailboxes()
        self._summaries = EngineSummaries(context, lambda: self._engine.load())
        self._install_s = 0.0


class ScriptedEngine:
    """Three letters and an end of turn for every request."""

    capacity = SimpleNamespace(cache_tokens=1)

    def __init__(self, letters: tuple[int, ...], end: int) -> None:
        self._letters, self._end = letters, end
        self._waiting: dict[TrajectoryId, Request] = {}
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            self._waiting.update({request.id: request for request in requests})

    def cancel(self, ids: Iterable[TrajectoryId]) -> None:
        """They are answered at once in any case."""

    def results(self, *, deadline_s: float, tick_s: float | None = None) -> Iterator[Completion]:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                _, request = self._waiting.popitem()
            yield self._completion(request)

    def load(self) -> Load:
        return Load(**dict.fromkeys(Load.__slots__, 0))

    def _completion(self, request: Request) -> Completion:
        keys = np.full(3, signed(stream_key(request.seed, request.id)), np.int64)
        chosen = uniforms_on_host(keys, len(request.prompt) + np.arange(3, dtype=np.int64))
        tokens = [self._letters[int(number * len(self._letters))] for number in chosen]
        return Completion(
            id=request.id, prompt=request.prompt, tokens_L=np.array([*tokens, self._end], np.int32),
            logprobs_L=np.log(np.array([*chosen, 0.5])).astype(np.float32), versions_L=np.zeros(4, np.int32),
            finish="stop", stop=self._end,
        )  # fmt: skip
