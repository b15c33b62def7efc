# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face body with a linear head of one number (or a few): critics and reward models, in packed form."""

# T packed tokens · S positions that are looked at · E hidden width · L labels

from __future__ import annotations

import copy
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from podium.errors import UnsupportedModelError
from podium.models.attention import PACKED_ATTENTION, register_packed_attention
from podium.models.causal_lm import decoder_layers
from podium.models.context_parallel import ContextPart
from podium.models.lora import inject
from podium.models.new_tokens import grown_vocabulary
from podium.models.packing import TokenBatch
from podium.models.plain import PlainKind, plain_outputs
from podium.models.precision import keep_in_float32
from podium.models.routing import attach_routers
from podium.models.training_mode import TrainedModule
from podium.recipe import ModelSection

ScalarKind = Literal["values", "objective", "scores", PlainKind]


class ScalarObjective(Protocol):
    """A loss over the values at the trained positions of one micro-batch."""

    def __call__(self, values_S: Tensor) -> Tensor:
        """The loss of each, differentiable."""


class PackedScalarLM(TrainedModule):
    """Body and head inside one forward, as in PackedCausalLM. The value at position i is that of the state in which
    token i + 1 is sampled."""

    def __init__(self, model: PreTrainedModel, vocab_size: int, *, dropout: bool = False) -> None:
        super().__init__(dropout=dropout)
        register_packed_attention()
        self.hf = model
        self.vocab_size = vocab_size
        self.layers = decoder_layers(model)
        self.routers, self.router_problem = attach_routers(model, self.layers)
        model.set_attn_implementation(PACKED_ATTENTION)
        self.train()

    def forward(
        self, batch: TokenBatch, objective: ScalarObjective | None, kind: ScalarKind = "values"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`values`: float32 numbers at the trained positions, [S] or, with several labels, [S, L]; `objective`: the
        weighted sum of the loss over them, and the values; `scores`: float32 hidden states there [S, E]; `plain`: the
        same through transformers' own attention, one document at a time, to compare with; `padded`: these again,
        computed in another way (plain.py). Over a context axis each rank has the numbers of all tokens, and the first
        the sum of their loss."""
        if kind == "plain" or kind == "padded":
            return self._plain_states(batch, kind)
        weights_S = batch.weights_S
        part = None if self.context is None else ContextPart.of(batch, self.context)
        if part is not None:
            batch = part.cut_batch(batch)
        with self.routed(batch.packing.routing):
            out = self.hf.base_model(
                input_ids=batch.tokens_T.unsqueeze(0),
                position_ids=batch.positions_T.unsqueeze(0),
                use_cache=False,
                packing=batch.packing,
            )
        hidden_SE = out.last_hidden_state[0].index_select(0, batch.trained_S)
        if kind == "scores":
            states: Tensor = hidden_SE.float()
            return states if part is None else part.join(states)
        values: Tensor = self.hf.score(hidden_SE).float()
        if values.shape[-1] == 1:
            values = values.squeeze(-1)
        if part is not None:
            values = part.join(values)
        if kind == "values":
            return values
        assert objective is not None
        if part is not None and not part.is_first:  # an empty sum, which takes part in the backward pass
            return values[:0].sum(), values.detach()
        return (objective(values) * weights_S).sum(), values.detach()

    @torch.no_grad()
    def _plain_states(self, batch: TokenBatch, kind: PlainKind) -> Tensor:
        def states(tokens_DL: Tensor) -> Tensor:
            return self.hf.base_model(input_ids=tokens_DL, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

        with self.routed(None):
            return plain_outputs(self.hf, batch, states, kind)[batch.trained_S].float()


def build_scalar(
    section: ModelSection, config: Any, *, device: torch.device, dtype: torch.dtype, labels: int | None
) -> PackedScalarLM:
    """The module tree of a sequence classifier. `labels`: size of the head; None: as the config says."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.vocab_size = grown_vocabulary(section, text.vocab_size)
    if labels is not None:
        config.num_labels = labels
    try:
        with torch.device(device):
            model = AutoModelForSequenceClassification.from_config(
                config, dtype=dtype, trust_remote_code=section.trust_remote_code
            )
    except ValueError as error:
        raise UnsupportedModelError(
            f"{section.path}: transformers has no sequence classifier of this kind ({str(error).splitlines()[0]})."
        ) from error
    keep_in_float32(model, dtype)
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear `score` head on a causal body, so Podium cannot use it as a critic "
            "or reward model."
        )
    if section.lora is not None:
        inject(model, section.lora, is_scalar=True)
    return PackedScalarLM(model, config.get_text_config().vocab_size, dropout=section.dropout)
