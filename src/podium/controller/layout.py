# SPDX-License-Identifier: Apache-2.0
"""Turns a recipe's placement into pools and roles: which role runs on which device, and how each role is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.cluster import Layout, MeshShape, Pool, Resources, RoleSpec
from podium.controller.phases import CRITIC, GENERATOR, LENT, PARTS, REFERENCE
from podium.errors import CheckpointError
from podium.models.cpu_settings import CpuSettings
from podium.models.folder import local_folder
from podium.recipe import ModelSection, OnPolicyRecipe
from podium.roles.episode_runner import EpisodeRunner, RunnerSpec
from podium.roles.grader import Grader, GraderSpec
from podium.roles.interfaces import (
    IMPLEMENTATIONS,
    MICRO_BATCH,
    POLICY,
    Critic,
    CriticSpec,
    Generator,
    GeneratorPart,
    GeneratorSpec,
    JudgeModel,
    JudgeModelSpec,
    Learner,
    LearnerSpec,
    RewardModel,
    RewardModelSpec,
    Scorer,
    ScorerSpec,
    micro_batch_tokens,
)
from podium.runs.folder import RunFolder
from podium.runs.host_memory import launch_folder

TRAIN, ROLLOUT, GRADERS, RUNNERS = "train", "rollout", "graders", "runners"
RUNNER, GRADER = "runner", "grader"
LINK = "weights"
# Graders wait most of the time; a whole core each would leave none for workers that compute.
_DEVICE_CPUS, _HELPER_CPUS = 0.9, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNames:
    """Names in the layout of the roles beside policy and generator."""

    critic: str | None
    reference: str | None
    teachers: tuple[str, ...]
    reward_models: tuple[tuple[int, str], ...]  # position among the recipe's rewards, and name
    lent: str | None = None  # generators on the learner's devices

    @property
    def on_devices(self) -> tuple[str, ...]:
        """Names of all roles that hold a model on a device."""
        models = tuple(name for _, name in self.reward_models)
        single = tuple(name for name in (self.lent, self.critic, self.reference) if name is not None)
        return (POLICY, GENERATOR, *single, *self.teachers, *models)


def role_names(recipe: OnPolicyRecipe, *, evaluates_only: bool = False) -> RoleNames:
    """Names of the roles that a recipe needs. An evaluation only generates and grades."""
    reward_models = tuple((index, f"reward-{index}") for index in recipe.device_rewards)
    if evaluates_only:
        return RoleNames(critic=None, reference=None, teachers=(), reward_models=reward_models)
    return RoleNames(
        critic=CRITIC if recipe.critic_section is not None else None,
        reference=REFERENCE if recipe.full_algorithm.kl is not None and not reference_is_base(recipe) else None,
        teachers=tuple(f"teacher-{number}" for number in range(len(recipe.teacher_sections))),
        reward_models=reward_models,
        lent=LENT if recipe.placement.layout == "elastic" else None,
    )


def state_folders(run: RunFolder) -> tuple[Path, ...]:
    """Where a run keeps its checkpoints: the policy's, and those of its critic and of a refreshed reference. All have
    the same steps."""
    others = (run.path / "critic", run.path / "reference")
    return (run.checkpoints, *(each for each in others if each.is_dir()))


def reference_is_base(recipe: OnPolicyRecipe) -> bool:
    """Whether the reference is the policy without its new adapter, so that no second model is needed."""
    kl, lora = recipe.full_algorithm.kl, recipe.model.lora
    if kl is None or lora is None or lora.adapter is not None:
        return False
    return kl.reference is None and kl.refresh_every is None


def num_learners(recipe: OnPolicyRecipe) -> int:
    """Number of devices that train. With layout split or elastic, the other devices generate."""
    return recipe.placement.training_devices


def engines_of_learners(recipe: OnPolicyRecipe, names: RoleNames) -> str | None:
    """The role of generators on the learner's devices; None if there are none."""
    return GENERATOR if recipe.placement.layout == "colocated" else names.lent


