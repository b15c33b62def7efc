# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on tiny models, and the same padded rectangles scored in the plainest way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor, nn

from helpers.tiny import save_tiny_folder, tiny_tokenizer

# R rows · L longest · V vocabulary

# Prompts and completions of unequal lengths, so that every batch has padding. A character is a token.
PAIRS = {
    "prompt": ["what is 1+2? ", "say a word. ", "2-1=", "name a letter, any letter. "],
    "chosen": ["3", "apple pie", "1", "q"],
    "rejected": ["it is 12", "no", "21 or so", "all of them"],
}
LABELS = {
    "prompt": PAIRS["prompt"],
    "completion": ["3", "apple pie", "21 or so", "all of them"],
    "label": [True, True, False, True],
}
# What TRL turns on by itself and a comparison in float32 on a CPU has no use for.
SETTINGS = {
    "per_device_train_batch_size": 4,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def tiny_llama(folder: Path, *, seed: int) -> Any:
    """A tiny Llama with weights moved by `seed`: a policy and a reference must differ."""
    model = transformers.AutoModelForCausalLM.from_pretrained(save_tiny_folder(folder, "llama"), dtype=torch.float32)
    return _moved(model, seed)


def tiny_scorer(folder: Path, *, seed: int) -> Any:
    """The same with one number at the end in place of a vocabulary."""
    save_tiny_folder(folder, "llama")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    return _moved(model, seed)


def _moved(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def trainer(
    kind: Any, config: Any, model: Any, rows: Mapping[str, Any], folder: Path, *more: Any, **settings: Any
) -> Any:
    """A trainer of TRL's, ready to compute the loss of its one batch; `more` is the reference where it takes one."""
    return kind(
        model,
        *more,
        args=config(output_dir=str(folder / "out"), **SETTINGS, **settings),
        train_dataset=Dataset.from_dict(dict(rows)),
        processing_class=tiny_tokenizer(),
    )


def only_batch(ready: Any) -> dict[str, Tensor]:
    """The trainer's own collated batch of all rows."""
    (batch,) = ready.get_train_dataloader()
    return batch


def loss_and_gradient(loss: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The loss and its whole gradient, end to end."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat([part.flatten() for part in parts])


def token_logprobs(model: Any, tokens_RL: Tensor, attention_RL: Tensor) -> Tensor:
    """[R, L - 1]: the log-prob of each token but the first."""
    logits_RLV = model(input_ids=tokens_RL, attention_mask=attention_RL, use_cache=False).logits
    logprobs_RLV = logits_RLV[:, :-1].float().log_softmax(dim=-1)
    return logprobs_RLV.gather(-1, tokens_RL[:, 1:, None]).squeeze(-1)


def completion_sums(model: Any, tokens_RL: Tensor, attention_RL: Tensor, mask_RL: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's summed log-prob where the mask is set, and how many tokens that is."""
    mask_RL = mask_RL[:, 1:].bool()
    return (token_logprobs(model, tokens_RL, attention_RL) * mask_RL).sum(dim=1), mask_RL.sum(dim=1)
