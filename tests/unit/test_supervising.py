# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a command: which deaths of its child processes it answers, and how it ends itself."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from podium.runs.host_memory import memory_folder
from podium.supervising import is_supervised, limit_before_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="supervisors are of Linux"),
    pytest.mark.timeout(120),
]

# Each child process adds its arguments to `lives`, and then does what the test says for the number of its life.
CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from podium.supervising import supervise
from podium.runs.supervised import SUPERVISION, SupervisedRun

arguments = list(supervise(["train", "recipe.yaml"]))
told, run, lives = SUPERVISION.get(), Path("runs/a"), Path("lives")
predecessor = told.predecessor(run)
with lives.open("a") as file:
    file.write(json.dumps([arguments, None if predecessor is None else predecessor.cause]) + "\\n")
life = len(lives.read_text().splitlines())

def begin(restarts=3, recorded=True, heartbeat_timeout_s=60.0):
    told.begins(SupervisedRun(folder=run, restarts=restarts, heartbeat_timeout_s=heartbeat_timeout_s))
    if recorded:
        run.mkdir(parents=True, exist_ok=True)
        (run / "run.json").write_text("{}")
        told.is_recorded()

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)

"""


def supervised(folder: Path, *what: str) -> tuple[int, list[tuple[list[str], str | None]], str]:
    """Exit code, the arguments and the predecessor's cause of each child process, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD + "".join(map(textwrap.dedent, [f"{each}\n" for each in what]))],
        cwd=folder, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    lives = [json.loads(line) for line in (folder / "lives").read_text().splitlines()]
    return done.returncode, [(arguments, cause) for arguments, cause in lives], " ".join(done.stdout.split())


FIRST, RESUMED = ["train", "recipe.yaml"], ["resume", "runs/a"]


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 2])
def test_it_ends_with_the_code_of_its_child(tmp_path: Path, code: int) -> None:
    assert supervised(tmp_path, "begin()", f"sys.exit({code})")[:2] == (code, [(FIRST, None)])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_command_that_is_killed_before_its_run_begins_is_repeated(tmp_path: Path, number: signal.Signals) -> None:
    """Nothing of the killed one is left, also what has left its session, and the next one knows of it."""
    dies = f"""
    if life < 3:
        Path(f"left-{{life}}").write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
        die({int(number)})
    assert not any(Path("/proc", each.read_text()).exists() for each in Path().glob("left-*"))
    assert not predecessor.is_recorded and predecessor.ray is None
    begin()
    """
    code, lives, said = supervised(tmp_path, dies)
    cause = f"The controller was killed by {number.name}."
    assert (code, lives) == (0, [(FIRST, None), (FIRST, cause), (FIRST, cause)])
    assert said.count(f"warning: {cause} The command is started again.") == 2


@pytest.mark.slow
def test_one_that_is_always_killed_before_its_run_ends_like_it(tmp_path: Path) -> None:
    code, lives, said = supervised(tmp_path, "die(signal.SIGSEGV)")
    assert (code, len(lives)) == (-signal.SIGSEGV, 4)
    assert "as often as placement.restarts allows. Give the command again." in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sys.exit(2)", "os._exit(1)"])
def test_an_error_before_the_run_ends_the_command_at_once(tmp_path: Path, how: str) -> None:
    code, lives, said = supervised(tmp_path, how)
    assert (code, len(lives), said) == (1 if "_exit" in how else 2, 1, "")


@pytest.mark.slow
def test_a_recipe_without_restarts_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("program: grpo\nplacement: {restarts: 0}")
    code, lives, said = supervised(tmp_path, "die()")
    assert (code, len(lives)) == (-signal.SIGKILL, 1)
    assert "The run ends: placement.restarts is 0." in said


@pytest.mark.slow
def test_a_run_that_keeps_nothing_is_not_begun_again(tmp_path: Path) -> None:
    code, lives, _ = supervised(tmp_path, "told.begins_alone()", "die()")
    assert (code, lives) == (-signal.SIGKILL, [(FIRST, None)])


@pytest.mark.slow
@pytest.mark.parametrize("is_aside", [False, True])
def test_a_pipeline_goes_on_in_a_stage_without_a_controller(tmp_path: Path, is_aside: bool) -> None:
    """Unless an earlier one may still have to be brought back, which the command itself does."""
    if is_aside:
        (tmp_path / ".overwritten-pipeline").mkdir()
    code, lives, _ = supervised(tmp_path, "told.begins_pipeline(Path('pipeline'))", "life == 1 and die()")
    assert (code, lives[1][0]) == (0, FIRST if is_aside else ["resume", "pipeline"])


