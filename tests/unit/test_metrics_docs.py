# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md defines every number that a run writes, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from helpers.made_batches import make_answer, make_graded, make_report, make_rollouts, make_task
from podium.algorithms.router_statistics import RouterStatistics
from podium.algorithms.staleness import AgeStatistics
from podium.algorithms.statistics import EffectiveSampleSize, ValueStatistics
from podium.controller import evaluation, records
from podium.controller.grading import HeldoutScores
from podium.controller.ledger import GroupRecord
from podium.controller.overlap_meter import OF_LEARNERS, WaitsFor
from podium.controller.records import StepRecord, step_metrics
from podium.data.documents import Example, SplitExamples
from podium.engine.train_step import source_sum
from podium.programs.distill import DistillMethod
from podium.programs.dpo import PreferenceMethod
from podium.programs.reward_model import RewardModelMethod
from podium.recipe.dense import DistillSection, KtoPreference, RewardModelSection, SigmoidPreference
from podium.recipe.solving import Solving
from podium.roles.carriers import DistanceNote
from podium.roles.stages import CriticReport
from podium.spmd.by_source import heldout_losses, source_metrics

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "podium"
# Words that stand for something in the page's names, and what the names of this test have in their place.
STAND_INS = {"NAME": "correct", "SOURCE": "(?:easy|hard)", "KEY": "calls", "K": r"\d+"}

# Keys of the answers that an evaluation shows: no metrics.
OF_SAMPLES = {"prompt", "answer", "reference", "score"}
# Numbers of a judge that compares, has a price, and agrees with itself in one of two comparisons.
JUDGED = {
    f"correct/judge/{name}": (2.0, 4.0)
    for name in ("requests", "retries", "cache_hits", "tokens_in", "tokens_out", "cost", "comparisons", "agreeing")
}
# All that a method needs of an engine to say what it counts.
ENGINE: Any = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")))


