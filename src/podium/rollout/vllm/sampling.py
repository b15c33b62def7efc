# SPDX-License-Identifier: Apache-2.0
"""Translates Podium's sampling settings into vLLM's."""

from __future__ import annotations

from typing import Any

from podium.data.splitmix import GAMMA, mix
from podium.rollout.randomness import stream_key
from podium.rollout.requests import Request

# Where a request's seed travels: from its own seed field vLLM would create its own generators.
SEED = "podium_seed"
# The name that the engine gave to a request; vLLM's workers have other names.
HANDLE = "podium_handle"
_LOWEST_TEMPERATURE, _HIGHEST_TEMPERATURE = 0.01, 2.0


def limits(request: Request, *, has_tokenizer: bool) -> str | None:
    """Why vLLM cannot serve a request that Podium's protocol allows, or None."""
    sampling = request.sampling
    if sampling.temperature and not _LOWEST_TEMPERATURE <= sampling.temperature <= _HIGHEST_TEMPERATURE:
        return (
            f"temperature is {sampling.temperature}, and vLLM samples with 0 or values from {_LOWEST_TEMPERATURE} to "
            f"{_HIGHEST_TEMPERATURE}. Use one of those, or the native engine."
        )
    if sampling.stop_strings and not has_tokenizer:
        return "stop_strings need a tokenizer, and the model's folder has none. Save one there, or use stop_tokens."
    return None


def sampling_params(request: Request, *, max_length: int, handle: str = "") -> Any:
    """vLLM's SamplingParams for this request: one answer, tokens streamed as they are sampled, no text."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    wanted = request.sampling
    return SamplingParams(
        max_tokens=min(wanted.max_new_tokens, max_length - len(request.prompt)),
        min_tokens=min(wanted.min_new_tokens, max_length - len(request.prompt)),
        temperature=wanted.temperature,
        top_k=wanted.top_k,
        top_p=wanted.top_p,
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        stop_token_ids=sorted(wanted.stop_tokens),
        stop=list(wanted.stop_strings),
        logit_bias=dict(wanted.logit_bias) or None,
        allowed_token_ids=None if wanted.allowed_tokens is None else sorted(wanted.allowed_tokens),
        extra_args={SEED: stream_key(request.seed, request.id), HANDLE: handle},
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        ignore_eos=True,  # an answer ends where the request says, not where the checkpoint says
        detokenize=bool(wanted.stop_strings),
        skip_special_tokens=True,  # stop strings are searched in text, and special tokens have none
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def position_seed(key: int, position: int) -> int:
    """One seed for the token at this position; seeds of neighbouring positions are unrelated."""
    return mix(key + position * GAMMA) >> 1
