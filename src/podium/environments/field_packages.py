# SPDX-License-Identifier: Apache-2.0
"""What environments of other packages have in common: the package, and how an episode begins."""

from __future__ import annotations

import importlib.util

from podium.data.masks import Tools
from podium.data.tasks import Task
from podium.environments.protocol import Observation
from podium.errors import MissingExtraError


class IllegalActionError(Exception):
    """An answer without a legal action. The text is for the model."""


def require_package(module: str, extra: str, key: str) -> None:
    """Raises an error that names the extra if a package is not installed. Imports nothing."""
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ValueError:  # imported already, without a spec
        is_installed = True
    if not is_installed:
        raise MissingExtraError(
            f"{key}: needs the package `{module}`, which is not installed. Run `pip install podium[{extra}]`."
        )


def beginning(task: Task, text: str, tools: Tools = None) -> Observation:
    """An episode that begins with the row's prompt, if it has one, and the environment's first observation behind it.
    The observation joins a prompt that ends with a user message, because roles alternate in many templates."""
    if task.text is not None:
        return Observation(text=task.text + text, tools=tools)
    messages = list(task.messages or ())
    if messages and messages[-1]["role"] == "user":
        joined = f"{messages[-1]['content']}\n\n{text}"
        return Observation(messages=[*messages[:-1], {**messages[-1], "content": joined}], tools=tools)
    return Observation(messages=[*messages, {"role": "user", "content": text}], tools=tools)
