# SPDX-License-Identifier: Apache-2.0
"""What the sides of the preference benchmark share: sft_task.py's tiny model, pairs of answers, a result's shape."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sft_task
from sft_task import END, NUM_WORDS

LEARNING_RATE, CLIP_NORM, BETA = 1e-4, 1.0, 0.1
# Tokens: prompts and completions are log-normal and independent, so the two answers of a pair differ in length.
PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_MOST = 24, 0.7, 128
ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_MOST = 40, 1.0, 384
MAX_TOKENS = PROMPT_MOST + ANSWER_MOST


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    """What one side did. Clocks are of the steps after warm-up, losses and counts of all steps.

    `cpu_s` is the processor time of the whole process, its background threads included: on a machine that others use
    too it says more than `wall_s`.
    """

    side: str
    wall_s: list[float]  # of each timed step
    cpu_s: list[float]
    losses: list[float]
    tokens: list[int]  # dpo: trained ones; reward_model: all of both texts. Sides that do the same work agree on them
    places: list[int]  # positions that went through the model with a gradient, padding included

    @property
    def steps_per_s(self) -> float:
        return len(self.wall_s) / sum(self.wall_s)

    @property
    def steps_per_cpu_s(self) -> float:
        return len(self.cpu_s) / sum(self.cpu_s)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> SideResult:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The files of the task, and how it is gone through: in their order, once, so many pairs a step."""

    folder: str
    pairs: int
    steps: int
    warmup: int

    @property
    def model(self) -> Path:
        return Path(self.folder) / "sft" / "model"

    @property
    def scorer(self) -> Path:
        """The same body with a head of one number."""
        return Path(self.folder) / "scorer"

    @property
    def pairs_file(self) -> Path:
        return Path(self.folder) / "pairs.jsonl"

    @property
    def ended_pairs_file(self) -> Path:
        """The same with the end token written out, for reward models: one side would add it, the other would not."""
        return Path(self.folder) / "ended.jsonl"

    @property
    def documents_file(self) -> Path:
        """Each pair as two rows to fine-tune on, chosen and then rejected."""
        return Path(self.folder) / "documents.jsonl"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def pair_rows(count: int) -> list[dict[str, str]]:
    """One word is one token, so that lengths are known exactly; answers begin with the space that parts words."""
    lengths, words = np.random.default_rng(0), random.Random(0)

    def text(median: int, spread: float, most: int) -> str:
        length = int(np.clip(lengths.lognormal(np.log(median), spread), 2, most))
        return " ".join(f"w{words.randrange(NUM_WORDS)}" for _ in range(length))

    def answer() -> str:
        return " " + text(ANSWER_MEDIAN, ANSWER_SPREAD, ANSWER_MOST - 1)  # the end token is one more

    return [
        {
            "prompt": text(PROMPT_MEDIAN, PROMPT_SPREAD, PROMPT_MOST),
            "chosen": answer(),
            "rejected": answer(),
        }
        for _ in range(count)
    ]


def make_task(task: Task) -> None:
    """Writes the models, the tokenizer and the pairs in their three forms."""
    # Its documents are not used: only the model and tokenizer, so that all benchmarks on CPU have the same.
    sft_task.make_task(Path(task.folder) / "sft", rows=1)
    _write_scorer(task)
    rows = pair_rows(task.pairs * task.steps)
    _write_rows(task.pairs_file, rows)
    ended = [{**row, **{side: f"{row[side]} {END}" for side in ("chosen", "rejected")}} for row in rows]
    _write_rows(task.ended_pairs_file, ended)
    documents = [{"prompt": row["prompt"], "completion": row[side]} for row in rows for side in ("chosen", "rejected")]
    _write_rows(task.documents_file, documents)


def _write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_scorer(task: Task) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    torch.manual_seed(0)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that the head is new is no surprise
    scorer: Any = AutoModelForSequenceClassification.from_pretrained(task.model, num_labels=1, dtype=torch.float32)
    logging.set_verbosity(verbosity)
    scorer.save_pretrained(task.scorer)
    AutoTokenizer.from_pretrained(task.model).save_pretrained(task.scorer)
