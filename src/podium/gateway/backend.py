# SPDX-License-Identifier: Apache-2.0
"""What the gateway asks for tokens: the interface of a backend, and the one with a rollout engine in its own thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from podium.data.documents import Tokens
from podium.data.trajectories import TrajectoryId
from podium.errors import PodiumError
from podium.gateway.refusal import RequestRefusedError
from podium.rollout.engine import Capacity, RolloutEngine, ScoresTokens, ShowsPartialAnswers, TokenScores
from podium.rollout.requests import Completion, Request, Sampling

if TYPE_CHECKING:
    from podium.weights.transports import Delivery
    from podium.weights.versions import WeightVersion

OnTokens = Callable[[Tokens], object]
"""Gets all tokens of an answer so far, now and then, in the thread of the event loop."""

# How long the engine may make no progress, and how long between two steps new requests wait.
_DEADLINE_S = 600.0
_TICK_S = 0.002
_PARTIAL_EVERY_S = 0.03
_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One answer that is wanted. Equal seeds, samples and prompts give equal tokens from equal weights."""

    prompt: Tokens
    sampling: Sampling
    seed: int
    sample: int = 0


class Generation:
    """An answer under way. Its future always ends: with the answer, also where it is cancelled, or an error."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.cancel = cancel


class TokenBackend(Protocol):
    """Samples tokens. Called from the event loop; never blocks it."""

    @property
    def capacity(self) -> Capacity:
        """Sizes of context and vocabulary."""

    def submit(self, wanted: GenerationRequest, on_tokens: OnTokens | None = None) -> Generation:
        """Begins an answer."""

    async def score(self, tokens_T: Tokens) -> TokenScores:
        """Scores given tokens. Raises a RequestRefusedError where that is impossible."""


@dataclass(slots=True, eq=False)
class _UnderWay:
    generation: Generation
    on_tokens: OnTokens | None


class EngineThread:
    """A backend with a rollout engine. Only its thread uses the engine: new requests, cancellations and scores wait
    until the step under way has ended. Owned by one event loop."""

    def __init__(self, engine: RolloutEngine, *, owns: bool = True) -> None:
        """`owns`: close the engine in the end."""
        self._engine, self._capacity, self._owns = engine, engine.capacity, owns
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._work: deque[Callable[[], object]] = deque()
        self._under_way: dict[TrajectoryId, _UnderWay] = {}
        self._attempts = itertools.count()
        self._installing: list[asyncio.Future[None]] = []
        self._closing = False
        self._failure: str | None = None
        self.ended = asyncio.Event()  # the engine is closed: `failure` says why
        self._thread = threading.Thread(target=self._run, name="podium-engine", daemon=True)
        self._thread.start()

    @property
    def capacity(self) -> Capacity:
        """Sizes of context and vocabulary."""
        return self._capacity

    @property
    def failure(self) -> str | None:
        """Why the engine answers no more, if it does not."""
        return self._failure

    def submit(self, wanted: GenerationRequest, on_tokens: OnTokens | None = None) -> Generation:
        """Begins an answer."""
        self._check()
        id = TrajectoryId(prompt_index=0, sample=wanted.sample, attempt=next(self._attempts))
        generation = Generation(lambda: self._post(lambda: self._engine.cancel([id])))
        request = Request(id=id, prompt=wanted.prompt, sampling=wanted.sampling, seed=wanted.seed)
        self._under_way[id] = _UnderWay(generation, on_tokens)
        self._post(lambda: self._engine.submit([request]))
        return generation

    async def score(self, tokens_T: Tokens) -> TokenScores:
        """Scores given tokens, between two steps."""
        self._check()
        engine = self._engine
        if not isinstance(engine, ScoresTokens):
            raise RequestRefusedError(
                400, "this engine gives no log-probs of prompts. Serve with --engine native.", param="echo"
            )
        future: asyncio.Future[TokenScores] = self._loop.create_future()

        def work() -> None:
            try:
                scores = engine.score(tokens_T)
            except PodiumError as error:
                refusal = RequestRefusedError(400, str(error))
                self._call(_end, future, None, refusal)
            else:
                self._call(_end, future, scores, None)

        self._post(work)
        return await future

    async def install(self, version: WeightVersion, delivery: Delivery) -> None:
        """Gives the engine other weights, between two steps. Raises what the engine raises."""
        self._check()
        future: asyncio.Future[None] = self._loop.create_future()

        def work() -> None:
            try:
                self._engine.install(version, delivery)
            except Exception as error:
                self._call(_end, future, None, error)
            else:
                self._call(_end, future, None, None)

        self._installing.append(future)
        self._post(work)
        try:
            await future
        finally:
            self._installing.remove(future)

    def close(self) -> None:
        """Cancels all answers and closes the engine. Blocks until its thread has ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise RequestRefusedError(503, f"the engine has failed: {self._failure}. Start the server again.")
        if self._closing:
            raise RequestRefusedError(503, "the server is stopping.")

    def _post(self, work: Callable[[], object]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    # In the engine's thread

    def _run(self) -> None:
        """Runs posted work, then steps the engine until nothing is left. Waits for `_post` and `close`."""
        try:
            while not self._closing:
                with self._changed:
                    self._changed.wait_for(lambda: self._work or self._closing, timeout=_DEADLINE_S)
                self._advance()
            self._failure = "it was closed"
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            if self._owns:
                self._engine.close()
            self._call(self._fail_all)

    def _advance(self) -> None:
        self._do_work()
        shown = 0.0
        for completion in self._engine.results(deadline_s=_DEADLINE_S, tick_s=_TICK_S):
            if completion is not None:
                self._call(self._finish, completion)
            elif (now := self._loop.time()) - shown >= _PARTIAL_EVERY_S:
                shown = now
                self._show_partial_answers()
            self._do_work()
            if self._closing:
                return

    def _do_work(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    return
                work = self._work.popleft()
            work()

    def _show_partial_answers(self) -> None:
        engine = self._engine
        watched = [id for id, each in list(self._under_way.items()) if each.on_tokens is not None]
        if watched and isinstance(engine, ShowsPartialAnswers):
            for id, partial in engine.partial_answers(watched).items():
                self._call(self._show, id, partial.tokens_L)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    # In the event loop

    def _show(self, id: TrajectoryId, tokens: Tokens) -> None:
        each = self._under_way.get(id)
        if each is not None and each.on_tokens is not None and len(tokens):
            each.on_tokens(tokens)

    def _finish(self, completion: Completion) -> None:
        each = self._under_way.pop(completion.id, None)
        if each is not None:
            _end(each.generation.completion, completion, None)

    def _fail_all(self) -> None:
        refusal = RequestRefusedError(503, f"the engine has stopped: {self._failure}.")
        for each in self._under_way.values():
            _end(each.generation.completion, None, refusal)
        self._under_way.clear()
        for installing in self._installing:
            _end(installing, None, refusal)
        self.ended.set()


def _end(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
