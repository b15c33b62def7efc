# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the manner of well-known families, each with a tiny tokenizer that has its control tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chat_tokenizers import CHATML, CHATML_MARKED, GEMMA, LLAMA3
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Thinks, calls tools by tags, and puts results of tools into a turn of the user.
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> "
    "call with <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# Calls as <function=...> with <parameter=...>; never thinks.
QWEN_CODER = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n<function>\n"
    "<name>{{ tool.function.name }}</name>\n"
    "<description>{{ tool.function.description }}</description>\n{{ tool.function.parameters | tojson }}\n</function>"
    "{% endfor %}\n</tools> call as <tool_call>\n<function=name>\n</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>\n<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS]"
    "{% for call in m.tool_calls %}{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}</s>{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }}{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>"
    "<arg_value>{{ value }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜></think>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<｜tool▁calls▁begin｜>{{ call.function.name }}<｜tool▁sep｜>"
    "{{ call.function.arguments | tojson }}<｜tool▁calls▁end｜>{% endfor %}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>You are a model.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|start|>assistant{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlFormat:
    """A family's template, and the tokens that its tokenizer adds: special ones, and others."""

    template: str
    special: tuple[str, ...]
    other: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()  # of `other`: they divide turns
    results: tuple[str, ...] = ()  # of `other`: they stand around results of tools
    tools: bool = True  # the template has tools

    def tokenizer(self) -> Any:
        return tokenizer_of(self)

    @property
    def control(self) -> tuple[str, ...]:
        return (*self.special, *self.turns)


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FORMATS = {
    "chatml": ControlFormat(template=CHATML, special=_CHATML, tools=False),
    "chatml marked": ControlFormat(template=CHATML_MARKED, special=_CHATML, tools=False),
    "qwen": ControlFormat(
        template=QWEN, special=_CHATML, results=("<tool_response>", "</tool_response>"),
        other=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "qwen coder": ControlFormat(
        template=QWEN_CODER, special=_CHATML, results=("<tool_response>", "</tool_response>"),
        other=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    "llama3": ControlFormat(
        template=LLAMA3, special=("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        tools=False,
    ),
    "mistral": ControlFormat(
        template=MISTRAL, special=(
            "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
            "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        ),
    ),
    "gemma": ControlFormat(
        template=GEMMA, special=("<s>", "<eos>", "<start_of_turn>", "<end_of_turn>"), other=("\n", "<table>"),
        tools=False,
    ),
    "glm": ControlFormat(
        template=GLM, special=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        other=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
               "</arg_key>", "<arg_value>", "</arg_value>"),
        results=("<tool_response>", "</tool_response>"),
    ),
    "deepseek": ControlFormat(
        template=DEEPSEEK, special=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        other=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>",
               "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        turns=("<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    "harmony": ControlFormat(
        template=HARMONY,
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|endoftext|>"),
    ),
}  # fmt: skip
_MERGES = [
    ("i", "m"),
    ("e", "n"),
    ("en", "d"),
    ("|", ">"),
    ("<", "|"),
    (">", "Ċ"),
    ("|>", "Ċ"),
    ("u", "s"),
    ("e", "r"),
    ("us", "er"),
]


def tokenizer_of(form: ControlFormat) -> Any:
    """Byte-level BPE whose merges cross the borders of what spells a control token."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for first, second in _MERGES:
        vocabulary.setdefault(first + second, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in form.special])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in form.other])
    end = form.special[1] if len(form.special) > 1 else form.special[0]
    return _wrapped(core, form.template, form.special[0], end)


def metaspace_tokenizer(template: str, *, scheme: str = "first", legacy: bool = False) -> Any:
    """A SentencePiece-like tokenizer with byte fallback: white space is a mark, which text begins with too. `<eot>`
    takes white space around it along."""
    alphabet = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for symbol in [*alphabet, "<e", "ot", "ot>", "▁h"]:
        vocabulary.setdefault(symbol, len(vocabulary))
    merges = [("<", "e"), ("o", "t"), ("ot", ">"), ("▁", "h")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    if legacy:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens(["<unk>", "<s>", "</s>", AddedToken("<eot>", lstrip=True, rstrip=True, normalized=False)])
    return _wrapped(core, template, "<s>", "</s>")


def lowercase_tokenizer(template: str) -> Any:
    """Its control tokens are looked for in normalized text, so that other spellings of them count."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=True) for text in _CHATML])
    return _wrapped(core, template, "<|endoftext|>", "<|im_end|>")


def _wrapped(core: Tokenizer, template: str, begin: str, end: str) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=begin, eos_token=end)
    tokenizer.chat_template = template
    return tokenizer
