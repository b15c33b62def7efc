# SPDX-License-Identifier: Apache-2.0
"""How ranks are placed, how the first failure is reported, and when something is due."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing

from helpers.hanging_ranks import work
from helpers.recipes import make_recipe
from podium.engine.mesh import check_tensor_groups
from podium.errors import CheckpointError, DataError, LaunchError
from podium.recipe.policy_mesh import MeshSizes
from podium.spmd.launch import (
    RankPlace,
    StopRequest,
    _ByValue,
    _first_failure,
    launch,
    place_under_torchrun,
)
from podium.spmd.own_hang import raising_if_hung
from podium.spmd.rank import RankTask, run_rank
from podium.spmd.rank_processes import RankMarks, RankProcesses, Stalls, is_stopped, place_of

ONE_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "LOCAL_WORLD_SIZE")


def _failure(message: Any, *, rank: int = 1, exitcode: int = 1) -> Any:
    """As torch's elastic launcher hands it over: the rank that failed first, with what it left in its error file."""
    first = SimpleNamespace(error_file_data={"message": message} if message else {}, exitcode=exitcode, pid=4321)
    return SimpleNamespace(get_first_failure=lambda: (rank, first))


def _recorded(text: str, trace: str = "Traceback ...") -> dict[str, Any]:
    return {"message": text, "extraInfo": {"py_callstack": trace}}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ONE_PROCESS:
        monkeypatch.delenv(name, raising=False)


def test_a_podium_error_of_a_rank_comes_back_as_itself() -> None:
    error = _first_failure(_failure(_recorded("podium.errors.DataError: train.jsonl, line 3: not valid JSON")))

    assert type(error) is DataError
    assert str(error) == "train.jsonl, line 3: not valid JSON"


def test_a_podium_error_without_its_module_and_with_colons_in_it_comes_back_whole() -> None:
    error = _first_failure(_failure(_recorded("CheckpointError: data: a: b")))

    assert type(error) is CheckpointError
    assert str(error) == "data: a: b"


def test_another_exception_comes_with_the_ranks_own_traceback() -> None:
    error = _first_failure(_failure(_recorded("ZeroDivisionError: by zero", "File mine.py, line 7"), rank=3))

    assert type(error) is LaunchError
    first, trace = str(error).splitlines()
    assert first.startswith("rank 3 ")
    assert trace == "File mine.py, line 7"


def test_a_message_that_is_plain_text_is_passed_on() -> None:
    assert "something went wrong" in str(_first_failure(_failure("something went wrong")))


@pytest.mark.parametrize("name", ["annotations", "Exception", "SystemExit"])
def test_a_name_that_is_no_podium_error_is_not_taken_for_one(name: str) -> None:
    assert type(_first_failure(_failure(_recorded(f"{name}: text")))) is LaunchError


@pytest.mark.parametrize(
    ("exitcode", "reported"),
    [
        (-signal.SIGKILL, r"rank 1 \(process 4321\) .*SIGKILL.*memory"),
        (-signal.SIGSEGV, r"rank 1 \(process 4321\) .*SIGSEGV"),
        (7, r"rank 1 \(process 4321\) .*exit code 7\b"),
    ],
)
def test_a_rank_that_died_without_a_message_is_reported_with_its_exit_code(exitcode: int, reported: str) -> None:
    text = str(_first_failure(_failure(None, exitcode=exitcode)))
    assert re.match(reported, text)
    assert ("memory" in text) == (exitcode == -signal.SIGKILL)


def test_one_rank_runs_in_this_process(tmp_path: Path) -> None:
    found = launch(
        lambda where, word: (os.getpid(), where, word), ("hello",), ranks=1, restarts=0, stop_file=tmp_path / "stop"
    )

    assert found == (os.getpid(), RankPlace(), "hello")


def test_without_torchrun_there_is_no_place() -> None:
    assert place_under_torchrun() is None


