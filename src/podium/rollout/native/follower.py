# SPDX-License-Identifier: Apache-2.0
"""A rank of an engine that follows rank 0: it holds a part of the model and of the KV cache, and computes when told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
from torch import nn

from podium.errors import WeightMismatchError
from podium.models.causal_lm import PackedCausalLM
from podium.rollout.engine import MemoryChange
from podium.rollout.native.cache import KVCache, LayerShape, attention_layers, bytes_per_token
from podium.rollout.native.engine_weights import receive_parts, verify_parts
from podium.rollout.native.forward import ModelForward
from podium.rollout.native.holding import Holding, free_bytes, hold
from podium.rollout.native.tensor_group import (
    Allocate,
    ClearBlocks,
    Close,
    Command,
    CopyBlocks,
    Install,
    MoveBlocks,
    Prepare,
    RunStep,
    Sleep,
    Verify,
    Wake,
)
from podium.weights.whole_copy import WholeCopy


class Follower:
    """One rank."""

    def __init__(
        self,
        model: PackedCausalLM,
        device: torch.device,
        *,
        receive: Callable[[], Command],
        answer: Callable[[Any], object],
        copy: WholeCopy | None = None,
    ) -> None:
        """`receive` waits for the next command; it ends this rank when rank 0 is gone. `copy`: of a learner's weights,
        which is freed while the engine sleeps."""
        model.eval()
        self._model, self._device, self._receive, self._answer = model, device, receive, answer
        self._copy = copy
        self._modules: Sequence[nn.Module] = ()
        self._shapes: Sequence[LayerShape] = ()
        self._holding: Holding | None = None
        self._cache: KVCache | None = None
        self._forward: ModelForward | None = None

    def serve(self) -> None:
        """Carries out commands until `Close`. Consumes the pipe from rank 0, which unblocks it."""
        while True:
            command = self._receive()
            if isinstance(command, Close):
                break
            self._carry_out(command)
        if self._holding is not None:
            self._holding.close()

    def _carry_out(self, command: Command) -> None:
        match command:
            case RunStep():
                self._run(command)
            case CopyBlocks():
                self._blocks.copy(command.copies)
            case MoveBlocks():
                self._blocks.move(command.moves)
            case ClearBlocks():
                self._blocks.clear(command.blocks)
            case Prepare():
                self._modules, self._shapes = attention_layers(self._model, self._device)
                self._answer(free_bytes(self._device))
            case Allocate():
                self._answer(self._allocate(command))
            case Install():
                self._answer(self._install(command))
            case Verify():
                verify_parts(self._model, command.version, everything=command.everything)
            case Sleep():
                self._answer(self._sleep())
            case Wake():
                self._answer(self._wake())
            case Close():
                raise AssertionError("handled before")
            case other:
                assert_never(other)

    @property
    def _blocks(self) -> KVCache:
        assert self._cache is not None
        return self._cache

    @torch.inference_mode()
    def _run(self, command: RunStep) -> None:
        assert self._forward is not None
        self._forward.run(command.inputs)

    def _allocate(self, command: Allocate) -> int:
        dtype = self._model.head_weight.dtype
        token_bytes = bytes_per_token(self._shapes, dtype)
        self._holding = hold(command.num_blocks * command.block_size * token_bytes, self._device)
        self._cache = KVCache(
            self._shapes,
            num_blocks=command.num_blocks,
            block_size=command.block_size,
            storage=self._holding.bytes,
            dtype=dtype,
        )
        self._forward = ModelForward(self._model, self._modules, self._cache, self._device)
        return self._holding.nbytes

    def _install(self, command: Install) -> str | None:
        try:
            receive_parts(self._model, command.version, self._device)
        except WeightMismatchError as error:
            return str(error)
        return None

    def _sleep(self) -> MemoryChange:
        assert self._holding is not None
        before = free_bytes(self._device)
        accounted = self._holding.release() + (0 if self._copy is None else self._copy.release())
        return MemoryChange(measured_bytes=self._measured(before), accounted_bytes=accounted)

    def _wake(self) -> MemoryChange:
        assert self._holding is not None
        before = free_bytes(self._device)
        self._holding.restore()
        accounted = self._holding.nbytes
        if self._copy is not None:
            self._copy.restore()
            accounted += self._copy.nbytes
        return MemoryChange(measured_bytes=-self._measured(before), accounted_bytes=accounted)

    def _measured(self, before: int) -> int:
        return free_bytes(self._device) - before if self._device.type == "cuda" else 0
