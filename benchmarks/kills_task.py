# SPDX-License-Identifier: Apache-2.0
"""What the runs of the fault-injection benchmark train: a tiny seeded model, prompts, and a recipe for each layout."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAYOUTS = ("colocated", "split", "elastic", "environment", "ppo", "lora")
ENVIRONMENTS, SPLITS = ("environment",), ("split", "elastic")
FIXED_DATA = ("sft",)  # two ranks under the local launcher
STEPS, PROMPTS, SAMPLES, TURNS = 12, 4, 4, 3
NEW_TOKENS, TURN_TOKENS = 24, 8
CHECKPOINT_EVERY = 3
SFT_TOKENS = 8192  # of a step
RESTARTS = 3
# Fewer than the episodes of a step, so that rows and cache blocks are used again in an order that a run can get wrong.
MAX_RUNNING = 4

_CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz.\n"
_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Files that all runs share."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def chats(self) -> Path:
        return self.folder / "chats.jsonl"

    def recipe_file(self, layout: str) -> Path:
        return self.folder / f"{layout}.yaml"


def make_task(folder: Path) -> Task:
    """Writes the model, the data and a recipe for each layout. The same files every time."""
    import yaml

    task = Task(folder=folder)
    task.model.mkdir(parents=True, exist_ok=True)
    _write_model(task.model)
    task.prompts.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows()), encoding="utf-8")
    task.chats.write_text("".join(json.dumps(row) + "\n" for row in chat_rows()), encoding="utf-8")
    for layout in (*LAYOUTS, *FIXED_DATA):
        content = sft_recipe(task) if layout in FIXED_DATA else recipe(task, layout)
        task.recipe_file(layout).write_text(yaml.safe_dump(content), encoding="utf-8")
    return task


def prompt_rows() -> list[dict[str, Any]]:
    """Sums of numbers of one to four digits, so that prompts are of unequal length; two steps see each."""
    draw = random.Random(0)
    numbers = [(draw.randrange(10 ** draw.randint(1, 4)), draw.randrange(10)) for _ in range(STEPS * PROMPTS // 2)]
    return [{"messages": [{"role": "user", "content": f"what is {left}+{right}?"}]} for left, right in numbers]


def chat_rows() -> list[dict[str, Any]]:
    """Sums with their results."""
    draw = random.Random(1)
    numbers = [(draw.randrange(10 ** draw.randint(1, 6)), draw.randrange(1000)) for _ in range(512)]
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {left}+{right}?"},
                {"role": "assistant", "content": str(left + right)},
            ]
        }
        for left, right in numbers
    ]


def sft_recipe(task: Task) -> dict[str, Any]:
    """SFT on two ranks, which are restarted."""
    return {
        "program": "sft",
        "model": {"path": str(task.model)},
        "data": {"train": [{"path": str(task.chats)}]},
        "optimizer": {"lr": 3e-3},
        "steps": STEPS,
        "tokens_per_step": SFT_TOKENS,
        "checkpoint": {"every": CHECKPOINT_EVERY},
        "placement": {"devices": 2, "restarts": RESTARTS, "device": "cpu", "threads": 1, "onednn": False},
    }


def recipe(task: Task, layout: str) -> dict[str, Any]:
    """GRPO, or PPO, on two Ray workers. Threads and oneDNN are given: measuring them takes time and changes sums."""
    found: dict[str, Any] = {
        "program": "ppo" if layout == "ppo" else "grpo",
        "model": {"path": str(task.model)} | ({"lora": {"rank": 4}} if layout == "lora" else {}),
        "data": {"train": [{"path": str(task.prompts)}]},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": TURN_TOKENS if layout in ENVIRONMENTS else NEW_TOKENS,
            "max_running": MAX_RUNNING,
        },
        "reward": [{"function": f"{HERE / 'kills_reward.py'}:digits"}],
        "optimizer": {"lr": 3e-3},
        "steps": STEPS,
        "checkpoint": {"every": CHECKPOINT_EVERY},
        "placement": {
            "launcher": "ray",
            "layout": layout if layout in SPLITS else "colocated",
            "devices": 2,
            "device": "cpu",
            "threads": 1,
            "onednn": False,
        },
    }
    if layout in ENVIRONMENTS:
        found["environment"] = {"environment": f"{HERE / 'kills_reward.py'}:Dialogue", "max_turns": TURNS}
    return found


def _write_model(folder: Path) -> None:
    """A Qwen3 of two layers, 32 wide, and a tokenizer of one token a character."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {symbol: index for index, symbol in enumerate([*_SPECIAL, *_CHARACTERS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, initializer_range=0.1,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
