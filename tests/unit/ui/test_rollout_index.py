# SPDX-License-Identifier: Apache-2.0
"""The index of rollouts against a list of all rows: every order, filter, page and search, while files come and go."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.run_folders import episode, write_rollouts
from podium.ui import rollout_columns, rollout_index, rollout_reading
from podium.ui.answers import Query
from podium.ui.apart import Apart
from podium.ui.rollout_blocks import Block, num_rows_of, opened
from podium.ui.rollout_columns import SORTS, EpisodeColumns, RolloutFilter, ranked
from podium.ui.rollout_index import RolloutIndex, update_index
from podium.ui.rollout_pages import RunRollouts
from podium.ui.rollout_reading import Previews, StepFiles, preview_of, stamp_of, summary_rows

_WORDS = ("sum", "Needle", "über", "%", "needle in", "x" * 150)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write_steps(run: Path, steps: range, seed: int = 0) -> None:
    """Files of one to nine rows in any order, with few different rewards, some of them missing."""
    for step in steps:
        chance = random.Random(1000 * seed + step)
        rows = [
            episode(
                step, chance.randrange(4), sample, reward=chance.choice([0.0, 1.0, 0.5, None]),
                source=chance.choice(["a", "b", None]), row=chance.choice([None, 3, 4]),
                trained=chance.choice([True, None]),
                messages=json.dumps([
                    {"role": "user", "content": f"{chance.choice(_WORDS)} {step}"},
                    {"role": "assistant", "content": f"{chance.choice(_WORDS)} of {sample}"},
                ]),
            )
            for sample in range(chance.randrange(1, 10))
        ]  # fmt: skip
        chance.shuffle(rows)
        write_rollouts(run, step, rows)


def all_rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step-*.parquet"))
    return [row for file in files for row in summary_rows(file, int(file.stem.removeprefix("step-")))]


def expected(rows: list[dict[str, Any]], wanted: RolloutFilter) -> list[dict[str, Any]]:
    """The rows that a list gives."""
    needle = wanted.search.lower()
    found = [
        row
        for row in rows
        if (wanted.source is None or row["source"] == wanted.source)
        and (wanted.group is None or row["group"] == wanted.group)
        and (wanted.row is None or row["row"] == wanted.row)
        and (wanted.first_step is None or row["step"] >= wanted.first_step)
        and (wanted.last_step is None or row["step"] <= wanted.last_step)
        and (wanted.changed_since is None or is_changed(rows, row, wanted.changed_since))
        and needle in row["preview"].lower()
    ]
    field, sign = wanted.sort.removeprefix("-"), -1 if wanted.sort.startswith("-") else 1

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        value = row[field]
        return value is None, 0 if value is None else sign * value, row["step"], row["group"], row["sample"]

    return sorted(found, key=place)


def is_changed(rows: list[dict[str, Any]], row: dict[str, Any], since: int) -> bool:
    """By its words: the mean reward of the prompt at the row's step, and at its last step before."""
    prompt = row["source"], row["row"]
    if row["step"] < since or row["row"] is None or row["reward"] is None:
        return False
    rewards: dict[int, list[float]] = {}
    for each in rows:
        if (each["source"], each["row"]) == prompt and each["reward"] is not None:
            rewards.setdefault(each["step"], []).append(each["reward"])
    before = [step for step in rewards if step < since]
    if not before:
        return False
    return fmean(rewards[row["step"]]) != pytest.approx(fmean(rewards[max(before)]))


