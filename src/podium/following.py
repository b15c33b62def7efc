# SPDX-License-Identifier: Apache-2.0
"""Follows a run while it is served: newer checkpoints take the place of the weights that are served."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import PodiumError
from podium.gateway.backend import EngineThread
from podium.gateway.version_gate import VersionGate
from podium.recipe import ModelSection
from podium.runs.folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """A run whose newest checkpoint is served. `step`: the one that is loaded first."""

    run: RunFolder
    step: int
    every_s: float = 2.0  # how often its folder is looked at


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint. A run that goes on from an earlier step may save the same step again."""

    step: int
    changed_ns: int


def version_name(step: int) -> str:
    """What clients are told of the weights."""
    return f"step-{step}"


class Follower:
    """Loads newer checkpoints. One that cannot be read is reported once, and the weights in place go on."""

    def __init__(
        self, followed: FollowedRun, model: ModelSection, dtype: str, backend: EngineThread, gate: VersionGate,
        say: Callable[[str], object],
    ) -> None:  # fmt: skip
        """`model`: as it is served, from an exported folder. `dtype`: in which the engine computes."""
        self._followed, self._model, self._dtype = followed, model, dtype
        self._backend, self._gate, self._say = backend, gate, say
        self._served: _Saved | None = None
        self._step = followed.step
        self._refused: _Saved | None = None
        self._number = 0

    async def follow(self) -> None:
        """Looks for newer checkpoints until it is cancelled."""
        self._served = _newest(self._followed.run)
        if self._served is not None and self._served.step != self._step:
            self._served = None  # saved since the first one was loaded
        while True:
            newest = await asyncio.to_thread(_newest, self._followed.run)
            if newest not in (None, self._served, self._refused):
                await self._replace(newest)
            await asyncio.sleep(self._followed.every_s)

    async def _replace(self, saved: _Saved) -> None:
        """Serves this checkpoint from now on. Waits for the requests under way."""
        try:
            version, weights = await asyncio.to_thread(self._read, saved.step)
        except Exception as error:
            self._refused = saved
            self._say(f"step {saved.step} is not served, and step {self._step} goes on: {_why(error)}")
            return
        try:
            async with self._gate.replace(version_name(saved.step)):
                await self._backend.install(version, weights)
        except Exception as error:
            self._refused = saved
            self._say(f"step {saved.step} was not installed: {_why(error)} If requests fail, start again.")
            return
        self._served, self._step, self._refused = saved, saved.step, None
        self._say(f"step {saved.step} of {self._followed.run.path} is served from now on")

    def _read(self, step: int) -> tuple[Any, Any]:
        """The version and its tensors, in host memory and in the form of the engine."""
        from podium.engine.mesh import adopt
        from podium.engine.sharding import compute_dtype, place
        from podium.spmd.export import export_checkpoint
        from podium.weights.published import PublishedWeights

        mesh = adopt(rank=0, world=1, device="cpu", devices=None)
        with tempfile.TemporaryDirectory(prefix="podium-follow-") as temporary:
            folder = Path(temporary) / "model"
            export_checkpoint(self._followed.run, folder, which=step, dtype=None)
            section = self._model.model_copy(update={"path": str(folder), "dtype": self._dtype})
            model, _ = place(section, folder, mesh, seed=0, masters=False)
        self._number += 1
        weights = PublishedWeights(model, (), mesh, compute_dtype(section, mesh.device))
        return weights.describe(self._number), weights


def _why(error: Exception) -> str:
    kind = "" if isinstance(error, PodiumError) else f"{type(error).__name__}: "
    return f"{kind}{(str(error).splitlines() or [''])[0]}"


def _newest(run: RunFolder) -> _Saved | None:
    from podium.engine.checkpoint_files import saved_steps

    saved = saved_steps(run.checkpoints)
    try:
        return _Saved(saved[-1].step, saved[-1].folder.stat().st_mtime_ns) if saved else None
    except OSError:  # removed meanwhile: a newer one has taken its place, or will
        return None
