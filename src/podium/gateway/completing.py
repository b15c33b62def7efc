# SPDX-License-Identifier: Apache-2.0
"""Answers completions of raw text with a backend."""

from __future__ import annotations

import asyncio
import secrets
from itertools import repeat

from podium.data.documents import Tokens
from podium.gateway.backend import Generation, GenerationRequest, OnTokens
from podium.gateway.chat import ChatSession, ModelService, readable
from podium.gateway.completions_wire import CompletedPrompt, CompletionCall
from podium.gateway.raw_prompts import RawPrompt
from podium.gateway.refusal import RequestRefusedError
from podium.gateway.shown_text import OnText, ShownText
from podium.rollout.engine import TokenScores
from podium.rollout.requests import Completion


async def complete(service: ModelService, call: CompletionCall, on_text: OnText | None = None) -> list[CompletedPrompt]:
    """All choices of all prompts, in order. `on_text`: for one prompt and one choice, without the echoed prompt."""
    async with service.gate.use() as version:
        return await _complete(service, call, on_text, version)


async def _complete(
    service: ModelService, call: CompletionCall, on_text: OnText | None, version: str | None
) -> list[CompletedPrompt]:
    seed = secrets.randbits(62) if call.wish.seed is None else call.wish.seed
    prompts: list[Tokens] = [_prompt_tokens(service, given) for given in call.prompts]
    generations: list[Generation] = []
    try:
        if call.generates:
            for prompt in prompts:
                sampling = service.sampling(call.wish, len(prompt))
                on_tokens: OnTokens | None = None
                if on_text is not None and not call.echo:
                    on_tokens = ShownText(service.conversations, sampling.stop_strings, on_text)
                generations += [
                    service.backend.submit(
                        GenerationRequest(prompt=prompt, sampling=sampling, seed=seed, sample=sample), on_tokens
                    )
                    for sample in range(call.wish.n)
                ]
        scored = [await _scores(service, prompt, call) for prompt in prompts]
        sampled = [_finished(await asyncio.shield(each.completion)) for each in generations]
    except BaseException:
        for each in generations:
            each.cancel()
        raise
    choices = [
        (prompt, scores) for prompt, scores in zip(prompts, scored, strict=True) for _ in range(call.num_choices)
    ]
    answers = sampled if call.generates else repeat(None, len(choices))
    return [
        CompletedPrompt(prompt_T=prompt, scores=scores, completion=completion, version=version)
        for (prompt, scores), completion in zip(choices, answers, strict=True)
    ]


async def complete_in(
    session: ChatSession, call: CompletionCall, on_text: OnText | None = None
) -> list[CompletedPrompt]:
    """The same in a session, which records them. Where nothing is sampled there is nothing to record."""
    if not call.generates:
        return await complete(session.service, call)
    scores = [
        await _scores(session.service, _prompt_tokens(session.service, given), call) for given in call.prompts
    ]  # first: where it is refused, nothing is sampled
    shown = None if call.echo else on_text
    answers = await asyncio.gather(*(session.complete(each, shown) for each in call.raw_calls()))
    return [
        CompletedPrompt(prompt_T=prompt_T, scores=scores_T, completion=choice.completion, collect=answer.collect)
        for (prompt_T, answer), scores_T in zip(answers, scores, strict=True)
        for choice in answer.choices
    ]


def _prompt_tokens(service: ModelService, given: RawPrompt) -> Tokens:
    tokens: Tokens = readable(lambda: service.conversations.raw_tokens(given))
    if not len(tokens):
        raise RequestRefusedError(400, "the prompt has no tokens.", param="prompt")
    return tokens


async def _scores(service: ModelService, prompt: Tokens, call: CompletionCall) -> TokenScores | None:
    return await service.backend.score(prompt) if call.echo and call.logprobs else None


def _finished(completion: Completion) -> Completion:
    if completion.finish == "error":
        raise RequestRefusedError(500, completion.error or "the engine cannot answer this request.")
    if completion.finish == "cancelled":
        raise RequestRefusedError(503, "the request was cancelled.")
    return completion
