# SPDX-License-Identifier: Apache-2.0
"""One step of every program with fixed data on any number of ranks, with its gradient as whole tensors. Here, because
a spawned process imports it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from helpers.on_policy import RecordingEngine
from helpers.ranks import assembled, mesh_of
from podium.data.document_store import DocumentStore
from podium.data.documents import Document, Example, SplitExamples
from podium.data.splitting import split_step
from podium.engine.mesh import Mesh, with_axes
from podium.engine.optimizer import AdamW
from podium.engine.scoring import summed_logprobs
from podium.engine.sharding import place, place_scalar
from podium.engine.train_step import TrainEngine
from podium.models.causal_lm import PackedCausalLM
from podium.programs.distill import DistillMethod
from podium.programs.dpo import PreferenceMethod
from podium.programs.references import References, base_logprobs, stored_logprobs
from podium.programs.reward_model import RewardModelMethod
from podium.programs.teachers import LiveTeachers, Teachers, stored_targets
from podium.recipe import ModelSection, OptimizerSection
from podium.recipe.dense import DistillSection, KtoPreference, PreferenceSection, RewardModelSection
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import RankPlace

VOCABULARY = 250


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A section of a recipe, and where its program has other models' numbers from."""

    section: PreferenceSection | RewardModelSection | DistillSection
    source: Literal["none", "live", "stored", "base"] = "none"
    teachers: tuple[float, ...] = (1.0,)  # weights
    adapted: bool = False  # the policy is an adapter on the reference
    chunk: int | None = None  # tokens that the head looks at in one go; None: all
    max_tokens: int = 40
    max_length: int = 256
    rows: tuple[int, ...] | None = None  # which, and in which order; None: all as they are


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseTask:
    """Pickles, so that all ranks have the same rows."""

    policy: Path
    scalar: Path
    others: tuple[Path, ...]  # the reference, or teachers
    adapter: Path  # on the first of them
    stores: Path  # folder of a store `reference` and one `teachers`
    pairs: tuple[Example, ...]
    labels: tuple[Example, ...]
    scores: tuple[Example, ...]
    cases: Mapping[str, Case]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped:
    """What one optimizer step saw before it changed anything, and what held-out rows like these measure."""

    gradient: dict[str, Tensor]
    loss: float
    averages: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def flat(self) -> Tensor:
        return torch.cat([each.flatten() for each in self.gradient.values()])


def random_rows(kind: Literal["pairs", "labels", "scores"], count: int = 9, *, seed: int = 0) -> tuple[Example, ...]:
    """Prompts of 1 to 6 tokens with completions of 1 to 9, of which some have a gap that is not trained."""
    draw = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt = draw.integers(0, VOCABULARY, draw.integers(1, 7))
        documents = tuple(_document(draw, prompt, kind) for _ in range(2 if kind == "pairs" else 1))
        value = float(number % 3 > 0) if kind == "labels" else float(draw.normal())
        rows.append(Example(documents=documents, value=value))
    return tuple(rows)


def _document(draw: np.random.Generator, prompt: np.ndarray, kind: str) -> Document:
    length = int(draw.integers(1, 10))
    tokens = np.concatenate([prompt, draw.integers(0, VOCABULARY, length)]).astype(np.int32)
    trained = np.arange(len(tokens)) >= len(prompt)
    if length > 4:
        trained[len(prompt) + 2] = False
    if kind == "scores":
        trained[:] = np.arange(len(tokens)) == len(tokens) - 1
    return Document(tokens=tokens, trained=trained)


def scored(pairs: Sequence[Example]) -> tuple[Example, ...]:
    """The same documents, looked at where they end."""
    return tuple(
        Example(
            documents=tuple(
                Document(tokens=each.tokens, trained=np.arange(len(each.tokens)) == len(each.tokens) - 1)
                for each in example.documents
            ),
            value=example.value,
        )
        for example in pairs
    )


def dense_rank(where: RankPlace, task: DenseTask, sizes: MeshSizes | None = None) -> dict[str, Stepped]:
    with mesh_of(where) as mesh:
        return dense_on(mesh if sizes is None else with_axes(mesh, sizes, timeout_s=120), task)


def dense_on_meshes(
    where: RankPlace, task: DenseTask, shapes: Mapping[str, MeshSizes]
) -> dict[str, dict[str, Stepped]]:
    """On each mesh in turn, by its name."""
    with mesh_of(where) as mesh:
        return {name: dense_on(with_axes(mesh, sizes, timeout_s=120), task) for name, sizes in shapes.items()}


