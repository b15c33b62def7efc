# SPDX-License-Identifier: Apache-2.0
"""Checks before a run that training rows have the columns that rewards take as parameters. Parses files of rewards,
runs none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from podium.data.surveying import SourceRows
from podium.data.tasks import TaskReader
from podium.environments.rewards import declared_reward
from podium.errors import DataError
from podium.observe.row_progress import RowProgress
from podium.recipe import FunctionReward, OnPolicyRecipe

# Rows of each source that are looked at for a column which the first ones do not have.
_MOST_ROWS = 2000


def require_reward_columns(recipe: OnPolicyRecipe) -> None:
    """Raises a DataError about a parameter of a reward function that no column of data.train fills. In TRL's style
    parameters are columns; `declared_reward` checks the other styles, which do not read columns by name."""
    for index, reward in enumerate(recipe.reward):
        declared = declared_reward(reward, f"reward.{index}") if isinstance(reward, FunctionReward) else None
        if declared is None or not declared.signature.required:
            continue
        missing = list(declared.signature.required)
        columns: dict[str, None] = {}
        for names in _column_names(recipe):
            columns.update(names)
            missing = [name for name in missing if name not in columns]
            if not missing:
                break
        if missing and columns:
            raise DataError(
                f"reward.{index}.function: {declared.text} needs `{missing[0]}`, and nothing fills it: it is no "
                f"column of data.train, no option, and none of {', '.join(declared.signature.names)}. The rows have: "
                f"{', '.join(columns)}. Rename a column in the source's `columns`, set "
                f"reward.{index}.options.{missing[0]}, or give the parameter a default."
            )


def _column_names(recipe: OnPolicyRecipe) -> Iterator[dict[str, None]]:
    """The columns of each training row, after the source's `columns` and `map`."""
    for index, section in enumerate(recipe.data.train):
        reader = TaskReader([section], "data.train", needs_prompt=recipe.needs_prompts)
        rows = SourceRows(section, f"data.train.{index}", _MOST_ROWS, RowProgress(None))
        for task in rows.results(partial(reader.read, 0)):
            if task is not None:
                yield dict.fromkeys(task.row)
