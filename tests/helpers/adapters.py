# SPDX-License-Identifier: Apache-2.0
"""Adapters made by peft itself, without Podium, with a B that is not zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers

RANK, ALPHA = 3, 7


def save_peft_adapter(base: Path, out: Path, *, seed: int = 5, kind: str = "CAUSAL_LM", **config: Any) -> Path:
    """An adapter of a causal LM or sequence classifier as peft writes it; every tensor of it is drawn."""
    loader = transformers.AutoModelForCausalLM if kind == "CAUSAL_LM" else _classifier
    model = loader.from_pretrained(base, dtype=torch.float32)
    values = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj", "down_proj"], **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, **values))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    adapted.save_pretrained(str(out))
    return out


def with_peft(base: Path, adapter: Path) -> Any:
    """What plain peft makes of the two folders, ready to be asked."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, str(adapter)).eval()


_classifier = transformers.AutoModelForSequenceClassification
