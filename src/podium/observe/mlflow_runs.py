# SPDX-License-Identifier: Apache-2.0
"""MLflow, behind the `mlflow` extra. Server or store, experiment and credentials are those of its environment
variables."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from podium.errors import TrackerError
from podium.observe.metrics import StepMetrics
from podium.observe.tracking import PROJECT, Row, flattened, note_run_id, recipe_of, run_id

# Limits of MLflow: characters of names and of the values of parameters, parameters and metrics of one request.
_NAME_LENGTH, _VALUE_LENGTH = 250, 6000
_MOST_PARAMS, _MOST_METRICS = 100, 900
# Tables that MLflow's page lists as tables: their names are in one tag, whose length is limited.
_LISTED_TABLES = 50
_TABLES_TAG = "mlflow.loggedArtifacts"
_STEP_TAG = "podium.step"

T = TypeVar("T")


class MlflowTracker:
    """One MLflow run for each run folder; a resumed run continues it. Steps that the run has already keep their first
    values: MLflow cannot remove any."""

    def __init__(self, folder: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, RunTag

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells on the console how it makes a database
        self._metric, self._tag = Metric, RunTag
        self._client = MlflowClient()
        run = _found(self._client, run_id(folder, "mlflow"))
        if run is None:
            run = self._client.create_run(_experiment(self._client), run_name=folder.name)
            with contextlib.suppress(OSError):  # the run folder may be gone or full; the run is at MLflow
                note_run_id(folder, "mlflow", run.info.run_id)
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._id: str = run.info.run_id
        self._last_step = int(run.data.tags.get(_STEP_TAG, -1))  # of an earlier process
        self._log_recipe(folder, run.data.params)

    def log(self, metrics: StepMetrics) -> None:
        """Logs the metrics of one step."""
        if metrics.step <= self._last_step:
            return
        time_ms = int(metrics.time_s * 1000)
        values = [self._metric(_name(name), value, time_ms, metrics.step) for name, value in metrics.values.items()]
        for part in _parts(values, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part, tags=[self._tag(_STEP_TAG, str(metrics.step))])

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as a file of its own."""
        self._client.log_text(self._id, text, f"{name}/step-{step:08d}.txt")

    def table(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Logs a table as a file of its own, in the format of MLflow's tables."""
        if not rows:
            return
        columns, file = list(rows[0]), f"{name}/step-{step:08d}.json"
        content = {"columns": ["step", *columns], "data": [[step, *(row[each] for each in columns)] for row in rows]}
        self._client.log_text(self._id, json.dumps(content), file)
        listed = json.loads(self._client.get_run(self._id).data.tags.get(_TABLES_TAG, "[]"))
        entry = {"path": file, "type": "table"}
        listed = [*[each for each in listed if each != entry][1 - _LISTED_TABLES :], entry]
        self._client.set_tag(self._id, _TABLES_TAG, json.dumps(listed))

    def close(self, *, failed: bool) -> None:
        """Marks the run as finished or failed."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")

    def _log_recipe(self, folder: Path, known: dict[str, str]) -> None:
        """The recipe as parameters, and as a file. MLflow cannot change a parameter, so after a resume with another
        recipe only the file is the new one."""
        from mlflow.entities import Param

        values = {_name(key): value for key, value in flattened(recipe_of(folder)).items()}
        new = [Param(key, _cut(value)) for key, value in values.items() if key not in known]
        for part in _parts(new, _MOST_PARAMS):
            self._client.log_batch(self._id, params=part)
        if (folder / "recipe.yaml").is_file():
            self._client.log_artifact(self._id, str(folder / "recipe.yaml"))


def log_artifact(folder: Path, exported: Path) -> None:
    """Adds an exported model to the MLflow run of a run folder."""
    from mlflow import MlflowClient

    client = MlflowClient()
    run = _found(client, run_id(folder, "mlflow"))
    if run is None:
        raise TrackerError("MLflow does not know this run. Set MLFLOW_TRACKING_URI to what it was while the run went")
    client.log_artifacts(run.info.run_id, str(exported), "model")


def _found(client: Any, id: str | None) -> Any | None:
    """The run with this id; None: the store that is used now has none."""
    from mlflow.exceptions import MlflowException

    if id is None:
        return None
    try:
        return client.get_run(id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def _experiment(client: Any) -> str:
    """The id of the experiment that the environment names, or of Podium's."""
    id = os.environ.get("MLFLOW_EXPERIMENT_ID")
    if id:
        return id
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


def _name(name: str) -> str:
    """A name that MLflow accepts for a metric or a parameter."""
    name = re.sub(r"[^\w\-. /]", "_", name)
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}..."


def _cut(value: str) -> str:
    return value if len(value) <= _VALUE_LENGTH else value[: _VALUE_LENGTH - 1] + "…"


def _parts(values: Sequence[T], size: int) -> Iterator[list[T]]:
    iterator = iter(values)
    while part := list(islice(iterator, size)):
        yield part
