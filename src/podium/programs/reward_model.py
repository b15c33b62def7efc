# SPDX-License-Identifier: Apache-2.0
"""Trains a model that scores conversations, from comparisons or scores. Every rank runs this."""

# D documents of a micro-batch, each scored at one token · R rows

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.algorithms.preferences import preferred
from podium.algorithms.reward_models import (
    bradley_terry,
    brier_score,
    calibration_bins,
    expected_calibration_error,
    pair_confidences,
    regression,
    regression_statistics,
)
from podium.data.documents import PackedExamples, SplitExamples, pack_examples
from podium.engine.train_step import LazyBatches, ObjectiveBatch, Tally, TrainEngine, source_sum
from podium.models.packing import RowTensors, round_tokens, rows_to_device, to_device
from podium.observe import ShownMetric
from podium.recipe import RewardModelRecipe
from podium.recipe.dense import RewardModelSection
from podium.spmd.by_source import heldout_losses
from podium.spmd.run import SpmdRun


def reward_model(run: SpmdRun[RewardModelRecipe]) -> None:
    """One optimizer step per step of rows; both sides of a pair go through one packed forward."""
    method = RewardModelMethod(run.recipe.reward_model, run.engine)
    for step in run.steps(method.measure, method.averages, shown=method.shown):
        tally = method.tally(step.split.sources)
        report, _ = run.engine.objective_step(
            method.batches(step.split, tally),
            normalizer=step.num_examples,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)


_SHOWN_OF_PAIRS = (ShownMetric("accuracy", "accuracy", ".1%"), ShownMetric("score_margin", "margin"))
_SHOWN_OF_SCORES = (ShownMetric("absolute_error", "error"),)
_PAIR_SUMS = ("correct", "score_chosen", "score_rejected")
_SCORE_SUMS = ("absolute_error", "score")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardObjective:
    """The loss of a row is placed where its first document is scored."""

    section: RewardModelSection
    rows: RowTensors
    tally: Tally

    def __call__(self, values_S: Tensor) -> Tensor:
        rows = self.rows
        if not len(rows.counts_D):
            return values_S  # no row and no value, but part of the graph: this rank still joins in the backward pass
        loss_R = self._loss(rows.of_documents(values_S), rows.values_R)
        self.tally.add_losses(loss_R, rows.sources_R)
        return rows.spread(loss_R, values_S)

    def _loss(self, scores: tuple[Tensor, ...], values_R: Tensor) -> Tensor:
        if self.section.learns == "pairs":
            chosen_R, rejected_R = scores
            self.tally.add(preferred(chosen_R, rejected_R).sum(), chosen_R.sum(), rejected_R.sum())
            return bradley_terry(chosen_R, rejected_R, values_R, center=self.section.center)
        (score_R,) = scores
        self.tally.add((score_R - values_R).abs().sum(), score_R.sum())
        return regression(score_R, values_R)


class RewardModelMethod:
    """The recipe's loss, in training and on held-out rows."""

    def __init__(self, section: RewardModelSection, engine: TrainEngine) -> None:
        self._section, self._engine = section, engine
        self._is_paired = section.learns == "pairs"

    @property
    def shown(self) -> tuple[ShownMetric, ...]:
        """What the step line shows of the averages."""
        return _SHOWN_OF_PAIRS if self._is_paired else _SHOWN_OF_SCORES

    def tally(self, sources: Sequence[str] = ()) -> Tally:
        """Sums that are collected beside the loss; `averages` turns them into metrics."""
        return Tally(_PAIR_SUMS if self._is_paired else _SCORE_SUMS, self._engine.mesh.device, sources)

    def batches(self, split: SplitExamples, tally: Tally) -> LazyBatches:
        """This rank's micro-batches with their objectives."""

        def make(batch: PackedExamples) -> ObjectiveBatch:
            rows = rows_to_device(batch, self._engine.mesh.device)
            objective = RewardObjective(section=self._section, rows=rows, tally=tally)
            return ObjectiveBatch(packed=batch.packed, objective=objective)

        return LazyBatches(split.parts, make)

    def averages(self, sums: Mapping[str, float], count: int) -> Mapping[str, float]:
        """Metrics of a step."""
        means = {name: sums[name] / count for name in self.tally().names}
        if not self._is_paired:
            return means
        margin = means["score_chosen"] - means["score_rejected"]
        return {"accuracy": means.pop("correct"), "score_margin": margin, **means}

    def measure(self, split: SplitExamples) -> Mapping[str, float]:
        """Loss, accuracy and calibration of held-out rows. Pairs use the confidence of the preferred side, scores use
        correlation and R². Collective."""
        mesh = self._engine.mesh
        scored = [self._scores(pack_examples(part)) for part in split.parts]
        mine = np.concatenate(scored)
        rows = [row for part in split.rows for row in part]
        gathered = mesh.gather((rows, mine.tolist()))
        by_row = {row: values for rank_rows, scores in gathered for row, values in zip(rank_rows, scores, strict=True)}
        scores_RN = torch.tensor([by_row[row] for row in range(len(split.examples))], dtype=torch.float64)
        values_R = torch.tensor([example.value for example in split.examples], dtype=torch.float64)
        measured = self._pairs(scores_RN, values_R) if self._is_paired else self._regression(scores_RN[:, 0], values_R)
        return {**measured, **self._by_source(split, scores_RN, values_R)}

    def _by_source(self, split: SplitExamples, scores_RN: Tensor, values_R: Tensor) -> Mapping[str, float]:
        if self._is_paired:
            chosen_R, rejected_R = scores_RN.T
            loss_R = bradley_terry(chosen_R, rejected_R, values_R, center=self._section.center)
        else:
            loss_R = regression(scores_RN[:, 0], values_R)
        sources_R = np.array([example.source for example in split.examples])
        names = {source_sum(name): at for at, name in enumerate(split.sources)}
        sums = {name: loss_R[torch.from_numpy(sources_R == at)].sum().item() for name, at in names.items()}
        return heldout_losses(split, sums, "rows")

    def _pairs(self, scores_RN: Tensor, margins_R: Tensor) -> Mapping[str, float]:
        chosen_R, rejected_R = scores_RN.T
        bins = calibration_bins(*pair_confidences(chosen_R, rejected_R))
        loss_R = bradley_terry(chosen_R, rejected_R, margins_R, center=self._section.center)
        return {
            "loss": loss_R.mean().item(),
            "accuracy": preferred(chosen_R, rejected_R).mean().item(),
            "calibration_error": expected_calibration_error(bins),
            "brier_score": brier_score(bins),
            "score_margin": (chosen_R - rejected_R).mean().item(),
        }

    def _regression(self, scores_R: Tensor, targets_R: Tensor) -> Mapping[str, float]:
        statistics = regression_statistics(scores_R, targets_R)
        return {
            "loss": statistics.mean_squared_error,
            "correlation": statistics.correlation,
            "r_squared": statistics.r_squared,
        }

    @torch.no_grad()
    def _scores(self, batch: PackedExamples) -> np.ndarray:
        """One row of scores for each example. Collective."""
        model, device = self._engine.model, self._engine.mesh.device
        model.eval()
        tokens = to_device(batch.packed, device, multiple=round_tokens(device))
        values_D: Tensor = model(tokens, None, "values")
        model.train()
        if not len(batch.documents):
            return np.empty((0, 2 if self._is_paired else 1))
        scores: np.ndarray = values_D.double().cpu().numpy()[batch.places]
        return scores
