# SPDX-License-Identifier: Apache-2.0
"""A scorer: a frozen language model that says how likely it finds what others sampled. References and teachers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from podium.cluster import Computed, Seat
from podium.data.tokenizer import has_tokenizer, load_tokenizer, require_same_tokens
from podium.data.trajectories import TokenColumn
from podium.engine.checkpoint import CheckpointReader, CheckpointWriter, Extras
from podium.engine.mesh import adopt
from podium.engine.offload import OffloadedTensors
from podium.engine.resuming import buffer_pieces, weight_pieces
from podium.engine.scoring import score
from podium.engine.sharding import PackedModel, local_tensor, place
from podium.errors import ModelError
from podium.models.buffers import persistent_buffers
from podium.recipe import ModelSection
from podium.roles.blocks import empty_block
from podium.roles.carriers import Residency, ScoreShard
from podium.roles.distances import distance
from podium.roles.learner import POLICY, Learner
from podium.rollout.engine import MemoryChange

_SAVING_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """How a scorer is built. `begin` is a folder of Podium's own to take the weights from, instead of the model's."""

    model: ModelSection
    folder: Path
    max_tokens: int
    seed: int  # where its weights are drawn
    policy: ModelSection | None = None  # whose tokens it scores; None: its own
    checkpoints: Path | None = None  # of a reference that is refreshed
    beside: Path | None = None  # checkpoints of the policy: it is kept as long as its policy
    begin: Path | None = None


class Scorer:
    """Sharded as the learner is. All methods are collective where there are several ranks."""

    def __init__(self, seat: Seat, spec: ScorerSpec) -> None:
        transformers.logging.set_verbosity_error()
        self._seat, self._spec = seat, spec
        self._mesh = adopt(rank=seat.rank, world=seat.world, device=seat.device, devices=seat.devices)
        self._model, self._held = place(
            spec.model,
            spec.folder,
            self._mesh,
            seed=spec.seed,
            checkpoint=None if spec.begin is None else CheckpointReader(spec.begin),
            masters=False,
        )
        policy = seat.roommate(POLICY, Learner).engine.language_model
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
        self._weights = HeldWeights(self._model)

    def score(self, shard: ScoreShard, temperature: float) -> Computed[TokenColumn]:
        """Log-probs of the sampled tokens, and how far each episode's are from those of the policy that drew them."""
        block = shard.rows.read() if len(shard.rows) else empty_block()
        column = score(self._model, self._mesh, block, temperature=temperature, max_tokens=self._spec.max_tokens)
        return Computed(rows=column, note=distance(block, column))

    def copy_from(self, role: str) -> None:
        """Becomes a copy of a learner on the same devices, sharded alike: of its adapter, where it has one."""
        learner = self._seat.roommate(role, Learner)
        with torch.no_grad():
            masters = {each.name: each.master for each in (*learner.engine.optimizer.trained, *learner.engine.frozen)}
            assert masters.keys() == {each.name for each in self._held}
            for mine in self._held:
                local_tensor(mine.parameter).copy_(masters[mine.name])
            buffers = persistent_buffers(learner.engine.language_model.hf)
            for name, buffer in persistent_buffers(self._model.hf).items():
                buffer.copy_(buffers[name])

    def save(self, step: int) -> None:
        """Its weights, which are no other file's once it was refreshed."""
        assert self._spec.checkpoints is not None
        writer = CheckpointWriter(
            self._spec.checkpoints, self._mesh, keep=1, keep_best=False, background=False, timeout_s=_SAVING_S,
            beside=self._spec.beside,
        )  # fmt: skip
        pieces = [*weight_pieces(self._held), *buffer_pieces(self._model.hf)]
        writer.save(step, pieces, Extras(values={}, arrays={}))

    def hold(self, residency: Residency) -> MemoryChange:
        """Offloaded: its weights are in host memory."""
        return self._weights.hold(residency)


class HeldWeights:
    """A frozen model's weights, on the device or away."""

    def __init__(self, model: PackedModel) -> None:
        self._model = model
        self._away: OffloadedTensors | None = None

    def hold(self, residency: Residency) -> MemoryChange:
        if residency == "offloaded" and self._away is None:
            unique = {id(each): each for each in self._model.parameters()}
            self._away = OffloadedTensors(list(unique.values()))
            return MemoryChange(measured_bytes=0, accounted_bytes=self._away.offload())
        if residency != "offloaded" and self._away is not None:
            back, self._away = self._away, None
            return MemoryChange(measured_bytes=0, accounted_bytes=back.restore())
        return MemoryChange(measured_bytes=0, accounted_bytes=0)
