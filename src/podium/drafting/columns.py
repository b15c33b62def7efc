# SPDX-License-Identifier: Apache-2.0
"""Looks at a data file: its rows and columns, which program they fit, and which columns are read under which names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from podium.data import storage
from podium.data.files import format_of, known_suffixes
from podium.data.rows import Row
from podium.data.sources import open_source
from podium.data.tasks import REFERENCE_COLUMNS
from podium.errors import DataError
from podium.recipe import SourceSection

Method = Literal["sft", "dpo", "kto", "reward_model", "distill", "grpo", "ppo", "expert_iteration", "on_policy_distill"]
METHODS: tuple[Method, ...] = (
    "sft", "dpo", "kto", "reward_model", "distill", "grpo", "ppo", "expert_iteration", "on_policy_distill",
)  # fmt: skip
ON_POLICY: tuple[Method, ...] = ("grpo", "ppo", "expert_iteration", "on_policy_distill")

# Names that other datasets have for a column; the first one that a file has is read.
_PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input")
_MESSAGES = ("messages", "conversations", "conversation")
_COMPLETIONS = ("completion", "response", "output")
_ANSWERS = ("answer", "solution", "target")
# Rows that are measured, and rows that are counted.
SAMPLE_ROWS, _COUNTED_ROWS = 2000, 200_000
_EXPECTED = """  sft: `messages`, `prompt` with `completion`, or `text`
  dpo: `chosen` and `rejected`, with or without `prompt`
  kto: `prompt`, `completion` and `label`
  reward_model: `chosen` and `rejected`, or `score` beside `messages` or `text`
  grpo: `prompt` with `answer`"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataFacts:
    """The rows of a data file. `rows` are the first ones."""

    path: str
    rows: Sequence[Row]
    num_rows: int
    is_counted: bool  # False: there are more rows than were counted
    columns: tuple[str, ...]  # those that have a value in some of the first rows

    @property
    def count(self) -> str:
        """The number of rows for people."""
        return f"{self.num_rows} rows" if self.is_counted else f"more than {self.num_rows} rows"

    def first(self, names: Sequence[str]) -> str | None:
        """The first of these columns that the file has."""
        return next((name for name in names if name in self.columns), None)


def read_data(path: str) -> DataFacts:
    """Reads the first rows and counts the others. A file that is missing, empty or unreadable is an error."""
    is_file = format_of(path) is not None and not storage.is_glob(path)
    if is_file and not storage.is_url(path) and not storage.exists(path):
        raise DataError(
            f"--data: there is no file {path}. Give a file with one row per example ({known_suffixes()}); paths are "
            "relative to the folder you start podium in."
        )
    source = open_source(SourceSection(path=path), "--data")
    rows: list[Row] = []
    num_rows = 0
    for block in range(source.num_blocks):
        block_rows = source.read_block(block)
        rows += block_rows[: SAMPLE_ROWS - len(rows)]
        num_rows += len(block_rows)
        if num_rows >= _COUNTED_ROWS and block < source.num_blocks - 1:
            return _facts(path, rows, num_rows, is_counted=False)
    return _facts(path, rows, num_rows, is_counted=True)


def _facts(path: str, rows: Sequence[Row], num_rows: int, *, is_counted: bool) -> DataFacts:
    columns = {name: None for row in rows for name, value in row.values.items() if value is not None}
    return DataFacts(path=path, rows=rows, num_rows=num_rows, is_counted=is_counted, columns=tuple(columns))


def fitting_method(data: DataFacts) -> Method:
    """The method that the columns fit; columns that fit none are an error."""
    has_document = data.first((*_MESSAGES, "text", *_COMPLETIONS)) is not None
    if data.first(("chosen",)) and data.first(("rejected",)):
        return "dpo"
    if data.first(("label",)) and data.first(_PROMPTS) and data.first(_COMPLETIONS):
        return "kto"
    if data.first(("score",)) and has_document:
        return "reward_model"
    messages = data.first(_MESSAGES)
    if messages is not None:
        return "sft" if _ends_with_answer(data.rows[0].values[messages]) else "grpo"
    if data.first(_PROMPTS):
        return "sft" if data.first(_COMPLETIONS) else "grpo"
    if data.first(("text",)):
        return "sft"
    raise DataError(
        f"--data: no program is known for the columns of {data.path}: {_listed(data.columns)}. Rename them to what "
        f"one of these reads:\n{_EXPECTED}"
    )


def renamed_columns(data: DataFacts, method: Method) -> dict[str, str]:
    """The source's `columns`: Podium's name -> the file's, for what this method reads."""
    pairs = dict(_needed(data, method))
    missing = [name for name, column in pairs.items() if column is None]
    if missing:
        raise DataError(
            f"--data: {method} needs {_listed(missing)}, and {data.path} has the columns {_listed(data.columns)}. "
            f"Rename a column, or choose another program. Programs read:\n{_EXPECTED}"
        )
    kinds = ("messages", "text", *(("prompt",) if method in ON_POLICY or "completion" in data.columns else ()))
    is_ambiguous = sum(kind in data.columns for kind in kinds) > 1
    return {name: column for name, column in pairs.items() if column and (column != name or is_ambiguous)}


def _needed(data: DataFacts, method: Method) -> Iterator[tuple[str, str | None]]:
    """(Podium's name, the file's column or None) of every column that the method reads."""
    is_paired = method == "dpo" or (method == "reward_model" and "score" not in data.columns)
    if is_paired:
        yield from ((name, data.first((name,))) for name in ("chosen", "rejected"))
        prompt = data.first(_PROMPTS)
        if prompt is not None:
            yield "prompt", prompt
        return
    if method == "kto":
        yield from _prompt_and_completion(data)
        yield "label", data.first(("label",))
        return
    if method == "reward_model":
        yield "score", "score"
    yield from _document(data, method)


def _document(data: DataFacts, method: Method) -> Iterator[tuple[str, str | None]]:
    messages, prompt, completion = (data.first(names) for names in (_MESSAGES, _PROMPTS, (*_COMPLETIONS, *_ANSWERS)))
    if messages is not None:
        yield "messages", messages
    elif method in ON_POLICY and prompt is not None:
        yield "prompt", prompt
    elif prompt is not None and completion is not None:
        yield from _prompt_and_completion(data)
    elif "text" in data.columns:
        yield "text", "text"
    else:
        yield ("prompt", None) if method in ON_POLICY else ("messages", None)


def _prompt_and_completion(data: DataFacts) -> Iterator[tuple[str, str | None]]:
    yield "prompt", data.first(_PROMPTS)
    yield "completion", data.first((*_COMPLETIONS, *_ANSWERS))


def reference_column(data: DataFacts) -> str | None:
    """Where the right answer is, for rewards: a column, verl's `reward_model.ground_truth`, or of chats the last
    turn."""
    messages = data.first(_MESSAGES)
    for name in REFERENCE_COLUMNS:
        if name == "reward_model":
            if any(_ground_truth(row.values.get(name)) is not None for row in data.rows):
                return "reward_model.ground_truth"
        elif name in data.columns:
            return name
    return messages if messages and _ends_with_answer(data.rows[0].values[messages]) else None


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None


def unread_columns(data: DataFacts, method: Method) -> list[str]:
    """Columns that neither the program nor a reward needs."""
    read = {column for _, column in _needed(data, method)}
    read |= {"tools", "data_source", "margin"}
    if method in ON_POLICY:
        read |= set(REFERENCE_COLUMNS)
    return [name for name in data.columns if name not in read]


def _ends_with_answer(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list | tuple) and messages else None
    return not isinstance(last, Mapping) or last.get("role") == "assistant"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
