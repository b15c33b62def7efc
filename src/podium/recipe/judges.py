# SPDX-License-Identifier: Apache-2.0
"""A judge: a model that rewards episodes by a rubric, behind an OpenAI-compatible endpoint or in the run itself."""

from __future__ import annotations

import ipaddress
import os
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from podium.recipe.fields import Count, NonNegative, Place, Real, Section, Switch, Text

_SCORES = (0.0, 10.0)
POLICY_JUDGE = "policy"
"""The model of a judge that is the policy itself."""
_OF_ENDPOINTS = (
    "api_key_env", "api_key_file", "plain_http", "timeout_s", "deadline_s", "retries", "concurrency",
    "requests_per_second", "price",
)  # fmt: skip
# What the run's engine reads of a request.
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "stop", "max_tokens",
    "max_completion_tokens",
)  # fmt: skip
_OF_FOLDERS = ("memory_gib", "max_length")
# Podium writes these fields of a request.
_RESERVED = ("messages", "model", "n", "stream", "tools")


def _base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL such as https://HOST/v1 or http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL with a password would be stored in the run folder. Use api_key_env or api_key_file")
    if parts.query or parts.fragment or not text.isascii() or any(each.isspace() for each in text):
        raise ValueError("expected the URL alone, without a query, a fragment or spaces")
    return text.rstrip("/")


def _request(fields: dict[str, Any]) -> dict[str, Any]:
    if reserved := [name for name in fields if name in _RESERVED]:
        raise ValueError(f"Podium sets {reserved[0]} itself. Remove it")
    return fields


class PriceSection(Section):
    """What the endpoint costs, in any currency."""

    tokens_in: Real = Field(ge=0, description="Price of a million tokens of requests.")
    tokens_out: Real = Field(ge=0, description="Price of a million tokens of answers.")


