# SPDX-License-Identifier: Apache-2.0
"""Custom losses on fixed data: of trained tokens (sft) and of pairs (dpo). A loss gets what its parameters name."""

# S trained tokens of a micro-batch · C tokens of a chunk · R pairs

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.algorithms.custom import call_loss, require_gradient, require_losses
from podium.data.documents import PackedExamples
from podium.errors import RecipeError
from podium.models.head import EntropyObjective, TokenObjective
from podium.recipe import plugins
from podium.recipe.dense import CustomPreference
from podium.recipe.losses import PAIR_INPUTS, TOKEN_INPUTS, declared_inputs, spans_tokens

_TOKEN_KEY, _PAIR_KEY = "algorithm.loss", "preference.loss"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CustomTokenLoss:
    """The loss of each trained token, by the recipe's own function."""

    where: str  # in errors
    function: Callable[..., Any]
    names: tuple[str, ...]  # what it takes, of TOKEN_INPUTS

    @classmethod
    def load(cls, path: str) -> CustomTokenLoss:
        """The function that the recipe names."""
        names = declared_inputs(path, _TOKEN_KEY, TOKEN_INPUTS)
        return cls(where=f"{_TOKEN_KEY}: {path}", function=plugins.load(path, _TOKEN_KEY), names=names)

    @property
    def reads_logprobs_only(self) -> bool:
        """Whether it takes nothing else: it is then a plain loss of tokens."""
        return self.names == ("logprobs_S",)

    def __call__(self, logprobs_C: Tensor, **others: Any) -> Tensor:
        """The loss of each of these tokens."""
        losses = call_loss(self.where, self.function, logprobs_S=logprobs_C, **others)
        loss_C = require_losses(self.where, losses, logprobs_C, "token")
        return require_gradient(self.where, loss_C, "logprobs_S") if logprobs_C.requires_grad else loss_C

    def objective(self, batch: PackedExamples, device: torch.device) -> TokenObjective | EntropyObjective:
        """The loss of one micro-batch. Called before the forward pass, so that copies to the device do not wait for
        it."""
        if self.reads_logprobs_only:
            return TokenObjective(self)
        of_tokens = {name: value for name, value in _token_columns(batch, device).items() if name in self.names}
        others = {"num_sequences": len(batch.documents)} if "num_sequences" in self.names else {}

        def loss(logprobs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
            columns = {name: values_S[tokens] for name, values_S in of_tokens.items()}
            entropy = {"entropy_S": entropy_C} if "entropy_S" in self.names else {}
            return self(logprobs_C, **columns, **entropy, **others)

        return EntropyObjective(
            loss=loss, watches_entropy="entropy_S" in self.names, ties_tokens=spans_tokens(self.names)
        )


def _token_columns(batch: PackedExamples, device: torch.device) -> dict[str, Tensor]:
    targets_S = batch.packed.targets_T[np.flatnonzero(batch.packed.weights_T)].astype(np.int64)
    columns = {"targets_S": targets_S, "sequence_S": batch.document_S}
    return {name: torch.from_numpy(values).to(device) for name, values in columns.items()}


class CustomPairLoss:
    """The loss of each pair, by the recipe's own function, and the numbers that it reports beside the loss."""

    def __init__(self, section: CustomPreference, device: torch.device) -> None:
        self._where = f"{_PAIR_KEY}: {section.loss}"
        self._names, self._beta = section.inputs, section.beta
        self._function = plugins.load(section.loss, _PAIR_KEY)
        self.metric_names: tuple[str, ...] = ()
        self.metric_names = tuple(self._tried(device))

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Losses of pairs, and the sum of each metric over them. `inputs`: by name, those of PAIR_INPUTS that there
        are."""
        loss_R, values = self._called(inputs)
        if values.keys() != set(self.metric_names):
            raise RecipeError(
                f"{self._where} reports {', '.join(values) or 'no metrics'}, and reported "
                f"{', '.join(self.metric_names) or 'none'} before. It reports the same names in every call."
            )
        return loss_R, tuple(values[name].sum() for name in self.metric_names)

    def _called(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        arguments = {name: value for name, value in {**inputs, "beta": self._beta}.items() if name in self._names}
        returned = call_loss(self._where, self._function, **arguments)
        loss_R, values = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
        chosen_R = inputs["chosen_R"]
        loss_R = require_losses(self._where, loss_R, chosen_R, "pair")
        if not isinstance(values, Mapping):
            raise RecipeError(
                f"{self._where} gave a {type(values).__name__} beside the losses. It gives a dict from names to one "
                "number for each pair, as tensors."
            )
        metrics = {
            str(name): require_losses(f"{self._where}, metric {name},", value, chosen_R, "pair").detach()
            for name, value in values.items()
        }
        return require_gradient(self._where, loss_R, "chosen_R") if chosen_R.requires_grad else loss_R, metrics

    def _tried(self, device: torch.device) -> list[str]:
        """Names of the metrics, from a call with made-up pairs: a mistake is found before the first step."""
        log_R = torch.tensor([-4.0, -2.5], device=device)
        tokens_R = torch.tensor([4, 3], device=device)
        tensors = {name: tokens_R if "_tokens_" in name else log_R.clone() for name in PAIR_INPUTS if name != "beta"}
        for name in ("chosen_R", "rejected_R"):
            tensors[name].requires_grad_()
        with torch.enable_grad():
            return list(self._called(tensors)[1])
