# SPDX-License-Identifier: Apache-2.0
"""Learning from preferences: DPO, IPO, SimPO and ORPO on pairs, KTO on labelled rows. Every rank runs this."""

# S trained tokens · D documents of a micro-batch · R its rows

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from podium.algorithms import preferences
from podium.data.documents import Document, Example, PackedExamples, SplitExamples, pack_examples
from podium.data.splitting import split_step
from podium.engine.scoring import summed_logprobs
from podium.engine.train_step import LazyBatches, ObjectiveBatch, Tally, TrainEngine
from podium.models.packing import RowTensors, rows_to_device
from podium.observe import ShownMetric
from podium.programs.custom_losses import CustomPairLoss
from podium.programs.references import References, open_references
from podium.recipe import DpoRecipe
from podium.recipe.dense import (
    CustomPreference,
    ImitatingPreference,
    IpoPreference,
    KtoPreference,
    OrpoPreference,
    PreferenceSection,
    SigmoidPreference,
    SimpoPreference,
)
from podium.spmd.by_source import heldout_losses
from podium.spmd.run import SpmdRun


def dpo(run: SpmdRun[DpoRecipe]) -> None:
    """One optimizer step per step of rows; chosen and rejected of a pair go through one packed forward."""
    max_length = run.recipe.data.max_length
    assert max_length is not None, "filled in when a recipe is resolved"
    method = PreferenceMethod(
        run.recipe.preference, run.engine, open_references(run), max_tokens=run.max_tokens, max_length=max_length
    )
    for step in run.steps(method.measure, method.averages, shown=_SHOWN):
        tally = method.tally(step.split.sources)
        report, _ = run.engine.objective_step(
            method.batches(step.split, tally),
            # The count over all ranks: they hold unequal shares, a local mean would weigh them wrongly.
            normalizer=step.num_examples,
            lr=step.lr,
            stop_requested=run.stop_requested,
            tally=tally,
        )
        run.record(step, report)