_FILTERS = [
    {"changed_since": 6}, {"changed_since": 4, "source": "a", "first_step": 6}, {"changed_since": 1},
    {}, {"source": "a"}, {"source": "none such"}, {"group": 2}, {"row": 3}, {"first_step": 4}, {"last_step": 3},
    {"first_step": 5, "last_step": 2}, {"search": "needle"}, {"search": "needle IN"}, {"search": "%"},
    {"search": "über", "source": "b"}, {"search": "no such text"}, {"first_step": 3, "last_step": 9, "search": "of 1"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sort", SORTS)
def test_every_order_filter_and_page_is_what_a_list_gives(run: Path, tmp_path: Path, sort: str) -> None:
    write_steps(run, range(1, 12))
    index = RolloutIndex(run, tmp_path / "cache", Apart())
    update_index(run, next((tmp_path / "cache").glob("*.sqlite")))
    rows = all_rows(run)
    for values in _FILTERS:
        wanted = RolloutFilter(sort=sort, **values)
        right = expected(rows, wanted)
        found: list[Any] = []
        for page in range(1, len(right) // 7 + 3):
            part = index.page(wanted, page=page, size=7, most_s=60)
            assert (part.total, part.is_whole) == (len(right), True)
            found += part.rows
        assert found == right, wanted


def test_files_that_come_change_and_go_while_it_is_open(run: Path, tmp_path: Path) -> None:
    """What is in memory of them is brought up to date."""
    write_steps(run, range(5, 9))
    index = RolloutIndex(run, tmp_path / "cache", Apart())
    file = next((tmp_path / "cache").glob("*.sqlite"))

    def check() -> None:
        update_index(run, file)
        rows = all_rows(run)
        for wanted in (RolloutFilter(sort="-reward"), RolloutFilter(sort="length", search="needle", source="a")):
            right = expected(rows, wanted)
            found = index.page(wanted, page=1, size=500, most_s=60)
            assert (found.rows, found.total) == (right, len(right))

    check()
    write_steps(run, range(1, 4))  # older ones
    write_steps(run, range(12, 14))
    check()
    write_steps(run, range(6, 8), seed=1)  # a resumed run replaces some
    check()
    (run / "rollouts" / "step-00000007.parquet").unlink()
    (run / "rollouts" / "step-00000012.parquet").write_bytes(b"PAR1")
    check_rows = index.progress()["done"]
    (run / "rollouts" / "step-00000012.parquet").unlink()
    check()
    assert index.progress()["done"] < check_rows
    assert index.sources() == ["a", "b"]


def test_a_search_that_takes_long_goes_on_with_the_next_request(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(run, range(1, 8))
    index = RolloutIndex(run, tmp_path / "cache", Apart())
    update_index(run, next((tmp_path / "cache").glob("*.sqlite")))
    looked: list[int] = []
    places_of = rollout_columns.places_of

    def slow(connection: Any, block: Block, needle: bytes) -> Any:
        looked.append(block.step)
        time.sleep(0.02)
        return places_of(connection, block, needle)

    monkeypatch.setattr(rollout_columns, "places_of", slow)
    wanted = RolloutFilter(sort="-step", search="needle")
    totals, is_whole = [], False
    while not is_whole:
        found = index.page(wanted, page=1, size=50, most_s=0.03)
        totals.append(found.total)
        is_whole = found.is_whole
        assert len(totals) < 10
    assert len(totals) > 1
    assert totals == sorted(totals)
    assert looked == [7, 6, 5, 4, 3, 2, 1]  # the newest first, each once
    assert found.rows == expected(all_rows(run), wanted)
    index.page(wanted, page=2, size=2, most_s=0.0)
    assert len(looked) == 7


def test_a_text_across_two_previews_is_not_found(run: Path, tmp_path: Path) -> None:
    messages = [json.dumps([{"role": "assistant", "content": text}]) for text in ("ends in nee", "dle begins", "")]
    write_rollouts(run, 1, [episode(1, 0, sample, messages=text) for sample, text in enumerate(messages)])
    index = RolloutIndex(run, tmp_path / "cache", Apart())
    update_index(run, next((tmp_path / "cache").glob("*.sqlite")))

    def samples(text: str) -> list[int]:
        return [
            row["sample"] for row in index.page(RolloutFilter(sort="step", search=text), page=1, size=9, most_s=9).rows
        ]

    assert samples("needle") == []
    assert samples("NEE") == [0]
    assert samples("dle") == [1]


def test_an_index_of_another_format_is_made_again(run: Path, tmp_path: Path) -> None:
    write_steps(run, range(1, 4))
    RolloutIndex(run, tmp_path / "cache", Apart())
    file = next((tmp_path / "cache").glob("*.sqlite"))
    update_index(run, file)
    old = sqlite3.connect(file)
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    with opened(file) as connection:
        assert connection.execute("SELECT COUNT(*) FROM files").fetchone() == (0,)
    update_index(run, file)
    with opened(file) as connection:
        assert connection.execute("SELECT COUNT(*) FROM files").fetchone() == (3,)


def test_an_episode_costs_few_bytes(run: Path, tmp_path: Path) -> None:
    """There is no row and no entry of a B-tree for it."""
    file = write_rollouts(run, 1, [episode(1, at // 8, at % 8) for at in range(1000)])
    for step in range(2, 31):
        os.link(file, file.with_name(f"step-{step:08d}.parquet"))
    update_index(run, tmp_path / "index.sqlite")
    assert (tmp_path / "index.sqlite").stat().st_size / 30_000 < 64


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 0.5, -2.0, float("nan"), float("inf")]), min_size=1, max_size=40),
    descending=st.booleans(),
    data=st.data(),
)
def test_ranks_are_those_of_a_stable_sort(values: list[float], descending: bool, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(values) - 1))
    end = data.draw(st.integers(begin + 1, len(values)))
    sign = -1 if descending else 1
    order = sorted(
        range(len(values)), key=lambda at: (np.isnan(values[at]), 0 if np.isnan(values[at]) else sign * values[at])
    )
    assert ranked(np.array(values), begin, end, descending=descending).tolist() == order[begin:end]


_TEXTS = st.text(st.sampled_from('ab "\\{}[],:→\n\té') | st.characters(exclude_categories=["Cs"]), max_size=300)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool"]),
            "content": _TEXTS | st.none() | st.lists(st.fixed_dictionaries({"text": _TEXTS}), max_size=2)
            | st.just('{"role": "assistant", "content": "no"}'),
        }
    ),
    max_size=5,
)  # fmt: skip


