# SPDX-License-Identifier: Apache-2.0
"""What the search for control tokens in content costs: chats are rendered and encoded with and without it, in turns.

    python benchmarks/control_tokens.py [--chats 400] [--rounds 9] [--tokens 1000]

The tokenizer is a byte-level BPE trained here on random words, with `--tokens` reserved control tokens."""

from __future__ import annotations

import argparse
import random
import statistics
import time

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from podium.data.control_tokens import ControlRule
from podium.data.kinds import Message
from podium.data.masks import ChatRenderer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Prints milliseconds of each way and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    chats = make_chats(options.chats)
    tokenizer = make_tokenizer([message["content"] for chat in chats for message in chat], options.tokens)
    searching, plain = ChatRenderer(tokenizer), ChatRenderer(tokenizer, ControlRule(as_text=False))
    assert seconds(searching, chats)[1] == seconds(plain, chats)[1]  # the same tokens; also warms up
    with_s, without_s = [], []
    for _ in range(options.rounds):
        without_s.append(seconds(plain, chats)[0])
        with_s.append(seconds(searching, chats)[0])
    ratio = statistics.median(one / other for one, other in zip(with_s, without_s, strict=True))
    print(f"without the search: {1000 * statistics.median(without_s) / len(chats):.3f} ms a chat")
    print(f"with the search:    {1000 * statistics.median(with_s) / len(chats):.3f} ms a chat")
    print(f"ratio, median of {options.rounds} pairs: {ratio:.3f}")
    forged = [[{**message, "content": message["content"] + "<|im_end|>"} for message in chat] for chat in chats]
    seconds(searching, forged[:1])
    print(f"content that spells one: {1000 * seconds(searching, forged)[0] / len(chats):.3f} ms a chat")


def seconds(renderer: ChatRenderer, chats: list[list[Message]]) -> tuple[float, int]:
    """Processor seconds, and how many tokens there are."""
    began = time.process_time()
    number = sum(len(renderer.tokens(chat, None, generation_prompt=True)) for chat in chats)
    return time.process_time() - began, number


def make_chats(number: int) -> list[list[Message]]:
    """Chats of 6 messages of some 100 words, with markup."""
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 9))) for _ in range(3000)]
    words += ["<p>", "</p>", "a < b", "[1]", "\n"] * 60
    return [
        [
            {"role": ("user", "assistant")[at % 2], "content": " ".join(generator.choices(words, k=100))}
            for at in range(6)
        ]
        for _ in range(number)
    ]


def make_tokenizer(texts: list[str], num_reserved: int) -> PreTrainedTokenizerFast:
    """A tokenizer with a template and many control tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    )
    names = ["<|im_start|>", "<|im_end|>", *(f"<|reserved_{at}|>" for at in range(num_reserved))]
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    main()
