# SPDX-License-Identifier: Apache-2.0
"""A whole run over fake roles: what it records, saves and evaluates, and how it ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_roles import Bandit
from helpers.trials import Trial
from podium.controller.run import OnPolicyRun
from podium.errors import DataError, ProgramError, StoreError

EVERY_STEP = """
lr reward/mean reward/std reward/max reward/min reward/exact_match/mean reward/exact_match/std reward/exact_match/max
reward/exact_match/min reward/extra/correct/certain groups groups/solved_all groups/solved_none groups/solved_some
groups/solve_rate groups/uniform episodes episodes/failed episodes/dropped episodes/learned_from episodes/truncated
response/mean response/max response/min prompt/mean staleness/mean staleness/max loss grad_norm skipped optimizer_steps
entropy kl/behavior kl/behavior_k1 clip/high clip/low clip/dual clip/fraction ratio/mean ratio/max ratio/ess
advantage/mean advantage/std gap/mean gap/max imbalance micro_steps trained_tokens step_s idle_s tokens tokens_per_s
rollout/generated_tokens rollout/reused_tokens rollout/preemptions rollout/cache_used rollout/tokens_per_s
update/tokens_per_s mfu update/mfu time/rollout_s time/grade_s time/update_s time/publish_s time/other_s
prompts/too_long epoch
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A run that is over, and how long it took."""

    trial: Trial
    run: OnPolicyRun
    seconds: float


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A hundred steps of GRPO. Read only."""
    trial, began = Trial(tmp_path_factory.mktemp("hundred")), time.perf_counter()
    return Done(trial=trial, run=trial.run(), seconds=time.perf_counter() - began)


@pytest.mark.serial
def test_a_hundred_steps_take_about_a_second_and_learn(hundred: Done) -> None:
    trial, rewards = hundred.trial, hundred.trial.metric("reward/mean")

    assert hundred.seconds < 5
    assert sum(rewards[step] for step in range(91, 101)) / 10 > 0.9 > 0.5 > rewards[1]
    assert hundred.run.num_committed == 100
    assert hundred.run.last_loss == trial.metric("loss")[100]
    assert trial.console.warnings == []
    assert trial.folder.state()["status"] == "finished"
    assert trial.folder.state()["step"] == 100


@pytest.mark.slow
def test_every_step_is_one_line_of_metrics_with_every_name(hundred: Done) -> None:
    trial = hundred.trial

    assert [line.step for line in trial.lines] == list(range(1, 101))
    assert all(sorted(line.values) == sorted(EVERY_STEP.split()) for line in trial.lines)
    assert trial.metric("prompt/mean") == dict.fromkeys(range(1, 101), 2.0)
    assert trial.metric("staleness/max") == dict.fromkeys(range(1, 101), 0.0)
    # Samples 0 to 3 of a prompt have 1, 2, 3 and 1 tokens, behind a prompt of 2.
    assert trial.metric("response/mean")[1] == 1.75
    assert trial.metric("tokens")[1] == trial.metric("trained_tokens")[1] == 16 * 3.75
    assert trial.metric("rollout/generated_tokens")[1] == 28.0


def test_the_epoch_of_a_step_is_that_of_its_own_prompts(hundred: Done) -> None:
    # 64 prompts and 4 a step: every prompt once in 16 steps.
    assert [hundred.trial.metric("epoch")[step] for step in (16, 17, 100)] == [0.0, 1.0, 6.0]