def test_limits_before_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("program: grpo\nplacement: {restarts: 7, heartbeat_timeout_s: 5}")
    stages = "{a: {program: sft, placement: {restarts: 9}}, b: {program: ppo}, c: {program: grpo}}"
    Path("b.yaml").write_text(f"program: pipeline\ndefaults: {{placement: {{restarts: 1}}}}\nstages: {stages}")
    Path("c.yaml").write_text("program: grpo\nplacement: {restarts: '${env:N}'}")
    known = {
        ("a.yaml",): 7, ("a.yaml", "--set", "placement.restarts=0"): 0, ("--set=placement.restarts=2", "a.yaml"): 2,
        ("b.yaml",): 1, ("b.yaml", "--set", "stages.b.placement.restarts=4"): 4, ("c.yaml",): 3, ("none.yaml",): 3,
        ("a.yaml", "--set", "placement.restarts=many"): 3, ("a.yaml", "--set", "nonsense"): 7,
    }  # fmt: skip
    assert {each: limit_before_run(["train", *each], "restarts") for each in known} == known
    assert limit_before_run(["train", "a.yaml"], "heartbeat_timeout_s") == 5
    assert limit_before_run(["train", "a.yaml", "--set", "placement.restarts=.inf"], "restarts") == 3


def test_an_argument_that_is_too_long_for_a_file_is_none() -> None:
    long = "reward.0.prompt=" + "a" * 5000
    assert not is_supervised(["train", long])
    assert limit_before_run(["train", "--set", long], "restarts") == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_controller_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    code, lives, said = supervised(tmp_path, "begin()", f"life == 1 and die({int(number)})")
    cause = f"The controller was killed by {number.name}."
    assert (code, lives) == (0, [(FIRST, None), (RESUMED, cause)])
    assert f"warning: {cause} A new controller goes on with the run." in said
    assert "A new controller" in (tmp_path / "runs" / "a" / "console.log").read_text()


@pytest.mark.slow
def test_a_controller_that_a_library_has_ended_is_started_again(tmp_path: Path) -> None:
    code, lives, said = supervised(tmp_path, "begin()", "life == 1 and os._exit(1)")
    assert (code, [arguments for arguments, _ in lives]) == (0, [FIRST, RESUMED])
    assert "was ended from within, with exit code 1" in said


@pytest.mark.slow
def test_before_the_folder_has_everything_the_command_is_repeated(tmp_path: Path) -> None:
    code, lives, _ = supervised(tmp_path, "begin(recorded=life > 1)", "life < 3 and die()")
    assert (code, [arguments for arguments, _ in lives]) == (0, [FIRST, FIRST, RESUMED])


@pytest.mark.slow
def test_a_controller_that_dies_before_it_has_begun_again_is_followed_by_another(tmp_path: Path) -> None:
    code, lives, _ = supervised(tmp_path, "life == 2 and die()", "begin()", "life == 1 and die()")
    assert (code, [arguments for arguments, _ in lives]) == (0, [FIRST, RESUMED, RESUMED])


@pytest.mark.slow
def test_a_stage_goes_on_with_its_pipeline(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "pipeline.json").write_text("{}")
    code, lives, _ = supervised(tmp_path, "begin(recorded=False)", "life == 1 and die()")
    assert (code, [arguments for arguments, _ in lives]) == (0, [FIRST, ["resume", "runs"]])


@pytest.mark.slow
def test_it_gives_up_without_progress(tmp_path: Path) -> None:
    code, lives, said = supervised(tmp_path, "begin(restarts=2)", "die()")
    assert (code, len(lives)) == (-signal.SIGKILL, 3)
    assert "replaced 2 times since the last committed step, as often as placement.restarts allows" in said
    assert said.endswith("Continue it with: podium resume runs/a")


@pytest.mark.slow
def test_progress_renews_the_budget(tmp_path: Path) -> None:
    code, lives, _ = supervised(tmp_path, "begin(restarts=1)", "told.note_progress()", "life < 5 and die()")
    assert (code, len(lives)) == (0, 5)


