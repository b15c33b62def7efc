# SPDX-License-Identifier: Apache-2.0
"""Whole runs with the real packages of trackers, in their offline modes; what they have kept is read back."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

try:
    for package in ("wandb", "mlflow", "trackio"):
        metadata.version(package)
except metadata.PackageNotFoundError:
    pytest.skip("trackers are not installed in this environment: run `make test-trackers`", allow_module_level=True)

from helpers.workspace import Workspace
from podium.observe.loggers import close_loggers, open_loggers
from podium.observe.metrics import StepMetrics
from trackers.readers import Kept, read_mlflow, read_trackio, read_wandb

pytestmark = pytest.mark.trackers

SECRETS = {
    "WANDB_API_KEY": "5ec4e7" * 6 + "abcd",
    "MY_SERVICE_TOKEN": "tok-do-not-keep-me",
    "HF_TOKEN": "hf_5ec4e7keepnot",
}
ALL = ["wandb", "mlflow", "trackio", "tensorboard"]
STOPS_AT_2 = """
from pathlib import Path

def stop(metrics):
    if metrics.step == 2:
        Path("runs/sums/stop-requested").touch()
"""
SAMPLES = {"evaluation": {"every": 2, "generation": {"prompts": 3, "max_new_tokens": 2}},
           "data": {"heldout": [{"path": "heldout.jsonl"}]}}  # fmt: skip


@pytest.fixture(params=["sqlite", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db" if request.param == "sqlite" else f"file://{tmp_path}/mlruns"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing leaves the machine, and the user's own settings are not read."""
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the artifacts of a database
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # for other processes


def run_folder(tmp_path: Path, recipe: str = "program: sft\n") -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def logged(names: list[str], folder: Path, losses: dict[int, float], *, resume_step: int | None = None) -> None:
    """One process of a run, with samples at its last step."""
    warnings: list[str] = []
    loggers = open_loggers(names, folder, resume_step=resume_step, warn=warnings.append)
    for logger in loggers:
        for step, loss in losses.items():
            logger.log(StepMetrics(step=step, time_s=1.7e9 + step, values={"loss": loss, "odd@name": math.nan}))
        logger.table(max(losses), "samples", [{"prompt": "2+2|\n", "score": 1.0}, {"prompt": "<b>", "score": None}])
    close_loggers(loggers, failed=False)
    assert warnings == []


ROWS = [{"prompt": "2+2|\n", "score": 1.0}, {"prompt": "<b>", "score": None}]
LONG = "x" * 7000
RECIPE = f"""program: sft
steps: 4
data: {{train: [{{path: a.jsonl}}], columns: {{}}}}
note: {LONG}
key: ${{env:SECRET}}
"""
AS_DICT = {"program": "sft", "steps": 4, "data": {"train": [{"path": "a.jsonl"}], "columns": {}}, "note": LONG,
           "key": "${env:SECRET}"}  # fmt: skip


def test_wandb_offline_has_recipe_metrics_and_tables_under_one_id(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, RECIPE)
    logged(["wandb"], folder, {1: 4.0, 2: 3.0, 3: 2.0})
    logged(["wandb"], folder, {3: 2.5, 4: 1.0}, resume_step=2)

    first, second = read_wandb(folder)
    assert first.id == second.id == (folder / "wandb-id").read_text()
    assert first.config == second.config == AS_DICT
    assert first.losses == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert second.losses == [(3, 2.5), (4, 1.0)]  # W&B itself leaves out what it has when they are uploaded
    assert first.samples == {3: ROWS}
    assert second.samples == {4: ROWS}
    assert {"odd@name", "machine/process_memory_gib", "machine/memory_gib", "machine/cpu"} <= first.names
    assert first.status == "exit 0"


