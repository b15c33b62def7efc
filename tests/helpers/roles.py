# SPDX-License-Identifier: Apache-2.0
"""Roles for tests of the cluster layer: they do next to nothing, and misbehave when asked to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from podium.cluster import Computed, Metric, RowRefs, WorkerContext
from podium.data.trajectories import TokenColumn, TrajectoryBlock, TrajectoryId, TrajectoryIds


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A shard without rows: which trajectories to make."""

    ids: TrajectoryIds


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A shard of stored rows, and a column beside them."""

    block: RowRefs[TrajectoryBlock]
    column: RowRefs[TokenColumn] | None = None

    @property
    def ids(self) -> TrajectoryIds:
        return self.block.ids


def ids(draws: range, samples: int = 2) -> TrajectoryIds:
    return TrajectoryIds.of(TrajectoryId(draw, sample) for draw in draws for sample in range(samples))


def length_of(each: TrajectoryId) -> int:
    return 1 + (7 * each.prompt_index + 3 * each.sample) % 11


def make_block(wanted: TrajectoryIds) -> TrajectoryBlock:
    """Trajectory (d, s) has `length_of` tokens, all of value 100·d + s."""
    lengths = [length_of(each) for each in wanted]
    total = sum(lengths)
    tokens = [
        np.full(length, 100 * each.prompt_index + each.sample) for each, length in zip(wanted, lengths, strict=True)
    ]
    return TrajectoryBlock(
        ids=wanted,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens_T=np.concatenate(tokens).astype(np.int32) if tokens else np.zeros(0, np.int32),
        loss_mask_T=np.ones(total, np.bool_),
        behavior_logprobs_T=np.zeros(total, np.float32),
        versions_T=np.zeros(total, np.int32),
    )


class Counter:
    """A role with a little state, which answers who and where it is."""

    def __init__(self, context: WorkerContext, start: int = 0) -> None:
        self.context, self._value = context, start

    def add(self, number: int, *, twice: bool = False) -> int:
        self._value += number * (2 if twice else 1)
        return self._value

    def value(self) -> int:
        return self._value

    def thread(self) -> tuple[int, int]:
        """Process and thread that it works in."""
        return os.getpid(), threading.get_ident()

    def measure(self, array: np.ndarray) -> int:
        return int(array.sum())

    def nap(self, seconds: float) -> str:
        with self.context.span("napping"):
            time.sleep(seconds)
        return "rested"

    def nap_on(self, rank: int, seconds: float) -> str:
        """Only one rank is late."""
        return self.nap(seconds) if self.context.rank == rank else "awake"

    def wait_for(self, file: str) -> str:
        """Until a file appears: lets a test decide when the call ends."""
        with self.context.span("waiting"):
            limit = time.monotonic() + 60
            while not Path(file).exists() and time.monotonic() < limit:
                time.sleep(0.01)
        return "came"

    def wait_on(self, rank: int, file: str) -> str:
        """Only one rank waits for the file."""
        return self.wait_for(file) if self.context.rank == rank else "went on"

    def add_after(self, file: str, number: int) -> int:
        """Adds when the file has appeared, and says so with another."""
        self.wait_for(file)
        self._value += number
        Path(file).with_suffix(".added").touch()
        return self._value

    def fail_on(self, rank: int) -> str:
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} does not feel well")
        return "fine"

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """Ends itself as a script would."""
        raise SystemExit(3)

    def unsendable(self) -> object:
        """What no process can send to another."""
        return threading.Lock()

    def generate(self, request: Request) -> Computed[TrajectoryBlock]:
        block = make_block(request.ids)
        return Computed(rows=block, metrics=_metrics(block))

    def generate_slowly(self, request: Request, pause_s: float = 0.0) -> Iterator[Computed[TrajectoryBlock]]:
        """One block for each trajectory."""
        for position in range(len(request.ids)):
            block = make_block(request.ids.take(np.array([position])))
            yield Computed(rows=block, metrics=_metrics(block))
            time.sleep(pause_s)

    def generate_long(self, request: Request, tokens: int) -> Computed[TrajectoryBlock]:
        """Trajectories of `tokens` zeros each: bulk, made quickly."""
        num_rows = len(request.ids)
        block = TrajectoryBlock(
            ids=request.ids,
            offsets=np.arange(num_rows + 1, dtype=np.int64) * tokens,
            tokens_T=np.zeros(num_rows * tokens, np.int32),
            loss_mask_T=np.ones(num_rows * tokens, np.bool_),
            behavior_logprobs_T=np.zeros(num_rows * tokens, np.float32),
            versions_T=np.zeros(num_rows * tokens, np.int32),
        )
        return Computed(rows=block)

    def generate_after(self, request: Request, file: str) -> Iterator[Computed[TrajectoryBlock]]:
        """One block for each trajectory, all but the first when the file has appeared."""
        for number, block in enumerate(self.generate_slowly(request)):
            if number == 1:
                self.wait_for(file)
            yield block

    def generate_and_fail(self, request: Request, after: int) -> Iterator[Computed[TrajectoryBlock]]:
        for number, block in enumerate(self.generate_slowly(request)):
            if number == after:
                raise ValueError(f"no room for trajectory {request.ids[number]}")
            yield block

    def generate_and_repeat(self, request: Request) -> Iterator[Computed[TrajectoryBlock]]:
        """The first trajectory comes again at the end."""
        yield from self.generate_slowly(request)
        yield Computed(rows=make_block(request.ids.take(np.array([0]))))

    def generate_and_lose(self, request: Request) -> Iterator[Computed[TrajectoryBlock]]:
        """The last trajectory never comes."""
        yield from self.generate_slowly(Request(ids=request.ids.take(np.arange(len(request.ids) - 1))))

    def generate_and_die(self, request: Request, after: int) -> Iterator[Computed[TrajectoryBlock]]:
        for number, block in enumerate(self.generate_slowly(request)):
            if number == after:
                time.sleep(0.3)  # what was yielded is on its way
                os.kill(os.getpid(), signal.SIGKILL)
            yield block

    def double(self, batch: Batch) -> Computed[TokenColumn]:
        """A column beside the rows: twice the token, plus the column it was given."""
        rows = batch.block.read() if len(batch.block) else make_block(batch.ids)
        values = rows.tokens_T * 2.0
        if batch.column is not None and len(batch.column):
            column = batch.column.read()
            assert column.ids.same_as(rows.ids)
            values = values + column.values_T
        return Computed(rows=TokenColumn.like(rows, values), metrics=(_mean("token", rows),))

    def consume(self, batch: Batch) -> Computed[TokenColumn]:
        """Only says what it has dealt with."""
        return Computed(done=batch.ids, metrics=(Metric(name="rows", value=len(batch.ids), reduction="sum"),))

    def lose_one(self, request: Request) -> Computed[TrajectoryBlock]:
        return Computed(rows=make_block(request.ids.take(np.arange(len(request.ids) - 1))))

    def repeat_one(self, request: Request) -> Computed[TrajectoryBlock]:
        return Computed(rows=make_block(TrajectoryIds.concatenate([request.ids, request.ids.take(np.array([0]))])))

    def invent_one(self, request: Request) -> Computed[TrajectoryBlock]:
        return Computed(rows=make_block(TrajectoryIds.concatenate([request.ids, ids(range(99, 100), 1)])))

    def not_rows(self, request: Request) -> Computed[TrajectoryBlock]:
        return 3  # type: ignore[return-value]


class Summer(Counter):
    """Meets the others of its mesh in collectives."""

    def all_sum(self, number: float) -> float:
        return self._reduced(number * (self.context.rank + 1))

    def _reduced(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        with self.context.span("summing"):
            tensor = torch.tensor([number])
            devices = self.context.devices
            for axis in devices.mesh_dim_names or () if devices is not None else ():
                dist.all_reduce(tensor, group=devices.get_group(axis))
        return float(tensor.item())

    def sum_without(self, rank: int) -> float:
        """One rank stays away for a while: the others wait in the collective."""
        if self.context.rank == rank:
            with self.context.span("staying away"):
                time.sleep(30)
            return 0.0
        return self.all_sum(1.0)

    def fail_in_sum(self, rank: int) -> float:
        """One rank raises instead of coming: the others wait in the collective."""
        self.fail_on(rank)
        return self.all_sum(1.0)

    def generate_meeting(self, request: Request, failing: int) -> Iterator[Computed[TrajectoryBlock]]:
        """The ranks meet before the first block, but for one that raises."""
        self.fail_in_sum(failing)
        yield from self.generate_slowly(request)

    def sum_tokens(self, batch: Batch) -> Computed[TokenColumn]:
        """The ranks meet over what each has read; every one answers for its own rows."""
        read = float(batch.block.read().tokens_T.sum()) if len(batch.block) else 0.0
        return Computed(done=batch.ids, metrics=(Metric(name="sum", value=self._reduced(read), reduction="max"),))

    def die_in_sum(self, rank: int) -> float:
        if self.context.rank == rank:
            time.sleep(0.2)
            self.die()
        return self.all_sum(1.0)

    def receive(self, link: str, size: int, source: int) -> float:
        """The sum of what the source rank of the link sends: an array of ones times its own value."""
        import torch

        group = self.context.transfer(link)
        tensor = torch.full((size,), float(self._value)) if group.rank == source else torch.empty(size)
        return float(group.broadcast(tensor, source).sum())


class Stubborn(Counter):
    """Cannot be built."""

    def __init__(self, context: WorkerContext) -> None:
        raise RuntimeError("no model at models/none")


class UnbuildableWhile(Counter):
    """Cannot be built while a file is there."""

    def __init__(self, context: WorkerContext, file: str) -> None:
        super().__init__(context)
        if Path(file).exists():
            raise RuntimeError(f"{file} is in the way")


class DiesOnce(Counter):
    """Its process dies while it is built, unless it has been through that already."""

    def __init__(self, context: WorkerContext, mark: str, rank: int) -> None:
        super().__init__(context)
        file = Path(mark)
        if context.rank == rank and not file.exists():
            file.touch()
            self.die()


def _metrics(block: TrajectoryBlock) -> tuple[Metric, ...]:
    return (
        _mean("token", block),
        Metric(name="tokens", value=float(block.offsets[-1]), reduction="sum"),
        Metric(name="longest", value=float(block.lengths_N.max(initial=0)), reduction="max"),
    )


def _mean(name: str, block: TrajectoryBlock) -> Metric:
    weight = float(len(block.tokens_T))
    return Metric(name=name, value=float(block.tokens_T.mean()) if weight else 0.0, reduction="mean", weight=weight)
