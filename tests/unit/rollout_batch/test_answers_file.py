# SPDX-License-Identifier: Apache-2.0
"""The file of answers: whole lines whatever happens, continued by the next start, in order at the end."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import RolloutError
from podium.rollout.answers_file import AnswerKey, AnswerRecord, AnswersFile, settings_file

SETTINGS = {"seed": 0, "temperature": 1.0, "stop_tokens": [], "logit_bias": {3: 0.5}}
ABOUT = {"model": "m"}


def record(row: int, sample: int = 0, **values: Any) -> AnswerRecord:
    common = {"prompt": "p", "answer": f"{row}.{sample}", "finish": "stop", "stop": 2, "num_prompt_tokens": 1}
    return AnswerRecord(**{**common, "row": row, "sample": sample, "num_tokens": 1, **values})


def write(path: Path, *records: AnswerRecord, in_order: bool = False) -> None:
    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        for each in records:
            file.write(each)
        if in_order:
            file.put_in_order()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The operating system refuses to write more, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rows(path: Path) -> list[tuple[int, int]]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(line["row"], line["sample"]) for line in lines]


def test_a_line_has_what_there_is_and_nothing_empty() -> None:
    plain = json.loads(record(4, 1).line())
    full = json.loads(record(4, 1, reference="r", error="e", tokens=[1, 2], logprobs=[-0.5, -1.0]).line())

    names = ["row", "sample", "prompt", "answer", "finish", "stop", "num_prompt_tokens", "num_tokens"]
    assert list(plain) == names
    assert list(full) == [*names, "reference", "error", "tokens", "logprobs"]


def test_half_a_surrogate_pair_and_new_lines_survive_in_one_line() -> None:
    line = record(0, reference="\ud83d\n\u2028é").line()

    assert line.count(b"\n") == 1
    assert json.loads(line)["reference"] == "\ud83d\n\u2028é"


def test_an_answer_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        file.write(record(3))
        assert rows(path) == [(3, 0)]
        assert AnswerKey(3, 0) in file
        assert AnswerKey(3, 1) not in file


def test_the_next_start_knows_what_is_done_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(5), record(1, finish="length"))
    with path.open("ab") as file:
        file.write(record(2).line()[:-7])

    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        assert AnswerKey(5, 0) in file
        assert AnswerKey(2, 0) not in file
        assert file.finish_of(AnswerKey(1, 0)) == "length"
        file.write(record(2))
        file.put_in_order()

    assert rows(path) == [(1, 0), (2, 0), (5, 0)]


@given(st.permutations([(row, sample) for row in range(4) for sample in range(3)]), st.integers(0, 2000))
def test_any_order_and_any_cut_give_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, int]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    write(path, *(record(row, sample) for row, sample in order))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])

    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        for row, sample in reversed(order):
            if AnswerKey(row, sample) not in file:
                file.write(record(row, sample))
        file.put_in_order()

    assert path.read_bytes() == b"".join(record(row, sample).line() for row, sample in sorted(order))


def test_a_file_in_order_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(0), record(1))
    before = path.stat().st_ino

    write(path, in_order=True)

    assert path.stat().st_ino == before


def test_blank_lines_and_repeated_answers_go_when_the_file_is_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(0))
    with path.open("ab") as file:
        file.write(b"\n" + record(0, answer="again").line())

    write(path, in_order=True)

    assert path.read_bytes() == record(0).line()


def test_other_settings_are_refused_with_what_differs_and_nothing_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(0))
    before = path.read_bytes()

    changed = {**SETTINGS, "temperature": 0.5, "top_k": 3}
    with pytest.raises(RolloutError) as refusal, AnswersFile.open(path, changed, about=ABOUT):
        pass

    assert re.search(r"temperature: 1\.0 .*\b0\.5\b", str(refusal.value))
    assert re.search(r"top_k: .*\b3\b", str(refusal.value))
    assert "seed" not in str(refusal.value)
    assert path.read_bytes() == before


def test_a_second_process_is_kept_out_while_the_first_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        file.write(record(0))
        with (
            pytest.raises(RolloutError, match=r"a\.jsonl\b.*another process"),
            AnswersFile.open(path, SETTINGS, about=ABOUT),
        ):
            pass
    write(path, record(1))
    assert rows(path) == [(0, 0), (1, 0)]


def test_a_start_that_fails_before_its_first_answer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), AnswersFile.open(tmp_path / "a.jsonl", SETTINGS, about=ABOUT):
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ['{"messages": []}\n', "no end of line"])
def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(content)

    with (
        pytest.raises(RolloutError, match=r"train\.jsonl\b.*train\.jsonl\.settings\.json"),
        AnswersFile.open(path, SETTINGS, about=ABOUT),
    ):
        pass

    assert path.read_text() == content
    assert [each.name for each in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(0), record(1))
    path.write_bytes(path.read_bytes().replace(b'"row": 1', b'"wor": 1'))

    with pytest.raises(RolloutError, match=r"a\.jsonl, line 2"), AnswersFile.open(path, SETTINGS, about=ABOUT):
        pass


def test_damaged_settings_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(0))
    settings_file(path).write_text("{")

    with pytest.raises(RolloutError, match="damaged"), AnswersFile.open(path, SETTINGS, about=ABOUT):
        pass


def test_what_is_remembered_is_there_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        assert file.remembered("cpu") is None
        file.remember("cpu", {"threads": 1})
        file.write(record(0))
    with AnswersFile.open(path, SETTINGS, about=ABOUT) as file:
        assert file.remembered("cpu") == {"threads": 1}
    assert json.loads(settings_file(path).read_text())["about"] == ABOUT


@pytest.mark.parametrize(
    ("name", "message"), [("gone/a.jsonl", r"--out: .*/gone\b"), (".", r"--out: .*answers\.jsonl")]
)
def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message), AnswersFile.open(tmp_path / name, SETTINGS, about=ABOUT):
        pass


def test_a_full_disk_leaves_whole_lines_and_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, record(0))
    whole = path.read_bytes()

    with (
        pytest.raises(RolloutError) as refusal,
        AnswersFile.open(path, SETTINGS, about=ABOUT) as file,
        files_of_at_most(len(whole) + 20),  # half a line more
    ):
        file.write(record(1))

    assert "Make room" in str(refusal.value)
    assert "1 answers" in str(refusal.value)
    assert path.read_bytes() == whole
    write(path, record(1))
    assert rows(path) == [(0, 0), (1, 0)]


def test_no_room_for_the_ordered_copy_leaves_the_unordered_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, *(record(row) for row in range(50, 0, -1)))
    whole = path.read_bytes()

    with (
        pytest.raises(RolloutError, match="Make room"),
        AnswersFile.open(path, SETTINGS, about=ABOUT) as file,
        files_of_at_most(len(whole) // 2),
    ):
        file.put_in_order()

    assert path.read_bytes() == whole
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.settings.json"]
