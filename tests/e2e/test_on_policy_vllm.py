# SPDX-License-Identifier: Apache-2.0
"""GRPO with vLLM as the rollout engine learns what it learns with the native one. Runs in vLLM's own environment."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from podium.observe import read_metrics

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: run `make test-vllm`"),
]
STEPS = 20


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A random model of fifty words that is rewarded for saying the first ten."""
    words = [f"w{number}" for number in range(50)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(tmp_path / "model")
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    draw = random.Random(0)
    rows = [{"prompt": " ".join(draw.choices(words, k=draw.randint(3, 9)))} for _ in range(200)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(
        "def small(answer):\n"
        "    said = answer.split()\n"
        "    return sum(len(word) == 2 for word in said) / max(1, len(said))\n"
    )
    return tmp_path


def rewards(task: Path, engine: str) -> tuple[list[float], list[float]]:
    """(mean reward, gap between engine and learner) of each step."""
    recipe: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": "model"},
        "data": {"train": [{"path": "prompts.jsonl"}]},
        "reward": [{"function": "rewards.py:small"}],
        "rollout": {
            "engine": engine, "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 8, "memory_gib": 0.25,
        },
        "optimizer": {"lr": 1e-2},
        "steps": STEPS,
        "placement": {"devices": 2, "layout": "split", "device": "cpu", "threads": 1},
    }  # fmt: skip
    (task / f"{engine}.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "podium", "train", f"{engine}.yaml"]
    done = subprocess.run(command, cwd=task, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = read_metrics(task / "runs" / engine / "metrics.jsonl")
    return [line.values["reward/mean"] for line in lines], [line.values["gap/mean"] for line in lines]


def test_a_policy_learns_the_same_with_either_engine(task: Path) -> None:
    found = {engine: rewards(task, engine) for engine in ("native", "vllm")}
    for engine, (reward, gap) in found.items():
        assert len(reward) == STEPS
        assert max(gap) < 1e-3, f"{engine} samples from what the learner computes"
        assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.2, f"{engine}: {reward}"
    last = [sum(reward[-5:]) / 5 for reward, _ in found.values()]
    assert abs(last[0] - last[1]) < 0.15, "the curves agree within noise"
