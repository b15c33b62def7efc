# SPDX-License-Identifier: Apache-2.0
"""Makes the demo's task: a tiny untrained model with its tokenizer, and sums asked in words.

    python examples/arithmetic/make_task.py demo

writes demo/model (Hugging Face format), demo/train.jsonl and demo/heldout.jsonl, and the same task as preferences:
demo/pairs.jsonl and demo/pairs-heldout.jsonl. The same seed gives the same files.

The demonstrations in train.jsonl come from a hasty teacher. He adds round numbers correctly and at once. He estimates
most other sums to the nearest ten, and works out the rest: 47 plus 38 is "90", or "70+15=85". A model that imitates him
estimates too. A model that is rewarded for right answers learns to work sums out. In the preferences the chosen answer
of each pair is worked out, and the rejected one is an estimate.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

SMALLEST, LARGEST = 10, 99
NUM_TRAIN, NUM_HELDOUT = 20_000, 600
NUM_PAIRS, NUM_PAIRS_HELDOUT = 4000, 300
HELDOUT_PAIRS = 0.2  # share of all operand pairs that training never sees
WORKED_OUT = 0.4  # share of the harder sums that the teacher works out; he estimates the others
PHRASINGS = (
    "What is {left} plus {right}?",
    "How much is {left} plus {right}?",
    "Tell me {left} plus {right}.",
    "Give me {left} plus {right}.",
)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The generation markers say which tokens are the assistant's: its text and the end of its turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Every digit is one token, with the space before it: the tens of a number differ from its units.
PIECES = r" ?\d| ?[A-Za-z]+\n?|[^\w\s]|\s"


@dataclass(frozen=True, slots=True)
class Question:
    """`left plus right`."""

    left: int
    right: int

    @property
    def answer(self) -> str:
        return str(self.left + self.right)

    @property
    def is_easy(self) -> bool:
        """Whether the second operand is a round number: the sum then keeps the last digit of the first."""
        return self.right % 10 == 0

    @property
    def estimate(self) -> str:
        return str((self.left + self.right + 5) // 10 * 10)

    @property
    def is_misjudged(self) -> bool:
        return not self.is_easy and self.estimate != self.answer

    @property
    def worked_out(self) -> str:
        """Tens, units, and both together."""
        tens, units = self.left // 10 + self.right // 10, self.left % 10 + self.right % 10
        return f"{10 * tens}+{units}={self.answer}"

    @property
    def pair(self) -> tuple[int, int]:
        """The operands in either order: 47 plus 38 in training would give away 38 plus 47."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def weight(self) -> float:
        """Numbers that end in a small digit come more often, as in daily life. It also makes the task learnable in a
        minute: sums with round numbers come first, and the others build on them."""
        return 1.0 / ((1 + self.left % 10) * (1 + self.right % 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write into; made if need be")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    make_task(arguments.out, seed=arguments.seed)


def make_task(out: Path, *, seed: int) -> None:
    """Writes the model, the training questions and the held-out ones."""
    dice = random.Random(seed)
    train, heldout = split_questions(all_questions(), dice)
    train_rows = [demonstration(each, dice) for each in dice.choices(train, weights_of(train), k=NUM_TRAIN)]
    heldout_rows = [as_row(each, each.answer, dice) for each in draw_distinct(heldout, NUM_HELDOUT, dice)]
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "train.jsonl", train_rows)
    write_jsonl(out / "heldout.jsonl", heldout_rows)
    # A separate generator: the pairs do not change the rows above.
    dice = random.Random(f"pairs {seed}")
    misjudged, misjudged_heldout = ([each for each in part if each.is_misjudged] for part in (train, heldout))
    drawn = dice.choices(misjudged, weights_of(misjudged), k=NUM_PAIRS)
    write_jsonl(out / "pairs.jsonl", [as_pair(each, dice) for each in drawn])
    drawn = draw_distinct(misjudged_heldout, NUM_PAIRS_HELDOUT, dice)
    write_jsonl(out / "pairs-heldout.jsonl", [as_pair(each, dice) for each in drawn])

    tokenizer = train_tokenizer(train_rows)
    model = make_model(tokenizer, seed)
    tokenizer.save_pretrained(out / "model")
    model.save_pretrained(out / "model")
    print(
        f"{out}: a model of {model.num_parameters():,} parameters and {len(tokenizer)} tokens, "
        f"{len(train_rows):,} questions to train on, {len(heldout_rows):,} held out"
    )


def all_questions() -> list[Question]:
    numbers = range(SMALLEST, LARGEST + 1)
    return [Question(left, right) for left in numbers for right in numbers]


def split_questions(questions: Sequence[Question], dice: random.Random) -> tuple[list[Question], list[Question]]:
    """(training, held out), with no pair of operands in both."""
    pairs = sorted({question.pair for question in questions})
    heldout_pairs = set(dice.sample(pairs, round(HELDOUT_PAIRS * len(pairs))))
    train = [question for question in questions if question.pair not in heldout_pairs]
    heldout = [question for question in questions if question.pair in heldout_pairs]
    return train, heldout


def weights_of(questions: Iterable[Question]) -> list[float]:
    return [question.weight for question in questions]


def draw_distinct(questions: Sequence[Question], count: int, dice: random.Random) -> list[Question]:
    """`count` different questions, each as likely as its weight says."""
    drawn = sorted(questions, key=lambda question: dice.random() ** (1 / question.weight), reverse=True)[:count]
    dice.shuffle(drawn)  # any prefix of the file is then as hard as the whole
    return drawn


def demonstration(question: Question, dice: random.Random) -> dict[str, object]:
    if question.is_easy:
        return as_row(question, question.answer, dice)
    return as_row(question, question.worked_out if dice.random() < WORKED_OUT else question.estimate, dice)


def as_row(question: Question, said: str, dice: random.Random) -> dict[str, object]:
    """A chat for imitation. `answer` is the right answer, for rewards and evaluations."""
    asked = dice.choice(PHRASINGS).format(left=question.left, right=question.right)
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": chat, "answer": question.answer}


def as_pair(question: Question, dice: random.Random) -> dict[str, object]:
    """Two answers to one question, the better one first."""
    asked = dice.choice(PHRASINGS).format(left=question.left, right=question.right)
    chosen, rejected = ([{"role": "assistant", "content": said}] for said in (question.worked_out, question.estimate))
    return {"prompt": [{"role": "user", "content": asked}], "chosen": chosen, "rejected": rejected}


def write_jsonl(path: Path, rows: Iterable[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(rows: Iterable[dict[str, object]]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a few hundred tokens that can spell any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for row in rows for text in texts_of(row)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def texts_of(row: dict[str, object]) -> Iterable[str]:
    messages = row["messages"]
    assert isinstance(messages, list)
    for message in messages:
        yield message["role"] + "\n"
        yield message["content"]


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Two layers, 96 wide, random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
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