def test_a_place_is_read_from_torchruns_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(ONE_PROCESS, ("5", "8", "1", "2", "4"), strict=True):
        monkeypatch.setenv(name, value)

    assert place_under_torchrun() == RankPlace(rank=5, world=8, local_rank=1, local_world=4, attempt=2, launched=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # other launchers leave it out
    place = place_under_torchrun()
    assert place is not None
    assert place.local_world is None


# --- tensor groups and machines ---


@pytest.mark.parametrize(("tensor", "first", "local"), [(1, 3, 3), (2, 0, 8), (2, 8, 4), (4, 4, 4)])
def test_tensor_groups_inside_of_machines_are_accepted(tensor: int, first: int, local: int) -> None:
    check_tensor_groups(MeshSizes(shard=24 // tensor, tensor=tensor), first_rank=first, local_world=local)


@pytest.mark.parametrize(
    ("tensor", "first", "local", "shape"),
    [
        (2, 0, 3, "{replicate: 1, shard: 8, tensor: 3}"),
        (4, 2, 2, "{replicate: 1, shard: 12, tensor: 2}"),
        (8, 4, 4, "{replicate: 1, shard: 6, tensor: 4}"),
        (2, 3, 4, "{replicate: 1, shard: 24, tensor: 1}"),  # a machine with an odd number of ranks is before this one
    ],
)
def test_tensor_groups_over_machines_are_refused_with_the_nearest_shape(
    tensor: int, first: int, local: int, shape: str
) -> None:
    with pytest.raises(LaunchError, match=r"placement\.policy\.tensor: .* share a machine") as error:
        check_tensor_groups(MeshSizes(shard=24 // tensor, tensor=tensor), first_rank=first, local_world=local)
    assert str(error.value).endswith(f"use placement.policy {shape}.")


def test_a_rank_under_torchrun_refuses_its_tensor_group_before_it_joins(tmp_path: Path) -> None:
    recipe = make_recipe("placement.devices=2", "placement.policy={tensor: 2}")
    task = RankTask(recipe=recipe, folder=tmp_path, resume_step=None, load_program=lambda name: pytest.fail(name))
    for rank in range(2):  # each alone on its machine
        with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE 1"):
            run_rank(RankPlace(rank=rank, world=2, local_rank=0, local_world=1), task)


def test_torchruns_environment_must_be_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(LaunchError, match="not numbers"):
        place_under_torchrun()


def test_the_stop_file_asks_rank_0_and_the_others_hear_it_from_the_step(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    first, second = (StopRequest(RankPlace(rank=rank, world=2, launched=True), stop_file) for rank in (0, 1))

    before = [first.requested, second.requested]
    stop_file.touch()

    assert before == [False, False]
    assert [first.requested, second.requested] == [True, False]


def test_a_signal_asks_to_stop_and_the_old_handler_comes_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(RankPlace(), tmp_path / "stop") as request:
        signal.raise_signal(signal.SIGTERM)
        assert request.requested

    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with StopRequest(RankPlace(), tmp_path / "stop") as request:
        signal.raise_signal(signal.SIGINT)
        assert request.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_tensors_of_a_result_come_as_values_and_hold_no_file() -> None:
    value = {"weights": torch.arange(6.0).view(2, 3), "step": 3}
    sent = bytes(ForkingPickler.dumps(_ByValue(value)))  # as multiprocessing's queue does it
    assert b"rebuild_storage_fd" not in sent
    arrived = ForkingPickler.loads(sent)
    assert arrived["step"] == 3
    assert arrived["weights"].tolist() == value["weights"].tolist()


def _look_until_all_ended(processes: RankProcesses, ranks: list[Any]) -> None:
    deadline = time.monotonic() + 60.0
    while any(rank.exitcode is None for rank in ranks):
        assert time.monotonic() < deadline
        processes.look(ends_others=lambda: True)
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_rank_that_is_stopped_is_killed_and_named(tmp_path: Path) -> None:
    processes = RankProcesses(tmp_path / "stacks.txt", most_stopped_s=1.0)  # five looks
    ranks = [multiprocessing.get_context("spawn").Process(target=time.sleep, args=(120,), daemon=True) for _ in "ab"]
    for rank in ranks:
        rank.start()
    for _ in range(9):
        processes.look(ends_others=lambda: True)
    assert [rank.exitcode for rank in ranks] == [None, None]  # they only sleep

    assert ranks[1].pid is not None
    os.kill(ranks[1].pid, signal.SIGSTOP)
    _look_until_all_ended(processes, ranks)

    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * 2
    assert processes.ended is not None
    assert f"(process {ranks[1].pid}): stopped (SIGSTOP), without a sign of life for 1 s" in processes.ended
    assert f"process {ranks[0].pid}" not in processes.ended
    assert f"process {ranks[0].pid}" in (tmp_path / "stacks.txt").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_rank_that_goes_on_in_time_is_left_alone(tmp_path: Path) -> None:
    processes = RankProcesses(None, most_stopped_s=1.0)
    rank = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(120,), daemon=True)
    rank.start()
    assert rank.pid is not None
    for _ in range(4):
        os.kill(rank.pid, signal.SIGSTOP)
        for _ in range(4):
            processes.look(ends_others=lambda: True)
        os.kill(rank.pid, signal.SIGCONT)
        while is_stopped(rank.pid):
            time.sleep(0.01)
        processes.look(ends_others=lambda: True)

    assert rank.exitcode is None
    assert processes.ended is None
    rank.kill()
    rank.join()


def test_a_mark_that_does_not_change_is_counted_in_looks() -> None:
    stalls, now_s = Stalls(), time.monotonic()
    assert stalls.look("rank", None) == 0.0  # it has not begun
    assert stalls.look("rank", now_s - 9.0) == 0.0
    assert stalls.look("rank", now_s - 9.0) == pytest.approx(0.2)  # whatever the clock says: it may have been stopped
    assert stalls.look("rank", now_s - 9.0) == pytest.approx(0.4)
    assert stalls.look("rank", now_s - 1.0) == 0.0
    assert stalls.look("rank", now_s + 60.0) == 0.0
    assert stalls.look("rank", now_s + 60.0) == 0.0  # it waits with a deadline


@pytest.mark.slow
def test_the_rank_that_hangs_is_killed_and_named_and_not_one_that_advances(tmp_path: Path) -> None:
    marks = RankMarks(2)
    processes = RankProcesses(tmp_path / "stacks.txt", marks=marks, most_hung_s=1.0)  # five looks
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(marks, rank, tmp_path), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 60.0
    while not all((tmp_path / f"advances-{rank}").exists() for rank in range(2)):
        processes.look(ends_others=lambda: False)
        time.sleep(0.02)
        assert time.monotonic() < deadline
    assert processes.ended is None

    (tmp_path / "hang-1").touch()
    while ranks[1].exitcode is None:
        processes.look(ends_others=lambda: False)
        time.sleep(0.1)
        assert time.monotonic() < deadline

    assert ranks[1].exitcode == -signal.SIGKILL
    assert ranks[0].exitcode is None
    assert processes.ended is not None
    assert processes.ended.startswith(f"rank 1 (process {ranks[1].pid}) hangs at File ")
    assert "in loops_for_ever: no progress for 1 s (placement.timeout_s)" in processes.ended
    stacks = (tmp_path / "stacks.txt").read_text()
    assert "rank 0 (process" in stacks
    assert "in loops_for_ever" in stacks
    ranks[0].kill()
    ranks[0].join()


@pytest.mark.slow
def test_a_rank_that_waits_in_a_collective_is_left_alone_while_another_one_advances(tmp_path: Path) -> None:
    marks = RankMarks(2)
    processes = RankProcesses(tmp_path / "stacks.txt", marks=marks, most_hung_s=1.0)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(marks, rank, tmp_path), daemon=True) for rank in range(2)]
    (tmp_path / "hang-0").write_text("collective")
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 90.0
    while not all((tmp_path / f"advances-{rank}").exists() for rank in range(2)):
        time.sleep(0.02)
        assert time.monotonic() < deadline
    for _ in range(20):  # four times the limit
        processes.look(ends_others=lambda: False)
        time.sleep(0.1)
    assert processes.ended is None

    (tmp_path / "hang-1").touch()
    while processes.ended is None:
        processes.look(ends_others=lambda: False)
        time.sleep(0.1)
        assert time.monotonic() < deadline

    assert processes.ended.startswith(f"rank 1 (process {ranks[1].pid}) hangs at ")
    assert "rank 0" not in processes.ended
    for rank in ranks:
        rank.kill()
        rank.join()


@pytest.mark.slow
def test_ranks_are_left_alone_while_a_debugger_has_stopped_one(tmp_path: Path) -> None:
    marks = RankMarks(1)
    processes = RankProcesses(tmp_path / "stacks.txt", marks=marks, most_hung_s=1.0)
    rank = multiprocessing.get_context("spawn").Process(target=work, args=(marks, 0, tmp_path), daemon=True)
    (tmp_path / "hang-0").write_text("debugger")
    rank.start()
    try:
        deadline = time.monotonic() + 60.0
        while not (tmp_path / "advances-0").exists():
            time.sleep(0.02)
            assert time.monotonic() < deadline
        for _ in range(20):  # four times the limit
            processes.look(ends_others=lambda: False)
        assert processes.ended is None
        assert rank.exitcode is None
        assert not (tmp_path / "stacks.txt").exists()
    finally:
        rank.kill()
        rank.join()


def test_a_handler_for_the_signal_of_hangs_still_gets_the_signals_of_others() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with raising_if_hung(60.0, None, lambda text: None):
            signal.raise_signal(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1] * 2


DUMP = """Thread 0x02 (most recent call first):
  File "/home/user/maps.py", line 3 in clean
  File "/lib/podium/data/examples.py", line 60 in make
  File "/lib/podium/data/loader.py", line 141 in _produce

Thread 0x01 (most recent call first):
  File "/lib/python3.11/queue.py", line 180 in get
  File "/lib/podium/data/loader.py", line 111 in __next__
  File "/lib/podium/spmd/run.py", line 240 in _next_step
"""


def test_a_rank_that_waits_for_data_is_where_its_loader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": "/lib/python3.11"})
    assert place_of(DUMP) == 'File "/home/user/maps.py", line 3 in clean'
    assert place_of(DUMP.replace("loader.py", "other.py")) == 'File "/lib/podium/data/other.py", line 111 in __next__'
