# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal language model in Podium's packed form: packed tokens in, summed loss out."""

# T packed tokens · S trained tokens · E hidden width

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, assert_never, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from podium.errors import ModelError, UnsupportedModelError
from podium.models.attention import PACKED_ATTENTION, register_packed_attention
from podium.models.context_parallel import ContextPart
from podium.models.head import (
    EntropyObjective,
    LogitsObjective,
    Objective,
    TokenLoss,
    fused_logits_objective,
    fused_objective,
    fused_token_loss,
    next_token_scores,
    target_logprobs,
)
from podium.models.head_kernels import HeadSpec
from podium.models.lora import adapter_off, inject
from podium.models.new_tokens import grown_vocabulary
from podium.models.packing import TokenBatch
from podium.models.plain import PlainKind, plain_outputs
from podium.models.precision import keep_in_float32
from podium.models.routing import attach_routers
from podium.models.training_mode import TrainedModule
from podium.recipe import ModelSection

ForwardKind = Literal["loss", "objective", "divergence", "logprobs", "scores", "states", PlainKind]
ObjectiveOutput = tuple[Tensor, Tensor, Tensor]
"""Σ weight · loss, and the log-prob and entropy of each trained token."""


class PackedCausalLM(TrainedModule):
    """Wraps the Hugging Face model so that body and head run inside one forward, which is the unit that FSDP shards."""

    def __init__(self, model: PreTrainedModel, vocab_size: int, *, dropout: bool = False) -> None:
        super().__init__(dropout=dropout)
        register_packed_attention()
        self.hf = model
        self.vocab_size = vocab_size  # without padding rows
        self.head_spec = _head_spec(model, vocab_size)
        # Looked up once: sharding renames the classes later.
        self.layers = decoder_layers(model)
        self.routers, self.router_problem = attach_routers(model, self.layers)
        model.set_attn_implementation(PACKED_ATTENTION)
        self.train()

    def forward(
        self,
        batch: TokenBatch,
        loss: TokenLoss | Objective | EntropyObjective | LogitsObjective | None,
        kind: ForwardKind = "loss",
        temperature: float = 1.0,
    ) -> Tensor | ObjectiveOutput | tuple[Tensor]:
        """`loss`: the weighted sum of a token loss over trained tokens; `objective`: that of an objective, with each
        token's log-prob and entropy; `divergence`: that of a loss over whole distributions, alone in a tuple;
        `logprobs`: of the targets [S] at their sampling temperature (which the other kinds ignore); `scores`: float32
        logits at the trained positions; `states`: the hidden states behind them [S, E]; `plain`: the same logits
        through transformers' own attention and head, one document at a time, for comparison; `padded`: these again,
        computed in another way (plain.py). Over a context axis the sums of a group's ranks add up to that of the
        micro-batch; what is said of tokens is that of all of them, on every rank."""
        if kind == "plain" or kind == "padded":
            return self._plain_scores(batch, kind)
        part = None if self.context is None else ContextPart.of(batch, self.context)
        if part is not None:
            batch = part.cut_batch(batch)
        hidden_SE = self.hidden(batch).index_select(0, batch.trained_S)
        head, targets_S, weights_S = (hidden_SE, self.head_weight), batch.targets_S, batch.weights_S
        match kind:
            case "loss":
                return fused_token_loss(*head, targets_S, weights_S, cast("TokenLoss", loss), self.head_spec, part)
            case "objective":
                objective = cast("Objective | EntropyObjective", loss)
                total, *seen = fused_objective(*head, targets_S, weights_S, objective, self.head_spec, part)
                logprobs_S, entropy_S = seen if part is None else map(part.join, seen)
                return total, logprobs_S, entropy_S
            case "divergence":
                divergence = cast("LogitsObjective", loss)
                return (fused_logits_objective(*head, weights_S, divergence, self.head_spec, part),)
            case "states":
                values_S = hidden_SE
            case "logprobs":
                values_S = target_logprobs(*head, targets_S, self.head_spec, temperature)
            case "scores":
                values_S = next_token_scores(*head, self.head_spec)
            case other:
                assert_never(other)
        return values_S if part is None else part.join(values_S)

    def hidden(self, batch: TokenBatch) -> Tensor:
        """Last hidden states [T, E]."""
        with self.routed(batch.packing.routing):
            out = self.hf.get_decoder()(
                input_ids=batch.tokens_T.unsqueeze(0),
                position_ids=batch.positions_T.unsqueeze(0),
                use_cache=False,
                packing=batch.packing,
            )
        if getattr(out, "last_hidden_state", None) is None:
            raise UnsupportedModelError(
                f"{type(self.hf).__name__} gives no last hidden states, so it is not supported."
            )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def _plain_scores(self, batch: TokenBatch, kind: PlainKind) -> Tensor:
        def logits(tokens_DL: Tensor) -> Tensor:
            return self.hf(input_ids=tokens_DL, use_cache=False).logits.float()  # type: ignore[no-any-return]

        with self.routed(None):
            return plain_outputs(self.hf, batch, logits, kind)[batch.trained_S][:, : self.vocab_size]

    def without_adapter(self) -> AbstractContextManager[None]:
        """A context in which the model computes as the frozen base of its adapter. Raises an error if it has none."""
        return adapter_off(self.hf)

    @property
    def head_weight(self) -> Tensor:
        """The weight of the language-model head."""
        return self.hf.get_output_embeddings().weight  # type: ignore[no-any-return]


