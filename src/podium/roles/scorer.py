# SPDX-License-Identifier: Apache-2.0
"""A scorer: a frozen language model that computes log-probs of sampled tokens. References and teachers are scorers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from podium.cluster import Computed, RowRefs, WorkerContext
from podium.data.tokenizer import has_tokenizer, load_tokenizer, require_same_tokens
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter
from podium.engine.checkpoint_files import Extras, SaveState
from podium.engine.offload import OffloadedTensors
from podium.engine.resuming import buffer_pieces, weight_pieces
from podium.engine.scoring import score
from podium.engine.sharding import local_tensor, place, reshard
from podium.errors import ModelError
from podium.models.buffers import persistent_buffers
from podium.models.tensor_shards import TensorShard
from podium.roles.blocks import empty_block
from podium.roles.carriers import Residency
from podium.roles.distances import distance
from podium.roles.interfaces import POLICY, NoSnapshot, Scorer, ScorerSpec, SnapshotBegun, StateSource
from podium.roles.learner import LearnerRank, mesh_on
from podium.roles.role_state import RoleState
from podium.rollout.engine import MemoryChange

_SAVING_S = 1800.0


class ScorerRank(Scorer):
    """One rank of a scorer."""

    def __init__(self, context: WorkerContext, spec: ScorerSpec) -> None:
        transformers.logging.set_verbosity_error()
        self._context, self._spec = context, spec
        self._mesh = mesh_on(context)
        self._model, self._held = place(
            spec.model,
            spec.folder,
            self._mesh,
            seed=spec.seed,
            checkpoint=None if spec.begin is None else CheckpointReader(spec.begin),
            masters=False,
        )
        policy = context.colocated_role(POLICY, LearnerRank).engine.language_model
        if self._model.vocab_size < policy.vocab_size:
            raise ModelError(
                f"{spec.model.path} has a vocabulary of {self._model.vocab_size} tokens and the policy one of "
                f"{policy.vocab_size}: it cannot score the policy's tokens. Teacher, reference and policy must share "
                "their tokenizer."
            )
        if spec.policy is not None and has_tokenizer(spec.folder):
            own = spec.model.model_copy(update={"tokenizer": None, "chat_template": None})
            require_same_tokens(load_tokenizer(spec.policy), load_tokenizer(own), spec.model.path)
        self._model.eval()
        self._weights = HeldTensors(self._model.parameters)
        self._state = RoleState(
            self._mesh, node=context.worker.node, memory=spec.snapshots, checkpoints=spec.checkpoints,
            pieces=self._pieces,
        )  # fmt: skip

    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float) -> Computed[TokenColumn]:
        """Log-probs of the rows' tokens under the frozen weights."""
        block = rows.read() if len(rows) else empty_block()
        column = score(self._model, self._mesh, block, temperature=temperature, max_tokens=self._spec.max_tokens)
        return Computed(rows=column, note=distance(block, column))

    def copy_from(self, role: str) -> None:
        """Copies the weights of the colocated learner."""
        self._state.begin_change()
        learner = self._context.colocated_role(role, LearnerRank)
        reshard(self._model)  # else the next forward reads what the last one has gathered
        with torch.no_grad():
            masters = {each.name: each.master for each in (*learner.engine.optimizer.trained, *learner.engine.frozen)}
            assert masters.keys() == {each.name for each in self._held}
            for mine in self._held:
                local_tensor(mine.parameter).copy_(masters[mine.name])
            buffers = persistent_buffers(learner.engine.language_model.hf)
            for name, buffer in persistent_buffers(self._model.hf).items():
                buffer.copy_(buffers[name])

    def save(self, step: int) -> SaveState:
        """Writes the weights and returns when they are complete."""
        assert self._spec.checkpoints is not None
        writer = CheckpointWriter(
            self._spec.checkpoints, self._mesh, keep=1, keep_best=False, background=False, timeout_s=_SAVING_S,
            beside=self._spec.beside,
        )  # fmt: skip
        writer.save(step, self._pieces(), Extras(values={}, arrays={}))
        return writer.finish()

    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Begins to copy the weights to host memory."""
        return self._state.snapshot(step, Extras(values=values, arrays={}))

    def snapshots(self) -> tuple[int, ...]:
        """Steps of whole snapshots."""
        return self._state.snapshots()

    def forget_snapshots(self) -> None:
        """Removes all snapshots."""
        self._state.forget_snapshots()

    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the weights after this step."""
        self.hold("resident")
        saved = self._state.read(step, source)
        if not self._state.is_after(step):
            self._state.begin_change()
            reshard(self._model)
            saved.load(self._pieces())
            self._state.note_restored(step)
        return saved.values

    def _pieces(self) -> list[TensorShard]:
        return [*weight_pieces(self._held), *buffer_pieces(self._model.hf)]

    def hold(self, residency: Residency) -> MemoryChange:
        """Moves the weights to host memory, or back."""
        self._state.wait_copied()
        return self._weights.hold(residency)


class HeldTensors:
    """Tensors of a role, on the device or offloaded."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: OffloadedTensors | None = None

    def hold(self, residency: Residency) -> MemoryChange:
        """Moves the tensors to host memory, or back."""
        if residency == "offloaded" and self._away is None:
            unique = {id(each): each for each in self._tensors()}
            self._away = OffloadedTensors(list(unique.values()))
            return MemoryChange(measured_bytes=0, accounted_bytes=self._away.offload())
        if residency != "offloaded" and self._away is not None:
            back, self._away = self._away, None
            return MemoryChange(measured_bytes=0, accounted_bytes=back.restore())
        return MemoryChange(measured_bytes=0, accounted_bytes=0)
