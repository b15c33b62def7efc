# SPDX-License-Identifier: Apache-2.0
"""Distillation on fixed data: a student learns its teachers' distribution. Every rank runs this."""

# S trained tokens · C tokens of one chunk · V vocabulary

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.data.documents import PackedExamples, SplitExamples
from podium.engine.train_step import LazyBatches, ObjectiveBatch, Tally, TrainEngine
from podium.observe import ShownMetric
from podium.programs.teachers import Target, Teachers, open_teachers
from podium.recipe import DistillRecipe
from podium.recipe.dense import DistillSection
from podium.spmd.run import SpmdRun


def distill(run: SpmdRun[DistillRecipe]) -> None:
    """One optimizer step per packed step of documents."""
    method = DistillMethod(run.recipe.distill, run.engine, open_teachers(run))
    for step in run.steps(method.measure, method.averages, shown=_SHOWN):
        tally = method.tally()
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

    def __call__(self, logits_CV: Tensor, tokens: slice) -> Tensor:
        far_C, agreement = self.target.compare(logits_CV, tokens)
        logprobs_CV = torch.log_softmax(logits_CV if self.share else logits_CV.detach(), dim=-1)
        entropy_C = -logprobs_CV.gather(1, self.targets_S[tokens, None]).squeeze(1)
        count = torch.tensor(len(far_C), device=far_C.device)
        self.tally.add(count, far_C.sum(), entropy_C.sum(), agreement)
        return (1 - self.share) * far_C + self.share * entropy_C if self.share else far_C


class DistillMethod:
    """The recipe's divergence, in training and on held-out documents."""

    def __init__(self, section: DistillSection, engine: TrainEngine, teachers: Teachers) -> None:
        self._section, self._engine, self._teachers = section, engine, teachers

    def tally(self) -> Tally:
        """Sums that are collected beside the loss; `averages` turns them into metrics."""
        return Tally(_SUMS, self._engine.mesh.device)

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
            )
            return ObjectiveBatch(packed=batch.packed, objective=objective, kind="divergence")

        return LazyBatches(split.parts, make)

    def averages(self, sums: Mapping[str, float], count: int) -> Mapping[str, float]:
        """Means over tokens."""
        return {name: sums[name] / max(1.0, sums["tokens"]) for name in _SUMS[1:]}

    def measure(self, split: SplitExamples) -> Mapping[str, float]:
        """Loss and averages of held-out documents. Collective."""
        tally, engine = self.tally(), self._engine
        total = engine.objective_sum(self.batches(split, tally))
        sums = engine.mesh.sum(torch.cat([total[None], tally.sums_M])).tolist()
        averages = self.averages(dict(zip(tally.names, sums[1:], strict=True)), len(split.examples))
        return {"loss": sums[0] / sums[1], **averages}
