# SPDX-License-Identifier: Apache-2.0
"""One engine over several ranks: each has a part of every layer, of the vocabulary and of the KV cache.

Rank 0 leads. It has the scheduler, the block tables and the samples. The other ranks follow: for each step they get the
same inputs over a pipe and run the same forward, whose sums over the ranks keep them in step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from podium.data.routed_experts import RouterShape
from podium.errors import PodiumError, RolloutError
from podium.models.causal_lm import PackedCausalLM
from podium.models.tensor_axis import TensorAxis
from podium.rollout.native.block_manager import BlockCopy
from podium.rollout.native.cache import KVCache
from podium.rollout.native.forward import ModelForward, StepInputs
from podium.rollout.native.slots import Arrangement
from podium.weights.versions import WeightVersion

# For ranks to end by themselves before they are killed.
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Prepare:
    """Find the attention layers, together with all ranks. Answer: free bytes of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Allocate the cache. Answer: its bytes."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run one forward, together with all ranks."""

    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """See `KVCache.copy`."""

    copies: Sequence[BlockCopy]


@dataclass(frozen=True, slots=True)
class MoveBlocks:
    """See `KVCache.move`."""

    moves: Arrangement


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """See `KVCache.clear`."""

    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Install:
    """Receive whole tensors from rank 0 and keep the own parts. Answer: None, or why it failed."""

    version: WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Add this rank's parts to the fingerprints of the weights in place. `everything`: also of a frozen base."""

    version: WeightVersion
    everything: bool


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the cache. Answer: a MemoryChange."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Take the memory of the cache again. Answer: a MemoryChange."""


@dataclass(frozen=True, slots=True)
class Close:
    """End."""


Command = Prepare | Allocate | RunStep | CopyBlocks | MoveBlocks | ClearBlocks | Install | Verify | Sleep | Wake | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The last word of a rank that fails."""

    text: str
    trace: str


class TensorLeader:
    """Rank 0's side of the pipes. Calls are serialized by the engine's lock; only `fail` may come from other threads.

    A rank that fails or dies breaks the group for good: the others may be in the middle of a forward."""

    def __init__(
        self,
        axis: TensorAxis,
        connections: Sequence[Connection],
        device: torch.device,
        *,
        timeout_s: float,
        end: Callable[[float], object] = lambda grace_s: None,
        who_died: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`end` ends the other ranks, which get so many seconds to end by themselves; `who_died` says which one has
        ended. `timeout_s`: longest wait for an answer."""
        self.axis, self.device, self._connections = axis, device, connections
        self._timeout_s, self._end, self._who_died = timeout_s, end, who_died
        self.on_death: Callable[[str], object] = lambda reason: None  # called once, on any thread, with the reason
        self._broken: str | None = None
        self._failing = threading.Lock()

    @property
    def size(self) -> int:
        """Number of ranks, this one included."""
        return self.axis.size

    def check(self) -> None:
        """Raises if the group is broken."""
        if self._broken is not None:
            raise RolloutError(
                f"the engine's {self.size} ranks cannot go on: {self._broken}. Its state is lost with that rank: close "
                "this engine and make a new one."
            )

    def fail(self, reason: str, *, is_death: bool = True, grace_s: float = 0.0) -> None:
        """Breaks the group, and ends the other ranks. The first reason counts. `is_death`: `on_death` is told."""
        with self._failing:
            if self._broken is not None:
                return
            self._broken = reason
        self._end(grace_s)
        if is_death:
            self.on_death(reason)

    def send(self, command: Command) -> None:
        """Tells all other ranks what to do next."""
        self.check()
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send(command)
            except OSError as error:
                self.fail(self._last_word(rank, connection) or f"rank {rank} is gone ({error})")
                self.check()

    def answers(self) -> list[Any]:
        """What each other rank says to the last command, in order of ranks."""
        self.check()
        return [self._answer(rank, connection) for rank, connection in enumerate(self._connections, start=1)]

    def _answer(self, rank: int, connection: Connection) -> Any:
        try:
            is_here = connection.poll(self._timeout_s)
            answer = connection.recv() if is_here else None
        except (EOFError, OSError) as error:
            is_here, answer = True, Problem(text=f"it is gone ({error or 'its pipe was closed'})", trace="")
        if not is_here:
            self.fail(f"rank {rank} did not answer in {self._timeout_s:.0f} s")
        if isinstance(answer, Problem):
            self.fail(f"rank {rank} failed: {answer.text}\n{answer.trace}".rstrip())
        self.check()
        return answer

    def _last_word(self, rank: int, connection: Connection, wait_s: float = 0.0) -> str | None:
        """The problem of a rank that has failed, if it said one."""
        try:
            answer = connection.recv() if connection.poll(wait_s) else None
        except (EOFError, OSError):
            return None
        return f"rank {rank} failed: {answer.text}\n{answer.trace}".rstrip() if isinstance(answer, Problem) else None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all ranks compute together: where this one fails, the others wait for it in vain, or have failed
        before."""
        try:
            yield
        except BaseException as error:
            # A RuntimeError, or what was made of it, is what a lost rank causes here.
            is_own = not isinstance(error, Exception) or (
                isinstance(error, PodiumError) and not isinstance(error.__cause__, RuntimeError)
            )
            words = [self._last_word(rank, each, 1.0) for rank, each in enumerate(self._connections, start=1)]
            own = f"rank 0 failed in a step of all ranks ({type(error).__name__}: {error})"
            self.fail(next(filter(None, words), None) or self._who_died() or own, is_death=not is_own)
            if isinstance(error, Exception) and not is_own:
                self._raise_from(error)
            raise

    def _raise_from(self, error: Exception) -> None:
        try:
            self.check()
        except RolloutError as reason:
            raise reason from error

    def close(self) -> None:
        """Ends the other ranks."""
        if self._broken is None:
            for connection in self._connections:
                try:
                    connection.send(Close())
                except OSError:
                    continue
        self.fail("it was closed", is_death=False, grace_s=_CLOSE_S)
        for connection in self._connections:
            connection.close()


class LeadingCache(KVCache):
    """Rank 0's part of the cache; what changes its blocks happens on all ranks."""

    def __init__(self, group: TensorLeader, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._group = group

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks on all ranks."""
        if copies:
            self._group.send(CopyBlocks(copies))
        super().copy(copies)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeros blocks on all ranks."""
        self._group.send(ClearBlocks(blocks))
        super().clear(blocks)

    def move(self, moves: Arrangement) -> None:
        """Permutes slots on all ranks."""
        self._group.send(MoveBlocks(moves))
        super().move(moves)


class LeadingForward(ModelForward):
    """Rank 0's part of the forward; the other ranks compute theirs at the same time."""

    def __init__(
        self,
        model: PackedCausalLM,
        modules: Sequence[nn.Module],
        cache: KVCache,
        device: torch.device,
        *,
        group: TensorLeader,
        recorded: RouterShape | None = None,
    ) -> None:
        super().__init__(model, modules, cache, device, recorded=recorded)
        self._group = group

    def run(self, inputs: StepInputs) -> Tensor:
        """Whole logits, gathered from all ranks."""
        self._group.send(RunStep(inputs))
        with self._group.together():
            return super().run(inputs)
