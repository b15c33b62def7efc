# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: cross-entropy over the trained tokens, or the recipe's own loss. Every rank runs this."""

from __future__ import annotations

from collections.abc import Mapping

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import PackedExamples, SplitExamples
from podium.engine.train_step import LazyBatches, ObjectiveBatch, Tally, TokenSources, TrainEngine, by_source
from podium.models.head import TokenObjective
from podium.models.packing import on_device
from podium.programs.custom_losses import CustomTokenLoss
from podium.recipe import SftRecipe
from podium.recipe.algorithm import SftAlgorithm
from podium.recipe.plugins import Plugin
from podium.spmd.evaluation import mean_token_loss
from podium.spmd.run import SpmdRun


def sft(run: SpmdRun[SftRecipe]) -> None:
    """One optimizer step per packed step of documents. All ranks have the same number of micro-batches."""
    # A custom program may hand its run on to this one; its recipe has no section for the loss.
    algorithm = run.recipe.algorithm if isinstance(run.recipe, SftRecipe) else SftAlgorithm()
    method = TokenMethod(algorithm, run.engine)
    for step in run.steps(method.measure):
        tally = method.tally(step.sources)
        report, _ = run.engine.objective_step(
            method.batches(step.split, step.sources, tally),
            # The count over all ranks: they hold unequal shares, a local mean would weigh them wrongly.
            normalizer=step.global_tokens,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)


class TokenMethod:
    """The recipe's loss of trained tokens, in training and on held-out documents."""

    def __init__(self, section: SftAlgorithm, engine: TrainEngine) -> None:
        self._engine = engine
        self._custom = CustomTokenLoss.load(section.loss) if isinstance(section.loss, Plugin) else None

    def tally(self, sources: TokenSources | None) -> Tally | None:
        """Sums of the losses of each source, where the data has several."""
        return None if sources is None else Tally((), self._engine.mesh.device, sources.names)

    def batches(
        self, split: SplitExamples, sources: TokenSources | None = None, tally: Tally | None = None
    ) -> LazyBatches:
        """This rank's micro-batches with their objectives. `tally` sums the losses of `sources`."""
        of_micro_batches = iter(() if sources is None else sources.of_micro_batches)

        def make(batch: PackedExamples) -> ObjectiveBatch:
            custom, device = self._custom, self._engine.mesh.device
            objective = TokenObjective(token_cross_entropy) if custom is None else custom.objective(batch, device)
            if tally is not None:
                objective = by_source(objective, tally, on_device(next(of_micro_batches), device))
            return ObjectiveBatch(packed=batch.packed, objective=objective)

        return LazyBatches(split.parts, make)

    def measure(self, split: SplitExamples) -> Mapping[str, float]:
        """Mean loss per held-out token. Collective."""
        engine, custom = self._engine, self._custom
        if custom is None or custom.reads_logprobs_only:
            return mean_token_loss(engine, custom or token_cross_entropy)(split)
        num_trained = sum(example.num_trained for example in split.examples)
        return {"loss": engine.mesh.sum_of_tokens(engine.objective_sum(self.batches(split))).item() / num_trained}
