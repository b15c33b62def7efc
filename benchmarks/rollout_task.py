# SPDX-License-Identifier: Apache-2.0
"""The workload of the rollout benchmark: prompts, and how long each answer is. Lengths are fixed in advance and
heavy-tailed, so that every engine draws exactly the same number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    },
    "1.7b": {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    },
    "8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Prompts, and for every sample of every prompt how many tokens are drawn."""

    prompts: list[list[int]]
    answers_NS: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.answers_NS.sum())

    def rows(self) -> list[tuple[int, int, list[int], int]]:
        """(prompt number, sample, prompt, new tokens) in the order in which they are submitted."""
        samples = self.answers_NS.shape[1]
        return [
            (number, sample, prompt, int(self.answers_NS[number, sample]))
            for number, prompt in enumerate(self.prompts)
            for sample in range(samples)
        ]


def workload(
    *, prompts: int, samples: int, shortest: int, longest: int, most_new: int, mean: float, vocabulary: int
) -> Workload:
    """Prompt lengths uniform in their logarithm, one of each extreme; answers log-normal, clipped and scaled to the
    mean, one of them as long as allowed."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.uniform(np.log(shortest), np.log(longest + 1), prompts)).astype(np.int64)
    lengths[0], lengths[-1] = shortest, longest
    raw = draw.lognormal(0.0, 0.9, (prompts, samples))
    scale = mean / raw.mean()
    for _ in range(20):  # clipping lowers the mean
        answers = np.clip(raw * scale, 4, most_new)
        scale *= mean / answers.mean()
    answers = answers.astype(np.int64)
    answers.flat[int(raw.argmax())] = most_new
    return Workload(prompts=[draw.integers(3, vocabulary, n).tolist() for n in lengths], answers_NS=answers)


def make_model(shape: str, folder: Path) -> Path:
    """A Qwen3 config of this shape; weights are drawn when it is loaded."""
    import transformers

    sizes = {"tie_word_embeddings": True} | SHAPES[shape]
    config = transformers.Qwen3Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return folder
