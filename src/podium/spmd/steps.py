# SPDX-License-Identifier: Apache-2.0
"""TrainStep: one optimizer step as a rank of an SPMD program sees it."""

from __future__ import annotations

from dataclasses import dataclass

from podium.data.documents import PackedBatch, SplitExamples, pack_examples
from podium.data.loader import StepExamples
from podium.engine.train_step import TokenSources


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainStep:
    """One optimizer step as this rank sees it."""

    number: int  # 1, 2, ... recipe.steps
    lr: float
    ready: StepExamples
    split: SplitExamples
    imbalance: float

    @property
    def num_examples(self) -> int:
        """Number of examples over all ranks: the denominator of losses of whole rows."""
        return len(self.split.examples)

    @property
    def global_tokens(self) -> int:
        """Trained tokens of the step over all ranks: the denominator of losses of tokens."""
        return self.ready.num_trained

    @property
    def micro_batches(self) -> tuple[PackedBatch, ...]:
        """This rank's packed micro-batches."""
        return tuple(pack_examples(part).packed for part in self.split.parts)

    @property
    def sources(self) -> TokenSources | None:
        """The sources of this rank's trained tokens; None if the data has a single source."""
        if not self.split.sources:
            return None
        parts = tuple(pack_examples(part).sources_S for part in self.split.parts)
        return TokenSources(names=self.split.sources, of_micro_batches=parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of all documents of the step."""
        return tuple(document.num_inputs for example in self.split.examples for document in example.documents)
