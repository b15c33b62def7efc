# SPDX-License-Identifier: Apache-2.0
"""One rank of the critic: a value model that estimates advantages and learns the returns."""

# N episodes · T tokens of all of them · S trained tokens of one micro-batch

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from podium.algorithms.returns import gae, moments_of
from podium.algorithms.statistics import ValueStatistics
from podium.algorithms.values import value_loss, value_statistics
from podium.cluster import Computed, WorkerContext
from podium.data.tokenizer import load_tokenizer
from podium.data.trajectories import Ints, TokenColumn, TrajectoryBlock, ValueColumns
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter
from podium.engine.checkpoint_files import SaveState
from podium.engine.offload import what_can_leave
from podium.engine.optimizer import AdamW
from podium.engine.resuming import checkpoint_shards, restore_engine, restore_optimizer, training_extras
from podium.engine.scoring import values
from podium.engine.sharding import place_scalar
from podium.engine.train_step import ObjectiveBatch, TrainEngine
from podium.errors import ModelError
from podium.models.scalar import PackedScalarLM
from podium.recipe import AlgorithmSection
from podium.roles.blocks import empty_block
from podium.roles.carriers import Residency, ValueShard
from podium.roles.interfaces import (
    Critic,
    CriticShard,
    CriticSpec,
    NoSnapshot,
    SnapshotBegun,
    StateSource,
    micro_batch_tokens,
)
from podium.roles.learner import mesh_on
from podium.roles.placed_rewards import trained_mask
from podium.roles.role_state import RoleState
from podium.roles.scorer import HeldTensors
from podium.roles.stages import CriticReport
from podium.roles.token_rows import packed_rows, token_rewards
from podium.rollout.engine import MemoryChange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ValueObjective:
    old_S: Tensor
    returns_S: Tensor
    clip: float | None

    def __call__(self, values_S: Tensor) -> Tensor:
        return value_loss(values_S, self.old_S, self.returns_S, clip=self.clip)