def defined(*headings: str) -> set[str]:
    """Names in the first column of the tables below these headings, and below headings within them."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names: set[str] = set()
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        if part.splitlines()[0] in headings:
            rows = [line for line in part.splitlines() if line.startswith("| `")]
            names |= {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    assert names, f"the page has nothing below {headings}"
    return names


def pattern(name: str) -> re.Pattern[str]:
    """A name of the page as what it stands for."""
    parts = [STAND_INS.get(part, re.escape(part)) for part in re.split(r"(NAME|SOURCE|KEY|\bK\b)", name)]
    return re.compile("".join(parts))


def assert_same(written: set[str], page: set[str]) -> None:
    missing = sorted(name for name in written if not any(pattern(each).fullmatch(name) for each in page))
    assert not missing, f"docs/metrics.md does not define {missing}"
    idle = sorted(each for each in page if not any(pattern(each).fullmatch(name) for name in written))
    assert not idle, f"docs/metrics.md defines {idle}, which nothing here writes"


def causes() -> set[str]:
    """Everything that the controller accounts time to: phases, and what is named where a span is opened."""
    found = {"other", "rollout", "grade", "score", "update"}
    for file in (SOURCE / "controller").glob("*.py"):
        found |= set(re.findall(r"watch\.span\(\"([^\"]+)\"", file.read_text(encoding="utf-8")))
    return found


def step_names() -> set[str]:
    """All names of a step in which everything happened: several sources and turns, refills, KL, a critic."""
    answers = [make_answer(draw, sample) for draw in (0, 1) for sample in (0, 1)]
    graded = make_graded(
        [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], answers=answers, sources={0: "easy", 1: "hard"},
        shaping_N=np.array([0.0, -0.5, 0.0, 0.0]), extras={"correct/calls": (2.0, 4.0)} | JUDGED,
    )  # fmt: skip
    note = replace(graded.rollouts.note, turns_N=np.array([1, 2, 1, 1]), counts={"calls": np.array([3.0])})
    engine = dict.fromkeys(("lent_s", "switch_s", "lendings", "lent_tokens", "moved_episodes", "generated_tokens"), 1.0)
    engine |= dict.fromkeys(("proposed_tokens", "accepted_tokens", "lane_steps"), 1.0)
    engine |= dict.fromkeys((f"idle_s/{cause}" for cause in get_args(WaitsFor)), 1.0)
    engine |= dict.fromkeys(("learner_idle_s", *(f"learner_idle_s/{cause}" for cause in OF_LEARNERS)), 1.0)
    graded = replace(graded, rollouts=replace(graded.rollouts, note=note, metrics=engine))
    ones_N = np.ones(4)
    distance = DistanceNote(k1_N=ones_N, k2_N=ones_N, k3_N=ones_N, tokens_N=np.ones(4, np.int64))
    weights = EffectiveSampleSize(count=4, kept=4, sum=4, sum_squares=4)
    ages = {1: AgeStatistics(count=4.0, kl_k3=0.1, ratio=4.0, ratio_squares=4.0)}
    routers = RouterStatistics(max_load=1.0, dead_experts=0.0, entropy=1.0, aux_loss=2.0, mismatch=0.0)
    trained = GroupRecord(
        prompt_index=0, step=1, attempts=1, admitted_version=0, oldest_version=0, newest_version=0, trained_version=1,
        void=None,
    )  # fmt: skip
    record = StepRecord(
        step=1, lr=1e-3, graded=graded, used=graded, distance=distance,
        report=make_report(sampling=weights, kept_mass=0.9, kl_reference=0.1, ages=ages, routers=routers),
        kl_coefficient=0.1,
        groups=[trained, *(replace(trained, trained_version=None, void=why) for why in ("uniform", "failed"))],
        overlaps=True, versions=(0, 1),
        critic=CriticReport(statistics=ValueStatistics.merge([]), losses=(1.0,), grad_norms=(1.0,)),
        seconds=dict.fromkeys(causes(), 1.0), step_s=2.0, idle_s=0.5, peak_flops=1e6,
        solving=Solving(reward=None, at=1.0),
        extra={"prompts/too_long": 0.0, "prompts/skipped": 0.0, "epoch": 0.0},
    )  # fmt: skip
    return set(step_metrics(record))


def evaluation_names() -> set[str]:
    """All names of an evaluation of two sources with four samples a prompt, one of which has no score."""
    answers = [make_answer(draw, sample) for draw in range(2) for sample in range(4)]
    rollouts = make_rollouts(answers, sources={0: "easy", 1: "hard"})
    scores_N = np.array([float("nan")] + 7 * [1.0])
    scores = HeldoutScores(scores_N=scores_N, solved_N=np.ones(8, np.bool_), texts=(), num_errors=0, first_error=None)
    pass_at = evaluation.pass_at_metrics(replace(scores, scores_N=np.ones(8)), rollouts.group_N, 4)
    summary = evaluation.summarise(3, rollouts, scores, [make_task(0), make_task(1)], pass_at)
    return {*summary.metrics, *literals(SOURCE / "controller" / "run.py", "_evaluate")}


def literals(file: Path, *functions: str) -> Iterator[str]:
    """Keys of metrics as they are written down in these functions (all, where none is named), `*` where a value is put
    in: of dictionaries, and where one is set."""
    for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if functions and function.name not in functions:
            continue
        for node in ast.walk(function):
            keys: list[ast.expr | None] = []
            match node:
                case ast.Dict(keys=found):
                    keys = list(found)
                case ast.DictComp(key=key):
                    keys = [key]
                case ast.Assign(targets=[ast.Subscript(slice=key)]):
                    keys = [key]
            for key in keys:
                match key:
                    case ast.Constant(value=str(text)):
                        yield text
                    case ast.JoinedStr(values=values):
                        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in values)


def test_every_number_of_a_step_is_defined() -> None:
    assert_same(step_names(), defined("On-policy programs: every step"))


def test_every_number_of_an_evaluation_is_defined() -> None:
    assert_same(evaluation_names(), defined("On-policy programs: evaluation"))


@pytest.mark.parametrize(("module", "names"), [(records, step_names), (evaluation, evaluation_names)])
def test_what_is_made_up_here_has_every_number_that_the_code_can_write(module: Any, names: Any) -> None:
    """Else a number of a case that this test does not think of would be defined nowhere, and nobody would notice."""
    written = names()
    for name in set(literals(Path(module.__file__))) - OF_SAMPLES:
        expected = re.compile(".+".join(re.escape(part) for part in name.split("*")))
        assert any(expected.fullmatch(each) for each in written), f"{name} is written and not in what is made up here"


def test_prompts_add_the_numbers_that_the_made_up_step_takes_as_given() -> None:
    assert set(literals(SOURCE / "controller" / "prompts.py", "metrics")) == {
        "prompts/too_long", "prompts/skipped", "epoch",
    }  # fmt: skip


def averaged(*methods: Any) -> set[str]:
    """What these methods make of the sums of a step."""
    return {name for each in methods for name in each.averages(dict.fromkeys(each.tally().names, 1.0), 2)}


def heldout(names: Iterable[str]) -> set[str]:
    return {f"heldout/{name}" for name in names if name != "loss"}  # `heldout/loss` is every program's


def test_every_number_of_all_programs_with_fixed_data_is_defined() -> None:
    written = set(literals(SOURCE / "spmd" / "run.py", "_publish", "_evaluate")) - OF_SAMPLES
    assert "heldout/*" in written
    assert_same(written - {"heldout/*"} | {"heldout/loss"}, defined("Fixed data: every program"))


def test_every_number_of_several_sources_is_defined() -> None:
    split = SplitExamples(
        examples=tuple(Example(documents=(), source=source) for source in (0, 1)), rows=((0, 1),),
        sources=("easy", "hard"),
    )  # fmt: skip
    sums = {source_sum(name): 1.0 for name in split.sources}
    written = {*source_metrics(split, sums, "rows"), *heldout(heldout_losses(split, sums, "rows"))}
    assert_same(written, defined("Fixed data: several sources"))


def test_every_number_of_preferences_is_defined() -> None:
    names = averaged(
        *(
            PreferenceMethod(section, ENGINE, None, max_tokens=64, max_length=64)
            for section in (SigmoidPreference(), KtoPreference())
        )
    )
    assert_same(names | heldout(names), defined("Preferences"))


def test_every_number_of_reward_models_is_defined() -> None:
    pairs, scores = (RewardModelMethod(RewardModelSection(learns=learns), ENGINE) for learns in ("pairs", "scores"))
    two_R = torch.tensor([0.0, 1.0])
    measured = {*pairs._pairs(torch.eye(2), two_R), *scores._regression(two_R, two_R)}
    assert_same(averaged(pairs, scores) | heldout(measured), defined("Reward models"))


def test_every_number_of_distillation_is_defined() -> None:
    teachers: Any = None
    names = averaged(DistillMethod(DistillSection(), ENGINE, teachers))
    assert_same(names | heldout(names), defined("Distillation"))
