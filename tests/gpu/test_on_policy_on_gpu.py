# SPDX-License-Identifier: Apache-2.0
"""On-policy programs on one CUDA device: they run, engine and learner agree, and who sleeps gives its memory back."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from podium.cluster import Workers, open_inline
from podium.controller.layout import layout_of
from podium.models.folder import read_config
from podium.observe import read_metrics
from podium.recipe import Recipe, parse_recipe
from podium.recipe.resolving import resolved
from podium.roles.interfaces import Critic, Generator, Learner, Scorer
from podium.runs.folder import RunFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
MIB = 1 << 20


def write_task(folder: Path, *, width: int = 128, layers: int = 2) -> None:
    """A random model with a word-level tokenizer, and prompts of some words each."""
    words = [f"w{number}" for number in range(500)]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<end>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(folder / "model")
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=max(1, width // 64), head_dim=32,
        max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [{"prompt": " ".join(draw.choices(words, k=draw.randint(5, 40))), "answer": "w1"} for _ in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text("def low_words(answer):\n    return float(answer.count('w1')) / 10\n")


def recipe_values(program: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "program": program,
        "model": {"path": "model", "compile": "off"},
        "data": {"train": [{"path": "prompts.jsonl"}], "heldout": [{"path": "prompts.jsonl"}]},
        "reward": [{"function": "rewards.py:low_words"}],
        "rollout": {
            "prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 32, "decode": "captured",
            "memory_gib": 2.0,
        },
        "optimizer": {"lr": 1e-4},
        "steps": 3,
        "evaluation": {"generation": {"prompts": 16, "max_new_tokens": 16, "show": 0}},
        "placement": {"device": "cuda", "launcher": "inline"},
    }  # fmt: skip
    for name, change in changes.items():
        values[name] = {**values[name], **change} if isinstance(values.get(name), dict) else change
    return values


def trained(folder: Path, name: str, values: dict[str, Any]) -> list[dict[str, float]]:
    (folder / f"{name}.yaml").write_text(json.dumps(values))
    command = [sys.executable, "-m", "podium", "train", f"{name}.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [dict(line.values) for line in read_metrics(folder / "runs" / name / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("program", "changes"),
    [
        ("grpo", {"algorithm": {"kl": {"coefficient": 0.01}}}),
        ("grpo", {"algorithm": {"loss": "sequence_clipped", "mini_batches": 2, "epochs": 2, "entropy": 0.01}}),
        ("ppo", {"algorithm": {"lam": 0.95}}),
        ("on_policy_distill", {"teachers": [{"path": "model"}]}),
        ("expert_iteration", {"grading": {"solved_at": 0.0}}),
        ("grpo", {"model": {"lora": {"rank": 8}}, "algorithm": {"kl": {"coefficient": 0.01}}}),
        ("ppo", {"model": {"lora": {"rank": 8}}}),
    ],
)
def test_a_program_runs_and_engine_and_learner_agree(tmp_path: Path, program: str, changes: dict[str, Any]) -> None:
    write_task(tmp_path)
    lines = [line for line in trained(tmp_path, "run", recipe_values(program, **changes)) if "step_s" in line]
    assert len(lines) == 3
    for line in lines:
        assert line["gap/mean"] < 0.05
        assert line["grad_norm"] == line["grad_norm"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("lora", [{"rank": 16}, None])
def test_a_deep_random_model_in_bfloat16_trains_without_an_alarm(tmp_path: Path, lora: dict[str, int] | None) -> None:
    """Qwen3 8B with an adapter, and 1.7B whole: rounding over 36 layers is no reason to warn of the engine."""
    write_task(tmp_path)
    hidden, intermediate, layers, heads, tied = (4096, 12288, 36, 32, False) if lora else (2048, 6144, 28, 16, True)
    transformers.Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    (tmp_path / "model" / "model.safetensors").unlink()
    model = {"init": "random", "dtype": "bfloat16", **({"lora": lora} if lora else {})}
    values = recipe_values("grpo", model=model, optimizer={"lr": 1e-6}, steps=6)

    lines = [line for line in trained(tmp_path, "run", values) if "step_s" in line]

    print([f"{line['gap/mean']:.4f} {line['gap/max']:.3f}" for line in lines])
    assert len(lines) == 6
    assert "differ" not in (tmp_path / "runs" / "run" / "console.log").read_text()


def test_grpo_on_ray_with_optimizer_state_offloaded_gives_the_rewards_of_inline(tmp_path: Path) -> None:
    write_task(tmp_path)
    inline = trained(tmp_path, "inline", recipe_values("grpo"))
    on_ray = trained(
        tmp_path,
        "on_ray",
        recipe_values("grpo", placement={"launcher": "ray"}, rollout={"offload_optimizer": True}),
    )
    first = [next(line["reward/mean"] for line in lines if "step_s" in line) for lines in (inline, on_ray)]
    assert first[0] == first[1], "the same weights and seeds draw the same tokens"


def test_roles_that_leave_the_device_give_back_the_memory_that_they_say(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path, width=1024, layers=8)
    values = recipe_values("ppo", algorithm={"kl": {"coefficient": 0.01}}, run={"name": "held"})
    recipe = resolved(parse_recipe(values), read_config(tmp_path / "model", "model.path"))
    found = asyncio.run(moved(recipe, RunFolder(path=tmp_path / "runs" / "held")))
    for role, (measured, accounted, back) in found.items():
        assert accounted > 50 * MIB, role
        assert measured >= 0.9 * accounted - 32 * MIB, f"{role} says {accounted} and the device has {measured} more"
        assert back >= 0.9 * accounted - 32 * MIB, role


async def moved(recipe: Recipe, folder: RunFolder) -> dict[str, tuple[int, int, int]]:
    """By role: bytes that the device had more after it left, bytes that it said, bytes that it took again."""
    async with open_inline() as cluster:
        workers = await cluster.start(layout_of(recipe, folder, device="cuda", resume_step=None))
        return {
            "policy": await one(workers, "policy", Learner),
            "generator": await one(workers, "generator", Generator),
            "reference": await one(workers, "reference", Scorer),
            "critic": await one(workers, "critic", Critic),
        }


async def one(workers: Workers, name: str, kind: type[Any]) -> tuple[int, int, int]:
    group = workers.role(name, kind)
    before = free()
    (gone,) = await group.call_all(kind.hold, "offloaded")
    away = free()
    await group.call_all(kind.hold, "active")
    return away - before, gone.value.accounted_bytes, away - free()


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