def test_every_episode_is_in_the_ledger_exactly_once(hundred: Done) -> None:
    found = hundred.trial.episodes("prompt_index, sample, branch, attempt, step, state, version, finish, source")

    assert len(found) == 1600
    assert {row[:4] for row in found} == {(draw, sample, 0, 0) for draw in range(400) for sample in range(4)}
    assert all(step == draw // 4 + 1 and version == step - 1 for draw, _, _, _, step, _, version, _, _ in found)
    assert Counter(row[5:6] + row[7:] for row in found) == {("consumed", "stop", "train"): 1600}


def test_versions_ascend_and_generators_have_each_before_they_generate(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=4")

    trial.run()

    assert [entry[::2] for entry in trial.bandit.calls("share")] == [("share", number) for number in range(4)]
    order = [entry[0] for entry in trial.bandit.calls("share", "generate", "grade", "update")]
    assert [what for what, _ in groupby(order)] == ["share", "generate", "grade", "update"] * 4
    assert [plan.version for plan, _ in trial.bandit.updates] == [0, 1, 2, 3]


def test_the_object_store_is_empty_after_each_step(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3")

    trial.run()

    assert trial.cluster.opened == ["step 1", "step 2", "step 3"]
    for step, (_, train_batch) in enumerate(trial.bandit.updates, start=1):
        with pytest.raises(StoreError, match=rf"freed .*step {step}\b"):
            train_batch.rollouts.rows.read()


def test_checkpoints_are_saved_when_due_and_at_the_end(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=10", "checkpoint.every=4")

    trial.run()

    saves = trial.bandit.saves["policy"]
    assert list(saves) == [4, 8, 10]
    assert [saves[step]["episodes"] for step in saves] == [64, 128, 160]
    assert [saves[step]["cursor"]["cursor"]["next_index"] for step in saves] == [16, 32, 40]
    assert saves[4]["recipe"]["steps"] == 10
    assert saves[4]["kl_coefficient"] is None
    assert trial.bandit.journal[-1] == ("finish_saving", "policy")


def test_a_checkpoint_has_the_position_before_what_was_taken_ahead(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", "checkpoint.every=1", "algorithm.dynamic_sampling=true")

    trial.run()

    draws = [entry[2] for entry in trial.bandit.calls("generate")]
    assert [draw for sampled in draws for draw in sampled] == list(range(sum(map(len, draws))))
    saves = trial.bandit.saves["policy"]
    found = trial.episodes("step, MAX(prompt_index) + 1", "GROUP BY step")
    assert [(step, saves[step]["cursor"]["cursor"]["next_index"]) for step in (1, 2, 3)] == found


def test_a_prompt_that_cannot_be_used_ends_the_run_before_its_own_step(tmp_path: Path) -> None:
    rows = [{"prompt": "?" * (99 if number == 5 else 4), "answer": "0"} for number in range(8)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trial = Trial(tmp_path, f"data.train.0.path={tmp_path / 'own.jsonl'}", "data.shuffle=false", "data.overlong=error")

    with pytest.raises(DataError, match="line 6"):
        trial.run()

    assert [line.step for line in trial.lines] == [1]


def test_a_last_step_that_was_due_is_not_saved_twice(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=8", "checkpoint.every=4")

    trial.run()

    assert [entry[2] for entry in trial.bandit.calls("save")] == [4, 8]


def test_evaluations_are_at_the_start_when_due_and_at_the_end(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=5", "evaluation={every: 2, at_start: true}", heldout=3)

    run = trial.run()

    assert [view.step for view in trial.console.evaluations] == [0, 2, 4, 5]
    assert sorted(trial.metric("heldout/score")) == [0, 2, 4, 5]
    assert [line.step for line in trial.lines] == [0, 1, 2, 2, 3, 4, 4, 5, 5]
    assert run.evaluation is not None
    assert run.evaluation.score == trial.metric("heldout/score")[5]
    # Held-out episodes count in no step, and each evaluation frees what it held.
    assert len(trial.episodes()) == 5 * 16
    evaluations = [name for name in trial.cluster.opened if "evaluation" in name]
    assert [name.rsplit(" ", 1)[1] for name in evaluations] == ["0", "2", "4", "5"]


def test_held_out_prompts_are_answered_greedily_by_the_newest_weights(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", "evaluation={every: 1}", heldout=3)

    trial.run()

    order = [entry[0] for entry in trial.bandit.calls("share", "generate")]
    assert order == ["share", "generate", "share", "generate", "generate", "share", "generate"]
    plans = [entry[4] for entry in trial.bandit.calls("generate")]
    assert [plan.temperature for plan in plans] == [1.0, 0.0, 1.0, 0.0]
    assert [entry[2] for entry in trial.bandit.calls("generate")][1] == (0, 1, 2)


def test_a_saved_step_that_is_evaluated_gets_its_score(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "steps=4", "evaluation.every=1", "checkpoint={every: 2, keep_best: true}", heldout=3,
        bandit=Bandit(log_odds=2.0),
    )  # fmt: skip

    trial.run()

    assert trial.bandit.calls("note_grade") == [("note_grade", "policy", 2, -1.0), ("note_grade", "policy", 4, -1.0)]


def test_the_last_checkpoint_is_graded_also_when_it_was_evaluated_first(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=6", "evaluation.every=2", "checkpoint={every: 4, keep_best: true}", heldout=3)

    trial.run()

    assert [entry[2] for entry in trial.bandit.calls("note_grade")] == [4, 6]


def test_samples_of_an_evaluation_are_written_with_their_step(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, "steps=2", "evaluation={every: 2, generation: {prompts: 3, show: 2}}", heldout=3,
        bandit=Bandit(log_odds=2.0),
    )  # fmt: skip

    trial.run()

    rows = [json.loads(line) for line in trial.folder.samples_file.read_text().splitlines()]
    assert rows == [
        {"step": 2, "prompt": "prompt 0", "answer": "right", "reference": "0", "score": 1.0},
        {"step": 2, "prompt": "prompt 1", "answer": "right", "reference": "1", "score": 1.0},
    ]
    (view,) = trial.console.evaluations
    assert (view.score_name, view.score, view.num_scored) == ("held-out accuracy", 1.0, 3)


def test_a_stop_request_is_honoured_at_the_end_of_the_step(tmp_path: Path) -> None:
    trial = Trial(tmp_path, heldout=2)

    def reports(step: int) -> dict[str, float]:
        if step == 3:
            trial.folder.stop_file.touch()
        return {}

    trial.bandit.reports = reports
    run = trial.run()

    assert run.num_committed == 3
    assert [line.step for line in trial.lines] == [1, 2, 3]
    assert list(trial.bandit.saves["policy"]) == [3]
    assert trial.folder.state()["status"] == "stopped"
    assert not trial.folder.stop_file.exists()
    assert not trial.console.evaluations


def test_a_stop_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.folder.stop_file.touch()

    run = trial.run()

    assert run.num_committed == 0
    assert trial.bandit.saves == {}
    assert trial.folder.state()["status"] == "stopped"


def test_a_resumed_run_takes_the_prompts_that_the_unbroken_one_would_have(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    whole = Trial(tmp_path / "whole", "steps=6")
    whole.run()
    first = Trial(tmp_path / "broken", "steps=5", "checkpoint.every=3")
    first.run()

    second = Trial(tmp_path / "broken", "steps=6", step=3, cursor=first.bandit.saves["policy"][3]["cursor"])
    second.run()

    assert [entry[2] for entry in second.bandit.calls("generate")] == [
        entry[2] for entry in whole.bandit.calls("generate")[3:]
    ]
    assert second.bandit.calls("share")[0] == ("share", "generator", 3)
    assert [line.step for line in second.lines] == [1, 2, 3, 4, 5, 6]
    ids = "prompt_index, sample, branch, attempt, step"
    assert second.episodes(ids) == whole.episodes(ids)


def test_a_run_that_is_resumed_at_its_end_only_evaluates(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=3", step=3, heldout=2)

    run = trial.run()

    assert run.evaluation is not None
    assert trial.bandit.calls("update", "save") == []
    assert trial.folder.state()["status"] == "finished"


def test_generators_apart_are_sent_the_weights_and_do_not_share_them(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", "placement={layout: split, devices: 2}")

    trial.run()

    names = [entry[0] for entry in trial.bandit.journal]
    in_order = [what for what, _ in groupby(names)]
    assert in_order[:6] == ["describe", "send", "install", "generate", "grade", "update"]
    assert [entry[2:] for entry in trial.bandit.calls("send")] == [(0, "weights"), (1, "weights")]
    assert not trial.bandit.calls("share")


def test_a_program_that_does_not_commit_a_step_ends_the_run(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    run = OnPolicyRun(trial.parts, trial.state)

    async def forgetful() -> None:
        async for _ in run.steps():
            pass

    with pytest.raises(ProgramError, match="step 1"):
        asyncio.run(forgetful())
    trial.close()


def _custom_run(folder: Path, *overrides: str, **commit: Any) -> Trial:
    """Two steps of a program that updates, and commits with these arguments."""
    trial = Trial(folder, "steps=2", *overrides)
    run = OnPolicyRun(trial.parts, trial.state)

    async def program() -> None:
        async for step in run.steps():
            batch = step.batch(step.rewards_N)
            report = await run.policy.update(batch)
            await run.commit(step, batch, **{"policy": report, **commit})

    try:
        asyncio.run(program())
    finally:
        trial.close()
    return trial


def test_an_update_whose_report_is_not_committed_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="policy=report"):
        _custom_run(tmp_path, policy=None)


def test_a_batch_without_the_reference_that_the_recipe_asks_for_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"algorithm\.kl"):
        _custom_run(tmp_path, "algorithm.kl={coefficient: 0.1}")


def test_a_program_records_metrics_of_its_own(tmp_path: Path) -> None:
    trial = _custom_run(tmp_path, metrics={"share": np.float32(0.5)})

    assert trial.metric("program/share") == {1: 0.5, 2: 0.5}


def test_what_is_shown_of_a_step_is_what_was_recorded(tmp_path: Path) -> None:
    trial = Trial(tmp_path, "steps=2", "optimizer.warmup_steps=1", "optimizer.lr=0.5")

    trial.run()

    view = trial.console.steps[0]
    assert (view.step, view.num_steps, view.lr) == (1, 2, 0.5)
    assert dict(view.own)["reward"] == f"{trial.metric('reward/mean')[1]:.3f}"
    assert [label for label, _ in view.own] == ["reward", "solved", "length", "entropy", "s"]