def layout_of(
    recipe: OnPolicyRecipe,
    folder: RunFolder,
    *,
    device: str,
    resume_step: int | None,
    cpu: CpuSettings | None = None,
    names: RoleNames | None = None,
) -> Layout:
    """All pools and roles of the run. `cpu`: settings measured by an earlier start, which are reused. `names`: roles
    beside policy and generator; default: all that the recipe needs."""
    names, ranks = names or role_names(recipe), num_learners(recipe)
    apart = recipe.placement.devices - ranks
    each = Resources(cpus=_DEVICE_CPUS, gpus=1.0 if device == "cuda" else 0.0)
    # A tensor group passes values in every layer: it stays on one node.
    shared = recipe.placement.learners_tensor
    together = math.lcm(recipe.placement.mesh_sizes.tensor, shared)
    pools = [Pool(name=TRAIN, slots=ranks, each=each, together=together)]
    roles = _train_roles(recipe, folder, names, ranks=ranks, device=device, resume_step=resume_step, cpu=cpu)
    if apart:
        size, grace_s = recipe.placement.generator_tensor, recipe.placement.grace_s
        most, first = (recipe.placement.max_rollout_devices or apart) // size, apart // size
        own = _of_generators(recipe, device)
        pools.append(Pool(name=ROLLOUT, slots=most, each=own, collectives=False, at_start=first, grace_s=grace_s))
        generator = _generator(recipe, learner=None)
        roles.append(_role(GENERATOR, Generator, ROLLOUT, MeshShape(replica=most), generator))
    sharing = engines_of_learners(recipe, names)
    if sharing is not None:
        generator = _generator(recipe, learner=POLICY)
        if shared > 1:
            roles.append(_role(PARTS, GeneratorPart, TRAIN, MeshShape(replica=ranks), generator))
        engines = _role(sharing, Generator, TRAIN, MeshShape(replica=ranks // shared), generator)
        roles.append(replace(engines, slots=tuple(range(0, ranks, shared))))
    roles += _judges(recipe, names, TRAIN, ranks=ranks, run=folder.path.resolve())
    helper_pools, helper_roles = _helper_roles(recipe, lent=names.lent, run=folder.path.resolve())
    return Layout(pools=(*pools, *helper_pools), roles=(*roles, *helper_roles))


def trial_layout(recipe: OnPolicyRecipe, *, device: str) -> Layout:
    """Pools and roles of a trial, which generates and grades and trains nothing: a generator with its own weights, and
    reward models."""
    mesh = MeshShape(replica=1)
    roles = [_role(GENERATOR, Generator, ROLLOUT, mesh, _generator(recipe, learner=None))]
    max_tokens = recipe.micro_batch_tokens or MICRO_BATCH[device]
    names = role_names(recipe)
    for index, name in names.reward_models:
        if index in recipe.reward_models:
            scorer = _reward_model(recipe, index, max_tokens)
            roles.append(_role(name, RewardModel, ROLLOUT, MeshShape(shard=1), scorer))
    roles += _judges(recipe, names, ROLLOUT, ranks=1, run=None)
    helper_pools, helper_roles = _helper_roles(recipe)
    pool = Pool(name=ROLLOUT, slots=1, each=_of_generators(recipe, device), collectives=False)
    return Layout(pools=(pool, *helper_pools), roles=(*roles, *helper_roles))


def _of_generators(recipe: OnPolicyRecipe, device: str) -> Resources:
    """Resources of one generator with its own weights. Its devices are one slot, so they are on one node; the engine
    starts a process for each device beside the worker's."""
    size = recipe.placement.generator_tensor
    return Resources(cpus=_DEVICE_CPUS * size, gpus=float(size) if device == "cuda" else 0.0)


def _helper_roles(
    recipe: OnPolicyRecipe, *, lent: str | None = None, run: Path | None = None
) -> tuple[list[Pool], list[RoleSpec]]:
    """Episode runners and graders, with their pools. `run`: the run folder; None: there is none."""
    pools, roles = [], []
    if recipe.environment is not None:
        runners = recipe.environment.runners
        pools.append(_helpers(RUNNERS, runners, recipe))
        runner = RunnerSpec(
            model=recipe.model, environment=recipe.environment, generator=GENERATOR, lent=lent,
            max_length=longest_sequence(recipe), deadline_s=recipe.placement.collective_s,
            sandbox=recipe.sandbox, has_rewards=bool(recipe.reward) or recipe.only_logs_rewards,
            stacks=None if run is None else RunFolder(path=run).stacks_file,
        )  # fmt: skip
        roles.append(
            RoleSpec(
                name=RUNNER, kind=EpisodeRunner, pool=RUNNERS, mesh=MeshShape(replica=runners), arguments=(runner,)
            )
        )
    # Needed with reward models only, too: a grader decodes the answers.
    count = recipe.grading.workers
    pools.append(_helpers(GRADERS, count, recipe))
    roles.append(
        RoleSpec(
            name=GRADER,
            kind=Grader,
            pool=GRADERS,
            mesh=MeshShape(replica=count),
            arguments=(GraderSpec.of(recipe, run),),
        )
    )
    return pools, roles


def _helpers(name: str, count: int, recipe: OnPolicyRecipe) -> Pool:
    """Workers without a device."""
    return Pool(
        name=name,
        slots=count,
        each=Resources(cpus=_HELPER_CPUS),
        collectives=False,
        tokenizers_only=not recipe.model.trust_remote_code,  # custom tokenizer code may need more
    )


def _train_roles(
    recipe: OnPolicyRecipe,
    folder: RunFolder,
    names: RoleNames,
    *,
    ranks: int,
    device: str,
    resume_step: int | None,
    cpu: CpuSettings | None,
) -> list[RoleSpec]:
    """Roles on the training devices. The policy comes first: other roles look it up on their worker."""
    mesh = MeshShape(shard=ranks, same_data=ranks // recipe.placement.mesh_sizes.data_ranks)
    model = local_folder(recipe.model.path, "model.path")
    max_tokens = micro_batch_tokens(recipe, device)
    run = folder.path.resolve()  # workers may have been started elsewhere
    memory = launch_folder(run) if recipe.keeps_snapshots else None

    def kept(role: str) -> Path | None:
        return None if memory is None else memory / role

    learner = LearnerSpec(
        recipe=recipe, folder=model, checkpoints=run / folder.checkpoints.name, resume_step=resume_step,
        cpu=cpu, snapshots=kept(POLICY), collective_s=recipe.placement.collective_s,
    )  # fmt: skip
    roles = [_role(POLICY, Learner, TRAIN, mesh, learner)]
    section = recipe.critic_section
    if names.critic is not None and section is not None:
        critic = CriticSpec(
            recipe=recipe,
            folder=_folder(section.path, model, "critic.path"),
            checkpoints=run / "critic",
            beside=run / folder.checkpoints.name,
            resume_step=resume_step,
            snapshots=kept(names.critic),
        )
        roles.append(_role(names.critic, Critic, TRAIN, mesh, critic))
    kl = recipe.full_algorithm.kl
    if names.reference is not None and kl is not None:
        at = kl.reference
        spec = ScorerSpec(
            model=_section(recipe, at), folder=_folder(at, model, "algorithm.kl.reference"), max_tokens=max_tokens,
            seed=recipe.run.seed, policy=None if at is None else recipe.model,
            checkpoints=run / "reference", beside=run / folder.checkpoints.name,
            begin=_reference_begin(run, resume_step, refreshed=kl.refresh_every is not None),
            snapshots=kept(names.reference),
        )  # fmt: skip
        roles.append(_role(names.reference, Scorer, TRAIN, mesh, spec))
    for number, name in enumerate(names.teachers):
        teacher = recipe.teacher_sections[number]
        spec = ScorerSpec(
            model=_section(recipe, teacher.path), folder=local_folder(teacher.path, f"teachers.{number}.path"),
            max_tokens=max_tokens, seed=recipe.run.seed, policy=recipe.model,
        )  # fmt: skip
        roles.append(_role(name, Scorer, TRAIN, mesh, spec))
    for index, name in names.reward_models:
        if index in recipe.reward_models:
            roles.append(_role(name, RewardModel, TRAIN, mesh, _reward_model(recipe, index, max_tokens)))
    return roles


def _judges(recipe: OnPolicyRecipe, names: RoleNames, pool: str, *, ranks: int, run: Path | None) -> list[RoleSpec]:
    """Judges in the run, on every device of the pool. They come after the generators, whose engine they may use."""
    roles = []
    for index, name in names.reward_models:
        section = recipe.local_judges.get(index)
        if section is None:
            continue
        key, folder = f"reward.{index}.judge", section.folder
        own = recipe.model if folder is None else _section(recipe, folder).model_copy(
            update={"tokenizer": None, "chat_template": None}
        )  # fmt: skip
        spec = JudgeModelSpec(
            section=section, key=key, policy=recipe.model, model=own,
            folder=local_folder(own.path, "model.path" if folder is None else f"{key}.model"),
            generator=GENERATOR if section.is_policy else None, seed=recipe.run.seed,
            tools=recipe.environment is not None and bool(recipe.environment.tools),
            cache=None if run is None or section.cache != "run_folder" else run / "judge_cache",
        )  # fmt: skip
        roles.append(_role(name, JudgeModel, pool, MeshShape(replica=ranks), spec))
    return roles


def _reward_model(recipe: OnPolicyRecipe, index: int, max_tokens: int) -> RewardModelSpec:
    path = recipe.reward_models[index]
    return RewardModelSpec(
        policy=recipe.model,
        model=_section(recipe, path).model_copy(update={"tokenizer": None, "chat_template": None}),
        folder=local_folder(path, f"reward.{index}.model"),
        max_tokens=max_tokens,
        tools=recipe.environment is not None and bool(recipe.environment.tools),
    )


def _role(name: str, kind: type[Any], pool: str, mesh: MeshShape, spec: object) -> RoleSpec:
    """A role whose class is imported only by its workers."""
    return RoleSpec(name=name, kind=kind, pool=pool, mesh=mesh, arguments=(spec,), implementation=IMPLEMENTATIONS[kind])


def _generator(recipe: OnPolicyRecipe, *, learner: str | None) -> GeneratorSpec:
    return GeneratorSpec(
        model=recipe.model,
        folder=local_folder(recipe.model.path, "model.path"),
        rollout=recipe.rollout,
        max_length=longest_sequence(recipe),
        learner=learner,
        deadline_s=recipe.placement.collective_s,
        records_experts=recipe.may_replay_routers,
        tensor=recipe.placement.generator_tensor if learner is None else recipe.placement.learners_tensor,
        parts=PARTS if learner is not None and recipe.placement.learners_tensor > 1 else None,
    )


def longest_sequence(recipe: OnPolicyRecipe) -> int:
    """Most tokens of a prompt and everything after it."""
    assert recipe.data.max_length is not None, "resolved before launch"
    return min(recipe.rollout.max_length or recipe.data.max_length, recipe.data.max_length)


def _section(recipe: OnPolicyRecipe, path: str | None) -> ModelSection:
    return recipe.model if path is None else recipe.model.for_checkpoint(path)


def _folder(path: str | None, default: Path, key: str) -> Path:
    return default if path is None else local_folder(path, key)


def _reference_begin(run: Path, resume_step: int | None, *, refreshed: bool) -> Path | None:
    """Folder of a refreshed reference, which is saved beside the policy that it copies."""
    if resume_step is None:
        return None
    saved = run / "reference" / f"step-{resume_step:08d}"
    if refreshed and not saved.is_dir():
        raise CheckpointError(
            f"{saved} is missing, and the reference was refreshed in this run: without it the KL would be to another "
            "policy. Go on from another step."
        )
    return saved if refreshed else None
