# SPDX-License-Identifier: Apache-2.0
"""TRL's side of the fine-tuning benchmark: SFTTrainer as its documentation uses it, on one CPU thread."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from sft_task import CLIP_NORM, LEARNING_RATE, MAX_TOKENS, SideResult, Task


class StepClock(TrainerCallback):  # type: ignore[misc]
    """The clocks at the end of every optimizer step."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


class CountingCollator:
    """TRL's own collator; notes how many real targets each batch holds."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self.num_targets: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch: dict[str, torch.Tensor] = self._collate(rows)
        # The first position of a document is nobody's target; packed batches mark it already, padded ones by the shift.
        self.num_targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--packing", choices=("off", "on", "accumulated"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(folder=asked.task, rows=asked.rows)
        train(task, asked.packing, asked.steps, asked.warmup, scratch).write(asked.out)


def train(task: Task, packing: str, steps: int, warmup: int, scratch: str) -> SideResult:
    """Trains for `steps` and accounts what came after `warmup`."""
    clock = StepClock()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        train_dataset=load_dataset("json", data_files=str(task.documents), split="train", cache_dir=scratch),
        args=_config(task, packing, steps, scratch),
        callbacks=[clock],
    )
    per_step = trainer.args.gradient_accumulation_steps
    counting = CountingCollator(trainer.data_collator)
    trainer.data_collator = counting
    loss = trainer.train().training_loss
    assert len(clock.wall_s) == steps
    return SideResult(
        side=f"TRL, packing {packing}",
        steps=steps - warmup,
        tokens=sum(counting.num_targets[warmup * per_step : steps * per_step]),
        wall_s=clock.wall_s[-1] - clock.wall_s[warmup - 1],
        cpu_s=clock.cpu_s[-1] - clock.cpu_s[warmup - 1],
        loss=loss,
    )


def _config(task: Task, packing: str, steps: int, scratch: str) -> SFTConfig:
    """`on`: all packed rows of a step in one forward, as TRL does by default; TRL then attends over their whole length
    at once. `accumulated`: one packed row at a time, which spares it most of that."""
    rows = round(task.tokens_per_step / MAX_TOKENS)
    # Gradient checkpointing and bf16 are TRL's defaults and would only slow it down here; logging is off altogether.
    return SFTConfig(
        output_dir=scratch,
        max_steps=steps,
        per_device_train_batch_size={"off": task.rows, "on": rows, "accumulated": 1}[packing],
        gradient_accumulation_steps=rows if packing == "accumulated" else 1,
        packing=packing != "off",
        max_length=MAX_TOKENS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


if __name__ == "__main__":
    main()
