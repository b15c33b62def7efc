# SPDX-License-Identifier: Apache-2.0
"""A recipe's placement as pools and roles: who sits on which device, and how each role is built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from podium.cluster import Layout, MeshShape, Pool, Resources, RoleSpec
from podium.controller.phases import CRITIC, GENERATOR, REFERENCE
from podium.models.folder import local_folder
from podium.recipe import ModelSection, Recipe
from podium.roles.critic import Critic, CriticSpec
from podium.roles.episode_runner import EpisodeRunner, RunnerSpec
from podium.roles.generator import Generator, GeneratorSpec
from podium.roles.grader import Grader, GraderSpec
from podium.roles.learner import MICRO_BATCH, POLICY, Learner, LearnerSpec
from podium.roles.reward_model import RewardModel, RewardModelSpec
from podium.roles.scorer import Scorer, ScorerSpec
from podium.spmd.folder import RunFolder

TRAIN, ROLLOUT, GRADERS, RUNNERS = "train", "rollout", "graders", "runners"
RUNNER = "runner"
LINK = "weights"
# Graders wait most of the time; a whole core each would leave none for those who compute.
_DEVICE_CPUS, _HELPER_CPUS = 0.9, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNames:
    """Roles of the run beside policy and generator, by the names they have in the layout."""

    critic: str | None
    reference: str | None
    teachers: tuple[str, ...]
    reward_models: tuple[tuple[int, str], ...]  # position among the recipe's rewards, and name
    graders: str | None

    @property
    def on_devices(self) -> tuple[str, ...]:
        models = tuple(name for _, name in self.reward_models)
        single = tuple(name for name in (self.critic, self.reference) if name is not None)
        return (POLICY, GENERATOR, *single, *self.teachers, *models)


def role_names(recipe: Recipe) -> RoleNames:
    functions = [reward for reward in recipe.reward if reward.model is None]
    scores = recipe.evaluation.generation is not None and recipe.evaluation.generation.score is not None
    return RoleNames(
        critic=CRITIC if recipe.program == "ppo" else None,
        reference=REFERENCE if recipe.algorithm.kl is not None else None,
        teachers=tuple(f"teacher-{number}" for number in range(len(recipe.teachers))),
        reward_models=tuple(
            (index, f"reward-{index}") for index, reward in enumerate(recipe.reward) if reward.model is not None
        ),
        # Without a reward somebody still has to read what was answered.
        graders="grader" if functions or scores or not recipe.reward else None,
    )


def layout_of(recipe: Recipe, folder: RunFolder, *, device: str, resume_step: int | None) -> Layout:
    """All pools and roles of the run."""
    placement, names = recipe.placement, role_names(recipe)
    split = placement.layout == "split"
    apart = (placement.rollout_devices or placement.devices // 2) if split else 0
    ranks = placement.devices - apart
    each = Resources(cpus=_DEVICE_CPUS, gpus=1.0 if device == "cuda" else 0.0)
    helper = Resources(cpus=_HELPER_CPUS)
    pools = [Pool(name=TRAIN, slots=ranks, each=each)]
    roles = _train_roles(recipe, folder, names, ranks=ranks, device=device, resume_step=resume_step)
    if split:
        pools.append(Pool(name=ROLLOUT, slots=apart, each=each, collectives=False))
        generator = _generator(recipe, learner=None)
        roles.append(
            RoleSpec(
                name=GENERATOR, kind=Generator, pool=ROLLOUT, mesh=MeshShape(replica=apart), arguments=(generator,)
            )
        )
    else:
        generator = _generator(recipe, learner=POLICY)
        roles.append(
            RoleSpec(name=GENERATOR, kind=Generator, pool=TRAIN, mesh=MeshShape(replica=ranks), arguments=(generator,))
        )
    if recipe.environment is not None:
        runners = recipe.environment.runners
        pools.append(Pool(name=RUNNERS, slots=runners, each=helper, collectives=False))
        runner = RunnerSpec(
            model=recipe.model, environment=recipe.environment, generator=GENERATOR,
            max_length=longest_sequence(recipe), deadline_s=recipe.placement.timeout_s,
        )  # fmt: skip
        roles.append(
            RoleSpec(
                name=RUNNER, kind=EpisodeRunner, pool=RUNNERS, mesh=MeshShape(replica=runners), arguments=(runner,)
            )
        )
    if names.graders is not None:
        count = recipe.grading.workers
        pools.append(Pool(name=GRADERS, slots=count, each=helper, collectives=False))
        spec = GraderSpec.of(recipe)
        roles.append(
            RoleSpec(name=names.graders, kind=Grader, pool=GRADERS, mesh=MeshShape(replica=count), arguments=(spec,))
        )
    return Layout(pools=tuple(pools), roles=tuple(roles))


def _train_roles(
    recipe: Recipe, folder: RunFolder, names: RoleNames, *, ranks: int, device: str, resume_step: int | None
) -> list[RoleSpec]:
    """The policy first: others look for it on their worker."""
    mesh = MeshShape(shard=ranks)
    model = local_folder(recipe.model.path, "model.path")
    max_tokens = recipe.micro_batch_tokens or MICRO_BATCH[device]
    learner = LearnerSpec(recipe=recipe, folder=model, checkpoints=folder.checkpoints, resume_step=resume_step)
    roles = [RoleSpec(name=POLICY, kind=Learner, pool=TRAIN, mesh=mesh, arguments=(learner,))]
    if names.critic is not None:
        critic = CriticSpec(
            recipe=recipe,
            folder=_folder(recipe.critic.path, model, "critic.path"),
            checkpoints=folder.path / "critic",
            resume_step=resume_step,
        )
        roles.append(RoleSpec(name=names.critic, kind=Critic, pool=TRAIN, mesh=mesh, arguments=(critic,)))
    if names.reference is not None:
        assert recipe.algorithm.kl is not None
        at = recipe.algorithm.kl.reference
        spec = ScorerSpec(
            model=_section(recipe, at), folder=_folder(at, model, "algorithm.kl.reference"), max_tokens=max_tokens,
            seed=recipe.run.seed, checkpoints=folder.path / "reference", begin=_reference_begin(folder, resume_step),
        )  # fmt: skip
        roles.append(RoleSpec(name=names.reference, kind=Scorer, pool=TRAIN, mesh=mesh, arguments=(spec,)))
    for number, (name, teacher) in enumerate(zip(names.teachers, recipe.teachers, strict=True)):
        spec = ScorerSpec(
            model=_section(recipe, teacher.path), folder=local_folder(teacher.path, f"teachers.{number}.path"),
            max_tokens=max_tokens, seed=recipe.run.seed,
        )  # fmt: skip
        roles.append(RoleSpec(name=name, kind=Scorer, pool=TRAIN, mesh=mesh, arguments=(spec,)))
    for index, name in names.reward_models:
        at = recipe.reward[index].model
        assert at is not None
        scorer = RewardModelSpec(
            policy=recipe.model,
            model=_section(recipe, at).model_copy(update={"tokenizer": None, "chat_template": None}),
            folder=local_folder(at, f"reward.{index}.model"),
            max_tokens=max_tokens,
        )
        roles.append(RoleSpec(name=name, kind=RewardModel, pool=TRAIN, mesh=mesh, arguments=(scorer,)))
    return roles


def _generator(recipe: Recipe, *, learner: str | None) -> GeneratorSpec:
    return GeneratorSpec(
        model=recipe.model,
        folder=local_folder(recipe.model.path, "model.path"),
        rollout=recipe.rollout,
        max_length=longest_sequence(recipe),
        learner=learner,
        deadline_s=recipe.placement.timeout_s,
    )


def longest_sequence(recipe: Recipe) -> int:
    """Prompt and everything behind it, in tokens."""
    assert recipe.data.max_length is not None, "resolved before launch"
    return min(recipe.rollout.max_length or recipe.data.max_length, recipe.data.max_length)


def _section(recipe: Recipe, path: str | None) -> ModelSection:
    """The policy's model section for another checkpoint that computes the same way."""
    return recipe.model if path is None else recipe.model.model_copy(update={"path": path, "init": "pretrained"})


def _folder(path: str | None, default: Path, key: str) -> Path:
    return default if path is None else local_folder(path, key)


def _reference_begin(folder: RunFolder, resume_step: int | None) -> Path | None:
    """A reference that was refreshed is saved beside the policy it is a copy of."""
    if resume_step is None:
        return None
    saved = folder.path / "reference" / f"step-{resume_step:08d}"
    return saved if saved.is_dir() else None
