# SPDX-License-Identifier: Apache-2.0
"""What is particular to a method: KL and its reference, critics, teachers, imitation; and when a run must stop."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Bandit
from helpers.made_batches import advantages_of
from helpers.trials import Trial
from podium.algorithms.behavior_check import BehaviorCheck
from podium.algorithms.staleness import AgeStatistics
from podium.algorithms.statistics import PolicyStatistics
from podium.controller.run import OnPolicyRun
from podium.errors import InvariantError, RecipeError, TrainingDivergedError
from podium.programs.controlled import load_program
from podium.roles.stages import TeacherAdvantages, TokenAdvantages
from podium.weights.canary import LogprobGap

K3 = math.exp(-0.5) - 1 + 0.5  # of a log-prob half a nat above the reference's


def _all_right(id: Any, chance: float) -> bool:
    return True


# --- KL and the reference ---


@pytest.mark.parametrize(("distance", "factor"), [(0.5, 1.02), (0.0, 0.98)])
def test_the_coefficient_moves_towards_the_target(tmp_path: Path, distance: float, factor: float) -> None:
    trial = Trial(
        tmp_path, "steps=3", "algorithm.kl={coefficient: 0.1, target: 0.01, horizon: 160}",
        bandit=Bandit(distance=distance),
    )  # fmt: skip

    trial.run()

    # The error is cut at 20%, and 16 of 160 episodes are a tenth of the horizon.
    # A step is recorded with the coefficient that it had; it moves afterwards.
    assert trial.metric("kl/coefficient") == {step: pytest.approx(0.1 * factor ** (step - 1)) for step in (1, 2, 3)}
    assert trial.bandit.saves["policy"][3]["kl_coefficient"] == pytest.approx(0.1 * factor**3)


def test_a_coefficient_without_a_target_stays(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", "algorithm.kl={coefficient: 0.1}", bandit=Bandit(distance=0.5))

    trial.run()

    assert trial.metric("kl/coefficient") == {1: 0.1, 2: 0.1, 3: 0.1}
    assert trial.metric("kl/rollout_reference") == dict.fromkeys((1, 2, 3), pytest.approx(K3))
    assert [plan.kl_coefficient for plan, _ in trial.bandit.updates] == [0.1] * 3
    assert all(train_batch.reference is not None for _, train_batch in trial.bandit.updates)


def test_a_resumed_run_continues_with_the_coefficient_that_it_had(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", "algorithm.kl={coefficient: 0.1}", step=2, saved={"kl_coefficient": 0.7})

    trial.run()

    assert trial.metric("kl/coefficient") == {3: 0.7}


def test_kl_in_the_reward_is_taken_off_before_episodes_are_compared(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "steps=1", "algorithm={advantage: group_centered, kl: {coefficient: 0.1, where: reward}}",
        bandit=Bandit(distance=0.5, is_right=_all_right),
    )  # fmt: skip

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    # k1 is 0.5 a token; answers have 1, 2, 3 and 1 tokens.
    assert train_batch.reference is not None
    assert train_batch.reference.penalty_N[:4] == pytest.approx([0.05, 0.1, 0.15, 0.05])
    assert advantages_of(train_batch)[:4] == pytest.approx([0.0375, -0.0125, -0.0625, 0.0375], abs=1e-6)
    assert trial.metric("reward/mean") == {1: 1.0}  # what was earned; the penalty is the method's


def test_the_kl_of_a_step_weighs_as_much_for_a_critic_as_for_a_comparison(tmp_path: Path) -> None:
    kl = "algorithm.kl={coefficient: 0.1, where: reward, target: 0.01, horizon: 16}"
    trial = Trial(tmp_path, "steps=1", "program=ppo", kl, bandit=Bandit(distance=0.5))

    trial.run()

    critic: Any = trial.roles.critic
    assert critic.estimates[0]["kl"] == 0.1


def test_the_reference_is_refreshed_every_so_many_steps_and_saved_beside_the_policy(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "steps=5", "algorithm.kl={coefficient: 0.1, refresh_every: 2}", "checkpoint={every: 4, keep: 3}"
    )

    trial.run()

    copies = [at for at, entry in enumerate(trial.bandit.journal) if entry[0] == "copy_from"]
    updates = [at for at, entry in enumerate(trial.bandit.journal) if entry[0] == "update"]
    assert [sum(at < copy for at in updates) for copy in copies] == [2, 4]
    assert trial.bandit.calls("copy_from")[0] == ("copy_from", "reference", "policy")
    # The policy last: once its checkpoint is whole, the step can be resumed. Till then one more of the others is kept.
    assert trial.bandit.calls("save") == [
        ("save", "reference", 4), ("save", "policy", 4), ("save", "reference", 5), ("save", "policy", 5)
    ]  # fmt: skip


def test_a_reference_that_never_changes_is_not_saved(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=1", "algorithm.kl={coefficient: 0.1}")

    trial.run()

    assert trial.bandit.calls("save", "copy_from") == [("save", "policy", 1)]


# --- PPO ---


def test_a_warm_up_trains_the_critic_only(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=4", "critic.warmup_steps=2")

    trial.run()

    assert [entry[1:3] for entry in trial.bandit.calls("update")] == [
        ("critic", 1), ("critic", 2), ("critic", 3), ("policy", 3), ("critic", 4), ("policy", 4)
    ]  # fmt: skip
    # The first version that was learned is of step 3.
    assert [entry[2] for entry in trial.bandit.calls("share")] == [0, 3]
    assert {line.step: "loss" in line.values for line in trial.lines} == {1: False, 2: False, 3: True, 4: True}
    assert sorted(trial.metric("value/loss")) == [1, 2, 3, 4]


def test_a_warm_up_is_nothing_to_warn_of(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=2", "critic.warmup_steps=1")

    trial.run()

    assert trial.console.warnings == []


def test_the_critic_has_a_rate_of_its_own_on_the_same_schedule(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=2", "critic.lr=3", "optimizer={lr: 0.5, schedule: linear}")

    trial.run()

    assert [entry[3] for entry in trial.bandit.calls("update") if entry[1] == "critic"] == [3.0, 1.5]
    assert [plan.lr for plan, _ in trial.bandit.updates] == [0.5, 0.25]


def test_advantages_of_tokens_are_whitened_over_the_whole_step(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=1", bandit=Bandit(is_right=lambda id, chance: id.sample == 0))

    trial.run()

    ((plan, train_batch),) = trial.bandit.updates
    # 4 of 16 are right: mean 1/4, unbiased variance (4 - 16 / 16) / 15 = 1/5.
    assert isinstance(train_batch.advantages, TokenAdvantages)
    assert plan.whitening == train_batch.advantages.whitening == pytest.approx((0.25, 5**0.5))


def test_a_critic_is_saved_before_the_policy(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=1")

    trial.run()

    assert trial.bandit.calls("save") == [("save", "critic", 1), ("save", "policy", 1)]


def test_ppo_continues_when_every_group_is_dropped(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=ppo", "steps=1", bandit=Bandit(fails=lambda id: "no" if id.sample == 0 else None))

    trial.run()

    assert trial.bandit.calls("update") == []
    assert trial.metric("episodes/learned_from") == {1: 0.0}
    assert trial.console.warnings[1].startswith("step 1: ")


# --- expert iteration ---


def test_expert_iteration_imitates_the_shortest_solved_episode_of_each_prompt(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "program=expert_iteration", "steps=1",
        bandit=Bandit(is_right=lambda id, chance: id.prompt_index != 2 and id.sample > 0),
    )  # fmt: skip

    trial.run()

    ((plan, train_batch),) = trial.bandit.updates
    assert plan.loss == "imitation"
    # Samples 1, 2 and 3 are right and have 2, 3 and 1 tokens.
    assert [tuple(id)[:2] for id in train_batch.rollouts.rows.ids] == [(0, 3), (1, 3), (3, 3)]
    assert advantages_of(train_batch).tolist() == [1.0] * 3
    assert trial.metric("episodes/learned_from") == {1: 3.0}
    assert trial.metric("groups/solve_rate") == {1: 9 / 16}
    assert len(trial.episodes()) == 16


def test_expert_iteration_waits_for_something_solved(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "program=expert_iteration", "steps=2", bandit=Bandit(is_right=lambda id, chance: False))

    run = trial.run()

    assert run.num_committed == 2
    assert trial.bandit.updates == []
    assert len(trial.console.warnings) == 1


# --- teachers ---


def test_teachers_weigh_relative_to_each_other(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "program=on_policy_distill", "reward=[]", "steps=1", "teachers=[{path: a, weight: 3}, {path: b}]",
        bandit=Bandit(distance=0.5),
    )  # fmt: skip

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    assert isinstance(train_batch.advantages, TeacherAdvantages)
    assert train_batch.advantages.weights == (0.75, 0.25)
    assert trial.console.warnings == []
    assert trial.metric("reward/mean") == {1: 0.0}


def test_a_student_with_rewards_only_logs_them(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "program=on_policy_distill", "steps=1", "teachers=[{path: a}]", bandit=Bandit(is_right=_all_right)
    )

    trial.run()

    assert trial.metric("reward/mean") == {1: 1.0}
    ((_, train_batch),) = trial.bandit.updates
    assert isinstance(train_batch.advantages, TeacherAdvantages)


def test_distillation_continues_when_every_group_is_dropped(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "program=on_policy_distill", "steps=1", "teachers=[{path: a}]",
        bandit=Bandit(fails=lambda id: "no" if id.sample == 0 else None),
    )  # fmt: skip

    trial.run()

    assert trial.bandit.updates == []


# --- when something is wrong ---


def _gap(mean: float) -> dict[str, Any]:
    return {"gap": LogprobGap(count=10, sum_abs=10 * mean, sum_ratio=10.0, largest=mean)}


def test_an_engine_that_samples_from_another_policy_is_warned_of(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", bandit=Bandit(reports=lambda step: _gap(0.3) if step == 2 else _gap(5e-5)))

    trial.run()

    (warning,) = trial.console.warnings
    assert re.search(r"^step 2: .*log-probs .* 0\.3 ", warning)
    assert trial.metric("gap/mean") == {1: pytest.approx(5e-5), 2: pytest.approx(0.3)}


def test_a_gap_that_is_corrected_for_is_nothing_to_warn_of(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=1", "algorithm.correction={}", bandit=Bandit(reports=lambda step: _gap(0.3)))

    trial.run()

    assert trial.console.warnings == []


@pytest.mark.parametrize("recipe", [("steps=3",), ("steps=3", "algorithm.correction={}")])
def test_log_probs_that_are_not_of_the_sampled_tokens_end_the_run(tmp_path: Path, recipe: tuple[str, ...]) -> None:
    trial = Trial(tmp_path, *recipe, bandit=Bandit(reports=lambda step: _gap(1.5) if step == 2 else _gap(5e-5)))

    with pytest.raises(InvariantError, match=r"step 2: .*log-probs .* 1\.5 .*invariant: behaviour log-probs"):
        trial.run()

    assert [line.step for line in trial.lines] == [1, 2]  # the step that ended it is recorded
    assert trial.episodes("step, COUNT(*)", "GROUP BY step") == [(1, 16), (2, 16)]


@pytest.mark.parametrize(("every", "saved", "advice"), [(1, [1, 2], r"goes on after step 2"), (9, [], "anew")])
def test_a_step_of_other_log_probs_is_not_saved_and_the_error_says_where_to_resume(
    tmp_path: Path, every: int, saved: list[int], advice: str
) -> None:
    trial = Trial(
        tmp_path, "steps=4", f"checkpoint.every={every}",
        bandit=Bandit(reports=lambda step: _gap(1.5 if step == 3 else 5e-5)),
    )  # fmt: skip

    with pytest.raises(InvariantError, match=rf"Step 3 is not saved.* {advice}"):
        asyncio.run(_run_as_a_driver_would(trial))

    assert sorted(trial.bandit.saves.get("policy", {})) == saved


async def _run_as_a_driver_would(trial: Trial) -> None:
    """Saves what can be saved when the program fails."""
    run = OnPolicyRun(trial.parts, trial.state)
    try:
        await load_program(trial.recipe.program)(run)
    except InvariantError:
        assert run.unsaved_step is None
        await run.save_before_failing()
        raise
    finally:
        trial.close()


def test_log_probs_of_other_tokens_are_reported_with_their_group_and_its_history(tmp_path: Path) -> None:
    """Also with a limit of the KL, which such log-probs would exceed too: the step must not count as diverged."""
    gap = LogprobGap.of(np.array([0.1, 0.1, 4.0, 4.0]), np.array([4, 4, 6, 6]))
    reports = lambda step: {"gap": gap, **_moved(9.0)} if step == 2 else {}  # noqa: E731
    trial = Trial(tmp_path, "steps=3", "algorithm.max_kl_behavior=0.1", bandit=Bandit(reports=reports))

    with pytest.raises(InvariantError) as raised:
        trial.run()

    report = str(raised.value)
    assert "The group of prompt 6 has the largest difference: 4 in the mean over 2 tokens" in report
    assert "GroupRecord(prompt_index=6, step=2, attempts=1, admitted_version=1" in report
    assert all(f"\n  {name}(group=6" in report for name in ("Admit", "EpisodeEnded"))
    assert "The event: the update of step 2" in report


def _stale(*, evidence: float = 0.0, distance: float = 0.0) -> dict[str, Any]:
    """A report of 1000 tokens of age 1, in an update of 8 sequences: the limit of the evidence is
    30 + 20 + 8 log 100 = 86.8 nats."""
    ages = {1: AgeStatistics(count=1000.0, kl_k3=0.0, ratio=1e3, ratio_squares=1e3,
                             kl_k1=1000 * distance, evidence=evidence)}  # fmt: skip
    return {"ages": ages, "behavior": BehaviorCheck(evidence={4: 0.25 * evidence, 6: 0.75 * evidence})}


def test_stale_log_probs_of_other_tokens_are_reported_with_their_group_and_its_history(tmp_path: Path) -> None:
    """Also with a limit of the KL, and where the policy seems to have run away."""
    wrong = _stale(evidence=87.0, distance=9.0) | _moved(9.0)
    reports = lambda step: wrong if step == 2 else _stale(evidence=86.0)  # noqa: E731
    trial = Trial(tmp_path, "steps=3", "algorithm.max_kl_behavior=0.1", bandit=Bandit(reports=reports))

    with pytest.raises(InvariantError, match=r"step 2: tokens of age 1 .* 87 nats .*invariant: behaviour") as raised:
        trial.run()

    report = str(raised.value)
    assert "The group of prompt 6 has the most evidence: 65.2 nats" in report
    assert "GroupRecord(prompt_index=6, step=2, attempts=1, admitted_version=1" in report
    assert all(f"\n  {name}(group=6" in report for name in ("Admit", "EpisodeEnded"))
    assert [line.step for line in trial.lines] == [1, 2]  # the step that ended it is recorded


def test_log_probs_above_0_end_the_run_at_staleness_0_too(tmp_path: Path) -> None:
    wrong = {"behavior": BehaviorCheck(impossible={0: 1, 1: 3})}
    trial = Trial(tmp_path, "steps=2", bandit=Bandit(reports=lambda step: wrong))

    with pytest.raises(InvariantError, match=r"step 1: .* for 4 sampled tokens[^$]*prompt 1 has the most of them: 3"):
        trial.run()


@pytest.mark.parametrize(("distance", "step"), [(4.9, None), (5.1, 2)])
def test_a_policy_that_has_nothing_left_of_the_one_that_sampled_stops_the_run(
    tmp_path: Path, distance: float, step: int | None
) -> None:
    """Without a limit of the KL too."""
    trial = Trial(
        tmp_path, "steps=3", bandit=Bandit(reports=lambda at: _stale(distance=distance if at == 2 else 0.5))
    )  # fmt: skip

    if step is None:
        trial.run()
        return
    with pytest.raises(TrainingDivergedError, match=rf"step {step}: .* age 1 .* 5\.1 nats .*optimizer\.lr"):
        trial.run()


def _skipping(*steps: int) -> Any:
    return lambda step: {"skipped": 1} if step in steps else {}


def test_steps_in_a_row_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "optimizer.max_skipped_in_a_row=3", bandit=Bandit(reports=_skipping(2, 3, 5, 6, 7)))

    with pytest.raises(TrainingDivergedError, match=r"steps 5 to 7 .*optimizer\.lr"):
        trial.run()

    assert [line.step for line in trial.lines] == [1, 2, 3, 4, 5, 6, 7]
    assert len(trial.console.warnings) == 5
    assert trial.bandit.saves == {}  # what is not finite is not saved


def _moved(kl: float) -> dict[str, Any]:
    """A report whose `kl/behavior` is `kl`."""
    return {"statistics": dataclasses.replace(PolicyStatistics.merge([]), count=10.0, sum_kl_k3=10 * kl)}


def test_a_policy_that_runs_away_from_the_one_that_sampled_stops_the_run(tmp_path: Path) -> None:
    bandit = Bandit(reports=lambda step: _moved(0.3 if step == 3 else 0.1))
    trial = Trial(tmp_path, "algorithm.max_kl_behavior=0.1", bandit=bandit)  # the limit itself is allowed

    with pytest.raises(TrainingDivergedError, match=r"step 3: .* 0\.3.* 0\.1\b") as caught:
        trial.run()

    assert {"algorithm.max_kl_behavior", "optimizer.lr"} <= set(re.findall(r"[a-z_]+\.[a-z_]+", str(caught.value)))
    assert trial.metric("kl/behavior")[3] == pytest.approx(0.3)  # the step that stopped it is recorded
    assert trial.bandit.saves == {}


def test_a_kl_that_is_not_a_number_does_not_hide_another_that_is_too_large(tmp_path: Path) -> None:
    stale = {1: AgeStatistics(count=10.0, kl_k3=3.0, ratio=10.0, ratio_squares=10.0)}
    bandit = Bandit(reports=lambda step: {**_moved(math.nan), "ages": stale} if step == 2 else _moved(0.1))
    trial = Trial(tmp_path, "algorithm.max_kl_behavior=0.1", bandit=bandit)

    with pytest.raises(TrainingDivergedError, match=r"step 2: .* 0\.3.* 0\.1\b"):
        trial.run()


def test_a_run_without_a_limit_of_its_kl_goes_on(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", bandit=Bandit(reports=lambda step: _moved(9.0)))

    trial.run()

    assert trial.metric("kl/behavior") == {1: pytest.approx(9.0), 2: pytest.approx(9.0)}


def test_the_step_that_stops_a_run_is_in_the_ledger(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "optimizer.max_skipped_in_a_row=1", bandit=Bandit(reports=_skipping(2)))

    with pytest.raises(TrainingDivergedError):
        trial.run()

    assert trial.episodes("step, COUNT(*)", "GROUP BY step") == [(1, 16), (2, 16)]


def test_a_resumed_run_remembers_the_steps_that_were_skipped(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "optimizer.max_skipped_in_a_row=3", step=2, saved={"skipped_in_a_row": 2},
        bandit=Bandit(reports=_skipping(3)),
    )  # fmt: skip

    with pytest.raises(TrainingDivergedError, match="steps 1 to 3"):
        trial.run()


def test_the_count_of_skipped_steps_is_saved(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", "checkpoint.every=1", bandit=Bandit(reports=_skipping(1, 2)))

    trial.run()

    saves = trial.bandit.saves["policy"]
    assert [saves[step]["skipped_in_a_row"] for step in (1, 2, 3)] == [1, 2, 0]


def test_a_custom_estimator_that_fails_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def half(rewards_N, group_N):\n    return rewards_N[1:] / 2\n")
    trial = Trial(tmp_path, f"algorithm.advantage='{tmp_path}/mine.py:half'")

    with pytest.raises(RecipeError, match=r"algorithm\.advantage: .*mine\.py:half .*\(15,\) .*\b16\b"):
        trial.run()


def test_a_custom_estimator_computes_the_advantages(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def own(rewards_N, group_N):\n    return rewards_N - 10 * group_N\n")
    trial = Trial(
        tmp_path, "steps=1", f"algorithm.advantage='{tmp_path}/mine.py:own'", bandit=Bandit(is_right=_all_right)
    )

    trial.run()

    ((_, train_batch),) = trial.bandit.updates
    assert advantages_of(train_batch).tolist() == np.repeat([1.0, -9.0, -19.0, -29.0], 4).tolist()
