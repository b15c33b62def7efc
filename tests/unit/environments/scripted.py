# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of bytes, chat templates in the manner of well-known families, and policies that say what they must."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from podium.data.tasks import Task
from podium.environments.episode import TurnAnswer, TurnRequest

# Tools in the system turn, calls as <tool_call>, results inside of a user turn.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools as <tool_call>:{% for tool in tools %} {{ tool.function.name }}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims contents, dates the chat, and knows a second end of turn behind calls to built-in tools.
LLAMA = (
    "<s>[{{ strftime_now('%d %b %Y') }}]{% for m in messages %}<|header|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>\n\n{{ m.content | trim }}"
    "{% if false %}<|eom|><|python_tag|>{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# No prompt for an answer, roles must alternate unless there are structured calls, and ids have nine characters.
MISTRAL = (
    "<s>{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.turn % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.turn = ns.turn + 1 %}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('not nine') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# Thoughts of turns before the last question are dropped: fit for tools, not for users who answer.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.index0 > ns.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The beginning says how long the chat is.
COUNTING = "<|im_start|>{{ messages | length }} messages\n" + CHATML
# No special tokens around turns.
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# Calls as <function=...> with <parameter=...>, results inside of a user turn.
QWEN_CODER = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}"
    "</tools>\n"
    "Call like <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
    "<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls as a name and pairs of <arg_key> and <arg_value>.
GLM = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}"
    "{% endfor %} as <tool_call>name"
    "\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>observation\n<tool_response>{{ m.content }}"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Calls between marks that are special tokens.
DEEPSEEK = (
    "<s>{% for tool in tools or [] %}{{ tool.function | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
    "{{ call.function.name }}<｜tool▁sep｜>"
    "{{ call.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}<|im_end|>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# An answer is several messages, each with a channel: thoughts, calls, and what the user reads.
HARMONY = (
    "<|start|>system<|message|>You are a model.{% for tool in tools or [] %} {{ tool.function | tojson }}{% endfor %}"
    "<|end|>{% set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %} to=functions.{{ ns.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<|eom|>", "<|python_tag|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip


def byte_tokenizer(template: str | None = CHATML, *, eos: str = "<|im_end|>") -> Any:
    """One token per byte, but `ab` is one token too: what is sampled as a, b would be read back as ab."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["ab"] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def task(question: str = "17*23?", *, reference: str | None = None, text: str | None = None) -> Task:
    messages = ({"role": "user", "content": question},) if text is None else None
    return Task(source="test", messages=messages, text=text, tools=None, reference=reference, row={}, place="here")


def answer(tokens: Sequence[int], finish: Any = "stop", *, version: int = 3) -> TurnAnswer:
    """Log-probs are -0.5, -1, -1.5 and so on."""
    return TurnAnswer(
        tokens_L=np.array(tokens, np.int32),
        logprobs_L=-0.5 * np.arange(1, len(tokens) + 1, dtype=np.float32),
        versions_L=np.full(len(tokens), version, np.int32),
        finish=finish,
    )


class ScriptedPolicy:
    """Says its lines one after the other in every episode, each with an end of turn; remembers what it was asked."""

    def __init__(self, tokenizer: Any, lines: Sequence[str] | Callable[[TurnRequest], str], *, end: str = "<|im_end|>"):
        self._tokenizer, self._lines, self._end = tokenizer, lines, end
        self.requests: list[TurnRequest] = []

    async def answer(self, request: TurnRequest, /) -> TurnAnswer:
        self.requests.append(request)
        await asyncio.sleep(0)
        line = self._lines(request) if callable(self._lines) else self._lines[request.turn]
        tokens = encoded(self._tokenizer, line + self._end)
        if len(tokens) > request.max_new_tokens:
            return answer(tokens[: request.max_new_tokens], "length")
        return answer(tokens)
