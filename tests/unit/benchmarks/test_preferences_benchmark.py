# SPDX-License-Identifier: Apache-2.0
"""The parts of the preference benchmark that compute something: its pairs, its table, its check of equal work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import preferences
from preferences_task import ANSWER_MOST, MAX_TOKENS, PROMPT_MOST, SideResult, Task, make_task, pair_rows


def make(folder: Path) -> Task:
    return Task(folder=str(folder), pairs=2, steps=3, warmup=1)


def result(
    *wall_s: float,
    cpu_s: float = 1.0,
    losses: tuple[float, ...] = (0.6931, 0.7),
    tokens: tuple[int, ...] = (10, 20),
    side: str = "TRL",
) -> SideResult:
    return SideResult(
        side=side,
        wall_s=list(wall_s),
        cpu_s=[cpu_s] * len(wall_s),
        losses=list(losses),
        tokens=list(tokens),
        places=[30, 40],
    )


# --- the task ---


def test_the_answers_of_a_pair_share_a_prompt_and_differ_in_length_within_the_limits() -> None:
    rows = pair_rows(200)
    lengths = {side: [len(row[side].split()) for row in rows] for side in ("prompt", "chosen", "rejected")}
    assert max(lengths["prompt"]) <= PROMPT_MOST
    assert max(*lengths["chosen"], *lengths["rejected"]) == ANSWER_MOST - 1  # the end token comes behind
    assert PROMPT_MOST + ANSWER_MOST == MAX_TOKENS
    assert sum(one != other for one, other in zip(lengths["chosen"], lengths["rejected"], strict=True)) > 180
    assert all(row["chosen"].startswith(" w") for row in rows)
    assert rows == pair_rows(200)


def test_the_three_forms_of_the_data_hold_the_same_pairs(tmp_path: Path) -> None:
    task = make(tmp_path)
    make_task(task)
    pairs, ended, documents = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (task.pairs_file, task.ended_pairs_file, task.documents_file)
    )
    assert len(pairs) == len(ended) == 6
    assert [row["completion"] for row in documents] == [pair[side] for pair in pairs for side in ("chosen", "rejected")]
    assert [row["prompt"] for row in documents[::2]] == [pair["prompt"] for pair in pairs]
    assert ended[0] == {side: text + (" <end>" if side != "prompt" else "") for side, text in pairs[0].items()}


def test_a_task_and_a_result_come_back_from_their_files(tmp_path: Path) -> None:
    task, found = make(tmp_path), result(1.5, 2.5)
    task.write(tmp_path / "task.json")
    found.write(tmp_path / "result.json")
    assert Task.read(tmp_path / "task.json") == task
    assert SideResult.read(tmp_path / "result.json") == found


# --- the table ---


def test_rates_are_steps_over_the_sum_of_their_times() -> None:
    found = result(0.5, 1.5, cpu_s=0.25)
    assert (found.steps_per_s, found.steps_per_cpu_s) == (1.0, 4.0)


def test_the_advantage_is_the_median_of_the_turns_own_ratios() -> None:
    # The third turn was disturbed on both sides; a ratio of totals would be 1.75.
    ours = [result(1.0, 1.0), result(1.0, 1.0), result(10.0, 10.0)]
    peers = [result(2.0, 2.0, cpu_s=3.0), result(4.0, 4.0, cpu_s=3.0), result(15.0, 15.0, cpu_s=3.0)]
    assert preferences.advantage(ours, peers) == (2.0, 3.0)


def test_the_table_names_the_advantage_over_every_peer_and_that_the_work_was_the_same(tmp_path: Path) -> None:
    lines = preferences.report(
        make(tmp_path), {"TRL": [result(3.0, 3.0, cpu_s=2.0)], "Podium": [result(1.0, 1.0)]}, same_loss=True
    )
    assert lines[2].endswith("0.6931  0.6966  3.00x, 2.00x")
    assert lines[3].endswith("0.6931  0.6966")
    assert lines[4] == "Same work: tokens and losses agree at every step"


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (result(1.0, tokens=(10, 21)), "NOT THE SAME WORK: step 2 has 20 tokens, and 21 in TRL"),
        (result(1.0, losses=(0.6931, 0.703)), "NOT THE SAME WORK: step 2 has loss 0.7000, and 0.7030 in TRL"),
    ],
)
def test_a_side_that_did_other_work_is_reported(tmp_path: Path, other: SideResult, fault: str) -> None:
    lines = preferences.report(make(tmp_path), {"TRL": [other], "Podium": [result(1.0)]}, same_loss=True)
    assert lines[-1] == fault


def test_fine_tuning_has_another_loss_and_is_compared_by_its_tokens_alone() -> None:
    assert preferences.unlike(result(1.0), result(1.0, losses=(6.2, 6.1)), same_loss=False) == []
    assert len(preferences.unlike(result(1.0), result(1.0, tokens=(9, 20)), same_loss=False)) == 1


def test_every_comparison_has_a_script_and_podium_is_in_it() -> None:
    for sides in preferences.SIDES.values():
        assert preferences.PODIUM in sides
        assert all((preferences.HERE / command[0]).is_file() for command in sides.values())
