# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a model, from its own shape: attention, windows, experts and frozen parts included.
Torch-free until it is given a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from podium.data.costs import AttentionCost, SequenceCost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from podium.models.tensor_split import TensorSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Matrix parameters that every token passes through, and the width of attention in each layer."""

    trained_matrix: int  # parameters of matrix products that are trained, without the head
    frozen_matrix: int
    head_matrix: int
    head_trained: bool
    attention_width: int  # query heads × head width
    windows: tuple[int | None, ...]  # one per layer; None: all earlier tokens are visible

    def training_flops(self, lengths: Sequence[int], head_tokens: int) -> float:
        """Forward and backward of packed documents of which `head_tokens` positions reach the head. A trained matrix
        costs 6 operations per token and parameter (2 forward, 2 for its input's gradient, 2 for its own), a frozen one
        4. The second forward of activation checkpointing does not count."""
        return float(self._body.of(lengths).sum()) + head_tokens * self._head_flops

    @property
    def per_sequence(self) -> SequenceCost:
        """Forward and backward of one sequence by its length, with every position through the head."""
        body = self._body
        return replace(body, per_token=body.per_token + self._head_flops)

    @property
    def forward(self) -> SequenceCost:
        """Operations of a forward pass without the head, the same for a model and its frozen copy."""
        per_token = 2.0 * (self.trained_matrix + self.frozen_matrix)
        return SequenceCost(per_token=per_token, attention=self._attention(2.0 * 2.0))

    @property
    def training_ratio(self) -> float:
        """Operations of forward and backward of one token, without the head, over those of its forward."""
        forward = self.forward.per_token
        return self._body.per_token / forward if forward else 3.0

    @property
    def _body(self) -> SequenceCost:
        """Everything but the head. Scores and values are 2 products of 2 operations for every (query, visible key)
        pair, and twice that again backward."""
        per_token = 6.0 * self.trained_matrix + 4.0 * self.frozen_matrix
        return SequenceCost(per_token=per_token, attention=self._attention(3.0 * 4.0))

    def _attention(self, operations: float) -> tuple[AttentionCost, ...]:
        """`operations` of each pair and number of a query."""
        layers = Counter(self.windows)
        return tuple(
            AttentionCost(window=window, per_pair=operations * self.attention_width * count)
            for window, count in layers.items()
        )

    @property
    def _head_flops(self) -> float:
        return (6.0 if self.head_trained else 4.0) * self.head_matrix


def model_cost(model: PreTrainedModel, split: TensorSplit | None = None) -> ModelCost:
    """Counts the matrices of a Hugging Face causal LM or sequence classifier. The input embedding is a look-up and
    costs nothing; the head does (tied or not). Of a mixture's experts only the active share counts. An adapter's
    matrices count as trained. `split`: how the model is divided over ranks, which count together."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = (model.get_output_embeddings() or model.get_submodule("score")).weight
    share = _active_share(config)
    trained = frozen = head_matrix = 0
    for name, parameter in model.named_parameters():
        numel = parameter.numel() if split is None else split.numel(name, parameter)
        if parameter is head:
            head_matrix = numel
        if parameter.dim() < 2 or parameter is embedding or parameter is head:
            continue
        active = int(numel * (share if ".experts" in name else 1.0))
        if parameter.requires_grad:
            trained += active
        else:
            frozen += active
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelCost(
        trained_matrix=trained,
        frozen_matrix=frozen,
        head_matrix=head_matrix,
        head_trained=head.requires_grad,
        attention_width=config.num_attention_heads * head_dim,
        windows=layer_windows(config),
    )


def _active_share(config: object) -> float:
    experts = (
        getattr(config, "num_experts", None)
        or getattr(config, "num_local_experts", None)
        or getattr(config, "n_routed_experts", None)
    )
    active = getattr(config, "num_experts_per_tok", None)
    return active / experts if experts and active else 1.0


def has_experts(model: PreTrainedModel) -> bool:
    """Whether some layers route each token to a few experts: only some tokens of a batch share one product."""
    return any(".experts" in name or parameter.dim() > 2 for name, parameter in model.named_parameters())


def layer_windows(config: object) -> tuple[int | None, ...]:
    """The sliding window of each layer by its config; None: all earlier tokens are visible."""
    layers: int = config.num_hidden_layers  # type: ignore[attr-defined]
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
