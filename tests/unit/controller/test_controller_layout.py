# SPDX-License-Identifier: Apache-2.0
"""A recipe as pools and roles: who sits where, in which order roles are built, and from which folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.made_batches import on_policy_recipe
from podium.cluster import Layout, MeshShape, RoleSpec
from podium.controller.layout import layout_of, longest_sequence, role_names
from podium.errors import CheckpointError
from podium.progress import WATCH_SLACK_S
from podium.recipe import Recipe
from podium.runs.folder import RunFolder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with model folders in it."""
    for name in ("models/base", "critic", "ref", "a", "b", "judge"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _layout(recipe: Recipe, device: str = "cpu", resume_step: int | None = None) -> Layout:
    return layout_of(recipe, RunFolder(path=Path("runs/bandit")), device=device, resume_step=resume_step)


EVERYTHING = (
    "program=ppo", "reward=[{model: judge}, {verifier: exact_match}, {model: a}]", "grading.workers=3",
    "algorithm.kl={coefficient: 0.1, reference: ref}", "critic.path=critic", "placement.devices=4",
)  # fmt: skip


# --- names ---


def role_of(layout: Layout, name: str) -> RoleSpec:
    return next(role for role in layout.roles if role.name == name)


def test_a_plain_run_has_a_policy_and_a_generator_on_its_devices() -> None:
    assert role_names(on_policy_recipe()).on_devices == ("policy", "generator")


def test_every_role_has_a_name_and_the_policy_is_first() -> None:
    names = role_names(on_policy_recipe(*EVERYTHING))

    assert names.on_devices == ("policy", "generator", "critic", "reference", "reward-0", "reward-2")
    assert names.reward_models == ((0, "reward-0"), (2, "reward-2"))


def test_an_evaluation_has_only_the_roles_that_generate_and_grade() -> None:
    names = role_names(on_policy_recipe(*EVERYTHING), evaluates_only=True)

    assert names.on_devices == ("policy", "generator", "reward-0", "reward-2")


def test_teachers_are_numbered() -> None:
    names = role_names(on_policy_recipe("program=on_policy_distill", "teachers=[{path: a}, {path: b}]"))

    assert names.teachers == ("teacher-0", "teacher-1")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("reward=[{model: judge}]",),
        ("program=on_policy_distill", "teachers=[{path: a}]", "reward=[]"),
        ("environment={environment: 'mine.py:Game'}", "reward=[]"),
    ],
)
def test_somebody_always_reads_what_was_answered(here: Path, overrides: tuple[str, ...]) -> None:
    assert role_of(_layout(on_policy_recipe(*overrides)), "grader").pool == "graders"


# --- colocated ---


def test_colocated_roles_share_all_devices(here: Path) -> None:
    layout = _layout(on_policy_recipe(*EVERYTHING))

    assert [(pool.name, pool.slots, pool.collectives) for pool in layout.pools] == [
        ("train", 4, True), ("graders", 3, False)
    ]  # fmt: skip
    assert [(role.name, role.kind.__name__, role.pool) for role in layout.roles] == [
        ("policy", "Learner", "train"),
        ("critic", "Critic", "train"),
        ("reference", "Scorer", "train"),
        ("reward-0", "RewardModel", "train"),
        ("reward-2", "RewardModel", "train"),
        ("generator", "Generator", "train"),
        ("grader", "Grader", "graders"),
    ]
    assert all(role.mesh == MeshShape(shard=4) for role in layout.roles[:5])
    assert role_of(layout, "generator").mesh == MeshShape(replica=4)
    assert role_of(layout, "grader").mesh == MeshShape(replica=3)
    assert role_of(layout, "generator").arguments[0].learner == "policy"


def test_a_tensor_group_gets_the_same_data_and_a_node(here: Path) -> None:
    layout = _layout(on_policy_recipe(*EVERYTHING, "placement.policy={tensor: 2}"))

    assert [(pool.name, pool.slots, pool.together) for pool in layout.pools] == [("train", 4, 2), ("graders", 3, 1)]
    assert all(role.mesh == MeshShape(shard=4, same_data=2) for role in layout.roles[:5])
    assert role_of(layout, "generator").mesh == MeshShape(replica=4)  # an engine on every device


def test_ranks_that_replicate_or_shard_have_their_own_data_and_any_node(here: Path) -> None:
    layout = _layout(on_policy_recipe(*EVERYTHING, "placement.policy={replicate: 2}"))

    assert layout.pools[0].together == 1
    assert role_of(layout, "policy").mesh == MeshShape(shard=4)


def test_generators_with_devices_of_their_own_are_in_no_tensor_group(here: Path) -> None:
    split = ("placement.layout=split", "placement.devices=3", "placement.rollout_devices=1")
    layout = _layout(on_policy_recipe(*split, "placement.policy={tensor: 2}"))

    assert [(pool.name, pool.slots, pool.together) for pool in layout.pools[:2]] == [("train", 2, 2), ("rollout", 1, 1)]


def test_folders_are_those_of_each_role(here: Path) -> None:
    layout = _layout(on_policy_recipe(*EVERYTHING))

    (policy,), (critic,), (reference,), (judge,) = (
        role_of(layout, name).arguments for name in ("policy", "critic", "reference", "reward-0")
    )
    run = here / "runs/bandit"  # absolute: workers may be elsewhere
    assert (policy.folder, policy.checkpoints) == (Path("models/base"), run / "checkpoints")
    assert (critic.folder, critic.checkpoints) == (Path("critic"), run / "critic")
    assert (reference.folder, reference.checkpoints, reference.begin) == (
        Path("ref"),
        run / "reference",
        None,
    )
    assert (judge.folder, judge.model.path, judge.model.tokenizer) == (Path("judge"), "judge", None)
    assert judge.policy.path == "models/base"