def test_mlflow_continues_one_run_and_has_every_step_once(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    folder = run_folder(tmp_path, RECIPE)
    logged(["mlflow"], folder, {1: 4.0, 2: 3.0, 3: 2.0})
    first = read_mlflow(folder, store)
    (folder / "recipe.yaml").write_text(RECIPE.replace("steps: 4", "steps: 9"))
    logged(["mlflow"], folder, {3: 2.5, 4: 1.0}, resume_step=2)
    second = read_mlflow(folder, store)

    assert first.id == second.id
    assert second.losses == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert second.samples == {3: ROWS, 4: ROWS}
    assert {"odd_name", "machine/process_memory_gib", "machine/memory_gib", "machine/cpu"} <= second.names
    assert second.config == {
        "program": "sft", "steps": "4", "data.train.0.path": "a.jsonl", "data.columns": "{}",
        "note": "x" * 5999 + "…", "key": "${env:SECRET}",
    }  # fmt: skip
    recipe = MlflowClient(store).download_artifacts(second.id, "recipe.yaml", str(tmp_path))
    assert Path(recipe).read_text() == RECIPE.replace("steps: 4", "steps: 9")
    assert second.status == "FINISHED"


def test_mlflow_lists_the_newest_tables_within_the_length_of_its_tag(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    from podium.observe.mlflow_runs import MlflowTracker

    folder = run_folder(tmp_path)
    tracker = MlflowTracker(folder)
    for step in range(60):
        tracker.table(step, "samples", ROWS)
    tracker.close(failed=True)

    run = MlflowClient().get_run((folder / "mlflow-id").read_text())
    listed = [each["path"] for each in json.loads(run.data.tags["mlflow.loggedArtifacts"])]
    assert listed == [f"samples/step-{step:08d}.json" for step in range(10, 60)]
    assert run.info.status == "FAILED"


def test_mlflow_starts_another_run_where_the_store_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path)
    logged(["mlflow"], folder, {1: 4.0})
    first = (folder / "mlflow-id").read_text()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other := f"sqlite:///{tmp_path}/other.db")
    logged(["mlflow"], folder, {2: 3.0}, resume_step=1)

    kept = read_mlflow(folder, other)
    assert kept.id != first
    assert kept.losses == [(2, 3.0)]


def test_trackio_continues_one_run_and_has_every_step_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, RECIPE)
    logged(["trackio"], folder, {1: 4.0, 2: 3.0, 3: 2.0})
    logged(["trackio"], folder, {3: 2.5, 4: 1.0}, resume_step=2)

    kept = read_trackio(folder)
    assert kept.losses == [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)]
    assert kept.samples == {3: ROWS, 4: ROWS}
    assert {key: value for key, value in kept.config.items() if not key.startswith("_")} == AS_DICT
    assert {"odd@name", "machine/process_memory_gib", "machine/memory_gib", "machine/cpu"} <= kept.names
    assert capfd.readouterr().out == ""  # the console is the run's


