# SPDX-License-Identifier: Apache-2.0
"""TRL's side of the preference benchmark: DPOTrainer and RewardTrainer as documented, on one CPU thread."""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from preferences_task import BETA, CLIP_NORM, LEARNING_RATE, MAX_TOKENS, SideResult, Task


class StepClock(TrainerCallback):  # type: ignore[misc]
    """The clocks at the end of every optimizer step."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


class CountingCollator:
    """TRL's own collator; notes the real tokens and the places of each batch."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self.tokens: list[int] = []
        self.places: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = self._collate(rows)
        # Completions are what DPO trains on; a reward model reads all of both texts.
        self.tokens.append(int(batch.get("completion_mask", batch["attention_mask"]).sum()))
        self.places.append(batch["input_ids"].numel())
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--program", choices=("dpo", "reward_model"), required=True)
    parser.add_argument("--reference", choices=("live", "precomputed"), default="precomputed", help="dpo only")
    parser.add_argument("--pairs-per-forward", type=int, help="gradients are accumulated over a step; default: all")
    parser.add_argument("--side", required=True, help="what the result is called")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    task = Task.read(asked.task)
    pairs = asked.pairs_per_forward or task.pairs
    with tempfile.TemporaryDirectory() as scratch:
        trainer = (
            _dpo_trainer(task, asked.reference, pairs, scratch)
            if asked.program == "dpo"
            else _reward_trainer(task, pairs, scratch)
        )
        train(task, trainer, asked.side).write(asked.out)


def train(task: Task, trainer: Any, side: str) -> SideResult:
    """Trains through the whole task."""
    clock, losses = StepClock(), []
    trainer.add_callback(clock)
    counting = CountingCollator(trainer.data_collator)
    trainer.data_collator = counting
    compute_loss = trainer.compute_loss

    def noted(*positional: Any, **named: Any) -> Any:
        loss = compute_loss(*positional, **named)
        losses.append(loss.detach())
        return loss

    trainer.compute_loss = noted
    trainer.train()
    assert len(clock.wall_s) == task.steps
    forwards = trainer.args.gradient_accumulation_steps
    ends = range(forwards, task.steps * forwards + 1, forwards)
    return SideResult(
        side=side,
        wall_s=[end - begin for begin, end in pairwise(clock.wall_s[task.warmup - 1 :])],
        cpu_s=[end - begin for begin, end in pairwise(clock.cpu_s[task.warmup - 1 :])],
        losses=[torch.stack(losses[end - forwards : end]).mean().item() for end in ends],
        tokens=[sum(counting.tokens[end - forwards : end]) for end in ends],
        places=[sum(counting.places[end - forwards : end]) for end in ends],
    )


def _dpo_trainer(task: Task, reference: str, pairs: int, scratch: str) -> DPOTrainer:
    return DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        train_dataset=_dataset(task.pairs_file, scratch),
        args=DPOConfig(beta=BETA, precompute_ref_log_probs=reference == "precomputed", **_shared(task, pairs, scratch)),
    )


def _reward_trainer(task: Task, pairs: int, scratch: str) -> RewardTrainer:
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(task.scorer, num_labels=1, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(task.scorer),
        train_dataset=_dataset(task.ended_pairs_file, scratch),
        args=RewardConfig(**_shared(task, pairs, scratch)),
    )


def _dataset(file: Path, scratch: str) -> Any:
    return load_dataset("json", data_files=str(file), split="train", cache_dir=scratch)


def _shared(task: Task, pairs: int, scratch: str) -> dict[str, Any]:
    """Gradient checkpointing and bf16 are TRL's defaults and would only slow it down here; logging is off altogether.
    (DPO's `padding_free` is switched off inside TRL 1.16, and RewardTrainer has none.)"""
    assert task.pairs % pairs == 0
    return {
        "output_dir": scratch,
        "max_steps": task.steps,
        "per_device_train_batch_size": pairs,
        "gradient_accumulation_steps": task.pairs // pairs,
        "train_sampling_strategy": "sequential",
        "max_length": MAX_TOKENS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP_NORM,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }


if __name__ == "__main__":
    main()
