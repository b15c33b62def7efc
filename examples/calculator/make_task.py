# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny agent task: a model that may call a calculator, with demonstrations that sometimes call it.

    python examples/calculator/make_task.py demo/calculator

writes model (Hugging Face format, untrained), sft.jsonl (demonstrations, most of which guess), train.jsonl and
heldout.jsonl (questions with their answers). The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from podium.environments.tools import load_tools

SMALLEST, LARGEST = 10, 99
NUM_DEMONSTRATIONS, NUM_TRAIN, NUM_HELDOUT = 8_000, 4_000, 200
HELDOUT_PAIRS = 0.2  # share of all pairs of operands that no demonstration and no training question has
CALLING = 0.3  # share of the demonstrations that call the calculator; the others guess, and are wrong

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL, CALL_END = "<tool_call>", "</tool_call>"
# One token each, so that a call is ten tokens long and not seventy.
WORDS = (CALL, CALL_END, '{"name": "calculate", "arguments": {"expression": "', '"}}')
# Roles are one token each. The generation markers say which tokens are the assistant's: text and end of its turn.
CHAT_TEMPLATE = (
    '{# A call is written <tool_call>{"name": ..., "arguments": ...}</tool_call>. #}'
    "{% if tools %}"
    "{{ '<|system|>' }}{% for tool in tools %}"
    "{{ tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|assistant|>' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Question:
    """`left+right`, `left-right` or `left*right`."""

    left: int
    sign: str
    right: int

    @property
    def expression(self) -> str:
        return f"{self.left}{self.sign}{self.right}"

    @property
    def answer(self) -> int:
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.sign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write into; made if need be")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    make_task(arguments.out, seed=arguments.seed)


def make_task(out: Path, *, seed: int) -> None:
    """Writes the model, the demonstrations and the questions."""
    dice = random.Random(seed)
    train, heldout = split_questions(all_questions(), dice)
    tools = [tool.schema for tool in load_tools([f"{Path(__file__).with_name('tools.py')}:calculate"])]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(
        out / "sft.jsonl", (demonstration(each, tools, dice) for each in dice.choices(train, k=NUM_DEMONSTRATIONS))
    )
    write_jsonl(out / "train.jsonl", (as_task(each) for each in dice.sample(train, NUM_TRAIN)))
    write_jsonl(out / "heldout.jsonl", (as_task(each) for each in dice.sample(heldout, NUM_HELDOUT)))

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    tokenizer.save_pretrained(out / "model")
    model.save_pretrained(out / "model")
    print(
        f"{out}: a model of {model.num_parameters():,} parameters and {len(tokenizer)} tokens, {NUM_DEMONSTRATIONS:,} "
        f"demonstrations, {NUM_TRAIN:,} questions to train on, {NUM_HELDOUT:,} held out"
    )


def all_questions() -> list[Question]:
    numbers = range(SMALLEST, LARGEST + 1)
    return [Question(left, sign, right) for left in numbers for sign in "+-*" for right in numbers]


def split_questions(questions: Sequence[Question], dice: random.Random) -> tuple[list[Question], list[Question]]:
    """(training, held out), with no pair of operands in both."""
    pairs = sorted({(question.left, question.right) for question in questions})
    kept_back = set(dice.sample(pairs, round(HELDOUT_PAIRS * len(pairs))))
    train = [question for question in questions if (question.left, question.right) not in kept_back]
    heldout = [question for question in questions if (question.left, question.right) in kept_back]
    return train, heldout


def demonstration(question: Question, tools: list[dict[str, Any]], dice: random.Random) -> dict[str, Any]:
    """A chat that calls the calculator and repeats its result, or one that guesses a number."""
    messages = [asked(question)]
    if dice.random() < CALLING:
        call = json.dumps({"name": "calculate", "arguments": {"expression": question.expression}})
        messages.append({"role": "assistant", "content": CALL + call + CALL_END})
        messages.append({"role": "tool", "content": str(question.answer)})
        messages.append({"role": "assistant", "content": str(question.answer)})
    else:
        messages.append({"role": "assistant", "content": str(wrong_guess(question, dice))})
    return {"messages": messages, "tools": tools}


def wrong_guess(question: Question, dice: random.Random) -> int:
    while (guess := dice.randrange(10 ** dice.randint(2, 4))) == question.answer:
        pass
    return guess


def as_task(question: Question) -> dict[str, Any]:
    """The environment offers the tools. The answer is for the reward, and not shown to the model."""
    return {"messages": [asked(question)], "answer": str(question.answer)}


def asked(question: Question) -> dict[str, str]:
    return {"role": "user", "content": f"{question.expression}?"}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that it can spell any text, and a few words that are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, END, *ROLES)])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Two layers, 80 wide, random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=80,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
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