@pytest.mark.slow
def test_a_controller_may_ask_for_another(tmp_path: Path) -> None:
    asks = "begin()\nif life == 1:\n    told.ask_restart('Ray died.')\n    sys.exit(3)"
    code, lives, said = supervised(tmp_path, asks)
    assert (code, lives) == (0, [(FIRST, None), (RESUMED, "Ray died.")])
    assert "warning: Ray died. A new controller goes on with the run." in said


@pytest.mark.slow
def test_one_that_asks_too_often_ends_with_an_error(tmp_path: Path) -> None:
    code, lives, said = supervised(tmp_path, "begin(restarts=1)", "told.ask_restart('Ray died.')", "sys.exit(3)")
    assert (code, len(lives)) == (2, 2)
    assert "Ray died. The run ends" in said


@pytest.mark.slow
def test_a_run_that_may_not_be_started_again_does_not_ask(tmp_path: Path) -> None:
    code, lives, _ = supervised(tmp_path, "told.ask_restart('Ray died.')", "sys.exit(3 if told.asks_restart else 2)")
    assert (code, len(lives)) == (2, 1)


@pytest.mark.slow
def test_nothing_of_a_dead_controller_is_left_when_the_next_begins(tmp_path: Path) -> None:
    leaves = """
    begin()
    if life == 1:
        Path("left").write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
        die()
    left = Path("/proc", Path("left").read_text())
    sys.exit(left.exists())
    """
    code, lives, _ = supervised(tmp_path, leaves)
    assert (code, len(lives)) == (0, 2)


# A controller with two processes, of which the next one may take over the first.
KEEPS = """
from podium.cluster.processes import look
from podium.runs.supervised import KeptProcess, KeptRay

def start():
    return look(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)

def keep(process, folder=None):
    kept = KeptProcess(pid=process.pid, started=process.started, name="raylet")
    told.keeps(KeptRay(address="here", token="secret", processes=(kept,), folder=folder, resume_step=3))

def lives(pid):
    return Path("/proc", str(pid)).exists()

begin()
"""


@pytest.mark.slow
def test_what_a_dead_controller_keeps_is_there_for_the_next(tmp_path: Path) -> None:
    keeps = """
    if life == 1:
        kept, other = start(), start()
        Path("left").write_text(f"{kept.pid} {other.pid}")
        keep(kept)
        die()
    kept, other = map(int, Path("left").read_text().split())
    ray = predecessor.ray
    assert (ray.address, ray.token, ray.resume_step, ray.processes[0].pid) == ("here", "secret", 3, kept)
    assert "secret" not in repr(predecessor)
    assert lives(kept) and not lives(other)
    if life == 2:
        die()  # before it has told anything: the next one finds the same
    """
    code, lives, _ = supervised(tmp_path, KEEPS, keeps)
    assert (code, len(lives)) == (0, 3)
    assert not Path("/proc", (tmp_path / "left").read_text().split()[0]).exists()  # at the end of the command


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "told.keeps(None)", "told.ask_restart('Ray died.')"])
def test_what_is_dead_or_given_up_is_not_kept(tmp_path: Path, how: str) -> None:
    loses = f"""
    if life == 1:
        folder = Path("folder")
        folder.mkdir()
        kept = start()
        Path("left").write_text(str(kept.pid))
        keep(kept, str(folder.absolute()))
        {"os.kill(kept.pid, signal.SIGKILL); os.wait()" if how == "kill" else how}
        die()
    assert predecessor.ray is None
    assert not lives(Path("left").read_text())
    assert not Path("folder").exists()
    """
    code, lives, _ = supervised(tmp_path, KEEPS, loses)
    assert (code, len(lives)) == (0, 2)


@pytest.mark.slow
def test_a_controller_that_cannot_attach_is_followed_by_one_with_nothing(tmp_path: Path) -> None:
    """Which is no death: with one restart, the run goes on."""
    tries = """
    if life == 1:
        keep(start())
        die()
    if life == 2:
        assert predecessor.ray is not None
        told.ask_restart("It does not answer.", is_death=False)
        sys.exit(3)
    assert predecessor.ray is None
    """
    code, lives, said = supervised(tmp_path, KEEPS.replace("begin()", "begin(restarts=1)"), tries)
    assert (code, len(lives)) == (0, 3)
    assert "warning: It does not answer. A new controller goes on with the run." in said


