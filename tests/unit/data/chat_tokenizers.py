# SPDX-License-Identifier: Apache-2.0
"""Tiny tokenizers with the chat templates of well-known families: one token per byte, and `\\n\\n` is one token."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from podium.data.documents import Document

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Drops what an assistant thought in every turn but the last, as reasoning models do.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No special end-of-turn token: plain words around the turns.
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOLS = "{% if tools %}[{{ tools[0].name }}]{% endif %}" + CHATML

_SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip


def byte_tokenizer(template: str | None = None, *, bos: bool = False, eos: str | None = "</s>") -> Any:
    """`bos`: plain texts get <s> in front, by the tokenizer's own policy."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    vocabulary["ĊĊ"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)
    wrapped.chat_template = template
    return wrapped


def text_of(tokenizer: Any, document: Document) -> str:
    return str(tokenizer.decode(document.tokens.tolist()))


def trained_spans(tokenizer: Any, document: Document) -> list[str]:
    """The text of each unbroken run of trained tokens."""
    spans: list[list[int]] = []
    before = False
    for token, trained in zip(document.tokens.tolist(), document.trained.tolist(), strict=True):
        if trained and not before:
            spans.append([])
        if trained:
            spans[-1].append(token)
        before = trained
    return [str(tokenizer.decode(span)) for span in spans]
