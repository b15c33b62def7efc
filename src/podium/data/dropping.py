# SPDX-License-Identifier: Apache-2.0
"""Says why sources give no document at all, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podium.data.chat import Dropped
from podium.errors import DataError

_WHAT_TO_DO = {
    Dropped.NO_ANSWER: "Only assistant turns are trained: add the answers as assistant turns, or set data.trained to "
    "everything. Prompts without answers are data of on-policy programs, such as grpo.",
    Dropped.OVERLONG: "Raise data.max_length, or set data.overlong to truncate.",
    Dropped.UNTRAINED: "Look at the completions, which may be empty, and at data.trained and data.max_length.",
    Dropped.BY_MAP: "Let the source's `map` return some rows.",
}


def reasons_of(dropped: Mapping[Dropped, int]) -> str:
    """Why rows were dropped, with counts."""
    return ", ".join(f"{count} dropped ({reason.value})" for reason, count in dropped.items() if count)


def no_trained_token(
    name: str, dropped: Mapping[Dropped, int], first_skipped: Sequence[str] = (), *, key: str | None = None
) -> DataError:
    """The error for sources whose rows were all dropped."""
    advice = [_WHAT_TO_DO[reason] for reason, count in dropped.items() if count]
    if first_skipped:
        advice.append(f"The first row that was skipped: {first_skipped[0]}")
    where = "" if key is None else f"{key}: "
    return DataError(
        f"{where}no trained token in the whole of {name}: {reasons_of(dropped) or 'none of its rows could be used'}. "
        + " ".join(advice)
    )