@settings(max_examples=100)
@given(st.lists(_MESSAGES, min_size=1, max_size=4))
def test_previews_of_many_are_those_of_each(episodes: list[list[dict[str, Any]]]) -> None:
    previews = Previews()
    for messages in [each for each in episodes for _ in range(2)]:
        text = json.dumps(messages)
        assert previews.of(text) == preview_of(text)


@pytest.mark.parametrize("text", [None, "", "no JSON", '[{"role": "assistant", "content": "cut', "[" * 100_000])
def test_previews_of_what_no_run_wrote(text: str | None) -> None:
    assert Previews().of(text) == preview_of(text)


def test_forgotten_columns_are_read_again(run: Path, tmp_path: Path) -> None:
    write_steps(run, range(1, 4))
    update_index(run, tmp_path / "index.sqlite")
    columns, wanted = EpisodeColumns(), RolloutFilter(sort="reward")
    with opened(tmp_path / "index.sqlite") as connection:
        first = columns.select(connection, wanted, begin=0, end=5, until_s=0.0)
        columns.forget()
        assert columns.select(connection, wanted, begin=0, end=5, until_s=0.0).rows == first.rows


def test_a_damaged_block_is_an_error_of_the_file(run: Path, tmp_path: Path) -> None:
    """The page makes the index again then."""
    write_steps(run, range(1, 4))
    index = RolloutIndex(run, tmp_path / "cache", Apart())
    file = next((tmp_path / "cache").glob("*.sqlite"))
    update_index(run, file)
    with opened(file) as connection:
        connection.execute("UPDATE details SET content = x'00'")
        connection.commit()
    with pytest.raises(sqlite3.DatabaseError, match="a block cannot be read"):
        index.page(RolloutFilter(sort="step"), page=1, size=5, most_s=1)


class TestStepFiles:
    def test_new_replaced_and_removed_files_are_seen(self, tmp_path: Path) -> None:
        folder = tmp_path / "rollouts"
        files = StepFiles(tmp_path)
        assert not files.look()
        folder.mkdir()
        for name in ("step-00000002.parquet", "step-00000001.parquet", ".tmp-step-00000003", "notes.txt"):
            (folder / name).write_text("")
        (folder / "step-00000009.parquet").symlink_to(tmp_path)
        assert list(files.look().items()) == [(step, folder / f"step-{step:08d}.parquet") for step in (1, 2)]
        before = files.inode(folder / "step-00000001.parquet")
        (folder / "new").write_text("")
        (folder / "new").replace(folder / "step-00000001.parquet")
        (folder / "step-00000002.parquet").unlink()

        assert list(files.look()) == [1]
        assert files.inode(folder / "step-00000001.parquet") not in (0, before)

    def test_a_folder_that_did_not_change_is_not_listed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rollout_reading, "_TICK_S", -1.0)
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "rollouts" / "step-00000001.parquet").write_text("")
        files = StepFiles(tmp_path)
        first = files.look()
        monkeypatch.setattr(rollout_reading.os, "scandir", lambda path: pytest.fail("the folder was listed again"))

        assert files.look() is first


def test_taking_in_one_more_file_asks_no_known_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, file = tmp_path / "run", tmp_path / "index.sqlite"
    run.mkdir()
    for step in range(1, 6):
        write_rollouts(run, step, [episode(step, 1, 0)])
    monkeypatch.setattr(rollout_index, "_COMPARE_TIMES", 1e9)
    folder = rollout_index._IndexedFolder(StepFiles(run))
    with opened(file) as connection:
        changes = folder.changes(connection)
        assert [step for step, _, _ in changes.new] == [1, 2, 3, 4, 5]
        folder.take_in(connection, changes)
        assert folder.changes(connection).new == []
        write_rollouts(run, 6, [episode(6, 1, 0)])
        asked: list[str] = []
        monkeypatch.setattr(rollout_index, "stamp_of", lambda path: asked.append(path.name) or stamp_of(path))
        changes = folder.changes(connection)
        folder.take_in(connection, changes)

        assert asked == ["step-00000006.parquet"]
        assert (len(changes.new), changes.num_kept) == (1, 5)
        assert num_rows_of(connection) == 6
        (run / "rollouts" / "step-00000002.parquet").unlink()
        assert folder.changes(connection).gone == [2]


