# SPDX-License-Identifier: Apache-2.0
"""The episodes of one group with their tokens. An answer has a bounded size, however many and long they are: each gets
its share, says what was left out, and can be asked for alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.ui.answers import PageError
from podium.ui.rollout_reading import messages_of, unreadable

# Of one answer: episodes, their tokens, and characters of their messages. A token is some 70 bytes of it.
_MOST_EPISODES, _MOST_TOKENS, _MOST_CHARACTERS = 256, 200_000, 4_000_000
# Tokens of one episode: the page shows no more at once.
_MOST_OF_EPISODE = 20_000
# Characters of other texts of an episode, and of the text of a token.
_MOST_TEXT, _MOST_TOKEN_TEXT = 20_000, 1_000
# Rows whose tokens are in memory at once.
_BATCH = 32
_PER_TOKEN = (
    "tokens", "texts", "loss_mask", "log_probs", "versions", "advantages", "reference_log_probs", "teacher_log_probs",
    "values", "returns",
)  # fmt: skip
_PER_EPISODE = (
    "step", "group", "sample", "source", "row", "reference", "messages", "prompt_tokens", "reward", "rewards", "ending",
    "trained", "state", "error",
)  # fmt: skip
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an episode is in its file."""

    part: int  # row group
    row: int  # in it
    sample: int


def read_group(path: Path, group: int, *, sample: int | None, first_episode: int, first_token: int) -> Json:
    """`episodes` in the order of their samples, from `first_episode` on; `left_out`: how many of the group come after
    them. `sample`: only that one. Tokens from `first_token` on."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            places = _places(file, group)
            chosen = [each for each in places if sample is None or each.sample == sample]
            shown = chosen[first_episode : first_episode + _MOST_EPISODES]
            rows = _rows(file, shown, first_token)
    except Exception as error:  # pyarrow raises many kinds
        raise unreadable(path, error) from error
    if not places:
        raise PageError(404, f"{path} has no group {group}. Go back to the list of rollouts.")
    if not chosen:
        raise PageError(404, f"group {group} of {path} has no sample {sample}. Leave sample= out to see which it has.")
    try:
        episodes = _bounded_messages(rows)
    except (TypeError, ValueError) as error:
        raise unreadable(path, error) from error
    left_out = max(0, len(chosen) - first_episode - len(shown))
    return {"episodes": episodes, "first_episode": first_episode, "left_out": left_out}


def _places(file: Any, group: int) -> list[_Place]:
    names = file.schema_arrow.names
    if "group" not in names:
        raise ValueError("it has no column `group`")
    wanted = [name for name in ("group", "sample") if name in names]
    found = []
    for part in range(file.num_row_groups):
        table = file.read_row_group(part, columns=wanted)
        samples = table.column("sample").to_pylist() if "sample" in wanted else [0] * table.num_rows
        for row, (each, number) in enumerate(zip(table.column("group").to_pylist(), samples, strict=True)):
            if each == group:
                found.append(_Place(part, row, number or 0))
    return sorted(found, key=lambda place: place.sample)


def _rows(file: Any, places: Sequence[_Place], first_token: int) -> list[Json]:
    """The rows at these places, with no more tokens than one answer may have."""
    present = set(file.schema_arrow.names)
    rows: dict[_Place, Json] = {place: {} for place in places}
    for name in _PER_EPISODE:
        if name in present:
            for place, value in _values(file, places, name):
                rows[place][name] = _plain(name, value.as_py())
    counted = next((name for name in ("loss_mask", "tokens") if name in present), None)
    if counted is None:
        return list(rows.values())
    lengths = {place: _length(value) for place, value in _values(file, places, counted)}
    rests = {place: max(0, count - first_token) for place, count in lengths.items()}
    share = min(_MOST_OF_EPISODE, fair_share(list(rests.values()), _MOST_TOKENS))
    for name in _PER_TOKEN:
        if name in present:
            for place, value in _values(file, places, name):
                rows[place][name] = _slice(value, first_token, share)
    for place, row in rows.items():
        row["num_tokens"] = lengths[place]
        if first_token:
            row["first_token"] = min(first_token, lengths[place])
        if rests[place] > share:
            row["tokens_left_out"] = rests[place] - share
    return list(rows.values())


def _values(file: Any, places: Sequence[_Place], name: str) -> Iterator[tuple[_Place, Any]]:
    """One column at these places. Only a few rows of it are in memory at once."""
    by_part: dict[int, list[_Place]] = {}
    for place in places:
        by_part.setdefault(place.part, []).append(place)
    for part, wanted in by_part.items():
        begin, rest = 0, sorted(wanted, key=lambda place: place.row)
        for batch in file.iter_batches(batch_size=_BATCH, row_groups=[part], columns=[name]):
            while rest and rest[0].row < begin + batch.num_rows:
                place = rest.pop(0)
                yield place, batch.column(0)[place.row - begin]
            begin += batch.num_rows
            if not rest:
                break


def _length(value: Any) -> int:
    return len(value.values) if value.is_valid else 0


def _slice(value: Any, first: int, count: int) -> list[Any] | None:
    if not value.is_valid:
        return None
    found: list[Any] = value.values.slice(first, count).to_pylist()
    return [each[:_MOST_TOKEN_TEXT] if isinstance(each, str) else each for each in found]


def _plain(name: str, value: Any) -> Any:
    if name == "rewards":
        return dict(value or ())
    return value[:_MOST_TEXT] if isinstance(value, str) and name != "messages" else value


def fair_share(sizes: Sequence[int], budget: int) -> int:
    """The most that each of several may have so that all together have at most the budget: the short ones are whole,
    and the long ones get equal parts of what is left."""
    rest = budget
    for number, size in enumerate(sorted(sizes)):
        share = rest // (len(sizes) - number)
        if size > share:
            return share
        rest -= size
    return max(sizes, default=0)


def _bounded_messages(rows: Sequence[Json]) -> list[Json]:
    """Messages as values, and not more of them than one answer may have."""
    sizes = [len(text) if isinstance(text := row.get("messages"), str) else 0 for row in rows]
    share = fair_share(sizes, _MOST_CHARACTERS)
    found = []
    for row, size in zip(rows, sizes, strict=True):
        messages = messages_of(row.get("messages"))
        row = {**row, "messages": messages, "rewards": row.get("rewards") or {}}
        if size > share:
            row["messages"] = _cut(messages, share)
            row["characters_left_out"] = size - share
        found.append(row)
    return found


def _cut(messages: Sequence[Any], most: int) -> list[Any]:
    """The first messages, the last of them cut."""
    kept: list[Any] = []
    for each in messages:
        content = each.get("content") if isinstance(each, Mapping) else None
        size = len(content) if isinstance(content, str) else len(str(each))
        if size > most:
            if isinstance(each, Mapping) and isinstance(content, str):
                kept.append({"role": each.get("role"), "content": content[:most] + "…"})
            break
        kept.append(each)
        most -= size
    return kept