def test_a_run_and_its_resumption_at_all_trackers(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (workspace.path / "stops.py").write_text(STOPS_AT_2)
    recipe = workspace.recipe(run={"loggers": [*ALL, "stops.py:stop"]}, checkpoint={"every": 1}, **SAMPLES)
    stopped = workspace.podium("train", recipe)
    assert stopped.code == 0, stopped
    resumed = workspace.podium("resume", "runs/sums", "--set", f"run.loggers=[{', '.join(ALL)}]")
    assert resumed.code == 0, resumed
    assert "warning" not in stopped.out + stopped.err + resumed.out + resumed.err

    run, losses = workspace.path / "runs" / "sums", list(workspace.metric("sums", "loss").items())
    assert [step for step, _ in losses] == [1, 2, 3, 4]
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    columns = ("prompt", "answer", "reference", "score")
    samples = {step: [{key: line[key] for key in columns} for line in lines if line["step"] == step] for step in (2, 4)}
    assert [len(rows) for rows in samples.values()] == [3, 3]
    first, second = read_wandb(run)
    assert first.id == second.id
    kept_by = {
        "wandb": Kept(id=first.id, config=first.config, losses=first.losses + second.losses,
                      samples=first.samples | second.samples),
        "mlflow": read_mlflow(run, os.environ["MLFLOW_TRACKING_URI"]),
        "trackio": read_trackio(run),
    }  # fmt: skip
    for name, kept in kept_by.items():
        assert kept.losses == losses, name
        assert kept.samples == samples, name
    assert kept_by["mlflow"].config["optimizer.lr"] == "0.003"
    assert kept_by["trackio"].config["optimizer"]["lr"] == 0.003
    assert kept_by["wandb"].config["optimizer"]["lr"] == 0.003
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == losses  # it is a float32
    assert {"recipe/text_summary", "samples/text_summary"} <= set(events.Tags()["tensors"])

    exported = workspace.podium("export", "runs/sums", "out", "--log-artifact")
    assert exported.code == 0, exported
    _check_artifacts(run, workspace.path / "out")
    _check_no_secret(run)


def _check_artifacts(run: Path, out: Path) -> None:
    from mlflow import MlflowClient
    from trackio.sqlite_storage import SQLiteStorage

    names = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert "model.safetensors" in names
    client, id = MlflowClient(), (run / "mlflow-id").read_text()
    assert {file.path.removeprefix("model/") for file in client.list_artifacts(id, "model")} >= names
    copy = client.download_artifacts(id, "model/model.safetensors")
    assert Path(copy).read_bytes() == (out / "model.safetensors").read_bytes()
    manifest = SQLiteStorage.get_artifact_manifest("podium", "sums-model", None)["manifest"]
    assert {entry["path"] for entry in manifest} == names
    logged = [file for file in run.glob("wandb/offline-run-*/run-*.wandb") if b"sums-model" in file.read_bytes()]
    assert len(logged) == 1  # the process that exported


def _check_no_secret(folder: Path) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"console.log", "recipe.yaml", "wandb-id", "mlflow-id", "trackio-id"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        for value in SECRETS.values():
            assert value.encode() not in content, file


# A process of its own: what counts is that it ends, also past the handlers that the packages run at its end.
HANGING = """
import sys, time
from pathlib import Path
tracker, asked = sys.argv[1:]
from podium.observe import background
from podium.observe.loggers import close_loggers, open_loggers
from podium.observe.metrics import StepMetrics

limits = background.Limits(close_s=2.0, silence_s=0.5)
background.Limits = lambda: limits
loggers = open_loggers([tracker], Path("."), warn=lambda text: print(text, flush=True))
began = time.monotonic()
for step in range(10):
    loggers[0].log(StepMetrics(step=step, time_s=0.0, values={"loss": 1.0}))
assert time.monotonic() - began < 0.5
while not Path(asked).exists():
    time.sleep(0.01)
time.sleep(0.6)
loggers[0].log(StepMetrics(step=10, time_s=0.0, values={"loss": 1.0}))
close_loggers(loggers, failed=False)
print("closed", flush=True)
"""


@pytest.fixture
def silent_server(tmp_path: Path) -> Iterator[str]:
    """Takes connections, and never answers. The first makes a file `asked`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = []

        def accept() -> None:
            try:
                while True:
                    kept.append(server.accept())
                    (tmp_path / "asked").touch()
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_server_that_never_answers_keeps_no_process_alive(tmp_path: Path, silent_server: str, tracker: str) -> None:
    variables = {
        "WANDB_MODE": "online", "WANDB_BASE_URL": f"http://{silent_server}",
        "MLFLOW_TRACKING_URI": f"http://me:hunter22@{silent_server}",
        "TRACKIO_SERVER_URL": f"http://{silent_server}", "TRACKIO_WRITE_TOKEN": "tok-do-not-keep-me",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", HANGING, tracker, "asked"], cwd=tmp_path, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip

    assert done.returncode == 0, done
    assert f"{tracker} has not answered for 0.5 s" in done.stdout
    assert "The run ends without it; 12 records may be missing" in done.stdout  # with the call that it is in
    assert done.stdout.endswith("closed\n")
    assert not [value for value in (*SECRETS.values(), "hunter22") if value in done.stdout + done.stderr]


def _refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter22@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "online")


@pytest.mark.parametrize(
    ("tracker", "broken", "said"), [("mlflow", _refuse, "Max retries exceeded"), ("wandb", _no_key, "no API key")]
)
def test_a_run_goes_on_without_a_tracker_that_cannot_be_reached(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tracker: str,
    broken: Callable[[pytest.MonkeyPatch], None], said: str,
) -> None:  # fmt: skip
    broken(monkeypatch)
    outcome = workspace.process("train", workspace.recipe(run={"loggers": [tracker]}))

    assert outcome.code == 0, outcome
    text = " ".join((outcome.out + outcome.err).split())
    assert f"warning: {tracker} failed: " in text
    assert said in text
    assert f"{tracker} is off for the rest of this run" in text
    assert "hunter22" not in text
    assert sorted(workspace.metric("sums", "loss")) == [1, 2, 3, 4]
    assert b"hunter22" not in (workspace.path / "runs/sums/console.log").read_bytes()
