# SPDX-License-Identifier: Apache-2.0
"""Assembles a controlled run: its inputs, the roles of its workers, and the step at which it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from podium.cluster import Cluster, Workers
from podium.controller.devices import Devices
from podium.controller.drive import StepChoice
from podium.controller.episodes import Episodes
from podium.controller.evaluation import OnPolicyEvaluator, heldout_limit
from podium.controller.layout import GRADER, RUNNER, RoleNames, engines_of_learners, state_folders
from podium.controller.ledger import LEDGER_FILE, Ledger
from podium.controller.parts import OnPolicyParts, Roles
from podium.controller.phases import GENERATOR, PARTS, who_leaves
from podium.controller.prompts import PromptSource
from podium.controller.recovery import RecoveryPlan
from podium.controller.replacing import WorkerReplacements
from podium.controller.replay import ReplayExecutor
from podium.controller.run import OnPolicyRun
from podium.controller.snapshots import Snapshots
from podium.controller.state import RunState
from podium.data.control_tokens import ControlRule
from podium.data.prompts import PromptTokenizer
from podium.data.skipping import RowSkipper, SkippedRow, SkipPolicy
from podium.data.tasks import Task, read_tasks
from podium.data.tokenizer import load_tokenizer
from podium.engine.checkpoint_files import SavedCheckpoint, set_aside_later
from podium.environments.reward_columns import require_reward_columns
from podium.errors import UnsupportedModelError
from podium.observe import Console, Stopwatch
from podium.recipe import OnPolicyRecipe
from podium.roles.episode_runner import EpisodeRunner
from podium.roles.grader import Grader, require_scorable_heldout
from podium.roles.grading_handle import GraderHandle, RewardModelHandle
from podium.roles.handles import CriticHandle, GeneratorHandle, LearnerHandle, ScorerHandle
from podium.roles.interfaces import (
    POLICY,
    Critic,
    Generator,
    GeneratorPart,
    Learner,
    LearnerFacts,
    RewardModel,
    Scorer,
    Stateful,
)
from podium.roles.runner_handle import RunnerHandle
from podium.roles.state_handle import StateHandle
from podium.runs.folder import RunFolder
from podium.runs.header import header_lines, model_line
from podium.runs.interrupts import StopRequest
from podium.runs.log import open_log
from podium.runs.milestones import Milestones
from podium.runs.result import RunResult, end_status
from podium.runs.rollout_files import forget_rollouts_after
from podium.runs.step_files import forget_steps_after


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Data that a run reads before its first step: prompts, and the position to continue from."""

    recipe: OnPolicyRecipe
    folder: RunFolder
    resume_step: int | None
    saved: Mapping[str, Any]  # the controller's values in the checkpoint
    tokenizer: PromptTokenizer
    prompts: PromptSource
    heldout: Sequence[Task]
    heldout_skipped: Sequence[SkippedRow]

    def rewound(self, step: int, saved: Mapping[str, Any]) -> Inputs:
        """The inputs of the same run, from another of its steps. `saved`: the controller's values after that step."""
        prompts = PromptSource(self.recipe, self.tokenizer, saved.get("cursor"))
        return replace(self, resume_step=step or None, saved=saved, prompts=prompts)


def read_inputs(
    recipe: OnPolicyRecipe, folder: RunFolder, resume_step: int | None, tokenizer: PromptTokenizer | None = None
) -> Inputs:
    """Reads prompts and checkpoint. Raises an error if the tokenizer, the prompts or the checkpoint are invalid.
    `tokenizer`: in place of the model's."""
    saved: Mapping[str, Any] = {}
    if resume_step is not None:
        # Tensors are verified where they are loaded.
        saved = SavedCheckpoint(folder.checkpoints / f"step-{resume_step:08d}", ranks=()).values
        for part in state_folders(folder):
            set_aside_later(part, resume_step)
    tokenizer = tokenizer or PromptTokenizer(load_tokenizer(recipe.model), ControlRule.of(recipe.model))
    prompts = PromptSource(recipe, tokenizer, saved.get("cursor"))
    limit = heldout_limit(recipe.evaluation.generation, recipe.evaluation.max_documents)
    skipper = RowSkipper(SkipPolicy.of(recipe.data), "data.heldout")
    heldout: Sequence[Task] = ()
    if recipe.data.heldout:
        check = partial(Task.encode, tokenizer=tokenizer) if skipper.skips else None
        heldout = read_tasks(recipe.data.heldout, "data.heldout", limit, skipper=skipper, check=check,
            needs_prompt=recipe.needs_prompts,
        )  # fmt: skip
    require_scorable_heldout(recipe, heldout)
    require_reward_columns(recipe)
    return Inputs(
        recipe=recipe, folder=folder, resume_step=resume_step, saved=saved, tokenizer=tokenizer, prompts=prompts,
        heldout=heldout, heldout_skipped=skipper.rows,
    )  # fmt: skip


