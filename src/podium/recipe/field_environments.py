# SPDX-License-Identifier: Apache-2.0
"""Sections of environments that were written for other packages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic.json_schema import JsonSchemaValue

from podium.recipe.fields import OneOrMore, Real, Section, Shorthand, Text
from podium.recipe.plugins import Plugin


@dataclass(frozen=True)
class NamedAlone(Shorthand):
    """A section whose one required key may stand alone: `gymnasium: NAME` for `gymnasium: {id: NAME}`."""

    key: str

    def in_full(self, value: Any) -> Any:
        """A section of this key, for a text."""
        return {self.key: value} if isinstance(value, str) else value

    def short_schema(self, schema: JsonSchemaValue) -> JsonSchemaValue:
        """A text."""
        return {"type": "string", "minLength": 1}


def _environment_id(text: str) -> str:
    return Plugin(os.path.expanduser(text)) if Plugin.has_shape(text) else text


EnvironmentId = Annotated[Text, AfterValidator(_environment_id)]


class GymnasiumSection(Section):
    """An environment with Gymnasium's interface. A text alone is its `id`."""

    id: EnvironmentId = Field(
        description="Id of a registered environment (`Name-v0`, `module:Name-v0`), or `file.py:Class`."
    )
    render: Plugin | None = Field(
        None,
        description="`file.py:function(observation, info)`, which gives the text of an observation. Default: a text as "
        "it is, a number, or the lines of a Dict.",
    )
    parse: Plugin | None = Field(
        None,
        description="`file.py:function(text)`, which gives the action of an answer, or raises a ValueError. Default: "
        "the text, or the number or name of a Discrete action.",
    )
    actions: Annotated[tuple[Text, ...], OneOrMore()] = Field(
        (), description="Names of the actions of a Discrete space, in order."
    )
    illegal_reward: Real = Field(0.0, description="Reward of a turn without a legal action.")
    seed: Text | None = Field(
        None,
        description="Column with the seed of an episode. Default: `seed` where rows have it, else a number from the "
        "row's content.",
    )
    reset_options: Text | None = Field(None, description="Column whose mapping `reset` gets as options.")


AnyGymnasium = Annotated[GymnasiumSection, NamedAlone("id")]


def _server_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ValueError("expected the address of a server, as http://127.0.0.1:8000")
    return text.rstrip("/")


class OpenEnvSection(Section):
    """An environment of an OpenEnv server. An address alone is its `base_url`."""

    base_url: Annotated[Text, AfterValidator(_server_url)] = Field(
        description="Address of the server, as `http://127.0.0.1:8000`."
    )
    client: Plugin | None = Field(
        None,
        description="The environment's client, a subclass of EnvClient. Default: GenericEnvClient, with plain values.",
    )
    action: Plugin | None = Field(
        None,
        description="Class of actions, or a function of the turn that gives an action or raises a ValueError. Default: "
        "plain values.",
    )
    answer: Literal["text", "json", "tool_call"] = Field(
        "text",
        description="What becomes an action: the answer's text as `field`, a JSON object, or a tool call with the "
        "class's fields as arguments.",
    )
    field: Text | None = Field(
        None, description="With `answer: text`, the action's field. Default: the class's only required field."
    )
    tool: Text = Field("step", description="With `answer: tool_call`, the name of the tool that the model is shown.")
    render: Plugin | None = Field(
        None,
        description="`file.py:function(observation)`, which gives its text. Default: the only field's value, or all "
        "fields as JSON.",
    )
    reset: Annotated[tuple[Text, ...], OneOrMore()] = Field(
        ("seed",), description="Columns that `reset` gets as keyword arguments, where a row has them."
    )
    illegal_reward: Real = Field(0.0, description="Reward of a turn without a legal action.")
    state_metrics: Annotated[tuple[Text, ...], OneOrMore()] = Field(
        (), description="Numbers of the server's state that become metrics when it ends an episode."
    )
    connect_timeout_s: Real = Field(10.0, gt=0, description="How long to wait for a server that does not listen.")


AnyOpenEnv = Annotated[OpenEnvSection, NamedAlone("base_url")]


class VerifiersSection(Section):
    """An environment of the package `verifiers`. A text alone is its `taskset`."""

    taskset: Text = Field(
        description="Id of an installed taskset, or `file.py`, whose `__all__` names the class. It may bring an "
        "environment and a harness of its own."
    )
    env: Text | None = Field(
        None,
        description="Id of an environment that plays the tasks, as `best-of-n`. Default: the taskset's, or one agent.",
    )


AnyVerifiers = Annotated[VerifiersSection, NamedAlone("taskset")]
