# SPDX-License-Identifier: Apache-2.0
"""Reads back what the packages of trackers have written."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = "podium"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a tracker has of one run: `losses` has (step, value) in the order in which they were logged."""

    id: str
    config: dict[str, Any]
    losses: list[tuple[int, float]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)  # of metrics
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    status: str | None = None


def read_wandb(folder: Path) -> list[Kept]:
    """One for each process that has logged offline, in their order. The process of the package writes the end of a
    file after `finish` has returned."""
    end = time.monotonic() + 60.0
    while True:
        kept = [_read_wandb_file(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
        if all(each.status is not None for each in kept):
            return kept
        assert time.monotonic() < end, kept
        time.sleep(0.05)


def _read_wandb_file(file: Path) -> Kept:
    kept = Kept(id="", config={})
    status = None
    for record in _wandb_records(file.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                config.pop("_wandb", None)
                kept = Kept(id=record.run.run_id, config=config)
            case "history":
                values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                step = record.history.step.num
                kept.names.update(values)
                if "loss" in values:
                    kept.losses.append((step, float(values["loss"])))
                if "samples/path" in values:
                    table = json.loads((file.parent / "files" / json.loads(values["samples/path"])).read_text())
                    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
                    assert {row.pop("step") for row in rows} == {step}
                    kept.samples[step] = rows
            case "exit":
                status = f"exit {record.exit.exit_code}"
    return Kept(
        id=kept.id, config=kept.config, losses=kept.losses, names=kept.names, samples=kept.samples, status=status
    )


def _wandb_records(data: bytes) -> Iterator[Any]:
    """The file is LevelDB's log: blocks of 32 KiB with records, or parts of them, after a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    at, content = 7, b""
    while at + 7 <= len(data):
        room = 0x8000 - at % 0x8000
        if room < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):
            return  # it is being written
        content += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            content = b""
            yield record


def read_mlflow(folder: Path, store: str) -> Kept:
    """The run of a run folder, from a store."""
    from mlflow import MlflowClient

    client, id = MlflowClient(store), (folder / "mlflow-id").read_text()
    run = client.get_run(id)
    assert len(client.search_runs([run.info.experiment_id])) == 1
    samples = {}
    for artifact in client.list_artifacts(id, "samples"):
        table = json.loads(Path(client.download_artifacts(id, artifact.path)).read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        assert len(client.load_table(run.info.experiment_id, artifact.path, run_ids=[id])) == len(rows)
        (step,) = {row.pop("step") for row in rows}
        samples[step] = rows
    losses = [(each.step, each.value) for each in client.get_metric_history(id, "loss")]
    return Kept(
        id=id, config=run.data.params, losses=losses, names=set(run.data.metrics), samples=samples,
        status=run.info.status,
    )  # fmt: skip


def read_trackio(folder: Path) -> Kept:
    """The run of a run folder, from the database of this machine."""
    from trackio.sqlite_storage import SQLiteStorage

    name = (folder / "trackio-id").read_text()
    (record,) = (each for each in SQLiteStorage.get_run_records(PROJECT) if each["name"] == name)
    lines = SQLiteStorage.get_logs(PROJECT, name, run_id=record["id"])
    return Kept(
        id=name,
        config=SQLiteStorage.get_run_config(PROJECT, name, run_id=record["id"]) or {},
        losses=[(line["step"], line["loss"]) for line in lines if "loss" in line],
        names={key for line in lines for key in line},
        samples={line["step"]: line["samples"]["_value"] for line in lines if "samples" in line},
    )
