# SPDX-License-Identifier: Apache-2.0
"""The generator of a simulated run: a device of the cost model behind the interface of the real role, or several that
are as fast as one of the cost model together. Its episodes have the lengths and the versions of their answers, and no
prompts. Torch-free."""

# N episodes · T tokens of all of them

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np

from podium.cluster import Computed, Metric, WorkerContext
from podium.controller.simulation.costs import RunCosts
from podium.controller.simulation.generator import EndedSequence, Episode, Pause
from podium.controller.simulation.generator import Generator as Device
from podium.controller.simulation.generator import Sequence as DeviceSequence
from podium.controller.simulation.requests import Requests, versions_of
from podium.controller.simulation.scoring import NO_CHANGE
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.roles.carriers import CANCELLED, FINISHES, EpisodeNote, PromptShard, Residency, SamplingPlan
from podium.roles.interfaces import Generator, GeneratorPart, GeneratorSpec, GeneratorUsage
from podium.rollout.engine import InFlight, Load, MemoryChange
from podium.rollout.requests import Completion, Request, given_back
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import WeightTransfer

_STOP, _LENGTH = FINISHES.index("stop"), FINISHES.index("length")


class SimulatedGenerator(Generator):
    """One device. Methods that wait are asynchronous: the cluster awaits them on one event loop, so nothing is locked.
    `stream` waits for the next end of a sequence, and for what other methods change."""

    def __init__(self, context: WorkerContext, spec: GeneratorSpec, costs: RunCosts) -> None:
        self._costs, self._worker = costs, context.worker
        self._device = Device(name=str(context.worker), lanes=costs.lanes, cost=costs.model.generation)
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._changed = asyncio.Event()
        self._is_finished = self._is_away = False
        self._limits: dict[tuple[int, int], int] = {}  # (prompt, sample) -> most tokens, of open episodes
        self._begun: dict[tuple[int, int], EndedSequence] = {}  # tokens of other devices, of open episodes
        self._returned: list[EndedSequence] = []  # given back and not sent yet
        self._ended: list[EndedSequence] = []  # not sent yet
        self._requests = Requests(costs)  # of episode runners
        self._num_tokens = self._num_finished = 0
        self._idle_s = self._install_s = 0.0
        self._idle_since_s: float | None = None  # while it has nothing to do
        for each in costs.slowness_of(context.worker):
            for at_s in (each.at_s, each.end_s):
                loop.call_at(at_s, self._set_speed)
        self._set_speed()

    def _set_speed(self) -> None:
        """Its device is as fast from now on as it is at this time."""
        self._advance()
        self._device.cost = self._costs.model.generation.slower(self._costs.factor(self._worker))
        self._changed.set()

    def _advance(self) -> None:
        """Generates until now. Nobody may have asked for the sequences that have ended meanwhile."""
        while (ends_s := self._device.next_end_s()) is not None and ends_s <= self._clock():
            self._device.advance(ends_s)
            self._ended.append(self._device.end_next())
        self._device.advance(self._clock())

    @property
    def _num_open(self) -> int:
        return self._device.num_open + len(self._ended)

    # --- episodes ---

    def lanes(self) -> int:
        """Sequences that it generates at the same time."""
        return self._costs.lanes

    def admit(self, shard: PromptShard, plan: SamplingPlan) -> None:
        """Adds episodes. Their lengths depend on the seed of the run and on their ids."""
        sequences, begun = [], {} if shard.begun is None else _begun(shard.begun.read())
        self._begun |= begun
        for prompt in shard.prompts:
            tokens, index = self._costs.group(prompt.prompt_index).tokens, prompt.prompt_index
            for sample in shard.samples:
                length = min(tokens[sample % len(tokens)], plan.max_new_tokens)
                if (index, sample) in begun:
                    length -= begun[index, sample].sequence.tokens
                sequences.append(DeviceSequence(group=index, attempt=shard.attempt, sample=sample, tokens=length))
                self._limits[index, sample] = plan.max_new_tokens
        self._advance()
        self._device.add(sequences)
        self._changed.set()
        self._recompute(sum(each.sequence.tokens for each in begun.values()))

    def _recompute(self, num_begun: float) -> None:
        """Computes the KV cache of tokens of other devices."""
        if num_begun and self._device.pause is None:
            self._pause_for("recompute", num_begun / self._device.cost.prefill_tokens_s)

    def give_back(self, ids: tuple[TrajectoryId, ...]) -> None:
        """Takes them off the device."""
        self._take_out({(id.prompt_index, id.sample, id.attempt) for id in ids})

    def finish_stream(self, abandon: bool) -> None:
        """Ends `stream` when all episodes have ended, or at once."""
        self._is_finished = True
        if abandon:
            self._take_out(None)
        self._changed.set()

    def _take_out(self, episodes: set[Episode] | None) -> None:
        self._advance()
        self._returned += self._device.take_out(episodes)
        self._changed.set()

    async def stream(self, plan: SamplingPlan) -> AsyncIterator[Computed[TrajectoryBlock]]:  # type: ignore[override]
        """Yields episodes as they end. The last block has the metrics."""
        began_s, num_tokens = self._clock(), self._num_tokens
        try:
            while True:
                ended = await self._next_ended()
                if self._is_finished and not self._num_open:
                    break
                if ended or self._returned:
                    yield self._computed(ended, ())
            generated = float(self._num_tokens + _num_tokens(ended) - num_tokens)
            yield self._computed(ended, _metrics(generated, self._clock() - began_s))
        finally:
            self._is_finished = False
            self._limits.clear()
            self._begun.clear()
            self._ended.clear()

    async def _next_ended(self) -> list[EndedSequence]:
        """Waits until a sequence ends, or something has changed. Returns all sequences that end at that time."""
        device, began_s = self._device, self._clock()
        if self._is_finished and not self._num_open:
            return []
        self._advance()
        ends_s = device.next_end_s()
        is_idle = ends_s is None and device.pause is None  # until something changes
        self._idle_since_s = began_s if is_idle else None
        self._changed.clear()
        try:
            if not self._ended:
                async with asyncio.timeout(None if ends_s is None else max(0.0, ends_s - began_s)):
                    await self._changed.wait()
        except TimeoutError:
            self._advance()
            if not self._ended:  # a rounding error
                self._ended.append(device.end_next())
        finally:
            self._idle_s, self._idle_since_s = self._idle_until_now(), None
        ended, self._ended = self._ended, []
        return ended

    def _idle_until_now(self) -> float:
        return self._idle_s + (0.0 if self._idle_since_s is None else self._clock() - self._idle_since_s)

    def _computed(self, ended: Sequence[EndedSequence], metrics: tuple[Metric, ...]) -> Computed[TrajectoryBlock]:
        returned, self._returned = self._returned, []
        self._count(ended, returned)
        rows = sorted([*ended, *returned], key=lambda each: each.sequence.episode)
        places = [(each.sequence.group, each.sequence.sample) for each in rows]
        limits = [self._limits.pop(place) for place in places]
        whole = [each.after(self._begun.pop(place, None)) for each, place in zip(rows, places, strict=True)]
        gone = {each.sequence.episode for each in returned}
        block, note = _block(whole, limits, [each.sequence.episode in gone for each in rows])
        return Computed(rows=block, note=note, metrics=metrics)

    def _count(self, ended: Sequence[EndedSequence], returned: Sequence[EndedSequence]) -> None:
        self._num_tokens += int(_num_tokens(ended) + _num_tokens(returned))
        self._num_finished += len(ended)

    # --- weights and devices ---

    async def install(self, transfer: WeightTransfer, in_flight: InFlight = "recompute") -> int:  # type: ignore[override]
        """Pauses for new weights. A KV cache that is computed anew pauses it further, after the new weights count."""
        publish_s = self._costs.model.publish_s
        await self._pause("publish", publish_s)
        self._install_s += publish_s
        self._device.version = transfer.version.number
        if in_flight == "recompute" and (recompute_s := self._device.recompute_s):
            self._pause_for("recompute", recompute_s)
        return 0

    def check_base(self, version: WeightVersion) -> None:
        """There are no tensors to compare."""

    async def share(self, number: int) -> str:  # type: ignore[override]
        """Returns to its device, and has the learner's weights."""
        await self._return()
        self._device.version = number
        return ""

    async def hold(self, residency: Residency) -> MemoryChange:  # type: ignore[override]
        """Leaves its device for the learner, or returns."""
        if residency == "offloaded":
            await self._costs.work(self._worker, self._costs.model.switch_s)
            self._is_away = True
        else:
            await self._return()
        return NO_CHANGE

    def usage(self) -> GeneratorUsage:
        """What it has done. Nothing is said of its cache."""
        device = self._device
        load = Load(
            waiting=device.num_open - device.num_running, running=device.num_running, cache_tokens=0,
            cache_tokens_used=0, cache_tokens_kept=0, finished=self._num_finished, generated_tokens=self._num_tokens,
            prefilled_tokens=0, reused_tokens=0, preemptions=0,
        )  # fmt: skip
        return GeneratorUsage(load=load, idle_s=self._idle_until_now(), install_s=self._install_s)

    async def _return(self) -> None:
        if self._is_away:
            await self._costs.work(self._worker, self._costs.model.switch_s)
            self._is_away = False

    async def _pause(self, cause: Pause, seconds: float) -> None:
        self._set_pause(cause)
        await self._costs.work(self._worker, seconds)
        self._set_pause(None)

    def _pause_for(self, cause: Pause, seconds: float) -> None:
        """Like `_pause`, without waiting for its end."""
        self._set_pause(cause)
        asyncio.get_running_loop().call_later(seconds, self._set_pause, None)

    def _set_pause(self, cause: Pause | None) -> None:
        self._advance()
        self._device.pause = cause
        self._changed.set()

    # --- episode runners ---

    async def serve(self) -> tuple[Metric, ...]:  # type: ignore[override]
        """Answers requests until `stop_serving`."""
        began_s, num_tokens = self._clock(), self._num_tokens
        try:
            while not self._is_finished or self._num_open or self._returned:
                ended = await self._next_ended()
                returned, self._returned = self._returned, []
                self._count(ended, returned)
                for each in ended:
                    self._requests.answer(each, is_returned=False)
                for each in returned:
                    self._requests.answer(each, is_returned=True)
        finally:
            self._requests.is_open = False
        return _metrics(float(self._num_tokens - num_tokens), self._clock() - began_s)

    def begin_serving(self, keeps_answers: bool = False) -> None:
        """Takes requests from now on."""
        self._requests.open(keeps_answers)
        self._is_finished = False

    def stop_serving(self, give_back: bool = False) -> None:
        """Ends `serve` when all requests are answered, or given back."""
        self._requests.is_open = False
        self.finish_stream(abandon=give_back)

    async def exchange(  # type: ignore[override]
        self, runner: str, requests: tuple[Request, ...], wait_s: float
    ) -> list[Completion]:
        """Begins new requests, and waits for an answer. Answers have as many tokens as the costs say of their turn."""
        if requests and not self._requests.is_open:
            return [given_back(request) for request in requests]
        if requests:
            self._advance()
            self._device.add([self._requests.take(runner, request) for request in requests])
            self._changed.set()
            self._recompute(sum(len(each.begun.tokens_L) for each in requests if each.begun is not None))
        return await self._requests.fetch(runner, wait_s)

    def forget(self, runner: str) -> None:
        """Takes the requests of a dead runner off the device."""
        self._advance()
        self._device.take_out(self._requests.forget(runner))
        self._changed.set()


