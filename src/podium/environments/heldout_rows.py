# SPDX-License-Identifier: Apache-2.0
"""Checks before a run that held-out rows have the columns that score them. Parses files of rewards, runs none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from podium.data.tasks import Task
from podium.environments.signatures import is_filled
from podium.errors import DataError, RecipeError
from podium.recipe import FunctionReward, JudgeReward, RewardSection, VerifierReward, plugins

REFERENCE = "reference"
_OF_THE_REFERENCE = ("reference", "references", "ground_truth", "ground_truths")


def require_scorable(
    rewards: Sequence[RewardSection], key: str, heldout: Sequence[Task], train: Sequence[Task]
) -> None:
    """Raises an error if no held-out row of a source has a column that a reward reads and training rows have.

    `key`: where the recipe has these rewards. `train`: some training rows."""
    by_source: dict[str, list[Task]] = {}
    for task in heldout:
        by_source.setdefault(task.source, []).append(task)
    for index, reward in enumerate(rewards):
        for name, column in _columns_read(reward, f"{key}.{index}"):
            if not any(_has(task, column) for task in train) and not isinstance(reward, VerifierReward | JudgeReward):
                continue  # the function copes without it
            for source, tasks in by_source.items():
                if not any(_has(task, column) for task in tasks):
                    raise DataError(
                        f"data.heldout: {tasks[0].where}: no row of {source} has a `{column}`, which {name} "
                        f"({key}.{index}) reads, so no answer could be scored. The rows have: "
                        f"{', '.join(map(str, tasks[0].row))}. Add the column, rename one in the source's `columns`, "
                        "or score held-out answers in another way with evaluation.generation.score."
                    )


def _columns_read(reward: RewardSection, key: str) -> Iterator[tuple[str, str]]:
    """(name of the reward, column) for each column that the reward cannot do without, as far as its file tells."""
    match reward:
        case VerifierReward(verifier="code"):  # it reads the reference where the row has no tests
            if isinstance(column := reward.options.get("tests"), str):
                yield reward.verifier, column
        case VerifierReward():
            yield reward.verifier, REFERENCE
        case JudgeReward() if reward.judge.compare == "reference":
            yield reward.metric_name, REFERENCE
        case FunctionReward():
            with suppress(RecipeError):  # a function that cannot be found is reported elsewhere
                function = plugins.outline(reward.function, f"{key}.function")
                if function is not None:
                    yield from ((reward.function.name, column) for column in _needed(function, reward.options))


def _needed(function: plugins.Outline, options: Mapping[str, object]) -> Iterator[str]:
    for name in function.required:
        if name in _OF_THE_REFERENCE:
            yield REFERENCE
        elif name not in options and not is_filled(name):
            yield name  # in TRL's style, a column of the rows
    yield from function.subscripts


def _has(task: Task, column: str) -> bool:
    return task.reference is not None if column == REFERENCE else task.row.get(column) is not None
