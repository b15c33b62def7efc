# SPDX-License-Identifier: Apache-2.0
"""The parts of the GRPO benchmark that compute something: its task, its clocks, its table."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

import grpo
import grpo_clock
from grpo_reward import small_digits
from grpo_task import PROMPTS, SHAPES, SideResult, Task, make_task, prompt_rows
from podium.data.tokenizer import load_tokenizer, stop_tokens
from podium.recipe import ModelSection


def make(folder: Path, *, device: str = "cpu", shape: str = "tiny") -> Task:
    return Task(
        folder=str(folder), shape=shape, device=device, steps=5, warmup=2, shortest=8, longest=64, new_tokens=64
    )


def result(*step_s: float, cpu_s: float = 1.0, **phases: float) -> SideResult:
    return SideResult(step_s=list(step_s), cpu_s=cpu_s, reward=0.5, phases={"step_s": 1.0, **phases})


# --- the task ---


def test_the_reward_is_the_share_of_words_that_end_in_a_small_digit() -> None:
    assert small_digits(["w10 w15 w24 w9", "w7", ""], prompts=["a", "b", "c"]) == [0.5, 0.0, 0.0]


def test_every_step_has_its_prompts_within_the_lengths_and_the_same_ones_each_time(tmp_path: Path) -> None:
    rows = prompt_rows(make(tmp_path), words=511)
    lengths = [len(row["prompt"].split()) for row in rows]
    assert len(rows) == 5 * PROMPTS
    assert min(lengths) >= 8
    assert max(lengths) <= 64
    assert len(set(lengths)) > PROMPTS  # steps differ, as they do in real runs
    assert rows == prompt_rows(make(tmp_path), words=511)


def test_no_answer_ends_before_it_is_as_long_as_allowed(tmp_path: Path) -> None:
    task = make(tmp_path)
    make_task(task)
    tokenizer = load_tokenizer(ModelSection(path=str(task.model)))
    assert stop_tokens(tokenizer, task.model) == frozenset()
    assert len(tokenizer) == SHAPES["tiny"]["vocab_size"]
    # What the peer adds has the first id without a row.
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    assert tokenizer.eos_token_id == SHAPES["tiny"]["vocab_size"]


def test_a_task_and_a_result_come_back_from_their_files(tmp_path: Path) -> None:
    task, found = make(tmp_path), result(1.5, 2.5, idle_s=0.01)
    task.write(tmp_path / "task.json")
    found.write(tmp_path / "result.json")
    assert Task.read(tmp_path / "task.json") == task
    assert SideResult.read(tmp_path / "result.json") == found


# --- the clocks ---


def write_process(proc: Path, pid: int, parent: int, user: int, system: int, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    before = f"{pid} ({name}) S {parent} " + " ".join("0" for _ in range(9))
    (folder / "stat").write_text(f"{before} {user} {system} 7 7 20 0 1 0 100\n")


def test_the_processor_time_is_of_a_process_and_what_it_started_at_any_depth(tmp_path: Path) -> None:
    write_process(tmp_path, 1, 0, 500, 500)
    write_process(tmp_path, 10, 1, 100, 20)
    write_process(tmp_path, 11, 10, 30, 0, name="a (b) c")  # started by the process
    write_process(tmp_path, 12, 11, 0, 50)  # started by that one
    write_process(tmp_path, 20, 1, 900, 0)  # somebody else's
    (tmp_path / "meminfo").write_text("")
    assert grpo_clock.tree_cpu_s(10, tmp_path) == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))


def test_without_proc_the_processor_time_is_not_known(tmp_path: Path) -> None:
    assert math.isnan(grpo_clock.tree_cpu_s(10, tmp_path))


# --- the sides and the table ---


def test_the_peer_is_tried_with_one_thread_with_all_and_with_as_many_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr(grpo, "BENCH", python)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    # Six processes could not share eight prompts evenly.
    assert [side.name for side in grpo.trl_sides("cpu")] == ["TRL, 1 thread", "TRL, 6 threads", "TRL, 4 processes"]
    assert [side.name for side in grpo.trl_sides("cuda")] == ["TRL"]
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert [side.name for side in grpo.trl_sides("cpu")] == ["TRL, 1 thread"]


def test_the_ratio_is_of_medians_against_the_best_peer_by_each_clock(tmp_path: Path) -> None:
    lines = grpo.report(
        make(tmp_path),
        {
            "Podium, 2 devices": [result(1.0, 1.0, 9.0, cpu_s=2.0), result(1.0, 1.0, 1.0, cpu_s=2.0)],
            "TRL, 1 thread": [result(5.0, 5.0, 5.0, cpu_s=5.0), result(5.0, 5.0, 5.0, cpu_s=5.0)],
            "TRL, 2 threads": [result(3.0, 3.0, 3.0, cpu_s=6.0), result(3.0, 3.0, 3.0, cpu_s=6.0)],
        },
    )
    (ratio,) = [line for line in lines if line.startswith("Podium, 2 devices: ")]
    assert re.search(r" 3\.00x .*\(best: TRL, 2 threads\).* 2\.50x .*\(best: TRL, 1 thread\)", ratio)


def test_without_a_peer_its_known_figure_is_cited_as_such(tmp_path: Path) -> None:
    text = "\n".join(grpo.report(make(tmp_path, device="cuda", shape="0.6b"), {"Podium, 1 device": [result(2.0)]}))
    assert "not measured" in text
    assert "6.2x to 6.8x" in text  # 12.5 / 2 and 13.6 / 2
    assert "not measured" not in "\n".join(grpo.report(make(tmp_path), {"Podium, 1 device": [result(2.0)]}))


@pytest.mark.parametrize(
    ("device", "idle_s", "message"),
    [("cpu", 0.049, "holds"), ("cpu", 0.051, "MISSED"), ("cuda", 0.019, "holds"), ("cuda", 0.021, "MISSED")],
)
def test_the_controllers_overhead_is_held_against_its_goal(
    tmp_path: Path, device: str, idle_s: float, message: str
) -> None:
    lines = grpo.phase_lines("Podium", make(tmp_path, device=device), [result(1.0, idle_s=idle_s)])
    assert lines[1].endswith(message)
