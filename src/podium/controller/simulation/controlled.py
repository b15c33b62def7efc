# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe on a simulated cluster: the real controller with its scheduler, program, ledger, metrics and
checkpoints, over roles that take their time from a cost model. Deterministic from the seed. Torch-free.

`simulation.run` has the same costs without a controller: faster, and for any number of devices."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from podium.cluster import Layout, Resources, open_simulated, run_virtual
from podium.cluster.member import Timeouts
from podium.cluster.simulated_faults import GENERATOR_SLOT
from podium.controller.assembly import read_inputs, result_of
from podium.controller.connecting import connect_workers
from podium.controller.drive import ControlledProgram, StepChoice
from podium.controller.healing import Assembled, run_program
from podium.controller.layout import ROLLOUT, layout_of, role_names
from podium.controller.recovery import RecoveryPlan
from podium.controller.simulation.costs import CostModel, RunCosts, SimulatedSlowness
from podium.controller.simulation.critic import SimulatedCritic
from podium.controller.simulation.faults import SimulatedFault, SimulatedStop
from podium.controller.simulation.learned_state import WEIGHTS, digest
from podium.controller.simulation.learner import SimulatedGrader, SimulatedLearner
from podium.controller.simulation.rollout import SimulatedGenerator, SimulatedGeneratorPart
from podium.controller.simulation.runner import SimulatedRunner
from podium.controller.simulation.scorers import SimulatedRewardModel, SimulatedScorer
from podium.data.chat_text import as_text
from podium.data.documents import Tokens
from podium.data.kinds import Message
from podium.data.masks import Tools
from podium.data.prompts import PromptTokenizer
from podium.data.rows import Row
from podium.engine.checkpoint_files import SavedCheckpoint
from podium.errors import ClusterError
from podium.observe import Console, StepView, Stopwatch
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_runner import EpisodeRunner, RunnerSpec
from podium.roles.grader import Grader
from podium.roles.interfaces import Critic, Generator, GeneratorPart, JudgeModel, Learner, RewardModel, Scorer
from podium.runs.folder import RunFolder
from podium.runs.result import RunResult

