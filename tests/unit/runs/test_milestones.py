# SPDX-License-Identifier: Apache-2.0
"""When a run saves and evaluates, and when it is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.made_batches import on_policy_recipe
from podium.errors import TrainingDivergedError
from podium.runs.guards import DivergenceGuard
from podium.runs.milestones import Milestones
from podium.runs.result import end_status

HELDOUT = "data.heldout=[{path: heldout.jsonl}]"


@pytest.mark.parametrize(
    ("every", "due"), [("null", []), ("1", [1, 2, 3, 4, 5, 6]), ("3", [3, 6]), ("7", [])], ids=["never", "1", "3", "7"]
)
def test_a_checkpoint_and_an_evaluation_are_due_at_every_nth_step(every: str, due: list[int]) -> None:
    recipe = on_policy_recipe(f"checkpoint.every={every}", f"evaluation.every={every}", HELDOUT)
    milestones = Milestones(recipe, 0, evaluates=True)

    assert [step for step in range(1, 7) if milestones.save_is_due(step)] == due
    assert [step for step in range(1, 7) if milestones.evaluation_is_due(step)] == due


def test_a_run_without_heldout_data_never_evaluates() -> None:
    milestones = Milestones(on_policy_recipe("evaluation.every=1", "steps=2", HELDOUT), 0, evaluates=False)

    assert not any(milestones.evaluation_is_due(step) for step in (1, 2))
    assert not milestones.last_evaluation_is_due(2)


def test_the_last_step_is_evaluated_once_and_only_where_all_steps_are_done() -> None:
    milestones = Milestones(on_policy_recipe("steps=4"), 0, evaluates=True)

    assert not milestones.last_evaluation_is_due(3)
    assert milestones.last_evaluation_is_due(4)
    milestones.evaluated_step = 4
    assert not milestones.last_evaluation_is_due(4)


def test_an_evaluation_at_the_start_is_of_a_new_run() -> None:
    milestones = Milestones(on_policy_recipe("evaluation.at_start=true", HELDOUT), 0, evaluates=True)

    assert milestones.starts_with_evaluation(0)
    assert not milestones.starts_with_evaluation(3)


class TestARestartedRun:
    RECIPE = ("evaluation.every=2", "checkpoint.every=2", HELDOUT)

    def test_makes_up_for_a_checkpoint_and_an_evaluation_in_which_it_was_killed(self) -> None:
        milestones = Milestones(on_policy_recipe(*self.RECIPE), 4, evaluates=True, restarted=True, saved_step=2)

        assert milestones.saved_step == 2
        assert milestones.starts_with_save(4)
        assert milestones.starts_with_evaluation(4)

    def test_makes_up_for_a_checkpoint_that_was_not_complete_some_steps_later(self) -> None:
        milestones = Milestones(on_policy_recipe(*self.RECIPE), 5, evaluates=True, restarted=True, saved_step=2)

        assert milestones.starts_with_save(5)
        assert milestones.whole_step == 2
        assert not Milestones(
            on_policy_recipe(*self.RECIPE), 5, evaluates=True, restarted=True, saved_step=4
        ).starts_with_save(5)

    def test_without_checkpoints_on_disk_saves_the_first_that_was_due(self) -> None:
        recipe = on_policy_recipe(*self.RECIPE)

        for step, is_due in ((0, False), (1, False), (2, True), (3, True)):
            milestones = Milestones(recipe, step, evaluates=True, restarted=True, saved_step=0)
            assert milestones.starts_with_save(step) == is_due
            assert milestones.whole_step is None

    def test_does_not_repeat_an_evaluation_that_was_recorded(self) -> None:
        milestones = Milestones(on_policy_recipe(*self.RECIPE), 4, evaluates=True, restarted=True, is_evaluated=True)

        assert not milestones.starts_with_evaluation(4)

    def test_begins_with_neither_where_none_was_due(self) -> None:
        milestones = Milestones(on_policy_recipe(*self.RECIPE), 3, evaluates=True, restarted=True)

        assert not milestones.starts_with_save(3)
        assert not milestones.starts_with_evaluation(3)

    def test_does_not_repeat_the_evaluation_at_the_start(self) -> None:
        recipe = on_policy_recipe("evaluation.at_start=true", HELDOUT)

        assert Milestones(recipe, 0, evaluates=True, restarted=True).starts_with_evaluation(0)
        assert not Milestones(recipe, 0, evaluates=True, restarted=True, is_evaluated=True).starts_with_evaluation(0)

    def test_a_resumed_one_goes_on_with_its_next_step(self) -> None:
        milestones = Milestones(on_policy_recipe(*self.RECIPE), 4, evaluates=True)

        assert milestones.saved_step == 4
        assert not milestones.starts_with_save(4)
        assert not milestones.starts_with_evaluation(4)


def test_a_run_is_finished_when_all_steps_are_done() -> None:
    recipe = on_policy_recipe("steps=4")

    assert [end_status(recipe, step) for step in (3, 4)] == ["stopped", "finished"]


def test_a_finite_step_in_between_starts_the_count_anew() -> None:
    guard = DivergenceGuard(2, Path("metrics.jsonl"), in_a_row=1)

    guard.check(5, is_skipped=False, suspect="data")
    guard.check(6, is_skipped=True, suspect="data")
    with pytest.raises(TrainingDivergedError, match=r"steps 6 to 7\b.* data\b.*metrics\.jsonl"):
        guard.check(7, is_skipped=True, suspect="data")


def test_a_failed_save_is_tried_again_after_longer_and_longer_pauses() -> None:
    milestones = Milestones(on_policy_recipe("checkpoint.every=10"), 0, evaluates=False)
    milestones.saving(10)
    assert milestones.saved_step == 10
    pauses, step = [], 10
    for _ in range(8):
        retry_step = milestones.save_failed(step)
        assert not milestones.save_is_due(retry_step - 1) or retry_step == step + 1
        assert milestones.save_is_due(retry_step)
        pauses.append(retry_step - step)
        step = retry_step
        milestones.saving(step)

    assert pauses == [1, 2, 4, 8, 16, 32, 32, 32]
    assert milestones.whole_step is None
    assert milestones.save_is_whole()
    assert milestones.whole_step == step
    assert [each for each in range(step + 1, step + 20) if milestones.save_is_due(each)] == [
        each for each in range(step + 1, step + 20) if each % 10 == 0
    ]
    milestones.saving(step + 10)
    assert not milestones.save_is_whole()  # nothing had failed


def test_lost_checkpoints_make_the_next_step_save() -> None:
    milestones = Milestones(on_policy_recipe("checkpoint.every=null"), 4, evaluates=False)
    milestones.forget_saved(6)
    assert (milestones.whole_step, milestones.saved_step) == (None, 0)
    assert milestones.save_is_due(7)


def test_a_checkpoint_that_was_set_aside_is_saved_again() -> None:
    recipe = on_policy_recipe("checkpoint.every=3", "evaluation.every=3", "steps=9", HELDOUT)
    milestones = Milestones(recipe, 0, evaluates=True)
    for step in (6, 9):
        milestones.saving(step)
        milestones.save_is_whole()
    milestones.evaluated_step = 9

    milestones.rewound([6, 9])
    milestones.goes_on_after(9)
    assert (milestones.saved_step, milestones.whole_step, milestones.evaluated_step) == (9, 9, 9)
    milestones.goes_on_after(8)

    assert milestones.saved_step not in (8, 9)  # a run that ends there saves
    assert milestones.starts_with_save(8)
    assert milestones.last_evaluation_is_due(9)


@pytest.mark.parametrize(("saved", "saves_again"), [((3,), True), ((3, 6), False)])
def test_a_save_that_was_in_flight_is_begun_again_unless_it_has_become_whole(
    saved: tuple[int, ...], saves_again: bool
) -> None:
    milestones = Milestones(on_policy_recipe("checkpoint.every=3", "steps=9"), 3, evaluates=False)
    milestones.saving(6)
    assert milestones.saving_step == 6

    milestones.rewound(saved)

    assert milestones.saving_step is None
    assert (milestones.saved_step, milestones.whole_step) == ((3, 3) if saves_again else (6, 6))
    assert milestones.starts_with_save(6) == saves_again
