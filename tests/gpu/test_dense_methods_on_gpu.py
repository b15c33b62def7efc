# SPDX-License-Identifier: Apache-2.0
"""Preferences, reward models, distillation and adapters on one CUDA device, in bfloat16."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pydantic import TypeAdapter

from podium.data.documents import Document, Example, SplitExamples
from podium.engine.mesh import Mesh, join
from podium.engine.optimizer import AdamW
from podium.engine.scoring import summed_logprobs
from podium.engine.sharding import PackedModel, place, place_scalar
from podium.engine.train_step import StepReport, TrainEngine
from podium.models.causal_lm import PackedCausalLM
from podium.programs.distill import DistillMethod
from podium.programs.dpo import PreferenceMethod
from podium.programs.references import base_logprobs
from podium.programs.reward_model import RewardModelMethod
from podium.programs.teachers import LiveTeachers
from podium.recipe import ModelSection, OptimizerSection, PlacementSection
from podium.recipe.dense import AnyPreference, DistillSection, RewardModelSection, SigmoidPreference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

VOCABULARY = 1000
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return join(PlacementSection.model_validate({"device": "cuda"}), rank=0, world=1, local_rank=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def section(folder: Path, dtype: str, **more: object) -> ModelSection:
    return ModelSection.model_validate({"path": str(folder), "dtype": dtype, "compile": "off", **more})


def engine_of(model: PackedModel, trained: list, mesh: Mesh) -> TrainEngine:  # type: ignore[type-arg]
    optimizer = OptimizerSection(lr=1e-3)
    return TrainEngine(model, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)


def document(draw: np.random.Generator, prompt: np.ndarray, low: int, high: int) -> Document:
    said = draw.integers(low, high, int(draw.integers(5, 60)))
    trained = np.concatenate([np.zeros(len(prompt), np.bool_), np.ones(len(said), np.bool_)])
    return Document(tokens=np.concatenate([prompt, said]).astype(np.int32), trained=trained)


def pairs(seed: int, count: int = 32) -> SplitExamples:
    """Chosen completions are of the lower half of the vocabulary, rejected ones of the upper."""
    draw, examples = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = draw.integers(0, VOCABULARY, int(draw.integers(3, 40)))
        both = document(draw, prompt, 0, VOCABULARY // 2), document(draw, prompt, VOCABULARY // 2, VOCABULARY)
        examples.append(Example(documents=both))
    half = count // 2
    return SplitExamples(examples=tuple(examples), rows=(tuple(range(half)), tuple(range(half, count))))


def scored(split: SplitExamples) -> SplitExamples:
    """The same, to be scored at their ends."""

    def ended(each: Document) -> Document:
        trained = np.zeros(len(each.tokens) + 1, np.bool_)
        trained[-1] = True
        return Document(tokens=np.append(each.tokens, 0).astype(np.int32), trained=trained)

    examples = tuple(Example(documents=tuple(map(ended, each.documents))) for each in split.examples)
    return SplitExamples(examples=examples, rows=split.rows)


def preference_steps(engine: TrainEngine, method: PreferenceMethod, steps: int, lr: float = 1e-3) -> list[StepReport]:
    reports = []
    for number in range(steps):
        split, tally = pairs(number), method.tally()
        batches = method.batches(split, tally)
        report, _ = engine.objective_step(batches, normalizer=len(split.examples), lr=lr, tally=tally)
        reports.append(report.resolve())
    assert not any(report.skipped for report in reports)
    return reports


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo", "orpo"])
def test_preferences_in_bfloat16_learn_as_in_float32(folder: Path, mesh: Mesh, loss: str) -> None:
    losses = []
    for dtype in DTYPES:
        model, trained = place(section(folder, dtype), folder, mesh, seed=0)
        reference, _ = place(section(folder, dtype), folder, mesh, seed=0, masters=False)
        engine = engine_of(model, trained, mesh)
        chosen = TypeAdapter(AnyPreference).validate_python({"loss": loss, "beta": 0.1})
        references = partial(summed_logprobs, reference, mesh) if loss in ("sigmoid", "ipo") else None
        method = PreferenceMethod(chosen, engine, references, max_tokens=4096, max_length=256)
        reports = preference_steps(engine, method, 6)
        losses.append([report.loss for report in reports])
        assert method.measure(pairs(99))["accuracy"] > 0.9
    assert losses[1] == pytest.approx(losses[0], rel=0.1, abs=0.03)


def test_an_adapter_is_its_own_reference_with_a_base_that_has_no_masters(folder: Path, mesh: Mesh) -> None:
    pytest.importorskip("peft")
    model, trained = place(section(folder, "bfloat16", lora={"rank": 8}), folder, mesh, seed=0)
    assert all("lora_" in each.name and each.master.dtype == torch.float32 for each in trained)
    frozen = [each for name, each in model.hf.named_parameters() if "lora_" not in name]
    assert all(each.dtype == torch.bfloat16 and not each.requires_grad for each in frozen)
    before = [each.clone() for each in frozen]
    engine = engine_of(model, trained, mesh)
    method = PreferenceMethod(
        SigmoidPreference(), engine, partial(base_logprobs, model, mesh), max_tokens=4096, max_length=256
    )
    reports = preference_steps(engine, method, 16, lr=1e-2)
    assert reports[0].loss == pytest.approx(0.6931, abs=2e-3)
    assert reports[-1].loss < 0.5
    assert all(torch.equal(one, other) for one, other in zip(before, frozen, strict=True))


def test_a_reward_model_in_bfloat16_learns_the_pairs(folder: Path, mesh: Mesh) -> None:
    model, trained = place_scalar(section(folder, "bfloat16"), folder, mesh, labels=1)
    engine = engine_of(model, trained, mesh)
    method = RewardModelMethod(RewardModelSection(), engine)
    for number in range(8):
        split, tally = scored(pairs(number)), method.tally()
        report, _ = engine.objective_step(
            method.batches(split, tally), normalizer=len(split.examples), lr=1e-3, tally=tally
        )
        assert not report.resolve().skipped
    found = method.measure(scored(pairs(99)))
    assert found["accuracy"] > 0.9
    assert found["loss"] < 0.5


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_a_student_comes_nearer_to_its_teacher_in_bfloat16(folder: Path, mesh: Mesh, divergence: str) -> None:
    teacher, _ = place(section(folder, "bfloat16"), folder, mesh, seed=0, masters=False)
    # Sharper than random weights are, so that there is something to learn.
    with torch.no_grad():
        teacher.hf.get_output_embeddings().weight.mul_(8)
    student, trained = place(section(folder, "bfloat16"), folder, mesh, seed=0)
    assert isinstance(student, PackedCausalLM)
    engine = engine_of(student, trained, mesh)
    chosen = DistillSection.model_validate({"divergence": divergence})
    method = DistillMethod(chosen, engine, LiveTeachers(chosen, [(teacher, 1.0)], mesh))
    heldout = pairs(99)
    first = method.measure(heldout)["divergence"]
    for number in range(12):
        split, tally = pairs(number), method.tally()
        count = sum(example.num_trained for example in split.examples)
        report, _ = engine.objective_step(method.batches(split, tally), normalizer=count, lr=2e-3, tally=tally)
        assert not report.resolve().skipped
    assert method.measure(heldout)["divergence"] < 0.9 * first