async def open_parts(
    inputs: Inputs, names: RoleNames, cluster: Cluster, workers: Workers, console: Console, watch: Stopwatch,
    stack: ExitStack, recovery: RecoveryPlan,
) -> OnPolicyParts[OnPolicyRecipe]:  # fmt: skip
    """Opens the parts of a run. `stack` closes everything that this function opens. `recovery`: what is done about
    deaths."""
    recipe, folder, step = inputs.recipe, inputs.folder, inputs.resume_step or 0
    replacements = WorkerReplacements(recovery, warn=console.warning, note=console.note, folder=folder.path, step=step)
    roles = await _roles(recipe, names, workers, console.warning, replacements)
    ledger = Ledger(folder.path / LEDGER_FILE)
    stack.callback(ledger.close)
    ledger.rewind(step)
    forget_steps_after(folder.steps, step)
    forget_rollouts_after(folder.rollouts, step)
    log = open_log(stack, recipe, folder, console, step=step)
    log.skipped_rows(0, inputs.heldout_skipped)
    facts = roles.policy.facts
    if facts.cpu is not None:
        folder.note_cpu_settings(roles.policy.num_ranks, facts.cpu)
    if (reason := no_router_replay(recipe, facts)) is not None:
        console.warning(f"router replay is off: {reason}. Engine and learner may choose other experts for a token")
    return OnPolicyParts(
        recipe=recipe, folder=folder, cluster=cluster, workers=workers, roles=roles, names=names,
        prompts=inputs.prompts, heldout=inputs.heldout, ledger=ledger, log=log,
        snapshots=Snapshots(roles.states, is_on=recipe.keeps_snapshots, note=console.note),
        recovery=recovery, replacements=replacements, watch=watch, tokenizer=inputs.tokenizer.own,
        stop_requested=StopRequest(folder.stop_file),
        leaving=who_leaves(
            names.on_devices, colocated=recipe.placement.layout == "colocated",
            optimizer_bytes=facts.optimizer_bytes, device_bytes=facts.device_bytes,
            offload_optimizer=recipe.rollout.offload_optimizer,
        ),
    )  # fmt: skip


def no_router_replay(recipe: OnPolicyRecipe, facts: LearnerFacts) -> str | None:
    """Why the learner does not replay the engine's choices of experts, where that would be expected; None: it does, or
    there is no reason to. Raises an error if the recipe insists."""
    if recipe.rollout.router_replay == "on" and facts.routers is None:
        reason = facts.router_problem or f"{facts.architecture} has no experts"
        raise UnsupportedModelError(
            f"rollout.router_replay: it is on, and {reason}. Set it to auto, which leaves it out where it is not "
            "possible."
        )
    is_mixture = facts.routers is not None or facts.router_problem is not None
    if not is_mixture or recipe.rollout.router_replay != "auto" or not recipe.can_be_stale:
        return None
    if recipe.rollout.engine != "native":
        return f"with {recipe.rollout.engine} it needs rollout.router_replay on, which turns captured graphs off"
    return facts.router_problem


def begin_run(
    inputs: Inputs, parts: OnPolicyParts[OnPolicyRecipe], steps: StepChoice, milestones: Milestones | None = None
) -> OnPolicyRun[OnPolicyRecipe]:
    """The run for its program, from the step of its inputs. Prints the header, unless the run was rewound: then it has
    `milestones`."""
    step = inputs.resume_step or 0
    if milestones is None:
        parts.log.console.header(_header(inputs.recipe, inputs.folder, parts.roles, step))
    else:
        milestones.goes_on_after(step)
    state, last, is_stopped = RunState.begin(inputs.recipe, step, inputs.saved), steps.last, parts.stop_requested
    if last is not None:
        parts = replace(parts, stop_requested=lambda: state.step >= last or is_stopped())
    replay = None if steps.recorded is None else ReplayExecutor(parts, steps.recorded)
    return OnPolicyRun(parts, state, replay=replay, milestones=milestones)


