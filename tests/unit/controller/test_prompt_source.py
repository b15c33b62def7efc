# SPDX-License-Identifier: Apache-2.0
"""Prompts of a run: too long ones are left out and counted, and a saved position continues exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.made_batches import on_policy_recipe
from helpers.trials import CountingEncoder
from podium.controller.prompts import PromptSource
from podium.data.tasks import IndexedTask
from podium.errors import DataError

# 64 tokens in all, 8 of them for the answer: a prompt of 56 fits, one of 57 does not.
FITS, TOO_LONG = 56, 57


def _written(path: Path, lengths: list[int]) -> Path:
    rows = ({"prompt": "?" * length, "number": number} for number, length in enumerate(lengths))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _source(folder: Path, lengths: list[int], *overrides: str, state: Any = None) -> PromptSource:
    file = _written(folder / "train.jsonl", lengths)
    recipe = on_policy_recipe(f"data.train.0.path={file}", *overrides)
    return PromptSource(recipe, CountingEncoder(), state)  # type: ignore[arg-type]


def _numbers(sampled: list[IndexedTask]) -> list[int]:
    return [each.task.row["number"] for each in sampled]


def test_prompts_come_in_order_and_begin_again(tmp_path: Path) -> None:
    source = _source(tmp_path, [3, 3, 3], "data.shuffle=false")

    sampled = source.take(4)

    assert _numbers(sampled) == [0, 1, 2, 0]
    assert [each.prompt_index for each in sampled] == [0, 1, 2, 3]
    assert source.metrics() == {"prompts/too_long": 0.0, "epoch": 1.0}


def test_a_prompt_without_room_for_an_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    source = _source(tmp_path, [FITS, TOO_LONG, 3, 90], "data.shuffle=false")

    sampled = source.take(3)

    assert _numbers(sampled) == [0, 2, 0]
    # A draw that is left out keeps its number, so that numbers never mean two prompts.
    assert [each.prompt_index for each in sampled] == [0, 2, 4]
    assert source.metrics() == {"prompts/too_long": 2.0, "epoch": 1.0}


@pytest.mark.parametrize(("override", "longest"), [("rollout.max_length=20", 12), ("rollout.max_length=1000", FITS)])
def test_the_shorter_of_the_engines_context_and_the_models_counts(tmp_path: Path, override: str, longest: int) -> None:
    source = _source(tmp_path, [longest, longest + 1], "data.shuffle=false", override)

    assert _numbers(source.take(3)) == [0, 0, 0]


def test_when_all_prompts_are_too_long_the_run_says_so_after_one_pass(tmp_path: Path) -> None:
    source = _source(tmp_path, [TOO_LONG] * 3)

    with pytest.raises(DataError) as caught:
        source.take(1)

    message = str(caught.value)
    assert message.startswith("data.train: ")
    assert "4 in a row" in message
    assert re.search(r"57 tokens .*rollout\.max_new_tokens 8 .*\b64\b", message)
    assert "data.max_length" in message


def test_many_in_a_row_are_too_many_also_after_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.controller.prompts._PATIENCE", 5)
    source = _source(tmp_path, [3, *[TOO_LONG] * 6], "data.shuffle=false")
    assert _numbers(source.take(1)) == [0]

    with pytest.raises(DataError, match="5 in a row"):
        source.take(1)


def test_rare_good_prompts_are_waited_for(tmp_path: Path) -> None:
    source = _source(tmp_path, [*[TOO_LONG] * 6, 3], "data.shuffle=false")

    assert _numbers(source.take(2)) == [6, 6]
    assert source.metrics()["prompts/too_long"] == 12.0


ONE_PASS = (
    "controller/prompts.py take: `once_through` is true for any first run of long prompts in a later epoch, also after "
    "good prompts were taken and also where only one of several sources is in its second epoch"
)


def test_the_last_prompt_of_an_epoch_and_the_first_of_the_next_may_be_long(tmp_path: Path) -> None:
    # Shuffled anew in every epoch; with this seed: short, long, long, short.
    source = _source(tmp_path, [3, TOO_LONG])

    assert _numbers(source.take(2)) == [0, 0]


def test_a_small_source_of_long_prompts_does_not_end_a_run_with_good_ones(tmp_path: Path) -> None:
    long, good = _written(tmp_path / "long.jsonl", [TOO_LONG]), _written(tmp_path / "good.jsonl", [3] * 50)
    recipe = on_policy_recipe(f"data.train=[{{path: {long}, weight: 9}}, {{path: {good}}}]")

    source = PromptSource(recipe, CountingEncoder(), None)  # type: ignore[arg-type]

    assert len(source.take(3)) == 3


def test_overlong_error_stops_at_the_first_with_its_place(tmp_path: Path) -> None:
    source = _source(tmp_path, [3, TOO_LONG], "data.shuffle=false", "data.overlong=error")

    with pytest.raises(DataError, match=r"train\.jsonl.*line 2: .*57 tokens .*data\.overlong"):
        source.take(2)


@pytest.mark.parametrize("overlong", ["truncate", "drop"])
def test_prompts_are_never_cut(tmp_path: Path, overlong: str) -> None:
    source = _source(tmp_path, [TOO_LONG, 3], "data.shuffle=false", f"data.overlong={overlong}")

    assert _numbers(source.take(1)) == [1]


def test_what_is_taken_ahead_comes_next_and_is_not_yet_gone(tmp_path: Path) -> None:
    source = _source(tmp_path, [3] * 5, "data.shuffle=false")
    source.take(1)
    before = source.state()

    source.take_ahead(2)
    source.take_ahead(2)  # once is enough

    assert source.state() == before
    assert _numbers(source.take(2)) == [1, 2]
    assert source.state() != before
    assert _numbers(source.take(2)) == [3, 4]


# A long prompt at the beginning and a good one behind it: long ones in later epochs are then no reason to stop.
SOME_LONG = st.lists(st.sampled_from([3, TOO_LONG]), max_size=7).map(lambda rest: [TOO_LONG, 3, *rest])
NONE_LONG = st.lists(st.sampled_from([3, 7]), min_size=1, max_size=9)


@settings(max_examples=40)
@given(
    data=st.one_of(st.tuples(SOME_LONG, st.just(False)), st.tuples(NONE_LONG, st.booleans())),
    before=st.integers(0, 12),
    after=st.integers(1, 12),
    seed=st.integers(0, 3),
    ahead=st.booleans(),
)
def test_a_saved_position_continues_exactly(
    data: tuple[list[int], bool], before: int, after: int, seed: int, ahead: bool
) -> None:
    lengths, shuffle = data
    overrides = (f"data.shuffle={str(shuffle).lower()}", f"run.seed={seed}")
    with TemporaryDirectory() as folder:
        unbroken = _source(Path(folder), lengths, *overrides)
        unbroken.take(before)
        if ahead:
            unbroken.take_ahead(after)
        state = json.loads(json.dumps(unbroken.state()))
        rest = unbroken.take(after)
        resumed = _source(Path(folder), lengths, *overrides, state=state)
        again = resumed.take(after)

    assert [(each.prompt_index, each.epoch, each.task.row) for each in again] == [
        (each.prompt_index, each.epoch, each.task.row) for each in rest
    ]
    assert resumed.metrics() == unbroken.metrics()
    assert resumed.state() == unbroken.state()