def test_critic_and_reference_begin_as_the_policy_where_the_recipe_says_nothing(here: Path) -> None:
    layout = _layout(on_policy_recipe("program=ppo", "algorithm.kl={coefficient: 0.1}", "model.init=random"))

    assert role_of(layout, "critic").arguments[0].folder == Path("models/base")
    reference = role_of(layout, "reference").arguments[0]
    assert (reference.folder, reference.model.init, reference.seed) == (Path("models/base"), "random", 0)


def test_another_checkpoint_is_never_initialized_at_random(here: Path) -> None:
    layout = _layout(
        on_policy_recipe("model.init=random", "program=on_policy_distill", "teachers=[{path: a}, {path: b}]")
    )

    teachers = [role_of(layout, f"teacher-{number}").arguments[0] for number in range(2)]
    assert [(spec.folder, spec.model.init) for spec in teachers] == [
        (Path("a"), "pretrained"),
        (Path("b"), "pretrained"),
    ]
    assert all(spec.checkpoints is None for spec in teachers)


def test_a_role_requests_a_whole_gpu_and_graders_request_none(here: Path) -> None:
    layout = _layout(on_policy_recipe(), "cuda")

    train, graders = layout.pools
    assert (train.each.gpus, graders.each.gpus) == (1.0, 0.0)
    assert train.each.cpus + graders.each.cpus < 1  # both fit one core
    assert _layout(on_policy_recipe(), "cpu").pools[0].each.gpus == 0.0


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 4096), ("cuda", 16_384)])
def test_scorers_take_as_many_tokens_as_the_device_bears(here: Path, device: str, tokens: int) -> None:
    kl = "algorithm.kl={coefficient: 0.1}"

    assert role_of(_layout(on_policy_recipe(kl), device), "reference").arguments[0].max_tokens == tokens
    asked = on_policy_recipe(kl, "micro_batch_tokens=99")
    assert role_of(_layout(asked, device), "reference").arguments[0].max_tokens == 99


# --- split ---


@pytest.mark.parametrize(
    ("placement", "learn", "generate"),
    [
        ("{layout: split, devices: 4}", 2, 2),
        ("{layout: split, devices: 5}", 3, 2),
        ("{layout: split, devices: 4, rollout_devices: 3}", 1, 3),
    ],
)
def test_split_generators_have_devices_of_their_own(here: Path, placement: str, learn: int, generate: int) -> None:
    layout = _layout(on_policy_recipe(*EVERYTHING[:-1], f"placement={placement}"), "cuda")

    assert [(pool.name, pool.slots, pool.collectives, pool.each.gpus) for pool in layout.pools] == [
        ("train", learn, True, 1.0), ("rollout", generate, False, 1.0), ("graders", 3, False, 0.0)
    ]  # fmt: skip
    assert role_of(layout, "policy").mesh == role_of(layout, "critic").mesh == MeshShape(shard=learn)
    generator = role_of(layout, "generator")
    assert (generator.pool, generator.mesh) == ("rollout", MeshShape(replica=generate))
    assert generator.arguments[0].learner is None


# --- environments ---


def test_episode_runners_have_processes_of_their_own(here: Path) -> None:
    layout = _layout(on_policy_recipe("environment={tools: ['mine.py:f'], runners: 2}", "placement.timeout_s=50"))

    assert [(pool.name, pool.slots) for pool in layout.pools] == [("train", 1), ("runners", 2), ("graders", 1)]
    runner = role_of(layout, "runner")
    assert (runner.kind.__name__, runner.mesh) == ("EpisodeRunner", MeshShape(replica=2))
    assert (runner.arguments[0].generator, runner.arguments[0].deadline_s) == ("generator", 50.0 + WATCH_SLACK_S)


# --- lengths, and a run that goes on ---


@pytest.mark.parametrize(("override", "longest"), [("rollout.max_length=40", 40), ("rollout.max_length=99", 64)])
def test_an_engine_is_never_longer_than_the_data_allows(here: Path, override: str, longest: int) -> None:
    recipe = on_policy_recipe(override)

    assert longest_sequence(recipe) == longest
    assert role_of(_layout(recipe), "generator").arguments[0].max_length == longest
    assert longest_sequence(on_policy_recipe()) == 64


def test_a_resumed_run_begins_at_its_checkpoints(here: Path) -> None:
    recipe = on_policy_recipe("program=ppo", "algorithm.kl={coefficient: 0.1, refresh_every: 3}")
    saved = here / "runs/bandit/reference/step-00000006"
    saved.mkdir(parents=True)

    resumed = _layout(recipe, resume_step=6)

    assert [role_of(resumed, name).arguments[0].resume_step for name in ("policy", "critic")] == [6, 6]
    assert role_of(resumed, "reference").arguments[0].begin == saved
    # Without it the KL would be to another policy than before.
    with pytest.raises(CheckpointError, match=r"reference/step-00000005"):
        _layout(recipe, resume_step=5)
    fixed = on_policy_recipe("program=ppo", "algorithm.kl={coefficient: 0.1}")
    assert role_of(_layout(fixed, resume_step=6), "reference").arguments[0].begin is None
