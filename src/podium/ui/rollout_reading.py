# SPDX-License-Identifier: Apache-2.0
"""Reads kept rollouts: Parquet files of one step each, in the folder `rollouts` of a run. Columns that a file does not
have are empty, and a file that is not readable is an error that names it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.ui.answers import PageError

FOLDER = "rollouts"
_NAME = re.compile(r"step-(\d{1,12})\.parquet")
# Characters of prompt and answer in a row of the table.
PREVIEW = 120
# Of one episode as the page gets it: a longer one is cut, and says so.
_MOST_TOKENS, _MOST_EPISODES = 50_000, 256
_PER_TOKEN = (
    "tokens", "texts", "loss_mask", "log_probs", "versions", "advantages", "reference_log_probs", "teacher_log_probs",
    "values", "returns",
)  # fmt: skip
_SMALL = ("group", "sample", "source", "row", "prompt_tokens", "reward", "rewards", "ending", "trained")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepFile:
    """The file of one step."""

    step: int
    path: Path
    stamp: str  # differs if it was replaced


def step_files(run: Path) -> dict[int, Path]:
    """Step -> file, in ascending order. Links are left out: they may lead out of the folder."""
    try:
        with os.scandir(run / FOLDER) as entries:
            found = {
                int(name[1]): Path(each.path)
                for each in entries
                if (name := _NAME.fullmatch(each.name)) is not None and not each.is_symlink()
            }
    except OSError:
        return {}
    return dict(sorted(found.items()))


def stamp_of(path: Path) -> str | None:
    """Identifies the content of a file; None if it is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def num_rows(path: Path) -> int:
    """Episodes of a file, from its footer."""
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except Exception:
        return 0


def summary_rows(path: Path, step: int, *, texts: bool = False) -> list[Json]:
    """All episodes of a file without their tokens. `texts`: with the whole messages as `messages`, to search in."""
    columns = _columns(path, (*_SMALL, "messages", "loss_mask"))
    try:
        return _rows(columns, step, texts=texts)
    except (TypeError, ValueError) as error:  # columns of other types than those of a run
        raise _unreadable(path, error) from error


def _rows(columns: Mapping[str, list[Any]], step: int, *, texts: bool) -> list[Json]:
    rows = []
    count = len(next(iter(columns.values()), ()))
    lengths = columns.get("loss_mask") or [None] * count
    for at in range(count):
        row = {name: columns[name][at] if name in columns else None for name in _SMALL}
        prompt_tokens = row.pop("prompt_tokens") or 0
        length = lengths[at]
        messages = columns["messages"][at] if "messages" in columns else None
        rows.append({
            **row,
            "step": step,
            "group": at if row["group"] is None else row["group"],
            "sample": 0 if row["sample"] is None else row["sample"],
            "rewards": dict(row["rewards"] or ()),
            "length": None if length is None else max(0, length - prompt_tokens),
            "preview": preview_of(messages),
            **({"messages": messages or ""} if texts else {}),
        })  # fmt: skip
    return rows


def _columns(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns that the file has. Of `loss_mask` only the lengths: it is the smallest column with one value per
    token."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        present = set(file.schema_arrow.names)
        counted = next((name for name in ("loss_mask", "tokens") if name in present), None)
        wanted = [name for name in names if name in present and name != "loss_mask"]
        table = file.read(columns=[*wanted, *([counted] if counted else [])])
        columns = {name: table.column(name).to_pylist() for name in wanted}
        if counted is not None:
            columns["loss_mask"] = pc.list_value_length(table.column(counted)).to_pylist()
    except Exception as error:  # pyarrow raises many kinds
        raise _unreadable(path, error) from error
    return columns


def _unreadable(path: Path, error: Exception) -> PageError:
    if isinstance(error, FileNotFoundError):
        return PageError(404, f"{path} is gone: a resumed run has removed it. Reload the list of rollouts.")
    reason = str(error).splitlines()[0] if str(error) else ""
    return PageError(422, f"{path} cannot be read ({type(error).__name__}: {reason}). Remove it, or restore it.")


def episodes(path: Path, group: int) -> Json:
    """All episodes of one group with everything that is known of them."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        found: list[Json] = []
        for part in range(file.num_row_groups):
            if "group" not in file.schema_arrow.names:
                raise ValueError("it has no column `group`")
            mask = pc.equal(file.read_row_group(part, columns=["group"]).column("group"), group)
            if pc.any(mask).as_py():
                found += file.read_row_group(part).filter(mask).to_pylist()
    except Exception as error:
        raise _unreadable(path, error) from error
    if not found:
        raise PageError(404, f"{path} has no group {group}. Go back to the list of rollouts.")
    try:
        found.sort(key=lambda row: row.get("sample") or 0)
        shown = [_whole(row) for row in found[:_MOST_EPISODES]]
    except (TypeError, ValueError) as error:
        raise _unreadable(path, error) from error
    return {"episodes": shown, "left_out": len(found) - len(shown)}


def _whole(row: Mapping[str, Any]) -> Json:
    """One row. Messages as values; only the first tokens of a very long episode."""
    whole = dict(row)
    whole["messages"] = _messages(row.get("messages"))
    whole["rewards"] = dict(row.get("rewards") or ())
    tokens = row.get("tokens") or ()
    if len(tokens) > _MOST_TOKENS:
        whole |= {name: row[name][:_MOST_TOKENS] for name in _PER_TOKEN if row.get(name) is not None}
        whole["tokens_left_out"] = len(tokens) - _MOST_TOKENS
    return whole


def _messages(text: Any) -> list[Any]:
    """The messages of an episode; a text that is no JSON is shown as it is."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return [{"role": "unknown", "content": text}]
    return found if isinstance(found, list) else []


def preview_of(messages: Any) -> str:
    """The last prompt and the beginning of the last answer in one line."""
    found = [each for each in _messages(messages) if isinstance(each, Mapping)]
    asked = next((each for each in reversed(found) if each.get("role") == "user"), None)
    answered = next((each for each in reversed(found) if each.get("role") == "assistant"), None)
    parts = [_beginning(each) for each in (asked, answered) if each is not None]
    return " → ".join(parts) if parts else " ".join(_beginning(each) for each in found)[:PREVIEW]


def _beginning(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    line = " ".join(text[: 4 * PREVIEW].split())
    return line if len(line) <= PREVIEW else line[: PREVIEW - 1] + "…"


def texts_of(messages: str) -> Iterator[str]:
    """What one can search in: the contents, not the JSON around them."""
    for each in _messages(messages):
        if isinstance(each, Mapping):
            content = each.get("content")
            yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            if each.get("tool_calls"):
                yield json.dumps(each["tool_calls"], ensure_ascii=False)