class TestNewest:
    """What a page asks for while a run goes on needs no index of the newest files."""

    QUERY = Query({"sort": "-step", "size": "3"})

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        for step in (1, 2):
            write_rollouts(folder, step, [episode(step, 1, sample) for sample in (1, 0)])
        return folder

    def indexed(self, rollouts: RunRollouts, rows: int) -> None:
        until_s = time.monotonic() + 30
        while rollouts.page(Query({"sort": "reward"}))["index"]["done"] < rows:
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def test_new_files_are_shown_and_not_taken_in(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rollouts = RunRollouts(run, tmp_path / "cache", Apart())
        self.indexed(rollouts, 4)
        before = rollouts.page(self.QUERY)
        assert [(row["step"], row["sample"]) for row in before["rows"]] == [(2, 0), (2, 1), (1, 0)]
        monkeypatch.setattr(RolloutIndex, "wake", lambda self, **values: pytest.fail("the index was asked"))
        write_rollouts(run, 3, [episode(3, 1, 0, source="new")])
        found = rollouts.page(self.QUERY)

        assert [(row["step"], row["sample"]) for row in found["rows"]] == [(3, 0), (2, 0), (2, 1)]
        assert (found["total"], found["steps"], found["index"]) == (5, [1, 3], {"done": 5, "of": 5})
        assert "new" in found["sources"]
        assert found["rows"][0].keys() == found["rows"][1].keys() == before["rows"][0].keys()
        monkeypatch.undo()
        self.indexed(rollouts, 5)
        assert rollouts.page(self.QUERY) == found
        rollouts.close()

    def test_a_file_that_was_replaced_or_removed_goes_through_the_index(self, run: Path, tmp_path: Path) -> None:
        rollouts = RunRollouts(run, tmp_path / "cache", Apart())
        self.indexed(rollouts, 4)
        asked: list[bool] = []
        index = rollouts._index
        assert index is not None
        index.wake = lambda **values: asked.append(True)  # type: ignore[method-assign]
        write_rollouts(run, 1, [episode(1, 1, 0)])
        rollouts.page(self.QUERY)
        assert asked == [True]
        (run / "rollouts" / "step-00000001.parquet").unlink()
        rollouts.page(self.QUERY)
        assert asked == [True, True]
        rollouts.close()


def test_changed_since_a_step_by_hand(run: Path, tmp_path: Path) -> None:
    """Row 3 is solved by one answer of two at step 1, by both at step 4 and by one again at step 5. Row 4 stays as it
    was, and row 5 was never answered before step 4."""
    rewards = {1: {3: (0.0, 1.0), 4: (1.0, 1.0)}, 4: {3: (1.0, 1.0), 4: (1.0, 1.0), 5: (0.0, 0.0)}, 5: {3: (1.0, 0.0)}}
    for step, prompts in rewards.items():
        rows = [
            episode(step, row, sample, reward=reward, source="a", row=row)
            for row, values in prompts.items()
            for sample, reward in enumerate(values)
        ]
        write_rollouts(run, step, rows)
    rollouts = RunRollouts(run, tmp_path / "cache", Apart())

    def changed(**query: str) -> list[tuple[int, int, int]]:
        until_s = time.monotonic() + 60
        while (found := rollouts.page(Query(query)))["index"]["done"] < 12:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return [(row["step"], row["row"], row["sample"]) for row in found["rows"]]

    assert changed(changed="2", sort="step") == [(4, 3, 0), (4, 3, 1)]
    assert changed(changed="5", sort="step") == [(5, 3, 0), (5, 3, 1)]
    assert changed(changed="2", step="5") == []
    assert changed(changed="5", step="5", sort="-reward") == [(5, 3, 0), (5, 3, 1)]
    assert changed(changed="0") == []  # nothing was answered before it
    rollouts.close()


@pytest.mark.parametrize("sort", ["reward", "-reward"])
def test_a_reward_that_is_no_number_comes_last_in_the_list_of_a_step(run: Path, tmp_path: Path, sort: str) -> None:
    """Files of other programs may have some."""
    nan = float("nan")
    write_rollouts(run, 1, [episode(1, 1, at, reward=each) for at, each in enumerate([nan, 2.0, None, nan, 1.0, 3.0])])
    rollouts = RunRollouts(run, tmp_path / "cache", Apart())
    order = [row["sample"] for row in rollouts.page(Query({"step": "1", "sort": sort}))["rows"]]
    assert order == ([4, 1, 5] if sort == "reward" else [5, 1, 4]) + [0, 2, 3]
    rollouts.close()
