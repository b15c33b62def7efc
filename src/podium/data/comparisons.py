# SPDX-License-Identifier: Apache-2.0
"""Rows with a judgement: chosen and rejected completions of a prompt, a completion with a label, a text with a
score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from podium.data.kinds import Message, check_values, parse_messages, parse_prompt_completion, quoted
from podium.data.rows import Row
from podium.errors import BadRowError

Shape = Literal["documents", "pairs", "labels", "ranked", "scores"]
"""The content of examples: plain documents; chosen and rejected completions; a completion with a label; chosen and
rejected conversations to be scored, with a margin; a conversation with its score."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The texts of a row, each as values of a separate row (mostly `prompt` with `completion`), and their judgement. In
    a pair the first text is the preferred one."""

    texts: tuple[Mapping[str, Any], ...]
    value: float = 0.0


def judged(values: Mapping[str, Any], shape: Shape, row: Row) -> Judged:
    """Splits the row into texts and judgement. A row of another shape raises a BadRowError that names it."""
    match shape:
        case "documents":
            return Judged(texts=(values,))
        case "pairs":
            return Judged(texts=_pair(values, row))
        case "ranked":
            return Judged(texts=_pair(values, row), value=_number(values, "margin", row, default=0.0))
        case "labels":
            return Judged(texts=(_completed(values, row),), value=_label(values, row))
        case "scores":
            score = _number(values, "score", row)
            return Judged(texts=({key: value for key, value in values.items() if key != "score"},), value=score)


def check_judged(values: Mapping[str, Any], columns: Mapping[str, str], shape: Shape, row: Row) -> None:
    """Raises an error unless the row is of this shape and well formed; needs no tokenizer."""
    for text in judged(values, shape, row).texts:
        check_values(text, columns, row)


def _pair(values: Mapping[str, Any], row: Row) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    for name in ("chosen", "rejected"):
        if values.get(name) is None:
            raise BadRowError(
                f"{row.where}: expected `prompt`, `chosen` and `rejected`, and there is no `{name}`. The row has: "
                f"{', '.join(values) or 'nothing'}. Rename columns with the source's `columns`."
            )
    prompt, chosen, rejected = values.get("prompt"), values["chosen"], values["rejected"]
    if prompt is None or _is_conversation(chosen) or _is_conversation(rejected):
        shared_prompt, chosen, rejected = _shared_prompt(chosen, rejected, row)
        if prompt is not None:
            _require_same_prompt(prompt, shared_prompt, row)
        prompt = shared_prompt
    shared = {"prompt": prompt, **({"tools": values["tools"]} if values.get("tools") else {})}
    texts = ({**shared, "completion": chosen}, {**shared, "completion": rejected})
    # Compared as they are read: a column of messages may have fields of nulls that the other one lacks.
    first, second = (_completion(text, name, row) for name, text in zip(("chosen", "rejected"), texts, strict=True))
    if first == second:
        raise BadRowError(
            f"{row.where}: `chosen` and `rejected` are the same, so there is nothing to prefer. Remove the row, or "
            "drop it with the source's `map`."
        )
    return texts


def _is_conversation(value: Any) -> bool:
    """Whether messages begin with a question, and not with an answer."""
    is_list = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)
    return is_list and value[0].get("role") in ("system", "developer", "user")


def _require_same_prompt(prompt: Any, shared: list[Message], row: Row) -> None:
    """Checks whole conversations beside a `prompt`, as some datasets have them: both must repeat the prompt."""
    user_texts = [message.get("content") for message in shared if message["role"] == "user"]
    if prompt in user_texts if isinstance(prompt, str) else parse_messages(prompt, "prompt", row) == shared:
        return
    raise BadRowError(
        f"{row.where}: `chosen` and `rejected` are whole conversations, and `prompt` is not what they begin with. "
        "Leave `prompt` out with the source's `map`, or give completions alone."
    )


def _shared_prompt(chosen: Any, rejected: Any, row: Row) -> tuple[Any, Any, Any]:
    """Whole conversations: they differ in the last turn, and everything before it is their shared prompt."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise BadRowError(
            f"{row.where}: `chosen` or `rejected` is text where a whole conversation is needed, so where the "
            "completion begins is ambiguous. Give a `prompt` column with two texts, or two lists of messages."
        )
    first, second = parse_messages(chosen, "chosen", row), parse_messages(rejected, "rejected", row)
    if first[:-1] != second[:-1]:
        differing = next(
            (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
            min(len(first), len(second)),
        )
        raise BadRowError(
            f"{row.where}: the prompts of `chosen` and `rejected` differ at message {differing}; a pair compares two "
            "answers to the same conversation. Fix the row, or drop it with the source's `map`."
        )
    for name, messages in (("chosen", first), ("rejected", second)):
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise BadRowError(
                f"{row.where}: `{name}` is a whole conversation and must end with an assistant turn that answers what "
                "comes before it. Give both, or completions alone beside a `prompt`."
            )
    return first[:-1], first[-1:], second[-1:]


def _completed(values: Mapping[str, Any], row: Row) -> Mapping[str, Any]:
    for name in ("prompt", "completion"):
        if values.get(name) is None:
            raise BadRowError(
                f"{row.where}: expected `prompt`, `completion` and `label`, and there is no `{name}`. The row has: "
                f"{', '.join(values) or 'nothing'}. Rename columns with the source's `columns`."
            )
    text = {name: values[name] for name in ("prompt", "completion", "tools") if values.get(name) is not None}
    _completion(text, "completion", row)
    return text


def _completion(text: Mapping[str, Any], name: str, row: Row) -> str | list[Message]:
    """The completion, which must not be empty: an empty one has no token to prefer."""
    _, completion = parse_prompt_completion(text, row, completion=name)
    if isinstance(completion, str):
        is_empty = not completion.strip()
    else:
        if completion[0]["role"] != "assistant":
            raise BadRowError(
                f"{row.where}: `{name}` begins with a turn of {completion[0]['role']}; a completion is what the "
                "assistant answers. Move what comes before it to the `prompt`."
            )
        is_empty = all(not str(turn.get("content") or "").strip() and not turn.get("tool_calls") for turn in completion)
    if is_empty:
        raise BadRowError(f"{row.where}: `{name}` is empty. Remove the row, or drop it with the source's `map`.")
    return completion


def _label(values: Mapping[str, Any], row: Row) -> float:
    label = values.get("label")
    if isinstance(label, str) and label.strip().lower() in ("true", "false"):
        label = label.strip().lower() == "true"  # CSV has no booleans
    if label is None:
        raise BadRowError(
            f"{row.where}: expected `prompt`, `completion` and `label`, and there is no `label`. The row has: "
            f"{', '.join(values) or 'nothing'}. Rename columns with the source's `columns`."
        )
    if label not in (True, False, 0, 1):
        raise BadRowError(
            f"{row.where}: `label` must be true (desirable) or false, found {quoted(label)}. Make it so with the "
            "source's `map`."
        )
    return float(label)


def _number(values: Mapping[str, Any], name: str, row: Row, default: float | None = None) -> float:
    value = values.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise BadRowError(
            f"{row.where}: there is no `{name}`. The row has: {', '.join(values) or 'nothing'}. Rename the column with "
            "the source's `columns`."
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise BadRowError(
            f"{row.where}: `{name}` must be a finite number, found {quoted(value)}. Rename the column with the "
            "source's `columns`, or fix it with its `map`."
        )
    return number
