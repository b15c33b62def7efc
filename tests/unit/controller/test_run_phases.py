# SPDX-License-Identifier: Apache-2.0
"""Who is on the device when: phases in order, and who leaves goes before who comes."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_roles import Bandit
from helpers.trials import Trial

KL = "algorithm.kl={coefficient: 0.1}"
PROGRAMS: dict[str, tuple[str, ...]] = {
    "grpo": (KL,),
    "ppo": ("program=ppo", KL),
    "on_policy_distill": ("program=on_policy_distill", "teachers=[{path: a}, {path: b}]"),
    "expert_iteration": ("program=expert_iteration",),
    "reward model": ("reward=[{verifier: exact_match}, {model: judge}]",),
}


def _steps(trial: Trial, step: int) -> list[tuple[Any, ...]]:
    """What happened from the first call of one step's generation to that of the next."""
    starts = [at for at, entry in enumerate(trial.bandit.journal) if entry[0] == "generate"]
    return trial.bandit.journal[starts[step - 1] : starts[step]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_roles_that_share_no_device_memory_are_never_moved(tmp_path: Path, program: str) -> None:
    trial = Trial(tmp_path, "steps=3", *PROGRAMS[program])

    trial.run()

    assert trial.bandit.calls("hold") == []


@pytest.mark.parametrize(
    ("program", "phases"),
    [
        ("grpo", ["generator", "grader", "reference", "policy"]),
        ("ppo", ["generator", "grader", "reference", "critic", "critic", "policy"]),
        ("on_policy_distill", ["generator", "grader", "teacher-0", "teacher-1", "policy"]),
        ("expert_iteration", ["generator", "grader", "policy"]),
        ("reward model", ["generator", "grader", "reward-1", "policy"]),
    ],
)
def test_phases_follow_one_another(tmp_path: Path, program: str, phases: list[str]) -> None:
    trial = Trial(tmp_path, "steps=3", "grading.solved_at=0", *PROGRAMS[program])

    trial.run()

    # Episodes are graded as they end, in several batches.
    happened = [entry[:2] for entry in _steps(trial, 2) if entry[0] != "share"]
    in_order = [role for (_, role), _ in groupby(happened)]
    if program == "reward model":  # functions and models grade at the same time
        assert (in_order[0], in_order[-1], set(in_order)) == (phases[0], phases[-1], set(phases))
    else:
        assert in_order == phases


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_role_works_while_it_is_away(tmp_path: Path, program: str) -> None:
    # A fake that is asked to work while it is away fails the run.
    trial = Trial(
        tmp_path, "steps=3", "grading.solved_at=0", "checkpoint.every=2", "evaluation.every=1", *PROGRAMS[program],
        heldout=2, offload=True,
    )  # fmt: skip

    trial.run()

    assert trial.bandit.calls("hold")


def test_who_leaves_goes_before_who_comes(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", KL, offload=True)

    trial.run()

    message = [entry[1:3] if entry[0] == "hold" else entry[0] for entry in _steps(trial, 2)]
    assert [what for what, _ in groupby(message)] == [
        "generate",
        "grade",
        ("generator", "offloaded"),
        ("reference", "active"),
        "score",
        ("reference", "offloaded"),
        ("policy", "active"),
        "update",
        ("policy", "offloaded"),
        "share",  # wakes the generator
    ]


def test_before_the_first_rollout_all_others_leave(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=1", KL, offload=True)

    trial.run()

    assert trial.bandit.journal[:3] == [
        ("hold", "policy", "offloaded"),
        ("hold", "reference", "offloaded"),
        ("share", "generator", 0),
    ]


@pytest.mark.parametrize(("num_ranks", "shared"), [(1, [0]), (2, [0, 0])])
def test_a_generator_whose_copy_left_the_device_gets_the_weights_again(
    tmp_path: Path, num_ranks: int, shared: list[int]
) -> None:
    # Nothing is ever solved, so the version stays.
    nothing = Bandit(is_right=lambda id, chance: False)
    trial = Trial(tmp_path, "program=expert_iteration", "steps=2", bandit=nothing, offload=True)
    trial.roles.policy.num_ranks = num_ranks  # type: ignore[misc]

    trial.run()

    assert [entry[2] for entry in trial.bandit.calls("share")] == shared


def test_generators_on_devices_of_their_own_stay_there(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", KL, "placement={layout: split, devices: 2}", offload=True)

    trial.run()

    assert {entry[1] for entry in trial.bandit.calls("hold")} == {"policy", "reference"}


def test_a_checkpoint_is_written_with_the_policy_on_the_device(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", "checkpoint.every=1", "evaluation.every=1", heldout=2, offload=True)

    trial.run()

    saved = [at for at, entry in enumerate(trial.bandit.journal) if entry[0] == "save"]
    assert len(saved) == 2
    for at in saved:
        moves = [entry for entry in trial.bandit.journal[:at] if entry[:2] == ("hold", "policy")]
        assert moves[-1] == ("hold", "policy", "active")


REFRESHED = "algorithm.kl={coefficient: 0.1, refresh_every: 2}"


def test_a_reference_is_refreshed_from_a_policy_that_is_on_the_device(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", REFRESHED, offload=True)

    trial.run()

    assert len(trial.bandit.calls("copy_from")) == 1


def test_a_reference_that_is_saved_is_on_the_device(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=1", REFRESHED, offload=True)

    trial.run()

    assert ("save", "reference", 1) in trial.bandit.journal


def test_time_is_accounted_to_the_phase_it_was_spent_in(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", KL, "checkpoint.every=1", "evaluation.every=1", heldout=2, offload=True)

    trial.run()

    spent = trial.parts.watch.seconds()
    assert {"rollout", "grade", "score", "update", "publish", "residency", "checkpoint", "evaluation"} <= set(spent)
    last = trial.lines[-2].values  # the step; behind it is the evaluation
    assert {name for name in last if name.startswith("time/")} >= {"time/rollout_s", "time/score_s", "time/residency_s"}