def load_config(folder: Path, *, trust_remote_code: bool) -> Any:
    """The model's config, checked to be a causal language model that Podium can build."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # configs have their own validators
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder}: transformers cannot read this config ({reason}).") from error


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """The number of rows of the padded embedding."""
    return -(-vocab_size // multiple) * multiple


def unbuildable(path: str, error: Exception) -> UnsupportedModelError:
    """Why transformers could not build a model of this config."""
    reason = next((line for line in str(error).splitlines() if line.strip()), "no message")
    if isinstance(error, ValueError):
        return UnsupportedModelError(f"{path}: not a causal language model ({reason}).")
    return UnsupportedModelError(
        f"{path}: transformers cannot build this model ({type(error).__name__}: {reason.strip()}). Its config is "
        "incomplete, or the architecture needs a package that is not installed."
    )


def build(section: ModelSection, config: Any, *, device: torch.device, dtype: torch.dtype) -> PackedCausalLM:
    """The module tree with a padded vocabulary. On the meta device nothing is allocated; elsewhere the weights are
    sampled from the current torch seed."""
    config = copy.deepcopy(config)  # the caller's keeps the real vocabulary
    text = config.get_text_config()
    vocab_size = grown_vocabulary(section, text.vocab_size)
    text.vocab_size = padded_vocabulary(vocab_size, section.pad_vocab_to)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # a model's own code can raise anything
        raise unbuildable(section.path, error) from error
    keep_in_float32(model, dtype)
    model.tie_weights()
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no output embeddings, so it is not a language model.")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a bias in its head, which the fused loss does not know."
        )
    if section.lora is not None:
        inject(model, section.lora)
    return PackedCausalLM(model, vocab_size, dropout=section.dropout)


def padded_parameters(model: PackedCausalLM) -> dict[str, int]:
    """Names (inside the Hugging Face model) of the tensors with padding rows -> number of real rows."""
    names = {}
    for role in (model.hf.get_input_embeddings(), model.hf.get_output_embeddings()):
        for name, parameter in model.hf.named_parameters():
            if parameter is role.weight:
                names[name] = model.vocab_size
    return names


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, which are sharded, compiled and checkpointed one by one."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} does not say what its layers are (_no_split_modules).")
    return layers


def longest_packable(config: Any) -> int | None:
    """The longest packed document. Some rotary embeddings choose their frequencies by the longest position of the whole
    batch, so that documents in one pack would change each other. Up to the original context they do not; None: no such
    limit."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = list(rope.values()) if rope and all(isinstance(each, dict) for each in rope.values()) else [rope]
    limits = [
        each.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        or text.max_position_embeddings
        for each in kinds
        if each.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(limits) if limits else None


def _head_spec(model: PreTrainedModel, vocab_size: int) -> HeadSpec:
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None):
        scale = 1.0 / config.logits_scaling  # Granite divides
    elif getattr(config, "logit_scale", None):
        scale = config.logit_scale  # Cohere multiplies
    return HeadSpec(
        vocab_size=vocab_size, softcap=getattr(config, "final_logit_softcapping", None) or None, scale=float(scale)
    )
