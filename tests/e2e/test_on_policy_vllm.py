# SPDX-License-Identifier: Apache-2.0
"""GRPO with vLLM as the rollout engine learns what it learns with the native one. Runs in vLLM's own environment."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import podium
from podium.observe import read_metrics
from podium.runs.rollout_files import KeptEpisode, read_rollouts, rollout_facts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
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


def trained(
    task: Path, name: str, *, steps: int = STEPS, rollouts: Literal["all", "none"] = "none", **rollout: Any,
) -> list[dict[str, float]]:  # fmt: skip
    """The metrics of each step of a run with these settings of `rollout`. All checkpoints are kept."""
    recipe: dict[str, Any] = {
        "program": "grpo",
        "model": {"path": "model"},
        "data": {"train": [{"path": "prompts.jsonl"}]},
        "reward": [{"function": "rewards.py:small"}],
        "rollout": {
            "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 8, "memory_gib": 0.25, **rollout,
        },
        "optimizer": {"lr": 1e-2},
        "steps": steps,
        "placement": {"devices": 2, "layout": "split", "device": "cpu", "threads": 1},
        "checkpoint": {"every": 1, "keep": steps},
        "run": {"rollouts": {"keep": rollouts}},
    }  # fmt: skip
    (task / f"{name}.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "podium", "train", f"{name}.yaml"]
    done = subprocess.run(command, cwd=task, capture_output=True, text=True, timeout=1100)
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
    lines = trained(
        task, on_new_weights, engine="vllm", staleness=1, on_new_weights=on_new_weights, max_new_tokens=40,
        rollouts="all",
    )  # fmt: skip

    assert len(lines) == STEPS
    assert {line["staleness/max"] for line in lines} == {0.0, 1.0}
    assert sum("staleness/kl" in line for line in lines) >= STEPS // 2  # steps with stale tokens
    reward = [line["reward/mean"] for line in lines]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.2, reward

    run, weights = task / "runs" / on_new_weights, Published(task, on_new_weights)
    episodes = list(read_rollouts(run))
    assert len(episodes) == STEPS * 64
    for episode in episodes:
        versions = sampled(episode.versions, episode)
        assert versions == sorted(versions)
        newest = rollout_facts(run, episode.step)["version"]
        assert newest - 1 <= versions[0] <= versions[-1] <= newest, episode
    over_an_update = [each for each in episodes if len(set(sampled(each.versions, each))) == 2]
    assert len(over_an_update) >= 10, "new weights reached running sequences"
    within_a_version = [each for each in episodes if len(set(sampled(each.versions, each))) == 1]
    gaps = {keeps: max(weights.gap(each, keeps_cache=keeps) for each in over_an_update[:40]) for keeps in (True, False)}
    assert gaps[on_new_weights == "keep"] < 1e-3, gaps
    assert gaps[on_new_weights != "keep"] > 1e-2, f"the two ways are told apart: {gaps}"
    assert max(weights.gap(each, keeps_cache=False) for each in within_a_version[::50]) < 1e-3


def sampled(values: Sequence[Any], episode: KeptEpisode) -> list[Any]:
    """Of the tokens of its answer."""
    return list(values[episode.prompt_tokens :])


class Published:
    """All versions of a run's weights, in transformers."""

    def __init__(self, task: Path, name: str) -> None:
        self._task, self._name = task, name
        self._models: dict[int, Any] = {}

    @torch.no_grad()
    def gap(self, episode: KeptEpisode, *, keeps_cache: bool) -> float:
        """Largest difference between the episode's log-probs and those of the versions that its tokens name: with the
        keys and values of all tokens by the version that fed them first, or by the newest."""
        tokens, first = torch.tensor([episode.tokens]), episode.prompt_tokens
        versions = sampled(episode.versions, episode)
        gaps, cache, fed = [0.0], transformers.DynamicCache(), 0
        for version in sorted(set(versions)):
            begin = first + versions.index(version)
            end = begin + versions.count(version)
            if not keeps_cache:
                cache, fed = transformers.DynamicCache(), 0
            # The last token of the answer so far was not fed by the version that sampled it.
            logits_LV = self._model(version)(tokens[:, fed : end - 1], past_key_values=cache).logits[0]
            logprobs_LV = logits_LV[begin - 1 - fed :].float().log_softmax(-1)
            fed = end - 1
            found_L = torch.tensor(episode.log_probs[begin:end])
            gaps.append(float((logprobs_LV.gather(1, tokens[0, begin:end, None])[:, 0] - found_L).abs().max()))
        return max(gaps)

    def _model(self, version: int) -> Any:
        if version not in self._models:
            folder = self._task / "model"
            if version:
                folder = self._task / "versions" / self._name / str(version)
                podium.export(self._task / "runs" / self._name, folder, which=version)
            self._models[version] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return self._models[version]


def test_the_learner_replays_the_experts_that_vllm_chose(task: Path) -> None:
    """In float32 the learner's routers would have chosen the same ones."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=52, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, max_position_embeddings=64, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(task / "model")

    lines = trained(task, "mixture", steps=3, engine="vllm", router_replay="on")

    assert len(lines) == 3
    for line in lines:
        assert line["gap/max"] < 1e-3
        assert line["router/mismatch"] < 1e-3
    assert lines[0]["reward/mean"] != lines[2]["reward/mean"]
