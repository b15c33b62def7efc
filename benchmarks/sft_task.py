# SPDX-License-Identifier: Apache-2.0
"""What the sides of a fine-tuning benchmark share: a tiny model, a skewed set of documents, the shape of a result."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

NUM_DOCUMENTS = 4096
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 40, 1.0, 512
LEARNING_RATE, CLIP_NORM = 1e-3, 1.0
PAD, END = "<pad>", "<end>"
NUM_WORDS = 510


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """What one side did after its warm-up. `tokens` are the predicted ones: a document of n tokens has n - 1.

    `cpu_s` is the processor time of the whole process, its background threads included: on a machine that others use
    too it says more than `wall_s`.
    """

    side: str
    steps: int
    tokens: int
    wall_s: float
    cpu_s: float
    loss: float  # mean over all steps, warm-up included

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> SideResult:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The files of the task, and how much of it one optimizer step takes: `rows` documents of average length."""

    folder: Path
    rows: int

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def documents(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def tokens_per_step(self) -> int:
        """The same for all sides."""
        return round(self.rows * float(np.mean(document_lengths())))


def document_lengths() -> list[int]:
    """Log-normal, as instruction sets are: most short, a few very long. The end token is counted."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SPREAD, NUM_DOCUMENTS)
    return [int(length) for length in np.clip(drawn, 4, MAX_TOKENS)]


def make_task(folder: Path, rows: int) -> Task:
    """Writes model, tokenizer and documents. One word is one token, so the lengths are known exactly."""
    folder.mkdir(parents=True, exist_ok=True)
    task = Task(folder=folder, rows=rows)
    dice = random.Random(0)
    with task.documents.open("w", encoding="utf-8") as file:
        for length in document_lengths():
            words = " ".join(f"w{dice.randrange(NUM_WORDS)}" for _ in range(length - 1))
            file.write(json.dumps({"text": words}) + "\n")
    _write_model(task.model)
    return task


def _write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    vocabulary = {PAD: 0, END: 1} | {f"w{index}": index + 2 for index in range(NUM_WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END).save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
