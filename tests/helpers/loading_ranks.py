# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of loaders that share the work of tokenizing. Here, because a spawned process imports it
by name."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.ranks import mesh_of
from podium.data.examples import ExampleMaker, MakerSpec
from podium.data.exchange import Exchange
from podium.data.files import ONE_READER, Readers
from podium.data.loader import StepExamples, StepLoader, StepSize
from podium.data.rows import Row
from podium.data.sources import open_source
from podium.data.state import LoaderState, encode
from podium.errors import DataError, LaunchError
from podium.recipe import ModelSection, SourceSection
from podium.spmd.exchanging import RankExchange
from podium.spmd.launch import RankPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTask:
    """Steps to load."""

    model: Path
    data: Path
    steps: int = 12
    state: LoaderState | None = None

    def open(self, exchange: Exchange | None) -> StepLoader:
        section = SourceSection(path=str(self.data))
        spec = MakerSpec(
            model=ModelSection(path=str(self.model)), sections=(section,), key="data.train", trained="assistant",
            max_length=200, overlong="truncate",
        )  # fmt: skip
        readers = ONE_READER if exchange is None else Readers(rank=exchange.rank, world=exchange.world)
        return StepLoader(
            [open_source(section, "data.train.0", readers=readers)], spec, seed=3, shuffle=True, shuffle_rows=40,
            size=StepSize(tokens=600), window=32, workers=0, prefetch=2, state=self.state, exchange=exchange,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """What one rank has loaded."""

    digests: tuple[str, ...]  # one for each step
    state: LoaderState  # after the fourth
    num_tokenized: int


def digest(step: StepExamples) -> str:
    """A hash of all that a step is, its place in the data included."""
    values, arrays = encode(step.state)
    sha = hashlib.sha256(str(values).encode())
    for array in arrays.values():
        sha.update(array.tobytes())
    for example in step.examples:
        sha.update(str((example.value, example.source)).encode())
        for document in example.documents:
            sha.update(document.tokens.tobytes() + document.trained.tobytes())
    return sha.hexdigest()


def loaded(task: LoadTask, exchange: Exchange | None) -> Loaded:
    """Loads the task's steps in this process."""
    num_tokenized, make = 0, ExampleMaker.make

    def counted(self: ExampleMaker, row: Row, *args: Any) -> Any:
        nonlocal num_tokenized
        num_tokenized += 1
        return make(self, row, *args)

    ExampleMaker.make = counted  # type: ignore[method-assign]
    try:
        with task.open(exchange) as loader:
            steps = [next(loader) for _ in range(task.steps)]
    finally:
        ExampleMaker.make = make  # type: ignore[method-assign]
    return Loaded(digests=tuple(map(digest, steps)), state=steps[3].state, num_tokenized=num_tokenized)


def loading_rank(place: RankPlace, task: LoadTask) -> list[Loaded]:
    """What each rank has loaded."""
    with mesh_of(place) as mesh:
        with RankExchange(mesh, timeout_s=60) as exchange:
            own = loaded(task, exchange)
            mesh.barrier()
        return mesh.gather(own)


def failing_rank(place: RankPlace, task: LoadTask) -> list[tuple[int, str]]:
    """How many steps each rank got, and its error."""
    with mesh_of(place) as mesh:
        num_steps, text = 0, ""
        with RankExchange(mesh, timeout_s=60) as exchange, task.open(exchange) as loader:
            try:
                for _ in loader:
                    num_steps += 1
                    mesh.barrier()
            except DataError as error:
                text = str(error)
        return mesh.gather((num_steps, text))


def leaving_rank(place: RankPlace) -> list[tuple[str, float]]:
    """Rank 1 closes its end while the others wait for it: their errors, and how long they and rank 1 waited."""
    with mesh_of(place) as mesh:
        text, exchange = "", RankExchange(mesh, timeout_s=60)
        began = time.monotonic()
        try:
            if mesh.rank != 1:
                exchange.all_gather(b"mine", lambda: False)
        except LaunchError as error:
            text = str(error)
        exchange.close()
        exchange.close()
        return mesh.gather((text, time.monotonic() - began))


def late_rank(place: RankPlace) -> list[tuple[str, bool]]:
    """Rank 1 never has anything to send. Then all send, and have what all sent."""
    with mesh_of(place) as mesh:
        with RankExchange(mesh, timeout_s=60) as exchange:
            text, stopped = "", False
            exchange._timeout_s = 2.0
            try:
                if mesh.rank == 0:
                    exchange.all_gather(b"early", lambda: False)
                if mesh.rank == 2:
                    stopped = exchange.all_gather(b"never sent", lambda: True) is None
            except LaunchError as error:
                text = str(error)
            mesh.barrier()
        return mesh.gather((text, stopped))


def sending_rank(place: RankPlace) -> list[bool]:
    """All send payloads of different lengths, many times; rank 2 begins late."""
    with mesh_of(place) as mesh:
        with RankExchange(mesh, timeout_s=60) as exchange:
            rounds = []
            for number in range(50):
                if mesh.rank == 2 and number % 10 == 0:
                    time.sleep(0.05)
                payloads = [bytes([rank + 1]) * (rank * number) for rank in range(mesh.world)]
                rounds.append(exchange.all_gather(payloads[mesh.rank], lambda: False) == payloads)
            mesh.barrier()
        return mesh.gather(all(rounds))


def raising_loader_rank(place: RankPlace) -> list[str]:
    """The loader of rank 2 fails: all others have its error."""
    with mesh_of(place) as mesh:
        text = ""
        with RankExchange(mesh, timeout_s=60) as exchange:
            if mesh.rank == 2:
                exchange.fail(DataError("rank 2 cannot read nodes.jsonl"))
            try:
                exchange.all_gather(b"mine", lambda: False)
            except DataError as error:
                text = str(error)
        return mesh.gather(text)
