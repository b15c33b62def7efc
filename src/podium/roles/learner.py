# SPDX-License-Identifier: Apache-2.0
"""The learner: one rank of the training engine under a controller. It scores, updates, publishes and saves."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from podium.algorithms.dense import token_cross_entropy
from podium.cluster import Computed, RowRefs, WorkerContext
from podium.data.trajectories import TokenColumn, TrajectoryBlock
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter
from podium.engine.checkpoint_files import SaveState
from podium.engine.mesh import Mesh, adopt, with_axes
from podium.engine.offload import OffloadedTensors, what_can_leave
from podium.engine.optimizer import AdamW
from podium.engine.resuming import checkpoint_shards, restore_engine, restore_optimizer, training_extras
from podium.engine.scoring import score
from podium.engine.sharding import compute_dtype, place
from podium.engine.train_step import TrainEngine
from podium.models.cost import model_cost
from podium.models.cpu_settings import CpuSettings
from podium.models.device import choose_cpu_settings, matrix_peak
from podium.models.verify import random_batch, self_check
from podium.roles.blocks import empty_block
from podium.roles.carriers import Residency, UpdatePlan, UpdateShard
from podium.roles.distances import distance
from podium.roles.interfaces import (
    POLICY,
    Learner,
    LearnerFacts,
    LearnerSpec,
    NoSnapshot,
    SnapshotBegun,
    StateSource,
    UpdateNote,
    micro_batch_tokens,
)
from podium.roles.policy_update import PolicyUpdate
from podium.roles.role_state import RoleState
from podium.rollout.engine import MemoryChange
from podium.weights.published import PublishedWeights
from podium.weights.transports import send_by_broadcast, send_by_store
from podium.weights.versions import WeightVersion
from podium.weights.weight_transfers import ByBroadcast, ByStore, WeightBucket, WeightTransfer


class LearnerRank(Learner):
    """One rank of the policy."""

    def __init__(self, context: WorkerContext, spec: LearnerSpec) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        recipe = spec.recipe
        self._context, self._spec, self._recipe = context, spec, recipe
        self.mesh: Mesh = with_axes(_all_shard(context), recipe.placement.mesh_sizes, timeout_s=spec.collective_s)
        torch.set_num_threads(recipe.placement.threads or 1)
        begin = None
        if spec.resume_step is not None:
            begin = CheckpointReader(spec.checkpoints / f"step-{spec.resume_step:08d}")
        model, trained = place(recipe.model, spec.folder, self.mesh, seed=recipe.run.seed, checkpoint=begin)
        optimizer = AdamW(trained, recipe.optimizer)
        self.engine = TrainEngine(
            model, trained, optimizer, self.mesh, recipe.optimizer.clip_norm,
            router_aux_loss_coef=recipe.model.router_aux_loss_coef,
        )  # fmt: skip
        if begin is not None:
            restore_optimizer(self.engine, begin)
        dtype = compute_dtype(recipe.model, self.mesh.device)
        self.weights = PublishedWeights(model, trained, self.mesh, dtype)
        self.cpu = self._cpu_settings()
        self._logprob_noise: float | None = None
        if recipe.model.self_check:
            comparison = self_check(model, self.mesh.device, dtype, max_length=recipe.data.max_length)
            self._logprob_noise = comparison.floor_mean
        self._leaving: OffloadedTensors | None = None
        self._steps_before = 0  # the last update
        self._writer = CheckpointWriter(
            spec.checkpoints,
            self.mesh,
            keep=recipe.checkpoint.keep,
            keep_best=recipe.checkpoint.keep_best,
            background=recipe.checkpoint.background,
            timeout_s=recipe.checkpoint.timeout_s,
            resumed=spec.resume_step,  # a learner that replaces this one is built from it
        )
        self._state = RoleState(
            self.mesh, node=context.worker.node, memory=spec.snapshots, checkpoints=spec.checkpoints,
            pieces=lambda: checkpoint_shards(self.engine),
        )  # fmt: skip
        self._update = PolicyUpdate(self.engine, max_tokens=self._max_tokens)

    def facts(self) -> LearnerFacts:
        """Facts about the model, its sizes and the device, for the controller."""
        model, mesh = self.engine.language_model, self.mesh
        cost, dtype = model_cost(model.hf, model.split), compute_dtype(self._recipe.model, mesh.device)
        cuda = mesh.device.type == "cuda"
        leaving = what_can_leave(self.engine.optimizer)
        assert self._recipe.data.max_length is not None
        return LearnerFacts(
            architecture=type(model.hf).__name__,
            num_parameters=model.num_parameters(),
            dtype=str(dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(mesh.device) if cuda else "CPU",
            cost=cost.per_sequence,
            prefixes=self.engine.prefixes,
            peak_flops=matrix_peak(mesh.device, dtype),
            max_tokens=self._max_tokens,
            optimizer_bytes=sum(tensor.untyped_storage().nbytes() for tensor in leaving),
            device_bytes=torch.cuda.get_device_properties(mesh.device).total_memory if cuda else 0,
            cpu=self.cpu,
            trained_parameters=(
                sum(math.prod(each.shape) for each in self.engine.optimizer.trained)
                if self._recipe.model.lora is not None
                else None
            ),
            logprob_noise=self._logprob_noise,
            routers=None if model.routers is None else model.routers.shape,
            router_problem=model.router_problem,
        )

    def score(self, rows: RowRefs[TrajectoryBlock], temperature: float, base: bool = False) -> Computed[TokenColumn]:
        """Log-probs of the rows' tokens under the current weights, or without the adapter."""
        block, model = rows.read() if len(rows) else empty_block(), self.engine.language_model
        with model.without_adapter() if base else contextlib.nullcontext():
            column = score(
                model, self.mesh, block, temperature=temperature, max_tokens=self._max_tokens, replays=not base
            )
        return Computed(rows=column, note=distance(block, column))

    def update(self, shard: UpdateShard, plan: UpdatePlan) -> Computed[TokenColumn]:
        """All optimizer steps over this rank's share of a batch."""
        self._state.begin_change()
        self._steps_before = self.engine.num_optimizer_steps
        block = shard.rows.read() if len(shard.rows) else empty_block()
        with self._context.span("update"):
            note: UpdateNote = self._update.run(block, shard, plan)
        return Computed(done=shard.ids, note=note)

    def has_stepped(self) -> bool:
        """Whether the last update ran an optimizer step."""
        return self.engine.num_optimizer_steps > self._steps_before

    def describe(self, number: int) -> WeightVersion:
        """The current weights as version `number`."""
        return self.weights.describe(number)

    def describe_base(self) -> WeightVersion:
        """The frozen weights under an adapter."""
        return self.weights.describe_frozen()

    def send(self, transfer: WeightTransfer) -> int:
        """Broadcasts published weights; returns the bytes that this rank sent."""
        assert isinstance(transfer, ByBroadcast)
        return send_by_broadcast(transfer, self.weights, self._context.transfer(transfer.link), self.mesh.device)

    def store(self, transfer: ByStore) -> Iterator[Computed[WeightBucket]]:
        """Yields the buckets of the weights on rank 0; the other ranks help to gather them."""
        for bucket in send_by_store(transfer, self.weights, is_sender=self.mesh.rank == 0):
            yield Computed(rows=bucket)

    def hold(self, residency: Residency) -> MemoryChange:
        """Moves moments, masters and gradients to host memory, or back."""
        moved = 0
        self._state.wait_copied()
        if residency == "offloaded" and self._leaving is None:
            self._leaving = OffloadedTensors(what_can_leave(self.engine.optimizer))
            moved = self._measured(self._leaving.offload)
            return MemoryChange(measured_bytes=moved, accounted_bytes=self._leaving.nbytes)
        if residency != "offloaded" and self._leaving is not None:
            back, self._leaving = self._leaving, None
            moved = self._measured(back.restore)
            return MemoryChange(measured_bytes=moved, accounted_bytes=back.nbytes)
        return MemoryChange(measured_bytes=0, accounted_bytes=0)

    def save(self, step: int, values: Mapping[str, Any]) -> SaveState:
        """Begins to write a checkpoint."""
        self._writer.save(step, checkpoint_shards(self.engine), training_extras(self.engine, values))
        return self._writer.state

    def save_state(self) -> SaveState:
        """How far this rank is with the checkpoint in flight."""
        return self._writer.state

    def finish_saving(self, *, give_up: bool = False) -> SaveState:
        """Waits until the checkpoint has ended."""
        return self._writer.finish(give_up=give_up)

    def snapshot(self, step: int, values: Mapping[str, Any]) -> SnapshotBegun | NoSnapshot:
        """Begins to copy weights and optimizer state to host memory."""
        return self._state.snapshot(step, training_extras(self.engine, values))

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
            restore_engine(self.engine, saved)
            self._state.note_restored(step)
        return saved.values

    def grade(self, step: int, loss: float) -> str | None:
        """Records the loss of a saved step; the lowest is the best."""
        return self._writer.grade(step, loss) if self.mesh.is_main else None

    @property
    def _max_tokens(self) -> int:
        return micro_batch_tokens(self._recipe, self.mesh.device.type)

    def _cpu_settings(self) -> CpuSettings | None:
        """Threads and kernels that suit the model. Rank 0 measures them for all ranks."""
        if self.mesh.device.type != "cpu":
            return None
        placement, known = self._recipe.placement, self._spec.cpu
        if (
            known is not None
            and placement.threads in (None, known.threads)
            and placement.onednn in (None, known.onednn)
        ):
            known.apply()
            return known
        batch = random_batch(self.engine.model.vocab_size, lengths=(16,) * 8 + (128,))
        settings = choose_cpu_settings(
            lambda: self.engine.gradients([batch], token_cross_entropy, normalizer=1.0),
            ranks=self.mesh.world,
            threads=placement.threads,
            onednn=placement.onednn,
        )
        chosen: CpuSettings = self.mesh.gather(settings)[0]
        chosen.apply()
        return chosen

    def _measured(self, move: Any) -> int:
        """Bytes of device memory that a move changed, as the device reports them; 0 on CPU, which has no such
        report."""
        if self.mesh.device.type != "cuda":
            move()
            return 0
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(self.mesh.device)[0]
        move()
        torch.cuda.empty_cache()
        return abs(torch.cuda.mem_get_info(self.mesh.device)[0] - before)


def mesh_on(context: WorkerContext) -> Mesh:
    """The mesh of the learner on this worker: models beside it are divided alike, over the same process groups. Where
    there is no learner, all ranks shard."""
    learner = context.colocated_roles.get(POLICY)
    return learner.mesh if isinstance(learner, LearnerRank) else _all_shard(context)


def _all_shard(context: WorkerContext) -> Mesh:
    return adopt(rank=context.rank, world=context.world, device=context.device, devices=context.devices)