class CriticRank(Critic):
    """One rank of the critic."""

    def __init__(self, context: WorkerContext, spec: CriticSpec) -> None:
        transformers.logging.set_verbosity_error()
        recipe, critic = spec.recipe, spec.recipe.critic_section
        assert critic is not None, "the program has a critic"
        self._context, self._value_clip = context, critic.value_clip
        self._mesh = mesh_on(context)
        self._max_tokens = micro_batch_tokens(recipe, self._mesh.device.type)
        own = critic.path is not None
        section = recipe.model
        if critic.path is not None:
            lora = recipe.model.lora  # an adapter of the policy's base does not fit another base
            adapter = None if lora is None else lora.model_copy(update={"adapter": None})
            section = recipe.model.for_checkpoint(critic.path).model_copy(update={"lora": adapter})
        begin = None
        if spec.resume_step is not None:
            begin = CheckpointReader(spec.checkpoints / f"step-{spec.resume_step:08d}")
        model, trained = place_scalar(
            section, spec.folder, self._mesh, labels=1, seed=recipe.run.seed, checkpoint=begin
        )
        needed = 0 if not own else len(load_tokenizer(recipe.model))
        if model.vocab_size < needed:
            raise ModelError(
                f"critic.path: {section.path} has a vocabulary of {model.vocab_size} tokens and the policy's tokenizer "
                f"one of {needed}: it cannot read the policy's tokens. Give a critic that shares the tokenizer."
            )
        optimizer = recipe.optimizer.model_copy(update={"lr": critic.lr or recipe.optimizer.lr})
        self._engine = TrainEngine(model, trained, AdamW(trained, optimizer), self._mesh, optimizer.clip_norm)
        if begin is not None:
            restore_optimizer(self._engine, begin)
        self._writer = CheckpointWriter(
            spec.checkpoints, self._mesh, keep=recipe.checkpoint.keep, keep_best=False, beside=spec.beside,
            background=recipe.checkpoint.background, timeout_s=recipe.checkpoint.timeout_s,
        )  # fmt: skip
        self._state = RoleState(
            self._mesh, node=context.worker.node, memory=spec.snapshots, checkpoints=spec.checkpoints,
            pieces=lambda: checkpoint_shards(self._engine),
        )  # fmt: skip
        self._steps_before = 0  # the last update
        self._held = HeldTensors(lambda: [*what_can_leave(self._engine.optimizer), *self._model.parameters()])

    def estimate(self, shard: ValueShard, algorithm: AlgorithmSection, kl_coefficient: float) -> Computed[ValueColumns]:
        """Values, generalised advantages and returns of the shard's trained tokens."""
        block = shard.rows.read() if len(shard.rows) else empty_block()
        with self._context.span("values"):
            values_T = values(self._model, self._mesh, block, max_tokens=self._max_tokens).values_T
        trained_T = trained_mask(block)
        reference = shard.reference
        reference_T = reference.read().values_T if reference is not None and len(reference) else None
        rewards_T = token_rewards(
            block, trained_T, shard.rewards_N, shard.turn_rewards, reference_T, algorithm, kl_coefficient
        )
        advantages_T, returns_T = gae(
            torch.from_numpy(rewards_T),
            torch.from_numpy(values_T.copy()),
            torch.from_numpy(trained_T),
            torch.from_numpy(block.offsets.copy()),
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
        columns = ValueColumns(
            ids=block.ids,
            offsets=block.offsets,
            values_T=values_T,
            advantages_T=advantages_T.numpy(),
            returns_T=returns_T.numpy(),
        )
        return Computed(rows=columns, note=moments_of(advantages_T, torch.from_numpy(trained_T)))

    def update(self, shard: CriticShard, lr: float) -> Computed[TokenColumn]:
        """All optimizer steps over this rank's share of a batch."""
        self._state.begin_change()
        self._steps_before = self._engine.num_optimizer_steps
        block = shard.rows.read() if len(shard.rows) else empty_block()
        columns = shard.columns.read() if len(shard.columns) else None
        trained_T = trained_mask(block)
        clip = self._value_clip
        mine = torch.zeros(len(shard.batches), dtype=torch.int64)
        before_T = np.concatenate([[0], np.cumsum(trained_T)])
        trained_N = before_T[block.offsets[1:]] - before_T[block.offsets[:-1]]
        for number, batch in enumerate(shard.batches):
            mine[number] = int(sum(trained_N[rows].sum() for rows in batch))
        counts = self._mesh.sum_of_data(mine.to(self._mesh.device)).tolist()
        reports, statistics = [], []
        for batch, count in zip(shard.batches, counts, strict=True):
            if count == 0:
                continue
            micro = [self._micro(block, columns, trained_T, rows, clip) for rows in batch]
            report, seen = self._engine.objective_step(micro, normalizer=float(count), lr=lr)
            reports.append(report)
            for each, (values_S,) in zip(micro, seen, strict=True):
                objective = each.objective
                assert isinstance(objective, _ValueObjective)
                statistics.append(value_statistics(values_S, objective.old_S, objective.returns_S, clip=clip))
        resolved = [report.resolve() for report in reports]
        note = CriticReport(
            statistics=ValueStatistics.merge(statistics),
            losses=tuple(report.loss for report in resolved),
            grad_norms=tuple(report.grad_norm for report in resolved),
        )
        return Computed(done=shard.ids, note=note)

    def has_stepped(self) -> bool:
        """Whether the last update ran an optimizer step."""
        return self._engine.num_optimizer_steps > self._steps_before

    def hold(self, residency: Residency) -> MemoryChange:
        """Moves optimizer state and weights to host memory, or back."""
        self._state.wait_copied()
        return self._held.hold(residency)

    def save(self, step: int, values: Mapping[str, Any]) -> SaveState:
        """Begins to write a checkpoint."""
        self._writer.save(step, checkpoint_shards(self._engine), training_extras(self._engine, values))
        return self._writer.state

    def finish_saving(self) -> SaveState:
        """Waits until the checkpoint has ended."""
        return self._writer.finish()

    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Begins to copy weights and optimizer state to host memory."""
        return self._state.snapshot(step, training_extras(self._engine, values))

    def snapshots(self) -> tuple[int, ...]:
        """Steps of whole snapshots."""
        return self._state.snapshots()

    def forget_snapshots(self) -> None:
        """Removes all snapshots."""
        self._state.forget_snapshots()

    def restore(self, step: int, source: StateSource) -> Mapping[str, Any]:
        """Goes back to the weights and optimizer state after this step."""
        self.hold("resident")
        saved = self._state.read(step, source)
        if not self._state.is_after(step):
            self._state.begin_change()
            restore_engine(self._engine, saved)
            self._state.note_restored(step)
        return saved.values

    @property
    def _model(self) -> PackedScalarLM:
        assert isinstance(self._engine.model, PackedScalarLM)
        return self._engine.model

    def _micro(
        self,
        block: TrajectoryBlock,
        columns: ValueColumns | None,
        trained_T: np.ndarray,
        rows: Ints,
        clip: float | None,
    ) -> ObjectiveBatch:
        packed, places_S, _, _ = packed_rows(block, trained_T, rows)
        none = np.empty(0, np.float32)
        old = none if columns is None else columns.values_T[places_S]
        returns = none if columns is None else columns.returns_T[places_S]
        device = self._mesh.device
        objective = _ValueObjective(
            old_S=torch.from_numpy(np.ascontiguousarray(old)).to(device),
            returns_S=torch.from_numpy(np.ascontiguousarray(returns)).to(device),
            clip=clip,
        )
        return ObjectiveBatch(packed=packed, objective=objective)
