# SPDX-License-Identifier: Apache-2.0
"""Makes what is needed to walk over Gymnasium's frozen lake: a tiny model, walks to imitate, and rows for episodes.

    python examples/gymnasium/make_task.py demo/lake

writes model (Hugging Face format, untrained), sft.jsonl (random walks), train.jsonl and heldout.jsonl (a seed in each
row). The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

MOVES = ("left", "down", "right", "up")  # Gymnasium's order
NUM_CELLS = 6
NUM_DEMONSTRATIONS, NUM_TRAIN, NUM_HELDOUT = 2_000, 500, 20

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# The generation markers say which tokens are the assistant's: text and end of its turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write into; made if need be")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    make_task(arguments.out, seed=arguments.seed)


def make_task(out: Path, *, seed: int) -> None:
    """Writes the model, the walks and the rows of episodes."""
    dice = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "sft.jsonl", (walk(dice) for _ in range(NUM_DEMONSTRATIONS)))
    write_jsonl(out / "train.jsonl", ({"seed": number} for number in range(NUM_TRAIN)))
    write_jsonl(out / "heldout.jsonl", ({"seed": NUM_TRAIN + number} for number in range(NUM_HELDOUT)))

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    tokenizer.save_pretrained(out / "model")
    model.save_pretrained(out / "model")
    print(
        f"{out}: a model of {model.num_parameters():,} parameters and {len(tokenizer)} tokens, "
        f"{NUM_DEMONSTRATIONS:,} walks, {NUM_TRAIN} seeds to train on, {NUM_HELDOUT} held out"
    )


def walk(dice: random.Random) -> dict[str, Any]:
    """Moves by chance, so that the model knows their names and nothing of the way."""
    messages = []
    for _ in range(dice.randint(1, 4)):
        messages.append({"role": "user", "content": str(dice.randrange(NUM_CELLS))})
        messages.append({"role": "assistant", "content": dice.choice(MOVES)})
    return {"messages": messages}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that it can spell any text, and the moves, which are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, END, *ROLES)])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in MOVES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Two layers, 32 wide, random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model


if __name__ == "__main__":
    main()