# Longer than any simulated call: only a deadlock is without end, and the virtual clock notices that.
_FOREVER_S = 1e12
# Between two heartbeats, where they are watched. Rarer than on Ray: each costs time of a simulation.
_BEAT_S = 5.0
_SIMULATED: Mapping[type[Any], type[Any]] = {
    Learner: SimulatedLearner,
    Generator: SimulatedGenerator,
    GeneratorPart: SimulatedGeneratorPart,
    Grader: SimulatedGrader,
    Critic: SimulatedCritic,
    Scorer: SimulatedScorer,
    RewardModel: SimulatedRewardModel,
    JudgeModel: SimulatedRewardModel,
    EpisodeRunner: SimulatedRunner,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The end of a simulated run. Its folder has metrics and ledger, in seconds of the virtual clock."""

    result: RunResult
    committed_s: tuple[float, ...]  # when each step was committed
    weights: str  # a digest of everything that they were trained on; empty: nothing
    ended_s: float


def simulate_run(
    program: ControlledProgram, recipe: OnPolicyRecipe, folder: RunFolder, costs: CostModel, *, seed: int = 0,
    resume_step: int | None = None, faults: Sequence[SimulatedFault] = (), slots_per_node: int = 1,
    limit_s: float = math.inf,
) -> SimulatedRun:  # fmt: skip
    """Runs the program to the recipe's last step, or until a SimulatedStop. The recipe is resolved, and the folder is
    that of the run. Every engine has `rollout.max_running` lanes, by default those of a CPU. The run recovers from
    `faults` as a real one does. Nodes with generators that are apart have room for `slots_per_node`. Raises a
    ClusterError if the run has not ended after `limit_s` virtual seconds."""
    lanes = recipe.rollout.running_on("cpu")
    run_costs = RunCosts(
        model=costs, lanes=lanes, samples=recipe.rollout.samples_per_prompt, seed=seed,
        slowness=tuple(each for each in faults if isinstance(each, SimulatedSlowness)),
    )  # fmt: skip
    run = _run(program, recipe, folder, run_costs, resume_step, faults, slots_per_node)
    return run_virtual(run, limit_s=limit_s)


async def _run(
    program: ControlledProgram, recipe: OnPolicyRecipe, folder: RunFolder, costs: RunCosts, resume_step: int | None,
    faults: Sequence[SimulatedFault], slots_per_node: int,
) -> SimulatedRun:  # fmt: skip
    names, console, loop = role_names(recipe), _CommitTimes(), asyncio.get_running_loop()
    inputs = read_inputs(recipe, folder, resume_step, EstimatedTokenizer())
    layout = layout_of(recipe, folder, device="cpu", resume_step=resume_step, names=names)
    watch, placement = Stopwatch(loop.time), recipe.placement
    timeouts = Timeouts(beat_s=_BEAT_S, heartbeat_timeout_s=placement.heartbeat_timeout_s)
    of_cluster = [each for each in faults if not isinstance(each, SimulatedSlowness | SimulatedStop)]
    for fault in faults:
        if isinstance(fault, SimulatedStop):
            loop.call_at(fault.at_s, folder.stop_file.touch)
    layout = simulated_layout(layout, costs)
    num_apart = sum(pool.num_first for pool in layout.pools if pool.name == ROLLOUT)
    async with open_simulated(
        of_cluster, start_s=costs.model.start_s, num_nodes=math.ceil(num_apart / slots_per_node),
        slots_per_node=slots_per_node,
    ) as cluster:  # fmt: skip
        with watch.span("start-up"):
            workers = await cluster.start(layout, timeouts, deadline_s=_FOREVER_S)
            await connect_workers(recipe, names, workers)
        assembled = Assembled(
            program=program, inputs=inputs, names=names, cluster=cluster, workers=workers, console=console, watch=watch
        )
        run = await run_program(assembled, StepChoice(), RecoveryPlan(placement.restarts))
        last = folder.checkpoints / f"step-{run.num_committed:08d}"
        return SimulatedRun(
            result=result_of(run, folder, watch), committed_s=tuple(console.committed_s),
            weights=digest(*SavedCheckpoint(last).values[WEIGHTS]) if run.num_committed else "", ended_s=loop.time(),
        )  # fmt: skip


def simulated_layout(layout: Layout, costs: RunCosts) -> Layout:
    """The same pools and roles, each role simulated, and each generator apart on nodes for such. Raises a
    ClusterError for agents, which are not simulated."""
    for role in layout.roles:
        if any(isinstance(spec, RunnerSpec) and spec.environment.is_agent for spec in role.arguments):
            raise ClusterError(
                "agents that ask through the gateway are not simulated: which requests they send is known only to "
                "them. Simulate an environment of as many turns (environment.environment or tools)."
            )
    roles = []
    for role in layout.roles:
        kind = _SIMULATED[role.kind]
        place = f"{kind.__module__}:{kind.__qualname__}"
        roles.append(replace(role, implementation=place, arguments=(*role.arguments, costs)))
    apart = Resources(cpus=0.9, custom={GENERATOR_SLOT: 1.0})
    pools = [replace(pool, each=apart) if pool.name == ROLLOUT else pool for pool in layout.pools]
    return replace(layout, pools=tuple(pools), roles=tuple(roles))


class EstimatedTokenizer(PromptTokenizer):
    """Counts a token for every four characters of a prompt: a simulation needs no tokenizer of the model."""

    def __init__(self) -> None:
        """It has no vocabulary."""
        self._tokenizer = None

    def tokens(self, messages: Sequence[Message] | None, text: str | None, tools: Tools, row: Row) -> Tokens:
        """As many zeros as the prompt has tokens, about."""
        length = len(as_text(messages) if messages is not None else text or "")
        return np.zeros(math.ceil(length / 4), np.int32)


class _CommitTimes(Console):
    """Shows nothing, and notes when steps are committed."""

    def __init__(self) -> None:
        self.committed_s: list[float] = []

    def step(self, view: StepView) -> None:
        """Notes the time of a committed step."""
        self.committed_s.append(asyncio.get_running_loop().time())