def test_the_end_of_a_command_ends_what_its_controller_kept(tmp_path: Path) -> None:
    """Killed by a signal that ends a run on purpose."""
    keeps = """
    kept = start()
    Path("left").write_text(str(kept.pid))
    keep(kept)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    die(signal.SIGHUP)
    """
    code, lives, _ = supervised(tmp_path, KEEPS, keeps)
    assert (code, len(lives)) == (-signal.SIGHUP, 1)
    assert not Path("/proc", (tmp_path / "left").read_text()).exists()


@pytest.mark.slow
def test_a_stopped_controller_is_killed(tmp_path: Path) -> None:
    code, lives, _ = supervised(tmp_path, "begin(heartbeat_timeout_s=1)", "life == 1 and die(signal.SIGSTOP)")
    assert code == 0
    assert lives[1][1] is not None
    assert "is stopped (SIGSTOP) and has given no sign of life for 1 s." in lives[1][1]


@pytest.mark.slow
def test_snapshots_are_kept_between_controllers_and_removed_at_the_end(tmp_path: Path) -> None:
    memory = memory_folder(tmp_path / "runs" / "a")
    if memory is None:
        pytest.skip("there is no tmpfs")
    holds = """
    from podium.runs.host_memory import held_memory, memory_folder
    begin()
    with held_memory(run, is_emptied=predecessor is None, is_removed=False):
        memory = memory_folder(run)
        if life == 1:
            (memory / "snapshot").write_text("weights")
            told.note_progress()
            time.sleep(1.5)  # the supervisor looks twice a second
            die()
        with held_memory(Path("runs/another")):  # removes what nobody holds
            sys.exit((memory / "snapshot").read_text() != "weights")
    """
    code, lives, _ = supervised(tmp_path, holds)
    assert (code, len(lives)) == (0, 2)
    assert not memory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handed_on_once_and_start_nothing_again(tmp_path: Path, number: signal.Signals) -> None:
    counts = """
    begin()
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    Path("ready").touch()
    while not seen:
        time.sleep(0.01)
    time.sleep(1.0)
    Path("seen").write_text(str(len(seen)))
    die()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + textwrap.dedent(counts)], cwd=tmp_path, start_new_session=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    end_s = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as a job scheduler does
    assert process.wait(30) == -signal.SIGKILL
    assert (tmp_path / "seen").read_text() == "1"
    assert len((tmp_path / "lives").read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_to_group", [True, False], ids=["to the group", "to the supervisor"])
def test_a_signal_on_a_terminal_comes_once(tmp_path: Path, is_to_group: bool) -> None:
    """A shell sends the signal of `kill %1` to all processes of the job."""
    counts = """
    begin()
    seen = []
    signal.signal(signal.SIGTERM, lambda *_: (seen.append(1), told.note_signal()))
    Path("ready").touch()
    while not seen:
        time.sleep(0.01)
    time.sleep(1.5)
    Path("seen").write_text(str(len(seen)))
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + textwrap.dedent(counts)], cwd=tmp_path, start_new_session=True, stdin=theirs
    )
    end_s = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    (os.killpg if is_to_group else os.kill)(process.pid, signal.SIGTERM)
    assert process.wait(30) == 0
    assert (tmp_path / "seen").read_text() == "1"
    for each in (ours, theirs):
        os.close(each)


@pytest.mark.slow
def test_the_child_ends_with_its_supervisor(tmp_path: Path) -> None:
    waits = "begin()\nPath('child').write_text(str(os.getpid()))\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", CHILD + waits], cwd=tmp_path, stdin=subprocess.DEVNULL)
    end_s = time.monotonic() + 30
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    child = Path("/proc", (tmp_path / "child").read_text())
    process.kill()
    process.wait(10)
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2].split()[:1]:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_which_commands_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipes = {
        "grpo": "program: grpo", "sft": "program: sft", "custom": "program: a.py:f\nsignal: on_policy",
        "both": "program: pipeline\nstages: {a: {program: sft}, b: {program: ppo}}", "broken": "program: [grpo",
    }  # fmt: skip
    for name, text in recipes.items():
        Path(f"{name}.yaml").write_text(text)
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text(recipes["grpo"])
    for arguments in (["train", "grpo.yaml"], ["train", "--devices", "2", "both.yaml"], ["train", "custom.yaml"],
                      ["resume", "run", "--step", "3"]):  # fmt: skip
        assert is_supervised(arguments), arguments
    for arguments in ([], ["train"], ["show", "run"], ["train", "sft.yaml"], ["train", "broken.yaml"], ["train", "no"]):
        assert not is_supervised(arguments), arguments
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_supervised(["train", "grpo.yaml"])
