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


def trained(task: Path, name: str, **rollout: Any) -> list[dict[str, float]]:
    """The metrics of each step of a run with these settings of `rollout`."""
    recipe: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": "model"},
        "data": {"train": [{"path": "prompts.jsonl"}]},
        "reward": [{"function": "rewards.py:small"}],
        "rollout": {
            "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 8, "memory_gib": 0.25, **rollout,
        },
        "optimizer": {"lr": 1e-2},
        "steps": STEPS,
        "placement": {"devices": 2, "layout": "split", "device": "cpu", "threads": 1},
    }  # fmt: skip
    (task / f"{name}.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "podium", "train", f"{name}.yaml"]
    done = subprocess.run(command, cwd=task, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [dict(line.values) for line in read_metrics(task / "runs" / name / "metrics.jsonl")]


def test_a_policy_learns_the_same_with_either_engine(task: Path) -> None:
    found: dict[str, list[float]] = {}
    for engine in ("native", "vllm"):
        lines = trained(task, engine, engine=engine)
        found[engine] = reward = [line["reward/mean"] for line in lines]
        assert len(reward) == STEPS
        assert max(line["gap/mean"] for line in lines) < 1e-3, f"{engine} samples from what the learner computes"
        assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.2, f"{engine}: {reward}"
    last = [sum(reward[-5:]) / 5 for reward in found.values()]
    assert abs(last[0] - last[1]) < 0.15, "the curves agree within noise"


@pytest.mark.parametrize("on_new_weights", ["keep", "recompute"])
def test_weights_reach_vllm_while_it_generates(task: Path, on_new_weights: str) -> None:
    lines = trained(task, on_new_weights, engine="vllm", staleness=1, on_new_weights=on_new_weights)

    assert len(lines) == STEPS
    assert {line["staleness/max"] for line in lines} == {0.0, 1.0}
    assert sum("staleness/kl" in line for line in lines) >= STEPS // 2  # steps with stale tokens
    reward = [line["reward/mean"] for line in lines]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.2, reward