class SimulatedGeneratorPart(GeneratorPart):
    """A device that follows an engine on another one, which takes all the time of both."""

    def __init__(self, context: WorkerContext, spec: GeneratorSpec, costs: RunCosts) -> None:
        self._is_left = asyncio.Event()

    def refill(self, number: int) -> str:
        """There are no tensors to take."""
        return ""

    async def accompany(self) -> None:  # type: ignore[override]
        """Returns after `leave`."""
        await self._is_left.wait()
        self._is_left.clear()

    def leave(self) -> None:
        """Ends `accompany`, also one that has not begun."""
        self._is_left.set()

    def reset(self) -> None:
        """Forgets that a call was to end."""
        self._is_left.clear()


def _num_tokens(ended: Sequence[EndedSequence]) -> int:
    return int(sum(each.sequence.tokens for each in ended))


def _metrics(generated: float, seconds: float) -> tuple[Metric, ...]:
    """Those of a real generator; it has no cache."""
    absent = ("prefilled_tokens", "reused_tokens", "preemptions")
    return (
        Metric(name="generated_tokens", value=generated, reduction="sum"),
        *(Metric(name=name, value=0.0, reduction="sum") for name in absent),
        Metric(name="cache_used", value=0.0, reduction="max"),
        Metric(name="seconds", value=seconds, reduction="max"),
    )


