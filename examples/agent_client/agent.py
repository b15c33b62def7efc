# SPDX-License-Identifier: Apache-2.0
"""A calculator agent as a plain client of OpenAI's API: it knows a base URL and a key, and nothing of training.

It uses the `openai` package where that is installed, else the standard library."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Works out a sum, difference or product of whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for instance 17*23"}},
            "required": ["expression"],
        },
    },
}


def solve(task: Any, base_url: str, api_key: str) -> None:
    """Asks the question, and runs the calculator if the model calls it. The recipe's reward grades the last answer."""
    messages = [dict(message) for message in task.messages]
    message = answer_to(messages, base_url, api_key)
    if message.get("tool_calls"):
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": result_of(call["function"])}
            for call in message["tool_calls"]
        ]
        answer_to([*messages, message, *results], base_url, api_key)


def answer_to(messages: list[dict[str, Any]], base_url: str, api_key: str) -> dict[str, Any]:
    """The model's next message."""
    body = {"model": "policy", "messages": messages, "tools": [TOOL]}
    if importlib.util.find_spec("openai") is not None:
        from openai import OpenAI

        with OpenAI(base_url=base_url, api_key=api_key) as client:
            found = client.chat.completions.create(**body).choices[0].message
            return {key: value for key, value in found.model_dump().items() if value is not None}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response)["choices"][0]["message"])


def result_of(function: dict[str, Any]) -> str:
    """The result of a call as text. What the model wrote may be anything."""
    try:
        expression = json.loads(function["arguments"])["expression"].replace(" ", "")
        sign = next(sign for sign in "+-*" if sign in expression[1:])
        left, right = map(int, expression.split(sign, 1))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return str({"+": left + right, "-": left - right, "*": left * right}[sign])