async def evaluate_once(inputs: Inputs, parts: OnPolicyParts[OnPolicyRecipe]) -> None:
    """Evaluates the weights that the learners loaded, and logs it with all answers. Saves and trains nothing."""
    step = inputs.resume_step or 0
    devices = Devices(parts)
    episodes = Episodes(parts, devices, RunState.begin(inputs.recipe, step, inputs.saved))
    evaluation = await OnPolicyEvaluator(parts, devices, episodes, records_all=True).evaluate(step)
    parts.log.evaluation(evaluation.view, evaluation.metrics, evaluation.answers)


def result_of(run: OnPolicyRun[OnPolicyRecipe], folder: RunFolder, watch: Stopwatch) -> RunResult:
    """The result of a run as the API returns it."""
    return RunResult(
        folder=folder.path,
        status=end_status(run.recipe, run.num_committed),
        step=run.num_committed,
        loss=run.last_loss,
        heldout_loss=None,
        score=run.evaluation.score if run.evaluation is not None else None,
        time=watch.summary(),
    )


def state_handles(recipe: OnPolicyRecipe, names: RoleNames, workers: Workers) -> tuple[StateHandle, ...]:
    """Handles of the roles that learn; the policy's is the first."""
    stateful: list[tuple[str, type[Stateful]]] = [(POLICY, Learner)]
    if names.critic is not None:
        stateful.append((names.critic, Critic))
    kl = recipe.full_algorithm.kl
    if names.reference is not None and kl is not None and kl.refresh_every is not None:
        stateful.append((names.reference, Scorer))
    return tuple(StateHandle(workers.role(name, kind)) for name, kind in stateful)


async def _roles(
    recipe: OnPolicyRecipe, names: RoleNames, workers: Workers, warn: Callable[[str], None],
    replacements: WorkerReplacements,
) -> Roles:  # fmt: skip
    policy = await LearnerHandle.open(workers.role(POLICY, Learner))
    functions = tuple(index for index in range(len(recipe.reward)) if index not in recipe.device_rewards)
    grader = GraderHandle(
        workers, workers.role(GRADER, Grader), functions, timeout_s=recipe.grading.timeout_s, warn=warn,
        replacements=replacements, judging_s=recipe.judging_s,
    )  # fmt: skip
    generator = _engines(recipe, names, workers, GENERATOR)
    lent = None if names.lent is None else _engines(recipe, names, workers, names.lent)
    runner = None
    if recipe.environment is not None:
        runner = RunnerHandle(
            workers, workers.role(RUNNER, EpisodeRunner), generator, lent=lent, warn=warn, replacements=replacements
        )
    return Roles(
        states=state_handles(recipe, names, workers),
        policy=policy,
        generator=generator,
        lent=lent,
        runner=runner,
        grader=grader,
        reward_models=tuple(
            (index, RewardModelHandle(workers.role(name, RewardModel), by_group=index in recipe.local_judges))
            for index, name in names.reward_models
        ),
        critic=CriticHandle(workers.role(names.critic, Critic), policy) if names.critic is not None else None,
        reference=ScorerHandle(workers.role(names.reference, Scorer)) if names.reference is not None else None,
        teachers=tuple(ScorerHandle(workers.role(name, Scorer)) for name in names.teachers),
    )


def _engines(recipe: OnPolicyRecipe, names: RoleNames, workers: Workers, role: str) -> GeneratorHandle:
    """Generators of a role, with their parts if several learners' devices hold each."""
    has_parts = recipe.placement.learners_tensor > 1 and role == engines_of_learners(recipe, names)
    parts = workers.role(PARTS, GeneratorPart) if has_parts else None
    return GeneratorHandle(workers.role(role, Generator), parts)


def _each_on(devices: int) -> str:
    return "" if devices == 1 else f", each on {devices}"


def _header(recipe: OnPolicyRecipe, folder: RunFolder, roles: Roles, step: int) -> list[str]:
    facts, rollout, placement = roles.policy.facts, recipe.rollout, recipe.placement
    trained = facts.num_parameters if facts.trained_parameters is None else facts.trained_parameters
    axes = "" if placement.policy is None and placement.experts == 1 else f" {placement.mesh_sizes}"
    return header_lines(
        recipe,
        folder,
        resume_step=step,
        step_size=f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples, up to "
        f"{rollout.max_new_tokens} new tokens",
        model=model_line(facts.architecture, facts.num_parameters, trained, facts.dtype),
        devices=f"{placement.devices} x {facts.device}, {placement.layout}: {roles.policy.num_ranks} learn{axes}, "
        f"{roles.generator.num_engines} generate ({rollout.engine}{_each_on(placement.generator_tensor)})"
        + (f" at the same time (staleness {rollout.staleness}, {rollout.on_new_weights})" if rollout.staleness else ""),
        cpu=facts.cpu,
    )
