# SPDX-License-Identifier: Apache-2.0
"""`placement.policy` on real Ray: runs whose learners replicate, shard or divide the model or its tokens compute what
one process does, in every layout, and continue on another mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from golden.runs import make_task, recipe, train
from helpers.on_policy import numbers
from helpers.runs import losses, tiny_recipe
from helpers.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from podium import api
from podium.engine.checkpoint import newest_usable
from podium.observe import read_metrics
from podium.replaying import ReplayResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

INLINE = {"launcher": "inline", "layout": "colocated", "devices": 1}
TENSOR = {"policy": {"tensor": 2}}
CONTEXT = {"policy": {"context": 2}}
TOGETHER = {"generator": {"tensor": 2}}  # two learners' devices hold one generator
COLOCATED = {"layout": "colocated", "devices": 2}
SPLIT = {"layout": "split", "devices": 3, "rollout_devices": 1}
ELASTIC = {"layout": "elastic", "devices": 3, "rollout_devices": 1}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "grpo": ("grpo", {**COLOCATED, **TENSOR}),
    "grpo, split": ("grpo", {**SPLIT, **TENSOR}),
    "agent, elastic": ("tool-agent", {**ELASTIC, **TENSOR}),
    "ppo": ("ppo", {**COLOCATED, **TENSOR}),
    "distillation, replicas": ("on-policy-distillation", {**COLOCATED, "policy": {"replicate": 2}}),
    "distillation, split": ("on-policy-distillation", {**SPLIT, **TENSOR}),
    "adapter": ("lora-grpo", {**COLOCATED, **TENSOR}),
    "judged": ("judged", {**COLOCATED, **TENSOR}),
    "grpo, context": ("grpo", {**COLOCATED, **CONTEXT}),
    "ppo, context": ("ppo", {**COLOCATED, **CONTEXT}),
    "judged, context": ("judged", {**COLOCATED, **CONTEXT}),
    "adapter, context": ("lora-grpo", {**COLOCATED, **CONTEXT}),
    "agent, elastic, context": ("tool-agent", {**ELASTIC, **CONTEXT}),
    "distillation, split, context": ("on-policy-distillation", {**SPLIT, **CONTEXT}),
    "grpo, four": ("grpo", {"layout": "colocated", "devices": 4, "policy": {"shard": 2, "tensor": 2}}),
    "grpo, four, together": ("grpo", {"layout": "colocated", "devices": 4, "policy": {"context": 2}, **TOGETHER}),
    "agent, together": ("tool-agent", {**COLOCATED, **CONTEXT, **TOGETHER}),
    "adapter, together": ("lora-grpo", {**COLOCATED, **TENSOR, **TOGETHER}),
}
# Of golden runs, but for these: a reward model whose vocabulary is not divided, and a reference that is refreshed.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "judged": {
        "reward": [{"model": "judge"}, {"function": "task.py:digits"}],
        "algorithm": {"kl": {"coefficient": 0.05, "refresh_every": 2}, "proximal": "always"},
    }
}
# What depends on the layout: tokens that engines generate, devices that change sides, and shares of the batch.
OF_LAYOUTS = (
    "rollout/", "lending/", "learner/", "response/offered_", "response/trained_", "staleness/", "groups/void/",
    "imbalance",
)  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes-on-ray")
    make_task(folder)
    tokenizer = tiny_tokenizer()
    config = tiny_config("qwen3", num_labels=1, vocab_size=len(tokenizer) | 1, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(5)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    return folder


@pytest.fixture(scope="module")
def alone(task: Path) -> dict[str, Path]:
    """Method -> its run in one process, filled as tests ask for it."""
    return {}


def run_of(task: Path, method: str, name: str, placement: Mapping[str, Any], **changes: Any) -> Path:
    values = recipe("grpo" if method in CHANGES else method) | CHANGES.get(method, {}) | changes
    values |= {"placement": {**values["placement"], **placement}, "run": {**values["run"], "name": name}}
    return train(values, task)


def require_same(run: Path, other: Path) -> None:
    """All metrics of all steps, as far as they do not depend on the layout."""
    found, wanted = numbers(run), numbers(other)
    assert found.keys() == wanted.keys()
    for step, values in wanted.items():
        compared = {name: value for name, value in values.items() if not name.startswith(OF_LAYOUTS)}
        assert len(compared) > 20 or step == 0
        for name, value in compared.items():
            assert found[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (step, name)


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_mesh_has_the_numbers_of_one_process(
    task: Path, alone: dict[str, Path], case: str, local_ray: None
) -> None:
    method, placement = CASES[case]
    if method not in alone:
        alone[method] = run_of(task, method, f"{method}-alone", INLINE)

    name = case.replace(", ", "-")
    run = run_of(task, method, name, {"launcher": "ray", **placement})

    require_same(run, alone[method])
    said = " ".join((task / f"{name}.log").read_text().split())
    axes = said.partition("learn {")[2].partition("}")[0]
    assert f"tensor: {placement['policy'].get('tensor', 1)}" in axes
    assert ("context: 2" in axes) == ("context" in placement["policy"])


def test_learners_that_divide_experts_have_the_numbers_of_one_process(task: Path, local_ray: None) -> None:
    save_tiny_model("qwen3_moe", task / "mixture", vocab_size=len(tiny_tokenizer()))
    tiny_tokenizer().save_pretrained(task / "mixture")
    model = {**recipe("grpo")["model"], "path": "mixture"}
    alone = run_of(task, "grpo", "mixture-alone", INLINE, model=model)

    run = run_of(task, "grpo", "mixture-divided", {"launcher": "ray", **SPLIT, "experts": 2}, model=model)

    require_same(run, alone)
    said = " ".join((task / "mixture-divided.log").read_text().split())
    assert "learn {replicate: 1, shard: 2, tensor: 1} with experts: 2" in said


def test_learners_hold_the_generator_of_a_mixture_together_and_free_it_while_they_learn(
    task: Path, local_ray: None
) -> None:
    save_tiny_model("qwen3_moe", task / "mixture-2", vocab_size=len(tiny_tokenizer()))
    tiny_tokenizer().save_pretrained(task / "mixture-2")
    model = {**recipe("grpo")["model"], "path": "mixture-2"}
    rollout = {**recipe("grpo")["rollout"], "offload_optimizer": True}
    alone = run_of(task, "grpo", "mixture-2-alone", INLINE, model=model)

    placement = {"launcher": "ray", **COLOCATED, **TOGETHER, "experts": 2}
    run = run_of(task, "grpo", "mixture-together", placement, model=model, rollout=rollout)

    require_same(run, alone)
    said = " ".join((task / "mixture-together.log").read_text().split())
    assert "1 generate (native, each on 2)" in said


def test_a_run_is_replayed_and_continues_on_other_meshes(task: Path, local_ray: None) -> None:
    optimizer = {**recipe("grpo")["optimizer"], "schedule": "constant"}
    rollout = {**recipe("grpo")["rollout"], "record": True}
    steady = {"optimizer": optimizer, "rollout": rollout, "checkpoint": {"every": 2, "background": False}}
    whole = run_of(task, "grpo", "whole", INLINE, **steady, steps=6)
    parts = run_of(task, "grpo", "parts", {"launcher": "ray", **COLOCATED, **TENSOR}, **steady, steps=2)
    one = ["placement.launcher=inline", "placement.devices=1", "placement.policy=null"]
    two = ["placement.launcher=ray", "placement.devices=2", "placement.policy={context: 2}"]
    with contextlib.chdir(task):
        replayed = api.replay(parts)
        assert isinstance(replayed, ReplayResult)
        assert replayed.is_identical, replayed.lines()
        api.resume(parts, overrides=["steps=4", *one])
        api.resume(parts, overrides=["steps=6", *two])

    require_same(parts, whole)
    assert newest_usable(parts / "checkpoints").step == 6


@pytest.mark.parametrize("axis", ["tensor", "replicate"])
def test_a_run_on_fixed_data_has_the_losses_of_one_rank(task: Path, axis: str, local_ray: None) -> None:
    def run(name: str, placement: Mapping[str, Any]) -> Path:
        values = tiny_recipe(task / "model", task / "chats.jsonl", task / "runs", name, placement=dict(placement))
        api.train(values)
        return task / "runs" / name

    single = run(f"one-for-{axis}", {})
    several = run(f"two-by-{axis}", {"launcher": "ray", "devices": 2, "policy": {axis: 2}})

    assert losses(several) == pytest.approx(losses(single), rel=1e-5)
    last = [metrics.values for metrics in read_metrics(several / "metrics.jsonl")][-1]
    wanted = [metrics.values for metrics in read_metrics(single / "metrics.jsonl")][-1]
    assert last["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