class JudgeSection(Section):
    """A model that judges answers: behind any OpenAI-compatible endpoint, or in the run itself (docs/judges.md)."""

    base_url: Annotated[Text, AfterValidator(_base_url)] | None = Field(
        None,
        description="An endpoint; requests go to BASE_URL/chat/completions. Default: the run has the model itself.",
    )
    model: Text = Field(
        description="Name of the model at the endpoint. Without base_url: folder or hub id of a checkpoint that judges "
        "with its own frozen weights, or `policy`, which is the policy as it is."
    )
    rubric: Text = Field(description="What makes an answer good, in words.")
    compare: Literal["group", "reference"] | None = Field(
        None,
        description="Compare answers in pairs, in both orders: those of a group with each other, or each with the "
        "row's reference. The reward is the win rate. Default: each answer gets a score by itself.",
    )
    opponents: Count | None = Field(
        None,
        description="compare group: so many other answers of the group each answer is compared with, an even number; "
        "default: all.",
    )
    score_range: tuple[Real, Real] = Field(
        _SCORES, description="Lowest and highest score; the reward is 0 at the lowest and 1 at the highest."
    )
    show_reference: Switch = Field(True, description="Show the judge the row's reference, where it has one.")
    answer_format: Literal["json", "line"] = Field(
        "json", description="How the judge is told to answer: with a JSON object, or with a last line `Score: N`."
    )
    request: Annotated[dict[str, Any], AfterValidator(_request)] = Field(
        default_factory=dict,
        description="Further fields of each request. A null removes one of the defaults: temperature 0, "
        "max_tokens 1024.",
    )
    api_key_env: Text | None = Field(None, description="Environment variable of the graders that has the API key.")
    api_key_file: Place | None = Field(None, description="File with the API key, on the graders' machines.")
    plain_http: Switch = Field(False, description="Allow sending the key over http beyond this machine.")
    timeout_s: Real = Field(60.0, gt=0, description="Longest time of one request.")
    deadline_s: Real = Field(
        180.0, gt=0, description="Longest time of one judgement, retries and their waits included."
    )
    retries: NonNegative = Field(
        4, description="How often a request is sent again after 429, 5xx, a timeout or a lost connection."
    )
    concurrency: Count = Field(16, description="Most requests at the same time, over all graders.")
    requests_per_second: Real | None = Field(
        None, gt=0, description="Most requests per second, over all graders; default: no limit."
    )
    cache: Literal["memory", "run_folder", "none"] = Field(
        "memory",
        description="Where judgements are kept, so that the same content is not judged twice. run_folder: also for a "
        "resumed run.",
    )
    price: PriceSection | None = None
    memory_gib: Real | None = Field(
        None, gt=0, description="Without base_url: device memory for keys and values of the judge; default: 2."
    )
    max_length: Count | None = Field(
        None,
        description="Without base_url: longest request and answer together, in tokens; default: what the judge was "
        "made for, at most 32768.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.score_range
        if not low < high:
            raise ValueError(f"score_range: the lowest score {low:g} is not below the highest {high:g}")
        if self.compare is not None and self.score_range != _SCORES:
            raise ValueError(f"score_range: has no meaning with compare {self.compare}, which gives win rates")
        if self.opponents is not None and (self.compare != "group" or self.opponents % 2):
            raise ValueError("opponents: is an even number, and only of compare group")
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("api_key_file: api_key_env names a key too. Remove one of them")
        if self.base_url is None:
            self._require_local()
        elif given := self._given(_OF_FOLDERS):
            raise ValueError(f"{given[0]}: is of a judge in the run itself. Remove it, or remove base_url")
        if self.has_key and not self.plain_http and not self._is_safe:
            raise ValueError(
                f"base_url: the key would be sent to {urlsplit(self.base_url or '').hostname} without encryption. Use "
                "https, or set plain_http to true"
            )
        return self

    def _require_local(self) -> None:
        """Refuses keys that only an endpoint has."""
        if given := self._given(_OF_ENDPOINTS):
            raise ValueError(
                f"{given[0]}: is of a judge behind an endpoint, and without base_url the run has the model itself. "
                "Remove it, or give base_url"
            )
        if unknown := [name for name in self.request if name not in _SAMPLING]:
            raise ValueError(
                f"request: {unknown[0]} is of an endpoint. A judge in the run itself has {', '.join(_SAMPLING)}"
            )
        if not self.is_policy:
            return
        if given := self._given(_OF_FOLDERS):
            raise ValueError(f"{given[0]}: the policy judges with the generators' engine. Set rollout.{given[0]}")
        if self.cache == "run_folder":
            raise ValueError("cache: the policy changes with every step, so its judgements are not kept. Remove it")

    def _given(self, names: tuple[str, ...]) -> list[str]:
        """Those of the keys that are not at their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @property
    def is_local(self) -> bool:
        """Whether the run itself has the model."""
        return self.base_url is None

    @property
    def is_policy(self) -> bool:
        """Whether the policy is the judge."""
        return self.is_local and self.model == POLICY_JUDGE

    @property
    def folder(self) -> str | None:
        """The checkpoint of a judge with its own weights in the run."""
        return os.path.expanduser(self.model) if self.is_local and not self.is_policy else None

    @property
    def has_key(self) -> bool:
        """Whether requests carry a key."""
        return self.api_key_env is not None or self.api_key_file is not None

    @property
    def _is_safe(self) -> bool:
        """Whether nobody on the way can read a request."""
        parts = urlsplit(self.base_url or "")
        if parts.scheme == "https" or parts.hostname == "localhost":
            return True
        try:
            return ipaddress.ip_address(str(parts.hostname)).is_loopback
        except ValueError:
            return False

    def longest_s(self, num_samples: int, group_size: int, *, share: int = 1) -> float:
        """Longest time that so many episodes take to be judged by one of `share` graders, where every judgement needs
        all of its time. 0 for a judge in the run itself, for which no grader waits."""
        if self.is_local:
            return 0.0
        opponents = group_size - 1 if self.opponents is None else min(self.opponents, group_size - 1)
        judgements = num_samples * {None: 1, "reference": 2, "group": opponents}[self.compare]
        queue_s = self.deadline_s * (1 + judgements / max(1, self.concurrency // share))
        rate = self.requests_per_second
        return queue_s + (judgements * share * (self.retries + 2) / rate if rate is not None else 0.0)