_SHOWN = (ShownMetric("accuracy", "accuracy", ".1%"), ShownMetric("reward_margin", "margin"))
_PAIR_SUMS = ("correct", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected")
_LABEL_SUMS = ("correct", "desirable", "reward_desirable", "reward_undesirable", "kl")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogprobs:
    """What a loss reads of a micro-batch: the summed log-prob of each document, the reference's, and the number of
    summed tokens. Columns are documents of the row: chosen and rejected, or the only one."""

    logprobs_R: tuple[Tensor, ...]
    references_R: tuple[Tensor, ...]  # empty without a reference
    tokens_R: tuple[Tensor, ...]
    values_R: Tensor
    sources_R: Tensor


RowLoss = Callable[[RowLogprobs], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceObjective:
    """Turns a loss of rows into an objective over tokens: the loss of a row is placed at its first trained token."""

    loss: RowLoss
    rows: RowTensors
    references_D: Tensor | None
    temperature: float = 1.0
    entropy: float = 0.0
    watches_entropy: bool = False
    ties_tokens: bool = True

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        rows = self.rows
        seen = RowLogprobs(
            logprobs_R=rows.of_documents(rows.summed(logprobs_C)),
            references_R=() if self.references_D is None else rows.of_documents(self.references_D),
            tokens_R=rows.of_documents(rows.counts_D),
            values_R=rows.values_R,
            sources_R=rows.sources_R,
        )
        return rows.spread(self.loss(seen), logprobs_C)


class PreferenceMethod:
    """The recipe's loss on pairs or labelled rows, in training and on held-out rows. `max_tokens` of one forward on a
    rank and `max_length` of one document apply to the rows built for KTO's baseline."""

    def __init__(
        self,
        section: PreferenceSection,
        engine: TrainEngine,
        references: References | None,
        *,
        max_tokens: int,
        max_length: int,
    ) -> None:
        self._section, self._engine, self._references = section, engine, references
        self._max_tokens, self._max_length = max_tokens, max_length
        self._device = engine.mesh.device
        self._custom = CustomPairLoss(section, self._device) if isinstance(section, CustomPreference) else None
        # Metrics that a custom loss reports beside the losses.
        self._reported = () if self._custom is None else tuple(f"loss/{name}" for name in self._custom.metric_names)

    def tally(self, sources: Sequence[str] = ()) -> Tally:
        """Sums that are collected beside the loss; `averages` turns them into metrics."""
        names = (*(_PAIR_SUMS if self._section.is_paired else _LABEL_SUMS), *self._reported)
        return Tally(names, self._device, sources)

    def batches(self, split: SplitExamples, tally: Tally) -> LazyBatches:
        """This rank's micro-batches with their objectives. The reference is computed for one micro-batch at a time.
        Collective."""
        baseline = None if self._section.is_paired else self._baseline(split)

        def make(batch: PackedExamples) -> ObjectiveBatch:
            objective = PreferenceObjective(
                loss=lambda rows: self._loss(rows, baseline, tally),
                rows=rows_to_device(batch, self._device),
                references_D=None if self._references is None else self._references(batch),
            )
            return ObjectiveBatch(packed=batch.packed, objective=objective)

        return LazyBatches(split.parts, make)

    def measure(self, split: SplitExamples) -> Mapping[str, float]:
        """Loss and averages of held-out rows. Collective."""
        tally, engine = self.tally(split.sources), self._engine
        total = engine.objective_sum(self.batches(split, tally))
        loss, *rest = engine.mesh.sum_of_tokens(torch.cat([total[None], tally.sums_M])).tolist()
        sums, count = dict(zip(tally.names, rest, strict=True)), len(split.examples)
        return {"loss": loss / count, **self.averages(sums, count), **heldout_losses(split, sums, "rows")}

    def averages(self, sums: Mapping[str, float], count: int) -> Mapping[str, float]:
        """Accuracy and rewards of a step or of held-out rows."""
        if not self._section.is_paired:
            desirable, undesirable = sums["desirable"], count - sums["desirable"]
            good = sums["reward_desirable"] / max(1.0, desirable)
            bad = sums["reward_undesirable"] / max(1.0, undesirable)
            means = {"reward_desirable": good, "reward_undesirable": bad, "reward_margin": good - bad}
            return {"accuracy": sums["correct"] / count, **means, "kl": sums["kl"] / count}
        means = {name: sums[name] / count for name in (*_PAIR_SUMS[1:], *self._reported)}
        margin = means["reward_chosen"] - means["reward_rejected"]
        return {"accuracy": sums["correct"] / count, "reward_margin": margin, **means}

    def _loss(self, rows: RowLogprobs, baseline: Tensor | None, tally: Tally) -> Tensor:
        section = self._section
        if isinstance(section, KtoPreference):
            assert baseline is not None
            return self._labelled(rows, section, baseline, tally)
        (chosen_R, rejected_R), tokens = rows.logprobs_R, rows.tokens_R
        reported: tuple[Tensor, ...] = ()
        match section:
            case CustomPreference():
                assert self._custom is not None
                loss_R, reported = self._custom(_named(rows))
            case SigmoidPreference():
                loss_R = preferences.sigmoid_dpo(
                    chosen_R,
                    rejected_R,
                    *rows.references_R,
                    beta=section.beta,
                    label_smoothing=section.label_smoothing,
                )
            case IpoPreference():
                loss_R = preferences.ipo(chosen_R, rejected_R, *rows.references_R, *tokens, beta=section.beta)
            case SimpoPreference():
                loss_R = preferences.simpo(
                    chosen_R, rejected_R, *tokens, beta=section.beta, gamma=section.gamma,
                    label_smoothing=section.label_smoothing,
                )  # fmt: skip
            case OrpoPreference():
                loss_R = preferences.orpo(chosen_R, rejected_R, *tokens, beta=section.beta)
            case _:
                raise TypeError(f"{type(section).__name__} is no loss on pairs")
        if isinstance(section, ImitatingPreference) and section.cross_entropy:
            loss_R = loss_R - section.cross_entropy * chosen_R / tokens[0]
        rewards = self._rewards(rows)
        tally.add(
            preferences.preferred(*rewards).sum(), rewards[0].sum(), rewards[1].sum(), chosen_R.sum(),
            rejected_R.sum(), *reported,
        )  # fmt: skip
        tally.add_losses(loss_R, rows.sources_R)
        return loss_R

    def _labelled(self, rows: RowLogprobs, section: KtoPreference, baseline: Tensor, tally: Tally) -> Tensor:
        desirable_R = rows.values_R > 0.5
        ratio_R = rows.logprobs_R[0] - rows.references_R[0]
        (reward_R,) = self._rewards(rows)
        tally.add(
            ((ratio_R > baseline) == desirable_R).sum(), desirable_R.sum(), (reward_R * desirable_R).sum(),
            (reward_R * ~desirable_R).sum(), baseline * len(reward_R),
        )  # fmt: skip
        loss_R = preferences.kto(
            ratio_R, desirable_R, baseline, beta=section.beta,
            desirable_weight=section.desirable_weight, undesirable_weight=section.undesirable_weight,
        )  # fmt: skip
        tally.add_losses(loss_R, rows.sources_R)
        return loss_R

    def _rewards(self, rows: RowLogprobs) -> tuple[Tensor, ...]:
        """Implicit reward of each document. For ipo, which averages, it is per token."""
        beta = self._section.beta
        if rows.references_R:
            pairs = zip(rows.logprobs_R, rows.references_R, strict=True)
            rewards = tuple(preferences.implicit_rewards(logprobs, ref, beta=beta) for logprobs, ref in pairs)
            if not isinstance(self._section, IpoPreference):
                return rewards
            return tuple(reward / tokens for reward, tokens in zip(rewards, rows.tokens_R, strict=True))
        pairs = zip(rows.logprobs_R, rows.tokens_R, strict=True)
        return tuple(preferences.mean_rewards(logprobs, tokens, beta=beta) for logprobs, tokens in pairs)

    def _baseline(self, split: SplitExamples) -> Tensor:
        """KTO's estimate of the KL: log-ratios of completions after the prompts of other rows, over all ranks. Each row
        gets the completion of the next row. Collective."""
        assert self._references is not None
        rows = split.examples
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        if len(rows) < 2:
            return preferences.kto_baseline(total, 0.0)
        others = [
            mismatched(row, rows[(at + 1) % len(rows)], max_length=self._max_length) for at, row in enumerate(rows)
        ]
        mesh, lengths = self._engine.mesh, [other.num_inputs for other in others]
        # The rows' own micro-batches do not work: a long prompt with a long completion may not fit in them.
        plan = split_step(lengths, num_ranks=mesh.data_ranks, max_tokens=max(self._max_tokens, *lengths))
        for part in plan.rows(mesh.data_rank)[0]:
            batch = pack_examples([others[at] for at in part.tolist()])
            policy_D = summed_logprobs(self._engine.language_model, mesh, batch)
            total += (policy_D - self._references(batch)).sum()
        return preferences.kto_baseline(mesh.sum_of_data(total), float(len(rows)))


def _named(rows: RowLogprobs) -> dict[str, Tensor]:
    """What there is of pairs, by the names of a custom loss's parameters."""
    columns = {"{}_R": rows.logprobs_R, "reference_{}_R": rows.references_R, "{}_tokens_R": rows.tokens_R}
    return {
        pattern.format(side): values_R
        for pattern, sides in columns.items()
        for side, values_R in zip(("chosen", "rejected"), sides, strict=False)
    }


def mismatched(prompt: Example, completion: Example, *, max_length: int) -> Example:
    """The first row's prompt with the whole completion of the second, cut at `max_length` inputs like any row."""
    before, after = prompt.documents[0], completion.documents[0]
    start, said = (int(np.flatnonzero(each.trained)[0]) for each in (before, after))
    tokens = np.concatenate([before.tokens[:start], after.tokens[said:]])[: max_length + 1]
    trained = np.concatenate([np.zeros(start, np.bool_), after.trained[said:]])[: max_length + 1]
    end = int(np.flatnonzero(trained)[-1]) + 1
    return Example(documents=(Document(tokens=tokens[:end], trained=trained[:end]),))
