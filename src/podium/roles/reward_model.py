# SPDX-License-Identifier: Apache-2.0
"""A reward model: a sequence classifier that scores whole episodes, in its own tokenizer and chat format."""

from __future__ import annotations

import numpy as np
import torch
import transformers

from podium.cluster import Computed, WorkerContext
from podium.data.control_tokens import ControlRule
from podium.data.documents import Document, pack
from podium.data.scored import ConversationEncoder, scored_document
from podium.data.splitting import split_step
from podium.data.tasks import Task
from podium.data.tokenizer import has_tokenizer, load_tokenizer, require_embeddings
from podium.data.trajectories import TokenColumn
from podium.engine.sharding import place_scalar
from podium.errors import ModelError
from podium.models.packing import round_tokens, to_device
from podium.progress import mark_progress
from podium.roles.carriers import Floats, GradeShard, Residency, ScoreNote
from podium.roles.interfaces import RewardModel, RewardModelSpec
from podium.roles.learner import mesh_on
from podium.roles.scorer import HeldTensors
from podium.roles.texts import EpisodeText, TextReader
from podium.rollout.engine import MemoryChange


class RewardModelRank(RewardModel):
    """One rank of a reward model."""

    def __init__(self, context: WorkerContext, spec: RewardModelSpec) -> None:
        transformers.logging.set_verbosity_error()
        self._spec = spec
        self._mesh = mesh_on(context)
        self._reader = TextReader(load_tokenizer(spec.policy))
        tokenizer = load_tokenizer(spec.model if has_tokenizer(spec.folder) else spec.policy)
        self._encoder = ConversationEncoder(tokenizer, ControlRule.of(spec.policy))
        self._model, _ = place_scalar(spec.model, spec.folder, self._mesh, labels=None, masters=False)
        require_embeddings(tokenizer, self._model.vocab_size)
        labels = self._model.hf.config.num_labels
        if labels != 1:
            raise ModelError(
                f"{spec.folder} has {labels} labels, and a reward is one number. Give a checkpoint with num_labels 1."
            )
        self._model.eval()
        self._context = getattr(self._model.hf.config.get_text_config(), "max_position_embeddings", None)
        self._weights = HeldTensors(self._model.parameters)

    def score(self, shard: GradeShard) -> Computed[TokenColumn]:
        """Scores the shard's episodes."""
        texts = list(self._reader.read(shard.rows.read())) if len(shard.rows) else []
        prompt_indices = shard.ids.array_N4[:, 0].tolist()
        documents = [
            self._document(shard.tasks[prompt_index], text)
            for prompt_index, text in zip(prompt_indices, texts, strict=True)
        ]
        return Computed(done=shard.ids, note=ScoreNote(values_N=self._scores(documents)))

    def hold(self, residency: Residency) -> MemoryChange:
        """Moves the weights to host memory, or back."""
        return self._weights.hold(residency)

    @torch.no_grad()
    def _scores(self, documents: list[Document]) -> Floats:
        lengths = [document.num_inputs for document in documents]
        batches: list[list[int]] = []
        if documents:
            plan = split_step(lengths, num_ranks=1, max_tokens=max(self._spec.max_tokens, *lengths))
            batches = [sorted(rows, key=lambda row: (lengths[row], row)) for rows in plan.micro_batches[0]]
        most = max(self._mesh.gather(len(batches)))
        scores = np.zeros(len(documents))
        for rows in [*batches, *[[]] * (most - len(batches))]:
            packed = pack([documents[row] for row in rows])
            tokens = to_device(packed, self._mesh.device, multiple=round_tokens(self._mesh.device))
            scores[rows] = self._model(tokens, None, "values").double().cpu().numpy()[: len(rows)]
            mark_progress()
        return scores

    def _document(self, task: Task, text: EpisodeText) -> Document:
        """The whole conversation in the format that the reward model was trained on."""
        other = "tool" if self._spec.tools else "user"
        if task.messages is not None:
            spoken = [
                {"role": "assistant" if is_policy else other, "content": said} for is_policy, said in text.turns
            ] or [{"role": "assistant", "content": ""}]
            tokens = self._encoder.chat([*task.messages, *spoken])
        else:
            tokens = self._encoder.text(str(task.text), "".join(part for _, part in text.turns))
        return scored_document(tokens, self._context)
