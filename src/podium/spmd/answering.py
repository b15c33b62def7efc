# SPDX-License-Identifier: Apache-2.0
"""Greedy answers for evaluation, by the native engine on every rank. The engine uses the learner's modules on one
device, and a full copy if they are sharded. A model too large for a copy generates sharded, and slowly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from podium.data.documents import Tokens
from podium.data.trajectories import TrajectoryId
from podium.engine.offload import OffloadedTensors, what_can_leave
from podium.engine.sharding import compute_dtype
from podium.engine.train_step import TrainEngine
from podium.errors import DataError, RecipeError, RolloutError
from podium.models.causal_lm import load_config
from podium.recipe import EngineSection, ModelSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.holding import free_bytes
from podium.rollout.requests import Completion, Request, Sampling
from podium.spmd.generation import greedy_answers
from podium.weights.published import PublishedWeights
from podium.weights.whole_copy import WholeCopy

# A decoding step takes milliseconds, so reaching this is a bug.
_DEADLINE_S = 600.0
# A full copy may take this share of the free memory.
_COPY_SHARE = 0.6
# Compiling the layers for decoding takes half a minute; fewer tokens than this are faster without.
_WORTH_COMPILING = 200_000


class Answerer:
    """Holds an engine that sleeps between evaluations. Collective throughout."""

    def __init__(
        self,
        engine: TrainEngine,
        model: ModelSection,
        rollout: EngineSection,
        folder: Path,
        prompts: Sequence[Tokens],
        *,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        max_batch_tokens: int,
    ) -> None:
        self._engine, self._mesh, self._prompts = engine, engine.mesh, prompts
        self._sampling = Sampling(max_new_tokens=max_new_tokens, temperature=0.0, stop_tokens=stop_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._round = 0
        self._copy: WholeCopy | None = None
        self._native: NativeEngine | None = None
        context = int(engine.model.hf.config.get_text_config().max_position_embeddings)
        longest = max(len(prompt) for prompt in prompts)
        if longest >= context:
            raise DataError(
                f"data.heldout: a prompt has {longest} tokens and the model's context {context}, which leaves no room "
                "for an answer. Drop such rows with the source's `map`, or lower evaluation.generation.prompts."
            )
        needed = min(context, longest + max_new_tokens)
        if rollout.max_length is not None and rollout.max_length < needed:
            raise RecipeError(
                f"rollout.max_length: {rollout.max_length} would cut answers: the longest held-out prompt has {longest}"
                f" tokens and evaluation.generation.max_new_tokens is {max_new_tokens}. Raise it to {needed} or more."
            )
        few = len(prompts) * max_new_tokens < _WORTH_COMPILING
        self._section = rollout.model_copy(
            update={
                "max_length": needed,
                "decode": "captured" if few and rollout.decode == "auto" else rollout.decode,
            }
        )
        self._weights = PublishedWeights(
            engine.language_model, engine.optimizer.trained, self._mesh, compute_dtype(model, self._mesh.device)
        )
        self._model, self._folder = model, folder
        leaving = what_can_leave(engine.optimizer) if rollout.offload_optimizer else []
        self._leaving = OffloadedTensors(leaving) if leaving else None
        self._open()  # now, so that a size that is unavailable is reported before the first step

    def answers(self) -> list[Tokens]:
        """The most likely continuation of each prompt, without its stop token; in order, on every rank."""
        mesh = self._mesh
        if self._native is None:
            return greedy_answers(
                self._engine.language_model, mesh, self._prompts, max_new_tokens=self._sampling.max_new_tokens,
                stop_tokens=self._sampling.stop_tokens, max_batch_tokens=self._max_batch_tokens,
            )  # fmt: skip
        if self._leaving is not None:
            self._leaving.offload()
        try:
            done = self._generated()
        finally:
            if self._leaving is not None:
                self._leaving.restore()
            self._engine.model.train()
        merged = {each.id.prompt_index: each for part in mesh.gather(done) for each in part}
        for row, each in sorted(merged.items()):
            if each.error is not None:  # the same on all ranks
                raise RolloutError(f"evaluation.generation: held-out prompt {row} cannot be answered: {each.error}")
        return [self._without_end(merged[row].tokens_L) for row in range(len(self._prompts))]

    def _generated(self) -> list[Completion]:
        """Answers this rank's share of the prompts. The engine is awake only during this call."""
        native = self._native
        assert native is not None
        native.wake()
        try:
            if self._copy is not None:
                self._copy.refill()
                native.install(self._weights.describe(self._round), None)
            self._round += 1
            mine = range(self._mesh.rank, len(self._prompts), self._mesh.world)
            native.submit(
                [Request(id=TrajectoryId(row, 0), prompt=self._prompts[row], sampling=self._sampling) for row in mine]
            )
            return list(native.results(deadline_s=_DEADLINE_S))
        finally:
            native.sleep()

    def _open(self) -> None:
        """Builds the engine and puts it to sleep. Returns none if a full copy of a sharded model does not fit on some
        rank."""
        mesh, model = self._mesh, self._engine.language_model
        if mesh.is_sharded:
            size = sum(spec.nbytes for spec in self._weights.manifest)
            if size > _COPY_SHARE * min(mesh.gather(free_bytes(mesh.device))):
                return
            config = load_config(self._folder, trust_remote_code=self._model.trust_remote_code)
            dtype = compute_dtype(self._model, mesh.device)
            self._copy = WholeCopy(self._weights, self._model, config, device=mesh.device, dtype=dtype)
            self._copy.refill()
            model = self._copy.model
        with torch.no_grad():
            self._native = NativeEngine(model, mesh.device, self._section, copy=self._copy)
        self._native.sleep()
        self._engine.model.train()

    def _without_end(self, tokens: Tokens) -> Tokens:
        ended = len(tokens) and int(tokens[-1]) in self._sampling.stop_tokens
        return np.asarray(tokens[:-1] if ended else tokens, np.int32)
