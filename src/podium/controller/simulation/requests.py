# SPDX-License-Identifier: Apache-2.0
"""Requests of episode runners at a simulated generator, and the answers that wait for them. Torch-free."""

# L tokens of an answer · T tokens of several sequences

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from podium.controller.simulation.costs import RunCosts
from podium.controller.simulation.generator import EndedSequence, Episode
from podium.controller.simulation.generator import Sequence as DeviceSequence
from podium.rollout.requests import Completion, Finish, PartialAnswer, Request

END = 1
"""The last token of every answer. Others are 0: the answers in a prompt can be counted."""


def versions_of(rows: Sequence[EndedSequence]) -> NDArray[np.int32]:
    """The first tokens of a sequence have its oldest version and the others its newest, as many of each as its sum of
    versions says."""
    lengths_N = np.array([each.sequence.tokens for each in rows], np.int64)
    oldest_N, newest_N = (np.array([getattr(each, name) for each in rows], np.int64) for name in ("oldest", "newest"))
    sums_N = np.array([each.version_sum for each in rows], np.float64)
    num_newest_N = np.rint((sums_N - oldest_N * lengths_N) / np.maximum(newest_N - oldest_N, 1)).astype(np.int64)
    parts_N2 = np.stack([lengths_N - num_newest_N, num_newest_N], axis=1)
    return np.repeat(np.stack([oldest_N, newest_N], axis=1), parts_N2.reshape(-1)).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    runner: str
    request: Request


class Requests:
    """Used by one generator. A runner has one call that waits: its next call ends it, so that no answer goes to a call
    whose caller has gone."""

    def __init__(self, costs: RunCosts) -> None:
        self._costs = costs
        self.is_open = False  # whether the generator takes further ones
        self._open: dict[Episode, _Open] = {}
        self._answers: dict[str, list[Completion]] = {}  # by runner, not fetched yet
        self._waiting: dict[str, asyncio.Event] = {}  # calls, by runner

    def open(self, keeps_answers: bool = False) -> None:
        """The generator takes requests from now on. What nobody has fetched before is forgotten, unless it is kept."""
        self.is_open = True
        self._open.clear()
        if not keeps_answers:
            self._answers.clear()

    def take(self, runner: str, request: Request) -> DeviceSequence:
        """The request as a sequence of the device. One that another generator has begun needs less."""
        id, begun = request.id, request.begun
        turn = int(np.count_nonzero(request.prompt == END))
        tokens = self._costs.episode(id.prompt_index, id.sample).answer_tokens[turn]
        tokens = min(tokens, request.sampling.max_new_tokens) - (0 if begun is None else len(begun.tokens_L))
        sequence = DeviceSequence(group=id.prompt_index, attempt=id.attempt, sample=id.sample, tokens=tokens)
        self._open[sequence.episode] = _Open(runner=runner, request=request)
        return sequence

    def answer(self, ended: EndedSequence, *, is_returned: bool) -> None:
        """A sequence has ended, or was given back with the tokens that it has."""
        runner, request = self._take_open(ended)
        if runner is None or request is None:
            return  # the runner is dead
        finish: Finish = "cancelled"
        if not is_returned:
            whole = ended.sequence.tokens + (0 if request.begun is None else len(request.begun.tokens_L))
            finish = "length" if whole >= request.sampling.max_new_tokens else "stop"
        self._answers.setdefault(runner, []).append(_completion(request, ended, finish))
        if runner in self._waiting:
            self._waiting[runner].set()

    def _take_open(self, ended: EndedSequence) -> tuple[str | None, Request | None]:
        open = self._open.pop(ended.sequence.episode, None)
        return (None, None) if open is None else (open.runner, open.request)

    async def fetch(self, runner: str, wait_s: float) -> list[Completion]:
        """The answers for this runner; waits for one if there is none."""
        if (earlier := self._waiting.pop(runner, None)) is not None:
            earlier.set()
        if runner not in self._answers and wait_s > 0:
            waiting = self._waiting[runner] = asyncio.Event()
            try:
                async with asyncio.timeout(wait_s):
                    await waiting.wait()
            except TimeoutError:
                pass
            if self._waiting.get(runner) is not waiting:
                return []  # another call has come
            del self._waiting[runner]
        return self._answers.pop(runner, [])

    def forget(self, runner: str) -> set[Episode]:
        """Forgets a runner. Returns the sequences that nobody wants any more."""
        unwanted = {episode for episode, each in self._open.items() if each.runner == runner}
        for episode in unwanted:
            del self._open[episode]
        self._answers.pop(runner, None)
        return unwanted


def _completion(request: Request, ended: EndedSequence, finish: Finish) -> Completion:
    """The whole answer, with what another generator has sampled of it."""
    num_new = int(ended.sequence.tokens)
    tokens_L = np.zeros(num_new, np.int32)
    if finish != "cancelled":
        tokens_L[-1] = END
    new = PartialAnswer(
        tokens_L=tokens_L, logprobs_L=np.zeros(num_new, np.float32),
        versions_L=versions_of([ended]) if num_new else np.empty(0, np.int32),
    )  # fmt: skip
    parts = [new] if request.begun is None else [request.begun, new]
    return Completion(
        id=request.id,
        prompt=request.prompt,
        tokens_L=np.concatenate([each.tokens_L for each in parts]),
        logprobs_L=np.concatenate([each.logprobs_L for each in parts]),
        versions_L=np.concatenate([each.versions_L for each in parts]),
        finish=finish,
    )
