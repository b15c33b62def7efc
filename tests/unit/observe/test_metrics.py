# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl is valid JSON whatever is measured, and holds each step once however often the run was resumed."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import RunFolderError
from podium.observe.metrics import MetricsFile, StepMetrics, read_last_metrics, read_metrics


def metrics(step: int, **values: float) -> StepMetrics:
    return StepMetrics(step=step, time_s=100.0 + step, values=values)


def write(path: Path, *steps: int) -> None:
    with MetricsFile(path) as file:
        for step in steps:
            file.append(metrics(step, loss=1.0 / step))


def steps_in(path: Path) -> list[int]:
    return [each.step for each in read_metrics(path)]


def refuse_constant(word: str) -> float:
    raise AssertionError(f"{word} is not JSON")


def test_a_line_is_one_flat_json_object(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 4)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 4, "time_s": 104.0, "loss": 0.25}\n'


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(metrics(1, loss=2.0))
    assert steps_in(tmp_path / "metrics.jsonl") == [1]
    file.close()


def test_numbers_that_json_lacks_are_written_as_words_and_read_back_as_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.append(metrics(1, a=math.nan, b=math.inf, c=-math.inf))
    fields = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert (fields["a"], fields["b"], fields["c"]) == ("NaN", "Infinity", "-Infinity")
    values = read_metrics(path)[0].values
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)


def test_resuming_at_a_step_cuts_off_what_came_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    with MetricsFile.resume(path, step=3) as file:
        assert steps_in(path) == [1, 2, 3]
        file.append(metrics(4, loss=9.0))
    assert steps_in(path) == [1, 2, 3, 4]
    assert read_metrics(path)[-1].values == {"loss": 9.0}
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_last_line_that_a_crash_cut_short_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    text = path.read_text()
    path.write_text(text[: len(text) - 1 - cut])
    assert steps_in(path) == [1, 2]
    with MetricsFile.resume(path, step=3) as file:
        file.append(metrics(3, loss=0.5))
    assert steps_in(path) == [1, 2, 3]


def test_a_last_line_that_lacks_only_its_newline_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    path.write_text(path.read_text().rstrip("\n"))
    with MetricsFile.resume(path, step=2) as file:
        file.append(metrics(3, loss=0.5))
    assert steps_in(path) == [1, 2, 3]


def test_a_foreign_line_in_the_middle_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    path.write_text(path.read_text().replace('{"step": 1', "oops", 1))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 1: .*oops"):
        read_metrics(path)


def test_a_run_that_was_stopped_before_its_first_line_can_be_resumed(tmp_path: Path) -> None:
    with MetricsFile.resume(tmp_path / "run" / "metrics.jsonl", step=0) as file:
        file.append(metrics(1, loss=1.0))
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [1]


def test_the_end_of_a_long_file_is_read_without_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *range(1, 10_001))
    with path.open("a") as file:
        file.write('{"step": 10001, "time')  # cut short by a crash

    last = read_last_metrics(path)

    assert last[-1] == metrics(10_000, loss=1e-4)
    assert [each.step for each in last] == list(range(last[0].step, 10_001))
    assert 100 < len(last) < 10_000
    assert read_last_metrics(tmp_path / "none.jsonl") == []


@given(
    values=st.dictionaries(st.text(min_size=1).filter(lambda name: name not in ("step", "time_s")), st.floats()),
    step=st.integers(min_value=0),
)
def test_whatever_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, float], step: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.append(StepMetrics(step=step, time_s=0.5, values=values))
    (read,) = read_metrics(path)
    assert read.step == step
    assert read.values.keys() == values.keys()
    assert all(read.values[name] == value or math.isnan(value) for name, value in values.items())
