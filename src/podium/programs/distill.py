# SPDX-License-Identifier: Apache-2.0
"""Distillation on fixed data: a student learns its teachers' distribution. Every rank runs this."""

# S trained tokens · C tokens of one chunk · V vocabulary

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.data.documents import PackedExamples, SplitExamples
from podium.engine.train_step import LazyBatches, ObjectiveBatch, Tally, TrainEngine
from podium.models.packing import on_device
from podium.observe import ShownMetric
from podium.programs.teachers import Target, Teachers, open_teachers
from podium.recipe import DistillRecipe
from podium.recipe.dense import DistillSection
from podium.spmd.by_source import heldout_losses
from podium.spmd.run import SpmdRun


def distill(run: SpmdRun[DistillRecipe]) -> None:
    """One optimizer step per packed step of documents."""
    method = DistillMethod(run.recipe.distill, run.engine, open_teachers(run))
    for step in run.steps(method.measure, method.averages, shown=_SHOWN):
        tally = method.tally(step.split.sources)
        report, _ = run.engine.objective_step(
            method.batches(step.split, tally),
            normalizer=step.global_tokens,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)


_SHOWN = (ShownMetric("divergence", "divergence", ".4f"), ShownMetric("agreement", "agreement", ".1%"))
_SUMS = ("tokens", "divergence", "cross_entropy", "agreement")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistillObjective:
    """Loss of each token: (1 - share) · divergence + share · cross-entropy."""

    target: Target
    targets_S: Tensor  # token ids of the data
    share: float
    tally: Tally
    sources_S: Tensor | None  # of each token; None without several sources

    def __call__(self, logits_CV: Tensor, tokens: slice) -> Tensor:
        far_C, agreement = self.target.compare(logits_CV, tokens)
        logprobs_CV = torch.log_softmax(logits_CV if self.share else logits_CV.detach(), dim=-1)
        entropy_C = -logprobs_CV.gather(1, self.targets_S[tokens, None]).squeeze(1)
        count = torch.tensor(len(far_C), device=far_C.device)
        self.tally.add(count, far_C.sum(), entropy_C.sum(), agreement)
        loss_C = (1 - self.share) * far_C + self.share * entropy_C if self.share else far_C
        self.tally.add_losses(loss_C, None if self.sources_S is None else self.sources_S[tokens])
        return loss_C


class DistillMethod:
    """The recipe's divergence, in training and on held-out documents."""

    def __init__(self, section: DistillSection, engine: TrainEngine, teachers: Teachers) -> None:
        self._section, self._engine, self._teachers = section, engine, teachers

    def tally(self, sources: Sequence[str] = ()) -> Tally:
        """Sums that are collected beside the loss; `averages` turns them into metrics."""
        return Tally(_SUMS, self._engine.mesh.device, sources)

    def batches(self, split: SplitExamples, tally: Tally) -> LazyBatches:
        """This rank's micro-batches with their objectives. Live teachers are queried for one micro-batch at a time.
        Collective."""
        device = self._engine.mesh.device

        def make(batch: PackedExamples) -> ObjectiveBatch:
            objective = DistillObjective(
                target=self._teachers(batch),
                targets_S=torch.from_numpy(batch.packed.targets_T[batch.packed.weights_T > 0]).long().to(device),
                share=self._section.cross_entropy,
                tally=tally,
                sources_S=on_device(batch.sources_S, device) if tally.has_sources else None,
            )
            return ObjectiveBatch(packed=batch.packed, objective=objective, kind="divergence")

        return LazyBatches(split.parts, make)

    def averages(self, sums: Mapping[str, float], count: int) -> Mapping[str, float]:
        """Means over tokens."""
        return {name: sums[name] / max(1.0, sums["tokens"]) for name in _SUMS[1:]}

    def measure(self, split: SplitExamples) -> Mapping[str, float]:
        """Loss and averages of held-out documents. Collective."""
        tally, engine = self.tally(split.sources), self._engine
        total = engine.objective_sum(self.batches(split, tally))
        loss, *rest = engine.mesh.sum_of_tokens(torch.cat([total[None], tally.sums_M])).tolist()
        sums = dict(zip(tally.names, rest, strict=True))
        averages = self.averages(sums, len(split.examples))
        return {"loss": loss / sums["tokens"], **averages, **heldout_losses(split, sums, "tokens")}
