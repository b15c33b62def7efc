# SPDX-License-Identifier: Apache-2.0
"""A grader that several threads call at the same time, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.made_batches import make_answer, make_rollouts
from podium.cluster import MeshShape, WorkerContext
from podium.cluster.identity import WorkerId
from podium.cluster.meshes import RoleMesh
from podium.cluster.spans import SpanRecorder
from podium.errors import RecipeError
from podium.recipe import FunctionReward, ModelSection
from podium.roles.carriers import GradeNote, GradeShard
from podium.roles.grader import Grader, GraderSpec
from podium.roles.grading_handle import shard_of

FUNCTIONS = Path(__file__).parents[1] / "environments" / "misbehaving.py"
CONTEXT = WorkerContext(
    worker=WorkerId("graders", 0, "here", "cpu"), role="grader",
    mesh=RoleMesh(role="grader", pool="graders", shape=MeshShape(), slots=(0,)), device="cpu", devices=None,
    recorder=SpanRecorder(), transfers={}, colocated_roles={}, channels={},
)  # fmt: skip


class Digits:
    """The text of a token is its number. Must not be used by two threads at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        assert self._lock.acquire(blocking=False)
        time.sleep(0.001)
        self._lock.release()
        return " ".join(map(str, tokens))


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Digits()
    monkeypatch.setattr("podium.roles.grader.load_tokenizer", lambda model: tokenizer)


def spec(*rewards: dict[str, Any]) -> GraderSpec:
    sections = [
        FunctionReward.model_validate({**each, "function": f"{FUNCTIONS}:{each['function']}"}) for each in rewards
    ]
    return GraderSpec(
        model=ModelSection(path="nowhere"), rewards=tuple(sections), evaluation=(), timeout_s=20.0, also_scored=False,
        tools=False,
    )  # fmt: skip


def shard(*tokens: int) -> GradeShard:
    """Episodes of one token each."""
    return shard_of(make_rollouts([make_answer(row, tokens=[each]) for row, each in enumerate(tokens)]))


def values(note: GradeNote) -> list[list[float]]:
    assert note.errors == {}
    return note.values_NR.tolist()


@pytest.fixture
def graders() -> Iterator[list[Grader]]:
    """Graders that are closed at the end of the test."""
    opened: list[Grader] = []
    yield opened
    for each in opened:
        each.close()


def _has_ended(process: int) -> bool:
    """Waits for it."""
    end_s = time.monotonic() + 10.0
    while time.monotonic() < end_s:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def _grading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "grading"]


def test_batches_of_several_threads_wait_together_and_keep_their_order(graders: list[Grader]) -> None:
    graders.append(grader := Grader(CONTEXT, spec({"function": "meeting"}, {"function": "as_number"})))

    with ThreadPoolExecutor(4) as threads:
        notes = list(threads.map(grader.grade, [shard(8, 7), shard(6, 5), shard(4, 3), shard(2, 1)], ["train"] * 4))

    assert [values(note) for note in notes] == [
        [[1.0, 8.0], [1.0, 7.0]], [[1.0, 6.0], [1.0, 5.0]], [[1.0, 4.0], [1.0, 3.0]], [[1.0, 2.0], [1.0, 1.0]],
    ]  # fmt: skip
    assert grader.facts().takes_single_episodes
    assert grader.facts().overlaps


@pytest.mark.slow
def test_a_reward_that_compares_episodes_needs_them_in_one_batch(graders: list[Grader]) -> None:
    rewards = [{"function": "length"}, {"function": "ranks", "per": "group"}]
    graders.append(grader := Grader(CONTEXT, spec(*rewards)))

    assert grader.facts().inputs == ("sample", "group")
    assert not grader.facts().takes_single_episodes
    assert not grader.facts().overlaps
    assert values(grader.grade(shard(5), "train")) == [[1.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_grader_leaves_no_thread_and_no_process(how: str) -> None:
    grader = Grader(CONTEXT, spec({"function": "process_id"}))
    process = int(grader.grade(shard(1), "train").values_NR[0, 0])
    [thread] = _grading_threads()

    if how == "closed":
        grader.close()
    else:
        del grader
        gc.collect()

    thread.join(10)
    assert not thread.is_alive()
    assert _has_ended(process)


def test_a_thread_that_waits_for_a_grader_is_freed_when_that_is_closed() -> None:
    grader = Grader(CONTEXT, spec({"function": "meeting"}))

    with ThreadPoolExecutor(1) as threads:
        threads.submit(CONTEXT.recorder.name_thread, "waits")
        waiting = threads.submit(grader.grade, shard(2), "train")
        end_s = time.monotonic() + 10.0
        while CONTEXT.recorder.doing("waits") == ("", 0.0) and time.monotonic() < end_s:
            time.sleep(0.01)
        grader.close()
        assert waiting.exception(10) is not None


@pytest.mark.slow
def test_rewards_that_cannot_be_loaded_leave_no_thread() -> None:
    with pytest.raises(RecipeError, match=r"^reward\.0\.function: .*'absent'"):
        Grader(CONTEXT, spec({"function": "absent"}))

    assert _grading_threads() == []
