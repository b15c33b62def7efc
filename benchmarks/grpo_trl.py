# SPDX-License-Identifier: Apache-2.0
"""TRL's side of the GRPO benchmark: GRPOTrainer as its documentation uses it, with transformers' generation."""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_reward import small_digits
from grpo_task import CLIP_NORM, LEARNING_RATE, PROMPTS, SAMPLES, SHAPES, SideResult, Task


class StepClock(TrainerCallback):  # type: ignore[misc]
    """The clocks at the end of every optimizer step."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--processes", type=int, default=1, help="how many of these run together, under torchrun")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    task = Task.read(asked.task)
    if task.device == "cpu":
        torch.set_num_threads(asked.threads)
        torch.backends.mkldnn.enabled = False
    with tempfile.TemporaryDirectory() as scratch:
        result = train(task, asked.processes, scratch)
    if not dist.is_initialized() or dist.get_rank() == 0:
        result.write(asked.out)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(task: Task, processes: int, scratch: str) -> SideResult:
    """Trains for `steps` and accounts what came after `warmup`."""
    clock = StepClock()
    torch.manual_seed(0)
    with torch.device(task.device):
        # bfloat16 is by autocast, over float32 masters, as on the other side.
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task.model), dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        processing_class=_tokenizer(task),
        reward_funcs=small_digits,
        train_dataset=load_dataset("json", data_files=str(task.prompts), split="train", cache_dir=scratch),
        args=_config(task, processes, scratch),
        callbacks=[clock],
    )
    trainer.train()
    assert len(clock.wall_s) == task.steps
    logged = next(line for line in trainer.state.log_history if "completions/min_length" in line)
    assert logged["completions/min_length"] == task.new_tokens, "an answer ended early"
    wall_s, timed = clock.wall_s[task.warmup - 1 :], task.steps - task.warmup
    return SideResult(
        step_s=[end - begin for begin, end in pairwise(wall_s)],
        cpu_s=_summed(clock.cpu_s[-1] - clock.cpu_s[task.warmup - 1], processes) / timed,
        reward=logged["reward"],
    )


def _tokenizer(task: Task) -> Any:
    """TRL cannot do without an end token: it gets one whose id is the first that the model has no row for, so that no
    answer draws it."""
    found = AutoTokenizer.from_pretrained(task.model, padding_side="left")
    found.add_special_tokens({"eos_token": "<end>"})
    assert found.eos_token_id == SHAPES[task.shape]["vocab_size"]
    return found


def _config(task: Task, processes: int, scratch: str) -> GRPOConfig:
    """Generation and update of the whole batch at once, one update for each. Gradient checkpointing is TRL's default
    and would only slow it down here; it logs once, at the end."""
    return GRPOConfig(
        output_dir=scratch,
        max_steps=task.steps,
        per_device_train_batch_size=PROMPTS * SAMPLES // processes,
        gradient_accumulation_steps=1,
        num_generations=SAMPLES,
        max_completion_length=task.new_tokens,
        beta=0.0,
        num_iterations=1,
        shuffle_dataset=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        gradient_checkpointing=False,
        bf16=task.device == "cuda",
        use_cpu=task.device == "cpu",
        logging_strategy="steps",
        logging_steps=task.steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )


def _summed(seconds: float, processes: int) -> float:
    if processes == 1:
        return seconds
    every: list[Any] = [None] * processes
    dist.all_gather_object(every, seconds)
    return float(sum(every))


if __name__ == "__main__":
    main()
