# SPDX-License-Identifier: Apache-2.0
"""A part of a generator on a learner's device: its share of the weights, and what connects it with the other parts."""

from __future__ import annotations

import threading

import transformers

from podium.cluster import WorkerContext
from podium.engine.mesh import neighbours
from podium.engine.sharding import compute_dtype
from podium.models.causal_lm import load_config
from podium.progress import mark_progress
from podium.roles.interfaces import GeneratorPart, GeneratorSpec
from podium.roles.learner import LearnerRank
from podium.rollout.native.colocated_ranks import follow_on_thread, joined_ranks
from podium.rollout.native.tensor_group import TensorLeader
from podium.rollout.native.tensor_ranks import require_divisible
from podium.weights.versions import WeightVersion
from podium.weights.whole_copy import WholeCopy

_PROGRESS_S = 0.5


class GeneratorPartRank(GeneratorPart):
    """One rank of a tensor group among the learner's ranks."""

    def __init__(self, context: WorkerContext, spec: GeneratorSpec) -> None:
        transformers.logging.set_verbosity_error()
        assert spec.learner is not None
        require_divisible(spec.model, spec.folder, spec.tensor)
        learner = context.colocated_role(spec.learner, LearnerRank)
        mesh, self._weights = learner.mesh, learner.weights
        axis = neighbours(mesh, spec.tensor, timeout_s=spec.deadline_s)
        config = load_config(spec.folder, trust_remote_code=spec.model.trust_remote_code)
        dtype = compute_dtype(spec.model, mesh.device)
        self.copy = WholeCopy(self._weights, spec.model, config, device=mesh.device, dtype=dtype, axis=axis)
        self.copy.refill()
        self._version: WeightVersion | None = None
        self._is_left = threading.Event()
        connections = joined_ranks(mesh, axis, timeout_s=spec.deadline_s)
        self._leader: TensorLeader | None = None
        if axis.rank == 0:
            self._leader = TensorLeader(axis, connections, mesh.device, timeout_s=spec.deadline_s)
        else:
            follow_on_thread(self.copy, mesh.device, connections[0])

    @property
    def leader(self) -> TensorLeader:
        """The other ranks of the group, on its first one."""
        assert self._leader is not None, "the engine is on the first rank of a group"
        return self._leader

    def refill(self, number: int) -> str:
        """Takes this rank's part of the learner's weights."""
        self.copy.restore()
        self.copy.refill()
        self._version = self._weights.describe(number)
        return self._version.fingerprint

    def version(self, number: int) -> WeightVersion:
        """The weights that the parts hold, which must be this version."""
        assert self._version is not None
        assert self._version.number == number, "parts are refilled before their engine is told"
        return self._version

    def accompany(self) -> None:
        """Returns after `leave`."""
        while not self._is_left.wait(_PROGRESS_S):
            mark_progress()
        self._is_left.clear()

    def leave(self) -> None:
        """Ends `accompany`, also one that has not begun."""
        self._is_left.set()

    def reset(self) -> None:
        """Forgets that a call was to end."""
        self._is_left.clear()
