# SPDX-License-Identifier: Apache-2.0
"""What the sides of the GRPO benchmark share: a model's config, prompts, the sizes of a step, the shape of a result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollout_task import SHAPES, make_model

PROMPTS, SAMPLES = 8, 8
LEARNING_RATE, CLIP_NORM = 1e-6, 1.0
PAD = "<pad>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Files and sizes of one run. All sides take the same prompts in the same order."""

    folder: str
    shape: str
    device: str
    steps: int
    warmup: int  # first steps, which are not timed
    shortest: int  # prompt, in tokens
    longest: int
    new_tokens: int  # of every answer
    lora: int | None = None  # rank of an adapter; None: all weights are trained

    @property
    def model(self) -> Path:
        return Path(self.folder) / "model"

    @property
    def prompts(self) -> Path:
        return Path(self.folder) / "prompts.jsonl"

    @property
    def generated_per_step(self) -> int:
        return PROMPTS * SAMPLES * self.new_tokens

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """What one side did after its warm-up. `cpu_s` is the processor time of a step, of all processes and threads that
    the side has: on a machine that others use too it says more than wall time."""

    step_s: list[float]  # from the end of one step to the end of the next
    cpu_s: float
    reward: float  # mean of the timed steps
    phases: dict[str, float] = field(default_factory=dict)  # Podium's own metrics, medians

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> SideResult:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def make_task(task: Task) -> None:
    """Writes the config, the tokenizer and the prompts; weights are random, made on the device."""
    task.model.mkdir(parents=True)
    make_model(task.shape, task.model)
    words = _write_tokenizer(task.model, int(SHAPES[task.shape]["vocab_size"]))
    with task.prompts.open("w", encoding="utf-8") as file:
        for row in prompt_rows(task, words):
            file.write(json.dumps(row) + "\n")


def prompt_rows(task: Task, words: int) -> list[dict[str, Any]]:
    """Lengths uniform in their logarithm, other ones in every step. One word is one token."""
    draw = np.random.default_rng(0)
    low, high = np.log(task.shortest), np.log(task.longest + 1)
    lengths = np.exp(draw.uniform(low, high, task.steps * PROMPTS)).astype(np.int64)
    return [{"prompt": " ".join(f"w{number}" for number in draw.integers(0, words, length))} for length in lengths]


def _write_tokenizer(folder: Path, vocab_size: int) -> int:
    """A word for every row of the model but the first; returns their number. There is no end token, so that every
    answer is as long as allowed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = vocab_size - 1
    vocabulary = {PAD: 0} | {f"w{index}": index + 1 for index in range(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD).save_pretrained(folder)
    return words