def _begun(block: TrajectoryBlock) -> dict[tuple[int, int], EndedSequence]:
    """What other devices have generated, by prompt and sample."""
    found = {}
    for row, id in enumerate(block.ids):
        versions_L = block.versions_T[block.offsets[row] : block.offsets[row + 1]]
        tokens = float(len(versions_L))
        sequence = DeviceSequence(group=id.prompt_index, attempt=id.attempt, sample=id.sample, tokens=tokens)
        found[id.prompt_index, id.sample] = EndedSequence(
            sequence=sequence, oldest=int(versions_L.min()), newest=int(versions_L.max()),
            version_sum=float(versions_L.sum()),
        )  # fmt: skip
    return found


def _block(
    rows: Sequence[EndedSequence], limits: Sequence[int], are_returned: Sequence[bool]
) -> tuple[TrajectoryBlock, EpisodeNote]:
    """Ids ascend."""
    count = len(rows)
    ids = np.array([(each.sequence.group, each.sequence.sample, 0, each.sequence.attempt) for each in rows], np.int64)
    lengths_N = np.array([each.sequence.tokens for each in rows], np.int64)
    oldest_N, newest_N = (np.array([getattr(each, name) for each in rows], np.int64) for name in ("oldest", "newest"))
    total = int(lengths_N.sum())
    block = TrajectoryBlock(
        ids=TrajectoryIds(ids.reshape(-1, 4)),
        offsets=np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int64),
        tokens_T=np.zeros(total, np.int32),
        loss_mask_T=np.ones(total, np.bool_),
        behavior_logprobs_T=np.zeros(total, np.float32),
        versions_T=versions_of(rows),
    )
    note = EpisodeNote(
        finish_N=np.where(
            np.array(are_returned, np.bool_),
            CANCELLED,
            np.where(lengths_N >= np.array(limits, np.int64), _LENGTH, _STOP),
        ).astype(np.int8),
        sampled_N=lengths_N,
        trained_N=lengths_N,
        turns_N=np.ones(count, np.int64),
        version_N=oldest_N,
        newest_version_N=newest_N,
        environment_N=np.full(count, np.nan),
    )
    return block, note
