# SPDX-License-Identifier: Apache-2.0
"""Teacher outputs for every trained token: the full distribution of live teachers, or the top k from a store."""

# S trained tokens · C tokens of one chunk · V shared vocabulary · K largest of a teacher

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from podium.algorithms.divergences import divergence, mixture_logprobs, top_k_divergence
from podium.data.document_store import DocumentStore
from podium.data.documents import PackedExamples
from podium.data.fingerprints import folder_fingerprint
from podium.data.tokenizer import load_tokenizer, require_same_tokens
from podium.engine.mesh import Mesh
from podium.engine.sharding import compute_dtype, place
from podium.models.causal_lm import PackedCausalLM, load_config
from podium.models.folder import local_folder
from podium.models.head import next_token_scores
from podium.models.head_kernels import HeadSpec
from podium.models.packing import TokenBatch, round_tokens, to_device
from podium.programs.passes import Compute, cache_folder, stored_pass
from podium.recipe import DistillRecipe, ModelSection, Recipe
from podium.recipe.dense import DistillSection
from podium.spmd.run import SpmdRun

_CHUNK_TOKENS = 1024


class Target(Protocol):
    """The teachers' outputs for the trained tokens of one micro-batch."""

    def compare(self, logits_CV: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """The student's divergence at each of these tokens [C], differentiable in its logits, and the number of tokens
        at which both have the same top token."""


# Targets of micro-batches. Collective.
Teachers = Callable[[PackedExamples], Target]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Head:
    """A teacher's head, whole on every rank because it never changes. Chunks as wide as the vocabulary are computed
    together with the student's."""

    weight_VE: Tensor
    spec: HeadSpec
    weight: float  # relative to the other teachers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WholeTarget:
    section: DistillSection
    heads: tuple[_Head, ...]
    states: tuple[Tensor, ...]  # [S, E] of each teacher

    def compare(self, logits_CV: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        section = self.section
        teacher_CV = self.logprobs(tokens, logits_CV.shape[1])
        student_CV = logits_CV[:, : teacher_CV.shape[1]]
        far_C = divergence(
            section.divergence, student_CV, teacher_CV, temperature=section.temperature, beta=section.mixture_share
        )
        return far_C, (logits_CV.detach().argmax(-1) == teacher_CV.argmax(-1)).sum()

    @torch.no_grad()
    def logprobs(self, tokens: slice, vocab_size: int) -> Tensor:
        """Log-probs of all teachers together over the vocabulary that they share with the student."""
        width = min(vocab_size, *(head.spec.vocab_size for head in self.heads))
        logprobs = [
            torch.log_softmax(
                next_token_scores(states_SE[tokens], head.weight_VE, head.spec)[:, :width] / self.section.temperature,
                -1,
            )
            for head, states_SE in zip(self.heads, self.states, strict=True)
        ]
        return logprobs[0] if len(logprobs) == 1 else mixture_logprobs(logprobs, [head.weight for head in self.heads])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TopTarget:
    section: DistillSection
    width: int  # of the shared vocabulary
    ids_SK: Tensor
    logprobs_SK: Tensor

    def compare(self, logits_CV: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        section, ids_CK = self.section, self.ids_SK[tokens]
        far_C = top_k_divergence(
            section.divergence, logits_CV[:, : self.width], ids_CK, self.logprobs_SK[tokens],
            temperature=section.temperature, beta=section.mixture_share,
        )  # fmt: skip
        return far_C, (logits_CV.detach().argmax(-1) == ids_CK[:, 0]).sum()  # the largest comes first


class LiveTeachers:
    """Separate models, sharded like the student; inference only."""

    def __init__(self, section: DistillSection, models: Sequence[tuple[PackedCausalLM, float]], mesh: Mesh) -> None:
        self._section, self._mesh = section, mesh
        self._models = [model for model, _ in models]
        self._heads = tuple(
            _Head(weight_VE=_whole(model.head_weight), spec=model.head_spec, weight=weight) for model, weight in models
        )

    def __call__(self, batch: PackedExamples) -> _WholeTarget:
        tokens = to_device(batch.packed, self._mesh.device, multiple=round_tokens(self._mesh.device))
        states = tuple(self._states(model, tokens) for model in self._models)
        return _WholeTarget(section=self._section, heads=self._heads, states=states)

    @torch.no_grad()
    def _states(self, model: PackedCausalLM, tokens: TokenBatch) -> Tensor:
        states_SE: Tensor = model(tokens, None, "states")
        return states_SE


def stored_targets(
    section: DistillSection, store: DocumentStore, mesh: Mesh, width: int, batch: PackedExamples
) -> Target:
    """Targets with the top k of every trained token, computed once, before training."""
    targets = [store.read(document) for document in batch.documents]
    none = {"ids": np.empty((0, 1), np.int32), "logprobs": np.empty((0, 1), np.float32)}
    ids_SK, logprobs_SK = (np.concatenate([each[name] for each in targets or [none]]) for name in none)
    return _TopTarget(
        section=section,
        width=width,
        ids_SK=torch.from_numpy(ids_SK).long().to(mesh.device),
        logprobs_SK=torch.from_numpy(logprobs_SK).to(mesh.device),
    )


def open_teachers(run: SpmdRun[DistillRecipe]) -> Teachers:
    """Opens the teachers of the recipe. Collective."""
    recipe, mesh, section = run.recipe, run.engine.mesh, run.recipe.distill
    student = load_tokenizer(recipe.model)
    for index, teacher in enumerate(recipe.teachers):
        require_same_tokens(student, load_tokenizer(teacher_section(recipe, teacher.path)), f"teachers.{index}.path")
    if section.targets == "live":
        with run.preparing("loading the teachers"):
            return LiveTeachers(section, _models(run), mesh)
    folders = [local_folder(teacher.path, f"teachers.{at}.path") for at, teacher in enumerate(recipe.teachers)]
    weights = [teacher.weight for teacher in recipe.teachers]
    who = [f"{folder_fingerprint(path)} {weight}" for path, weight in zip(folders, weights, strict=True)]
    width = min(run.engine.language_model.vocab_size, *(_vocab_size(recipe, path) for path in folders))
    how = f"top {section.num_cached} of {width} at {section.temperature} in {compute_dtype(recipe.model, mesh.device)}"
    folder = cache_folder(recipe, "teachers", [*who, how])

    def prepare() -> Compute:
        live = LiveTeachers(section, _models(run), mesh)

        def compute(batch: PackedExamples) -> tuple[Sequence[int], Mapping[str, NDArray[Any]]]:
            lengths = [document.num_trained for document in batch.documents]
            return lengths, _top(live(batch), sum(lengths), width, section.num_cached)

        return compute

    store = stored_pass(run, folder, f"computing the teachers' top {section.num_cached}", prepare)
    return partial(stored_targets, section, store, mesh, width)


def _top(target: _WholeTarget, num_tokens: int, vocab_size: int, top_k: int) -> dict[str, NDArray[Any]]:
    """Ids and log-probs of each token's top k, largest first. A smaller vocabulary gives all of its tokens."""
    top_k = min(top_k, vocab_size)
    ids, logprobs = [np.empty((0, top_k), np.int32)], [np.empty((0, top_k), np.float32)]
    for start in range(0, num_tokens, _CHUNK_TOKENS):
        logprobs_CV = target.logprobs(slice(start, start + _CHUNK_TOKENS), vocab_size)
        values_CK, ids_CK = logprobs_CV.topk(top_k, dim=-1)
        ids.append(ids_CK.cpu().numpy().astype(np.int32))
        logprobs.append(values_CK.float().cpu().numpy())
    return {"ids": np.concatenate(ids), "logprobs": np.concatenate(logprobs)}


def _models(run: SpmdRun[DistillRecipe]) -> list[tuple[PackedCausalLM, float]]:
    recipe, models = run.recipe, []
    for index, teacher in enumerate(recipe.teachers):
        folder = local_folder(teacher.path, f"teachers.{index}.path")
        section = teacher_section(recipe, str(folder))
        model, _ = place(section, folder, run.engine.mesh, seed=0, masters=False)
        model.eval()
        models.append((model, teacher.weight))
    return models


def _vocab_size(recipe: Recipe, folder: Path) -> int:
    config = load_config(folder, trust_remote_code=teacher_section(recipe, str(folder)).trust_remote_code)
    return int(config.get_text_config().vocab_size)


def teacher_section(recipe: Recipe, path: str) -> ModelSection:
    """How a teacher computes: the same way as the student."""
    own = {"tokenizer": None, "chat_template": None, "new_tokens": None, "activation_checkpointing": "none"}
    return recipe.model.for_checkpoint(path).model_copy(update=own)


@torch.no_grad()
def _whole(weight_VE: Tensor) -> Tensor:
    return weight_VE.full_tensor() if isinstance(weight_VE, DTensor) else weight_VE.detach()