def dense_on(mesh: Mesh, task: DenseTask) -> dict[str, Stepped]:
    """Every case, from the same weights. Collective."""
    return {name: step_of(mesh, task, case) for name, case in task.cases.items()}


def step_of(mesh: Mesh, task: DenseTask, case: Case) -> Stepped:
    engine = _engine(mesh, task, case)
    rows = _rows(task, case)
    if case.rows is not None:
        rows = tuple(rows[at] for at in case.rows)
    split = dealt(rows, mesh, case.max_tokens)
    method = _method(engine, task, case)
    tally = method.tally()
    trained = sum(example.num_trained for example in rows)
    normalizer = trained if isinstance(case.section, DistillSection) else len(rows)
    report = engine.objective_step(method.batches(split, tally), normalizer=normalizer, lr=0.0, tally=tally)[
        0
    ].resolve()
    measured = method.measure(split)
    whole = assembled(engine, engine.recorded[0])
    return Stepped(
        gradient=whole, loss=report.loss, averages=method.averages(report.sums, len(rows)), measured=measured
    )


def dealt(rows: tuple[Example, ...], mesh: Mesh, max_tokens: int) -> SplitExamples:
    """As a run deals them."""
    plan = split_step(
        [example.num_inputs for example in rows], num_ranks=mesh.data_ranks, max_tokens=max_tokens, hard_cap=False
    )
    return SplitExamples(examples=rows, rows=tuple(tuple(part.tolist()) for part in plan.rows(mesh.data_rank)[0]))


def _engine(mesh: Mesh, task: DenseTask, case: Case) -> RecordingEngine:
    if isinstance(case.section, RewardModelSection):
        model, trained = place_scalar(ModelSection(path=str(task.scalar)), task.scalar, mesh, labels=1)
    else:
        folder = task.others[0] if case.adapted else task.policy
        lora = {"lora": {"adapter": str(task.adapter)}} if case.adapted else {}
        section = ModelSection.model_validate({"path": str(folder), **lora})
        model, trained = place(section, folder, mesh, seed=0)
    engine = RecordingEngine(model, trained, AdamW(trained, OptimizerSection(lr=1e-3)), mesh, None)
    engine.recorded = []
    if case.chunk is not None and isinstance(model, PackedCausalLM):
        model.head_spec = replace(model.head_spec, chunk_tokens=case.chunk, logits_chunk_tokens=case.chunk)
    return engine


def _rows(task: DenseTask, case: Case) -> tuple[Example, ...]:
    match case.section:
        case KtoPreference():
            return task.labels
        case PreferenceSection():
            return task.pairs
        case RewardModelSection(learns="pairs"):
            return scored(task.pairs)
        case RewardModelSection():
            return task.scores
        case _:
            return task.labels


def _method(engine: TrainEngine, task: DenseTask, case: Case) -> PreferenceMethod | RewardModelMethod | DistillMethod:
    mesh = engine.mesh
    match case.section:
        case PreferenceSection() as section:
            return PreferenceMethod(
                section, engine, _references(engine, task, case), max_tokens=case.max_tokens, max_length=case.max_length
            )
        case RewardModelSection() as section:
            return RewardModelMethod(section, engine)
        case section:
            teachers: Teachers
            if case.source == "stored":
                teachers = partial(stored_targets, section, DocumentStore(task.stores / "teachers"), mesh, VOCABULARY)
            else:
                models = [
                    (_other(mesh, path), weight) for path, weight in zip(task.others, case.teachers, strict=False)
                ]
                teachers = LiveTeachers(section, models, mesh)
            return DistillMethod(section, engine, teachers)


def _references(engine: TrainEngine, task: DenseTask, case: Case) -> References | None:
    match case.source:
        case "none":
            return None
        case "live":
            return partial(summed_logprobs, _other(engine.mesh, task.others[0]), engine.mesh)
        case "stored":
            return partial(stored_logprobs, DocumentStore(task.stores / "reference"), engine.mesh)
        case "base":
            return partial(base_logprobs, engine.language_model, engine.mesh)


def _other(mesh: Mesh, folder: Path) -> Any:
    model, _ = place(ModelSection(path=str(folder)), folder, mesh, seed=0, masters=False)
    return model.eval()
