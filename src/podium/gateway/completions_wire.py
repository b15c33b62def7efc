# SPDX-License-Identifier: Apache-2.0
"""OpenAI's completions: raw text or token ids, with log-probs of prompt and answer as `lm-eval` reads them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from podium.data.documents import Tokens
from podium.gateway.chat import RawCall, SamplingWish
from podium.gateway.chat_wire import content_key, event, fingerprint, refuse_unsupported, sampling_wish
from podium.gateway.conversation import Conversations, as_tokens
from podium.gateway.raw_prompts import RawPrompt
from podium.gateway.refusal import RequestRefusedError
from podium.observe.timing import wall_clock_s
from podium.rollout.engine import TokenScores
from podium.rollout.requests import Completion

_MOST_PROMPTS, _DEFAULT_TOKENS = 1024, 16
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""), "best_of": (None, 1), "frequency_penalty": (None, 0), "presence_penalty": (None, 0),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletionCall:
    """A request for completions. `generates`: with max_tokens 0 only the prompt is scored. `content`: all that the
    answer depends on. `id`: of the response, behind `cmpl-`."""

    prompts: tuple[RawPrompt, ...]
    wish: SamplingWish
    echo: bool
    logprobs: bool
    token_ids: bool
    generates: bool
    content: bytes
    idempotency_key: str | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.wish.n if self.generates else 1

    def raw_calls(self) -> list[RawCall]:
        """One for each prompt, to be recorded."""
        calls = []
        for at, given in enumerate(self.prompts):
            key = self.idempotency_key
            calls.append(
                RawCall(
                    given=given,
                    wish=self.wish,
                    content=hashlib.sha256(b"%d " % at + self.content).digest(),
                    idempotency_key=key if key is None or not at else f"{key} {at}",
                    id=self.id,
                )
            )
        return calls


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompletedPrompt:
    """One choice: the prompt, its scores if they were asked for, and the answer if one was sampled."""

    prompt_T: Tokens
    scores: TokenScores | None
    completion: Completion | None
    version: str | None = None  # of the weights, where they have a name
    collect: Callable[[], object] = lambda: None
    """To call when the client gets the answer: a session records it only then."""


def completion_call(body: Mapping[str, Any], vocab_size: int, *, idempotency_key: str | None = None) -> CompletionCall:
    """A request as it came."""
    refuse_unsupported(body, _UNSUPPORTED)
    logprobs = body.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, bool) and logprobs not in (0, 1):
        raise RequestRefusedError(400, "logprobs is at most 1: the most likely token beside its own.", param="logprobs")
    wanted = {"max_tokens": _DEFAULT_TOKENS, **{key: value for key, value in body.items() if value is not None}}
    echo, generates = bool(body.get("echo")), wanted["max_tokens"] != 0
    if not generates and not echo:
        raise RequestRefusedError(400, "max_tokens is 0 and echo is off, so there is no answer.", param="max_tokens")
    return CompletionCall(
        prompts=tuple(_given(each, vocab_size) for each in _prompts(body.get("prompt"))),
        wish=sampling_wish({**wanted, "max_tokens": wanted["max_tokens"] or 1}, max_tokens=("max_tokens",)),
        echo=echo,
        logprobs=logprobs is not None and logprobs is not False,
        token_ids=bool(body.get("return_token_ids")),
        generates=generates,
        content=content_key({"completion": True, **body}),
        idempotency_key=idempotency_key,
    )


def completion_response(
    call: CompletionCall, done: Sequence[CompletedPrompt], conversations: Conversations, model: str
) -> dict[str, Any]:
    """The response of one piece."""
    prompts = sum(len(each.prompt_T) for each in done[:: call.num_choices])
    sampled = sum(each.completion.num_tokens for each in done if each.completion is not None)
    return {
        **completion_frame(model, call.id),
        **fingerprint(done[0].version if done else None),
        "choices": [_choice(index, each, call, conversations) for index, each in enumerate(done)],
        "usage": {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled},
    }


def completion_frame(model: str, id: str) -> dict[str, Any]:
    """What every response and chunk begins with."""
    return {
        "id": f"cmpl-{id}",
        "object": "text_completion",
        "created": int(wall_clock_s()),
        "model": model,
    }


class CompletionChunks:
    """The chunks of one streamed completion, as events."""

    def __init__(self, call: CompletionCall, conversations: Conversations, model: str) -> None:
        self._call, self._conversations, self._frame = call, conversations, completion_frame(model, call.id)
        self._sent = ""

    def more(self, text: str) -> str | None:
        """What is new in the text so far, if there is something."""
        if not text.startswith(self._sent) or len(text) == len(self._sent):
            return None
        delta, self._sent = text[len(self._sent) :], text
        return self._event({"text": delta, "finish_reason": None, "logprobs": None})

    def last(self, done: CompletedPrompt) -> list[str]:
        """The rest of the answer, and the end of the stream."""
        choice = _choice(0, done, self._call, self._conversations)
        text = str(choice["text"])
        rest = text[len(self._sent) :] if text.startswith(self._sent) else ""
        self._frame |= fingerprint(done.version)
        return [self._event({**choice, "text": rest}), "data: [DONE]\n\n"]

    def _event(self, choice: Mapping[str, Any]) -> str:
        return event({**self._frame, "choices": [{"index": 0, **choice}]})


def _choice(index: int, done: CompletedPrompt, call: CompletionCall, conversations: Conversations) -> dict[str, Any]:
    completion = done.completion
    text = conversations.text(done.prompt_T.tolist()) if call.echo else ""
    finish = "length"
    if completion is not None:
        text += conversations.text(completion.tokens_L.tolist(), stop=completion.stop)
        finish = "length" if completion.finish == "length" else "stop"
    marks = _logprobs(done, conversations, echo=call.echo) if call.logprobs else None
    ids: dict[str, Any] = {}
    if call.token_ids:
        sampled = [] if completion is None else completion.tokens_L.tolist()
        ids = {"prompt_token_ids": done.prompt_T.tolist(), "token_ids": sampled}
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": marks, **ids}


def _logprobs(done: CompletedPrompt, conversations: Conversations, *, echo: bool) -> dict[str, Any]:
    tokens: list[int] = []
    logprobs: list[float | None] = []
    best: list[tuple[int, float] | None] = []
    if echo and done.scores is not None:
        tokens += done.prompt_T.tolist()
        logprobs += [None, *done.scores.logprobs_T.tolist()]
        best += [None, *zip(done.scores.best_T.tolist(), done.scores.best_logprobs_T.tolist(), strict=True)]
    if done.completion is not None:
        tokens += done.completion.tokens_L.tolist()
        logprobs += done.completion.logprobs_L.tolist()
        best += [None] * done.completion.num_tokens
    texts = [conversations.token_text(token) for token in tokens]
    offsets = np.cumsum([0, *(len(text) for text in texts)])[:-1].tolist()
    top: list[dict[str, float] | None] = []
    for token, text, logprob, most in zip(tokens, texts, logprobs, best, strict=True):
        if logprob is None:
            top.append(None)
            continue
        named = {text: logprob}
        if most is not None and most[0] != token:
            other = conversations.token_text(most[0])
            named[other if other != text else f"token_id:{most[0]}"] = most[1]
        top.append(named)
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _prompts(prompt: Any) -> list[Any]:
    """Each prompt: text, or a list of token ids."""
    prompts = prompt if isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt) else [prompt]
    if prompt in (None, [], "") or len(prompts) > _MOST_PROMPTS:
        raise RequestRefusedError(400, "prompt must be text, token ids, or a list of these.", param="prompt")
    return prompts


def _given(prompt: Any, vocab_size: int) -> RawPrompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < vocab_size for token in prompt):
        return as_tokens(prompt)
    raise RequestRefusedError(
        400, f"prompt must be text, or token ids below {vocab_size}, or a list of these.", param="prompt"
    )
