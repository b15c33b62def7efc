# SPDX-License-Identifier: Apache-2.0
"""An on-policy run over fake roles: the real controller, programs, ledger, metrics and run folder, in one process."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from helpers.fake_roles import (
    Bandit,
    FakeCritic,
    FakeGenerator,
    FakeGrader,
    FakeLearner,
    FakeRewardModel,
    FakeScorer,
)
from helpers.made_batches import on_policy_recipe
from podium.cluster.objects import InlineStored, ObjectScope
from podium.cluster.results import Span
from podium.controller.layout import role_names
from podium.controller.ledger import Ledger
from podium.controller.parts import OnPolicyParts, Roles
from podium.controller.phases import who_leaves
from podium.controller.prompts import PromptSource
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.controller.replay import ReplayExecutor
from podium.controller.run import OnPolicyRun
from podium.controller.snapshots import Snapshots
from podium.controller.state import RunState
from podium.data.rows import Row
from podium.data.tasks import read_tasks
from podium.observe import EvaluationView, StepMetrics, Stopwatch, read_metrics
from podium.observe.console import Console, StepView
from podium.programs import controlled
from podium.runs.folder import RunFolder
from podium.runs.log import open_log
from podium.runs.rollout_files import forget_rollouts_after
from podium.runs.step_files import forget_steps_after


class HeardConsole(Console):
    """Remembers what a person would have seen."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.steps: list[StepView] = []
        self.evaluations: list[EvaluationView] = []

    def step(self, view: StepView) -> None:
        self.steps.append(view)

    def evaluation(self, view: EvaluationView) -> None:
        self.evaluations.append(view)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class CountingEncoder:
    """As many tokens as the prompt has characters."""

    def tokens(self, messages: object, text: object, tools: object, row: Row) -> np.ndarray:
        return np.zeros(len(row.values["prompt"]), np.int32)


class FakeCluster:
    """Stores in this process, and frees what a step held."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[ObjectScope]:
        self.opened.append(name)
        with ObjectScope(name) as scope:
            yield scope

    def store(self, value: Any) -> InlineStored[Any]:
        return InlineStored(value)


class FakeWorkers:
    """Nobody did anything, unless a test says so."""

    pools: tuple[str, ...] = ()  # none whose workers could be replaced

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def renew_links(self) -> None:
        """Nobody was replaced."""

    def take_spans(self) -> list[Span]:
        taken, self.spans = self.spans, []
        return taken


def write_prompts(path: Path, count: int, *, length: int = 4) -> Path:
    rows = [{"prompt": "?" * length, "answer": str(number)} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Trial:
    """A run that is ready to begin. `bandit` says how its roles behave and remembers what was asked of them."""

    def __init__(
        self, folder: Path, *overrides: str, heldout: int = 0, offload: bool = False, step: int = 0,
        saved: Mapping[str, Any] | None = None,
        cursor: Mapping[str, Any] | None = None, bandit: Bandit | None = None,
    ) -> None:  # fmt: skip
        data = [f"data.train.0.path={write_prompts(folder / 'train.jsonl', 64)}", f"run.folder={folder}"]
        if heldout:
            data.append(f"data.heldout=[{{path: {write_prompts(folder / 'heldout.jsonl', heldout)}}}]")
        self.recipe = recipe = on_policy_recipe(*data, *overrides)
        self.bandit = bandit or Bandit()
        self.state = RunState.begin(recipe, step, saved)
        self._stack = ExitStack()
        self.console, self.workers, self.cluster = HeardConsole(), FakeWorkers(), FakeCluster()
        path = folder / "bandit"
        self.folder = RunFolder.open(path) if path.exists() else RunFolder.create(recipe)
        self.roles, names = _roles(recipe, self.bandit), role_names(recipe)
        # As the recipe may ask for on any device: all that can leave does.
        leaving = frozenset[str]()
        if offload:
            colocated = recipe.placement.layout == "colocated"
            leaving = who_leaves(
                names.on_devices, colocated=colocated, optimizer_bytes=0, device_bytes=0, offload_optimizer=True
            )
        plan = RecoveryPlan(0)
        fakes: dict[str, Any] = {"cluster": self.cluster, "workers": self.workers, "roles": self.roles}
        self.parts = OnPolicyParts(
            recipe=recipe, folder=self.folder, names=names, leaving=leaving, watch=Stopwatch(),
            log=open_log(self._stack, recipe, self.folder, self.console, step=step),
            prompts=PromptSource(recipe, CountingEncoder(), cursor),  # type: ignore[arg-type]
            heldout=read_tasks(recipe.data.heldout, "data.heldout", None) if heldout else [],
            ledger=Ledger(self.folder.path / "episodes.sqlite"),
            stop_requested=self.folder.stop_file.exists,
            snapshots=Snapshots((), is_on=False, note=self.console.note), recovery=plan,
            replacements=WorkerReplacements(
                plan, warn=self.console.warning, note=self.console.note, folder=self.folder.path, step=step
            ),
            **fakes,
        )  # fmt: skip
        self.parts.ledger.rewind(step)
        forget_steps_after(self.folder.steps, step)
        forget_rollouts_after(self.folder.rollouts, step)

    def run(self, *, recorded: Path | None = None) -> OnPolicyRun:
        """Its program from beginning to end; with `recorded`, over the steps of that folder."""
        run = OnPolicyRun(
            self.parts, self.state, replay=None if recorded is None else ReplayExecutor(self.parts, recorded)
        )
        asyncio.run(self._program(run))
        return run

    async def _program(self, run: OnPolicyRun) -> None:
        """As a controlled run is driven: its files are closed while its loop still runs."""
        try:
            await controlled.load_program(self.recipe.program)(run)
        finally:
            self.close()

    def close(self) -> None:
        """Its files, so that they can be read."""
        self.parts.ledger.close()
        self._stack.close()

    @property
    def lines(self) -> list[StepMetrics]:
        return read_metrics(self.folder.metrics_file)

    def metric(self, name: str) -> dict[int, float]:
        """Step -> value, of the steps that have it."""
        return {line.step: line.values[name] for line in self.lines if name in line.values}

    def episodes(self, columns: str = "*", rest: str = "", *, table: str = "episodes") -> list[tuple[Any, ...]]:
        """What the ledger has, in the order of ids."""
        file = sqlite3.connect(self.folder.path / "episodes.sqlite")
        try:
            return file.execute(f"SELECT {columns} FROM {table} {rest}").fetchall()
        finally:
            file.close()


def _roles(recipe: Any, bandit: Bandit) -> Roles:
    names, policy = role_names(recipe), FakeLearner(bandit)
    functions = tuple(index for index in range(len(recipe.reward)) if index not in recipe.device_rewards)
    fakes: dict[str, Any] = {
        "policy": policy,
        "generator": FakeGenerator(bandit),
        "grader": FakeGrader(bandit, functions),
        "reward_models": tuple((index, FakeRewardModel(bandit, name)) for index, name in names.reward_models),
        "critic": FakeCritic(bandit) if names.critic else None,
        "reference": FakeScorer(bandit, names.reference, policy) if names.reference else None,
        "teachers": tuple(FakeScorer(bandit, name, policy) for name in names.teachers),
    }
    return Roles(runner=None, **fakes)
