# SPDX-License-Identifier: Apache-2.0
"""GRPO's loss could be a function of one's own; the losses of SFT and DPO could be changed only by copying the
program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from helpers.runs import losses, tiny_recipe
from helpers.tiny import write_chats
from podium.errors import RecipeError
from podium.models.head import EntropyObjective, HeadSpec, fused_objective
from podium.observe import read_metrics
from podium.recipe import DpoRecipe

BUILT_IN = "built-in"
LOSSES = """
import torch
from torch.nn.functional import logsigmoid

def cross_entropy(logprobs_S):
    return -logprobs_S

def cross_entropy_of_documents(logprobs_S, sequence_S, num_sequences, targets_S, entropy_S, scale=1.0):
    assert len(logprobs_S) == len(sequence_S) == len(targets_S) == len(entropy_S)
    assert not len(sequence_S) or int(sequence_S.max()) == num_sequences - 1
    assert not entropy_S.requires_grad and not bool((entropy_S < 0).any())
    return -logprobs_S * scale

def sigmoid(chosen_R, rejected_R, reference_chosen_R, reference_rejected_R, beta):
    lead_R = (chosen_R - reference_chosen_R) - (rejected_R - reference_rejected_R)
    return -logsigmoid(beta * lead_R), {"lead": lead_R}

def without_reference(chosen_R, rejected_R, chosen_tokens_R, rejected_tokens_R):
    return (rejected_R / rejected_tokens_R - chosen_R / chosen_tokens_R).exp()

def one_number(logprobs_S):
    return -logprobs_S.mean()

def no_gradient(logprobs_S):
    return -logprobs_S.detach()

def raising(logprobs_S):
    table = {}
    return table["missing"]

def of_words(logprobs_S, words):
    return -logprobs_S

def pairs_raise(chosen_R, rejected_R):
    raise ValueError("no pairs today")

def no_metrics_dict(chosen_R, rejected_R):
    return rejected_R - chosen_R, [1.0]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats, pairs and custom losses."""
    folder = tmp_path_factory.mktemp("losses")
    write_chats(folder / "chats.jsonl")
    pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1 + i % 7)} for i in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "mine.py").write_text(LOSSES)
    return folder


def sft_recipe(model: Path, place: Path, runs: Path, name: str, loss: str | None, **changes: Any) -> podium.Recipe:
    if loss is not None:
        changes["algorithm"] = {"loss": f"{place}/mine.py:{loss}"}
    data = place / "chats.jsonl"
    heldout = {"heldout": [{"path": str(data)}], "packing_window": 16, "max_length": 60}
    return tiny_recipe(model, data, runs, name, **{"steps": 4, "micro_batch_tokens": 160, "data": heldout, **changes})


def dpo_recipe(model: Path, place: Path, runs: Path, name: str, loss: str, **changes: Any) -> podium.Recipe:
    preference = {"loss": "sigmoid" if loss == BUILT_IN else f"{place}/mine.py:{loss}"}
    base: dict[str, Any] = {"program": "dpo", "preference": preference, "rows_per_step": 8, "steps": 4}
    return tiny_recipe(model, place / "pairs.jsonl", runs, name, **{**base, **changes})


def weights(run: Path) -> dict[str, bytes]:
    """The tensors of a run's last checkpoint, as bytes."""
    folder = max((run / "checkpoints").glob("step-*"))
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


# --- the built-in formula, written as a plug-in ---


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy_of_documents"])
def test_cross_entropy_as_a_plug_in_gives_the_same_weights_bit_for_bit(
    tiny_folder: Path, place: Path, tmp_path: Path, loss: str
) -> None:
    built_in = podium.train(sft_recipe(tiny_folder, place, tmp_path, "built-in", None))
    own = podium.train(sft_recipe(tiny_folder, place, tmp_path, "own", loss))
    assert losses(own.folder) == losses(built_in.folder)
    assert own.heldout_loss == pytest.approx(built_in.heldout_loss, rel=1e-6)
    assert weights(own.folder) == weights(built_in.folder)


def test_dpo_as_a_plug_in_gives_the_same_weights_bit_for_bit(tiny_folder: Path, place: Path, tmp_path: Path) -> None:
    built_in = podium.train(dpo_recipe(tiny_folder, place, tmp_path, "built-in", BUILT_IN))
    own = podium.train(dpo_recipe(tiny_folder, place, tmp_path, "own", "sigmoid"))
    assert losses(own.folder) == losses(built_in.folder)
    assert weights(own.folder) == weights(built_in.folder)
    for mine, theirs in zip(read_metrics(own.folder), read_metrics(built_in.folder), strict=True):
        assert mine.values.get("accuracy") == theirs.values.get("accuracy")
        if "reward_margin" in mine.values:  # beta times the lead
            assert mine.values["loss/lead"] * 0.1 == pytest.approx(mine.values["reward_margin"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sft", "dpo"])
def test_a_plug_in_on_two_ranks_is_the_built_in_loss_on_two_ranks(
    tiny_folder: Path, place: Path, tmp_path: Path, program: str
) -> None:
    two = {"placement": {"devices": 2}}
    if program == "sft":
        built_in = podium.train(sft_recipe(tiny_folder, place, tmp_path, "built-in", None, **two))
        own = podium.train(sft_recipe(tiny_folder, place, tmp_path, "own", "cross_entropy_of_documents", **two))
        alone = podium.train(sft_recipe(tiny_folder, place, tmp_path, "alone", "cross_entropy_of_documents"))
    else:
        built_in = podium.train(dpo_recipe(tiny_folder, place, tmp_path, "built-in", BUILT_IN, **two))
        own = podium.train(dpo_recipe(tiny_folder, place, tmp_path, "own", "sigmoid", **two))
        alone = podium.train(dpo_recipe(tiny_folder, place, tmp_path, "alone", "sigmoid"))
    assert weights(own.folder) == weights(built_in.folder)
    assert list(losses(alone.folder).values()) == pytest.approx(list(losses(own.folder).values()), rel=1e-4)


@pytest.mark.slow
def test_a_run_with_a_plug_in_does_not_depend_on_micro_batches_and_resumes_exactly(
    tiny_folder: Path, place: Path, tmp_path: Path
) -> None:
    loss, every = "cross_entropy_of_documents", {"checkpoint": {"every": 2}}
    whole = podium.train(sft_recipe(tiny_folder, place, tmp_path, "whole", loss, micro_batch_tokens=4096))
    cut = podium.train(sft_recipe(tiny_folder, place, tmp_path, "cut", loss, **every))
    assert list(losses(cut.folder).values()) == pytest.approx(list(losses(whole.folder).values()), rel=1e-5)
    before, recorded = weights(cut.folder), losses(cut.folder)
    resumed = podium.resume(cut.folder, step=2)
    assert (resumed.step, losses(cut.folder)) == (4, recorded)
    assert weights(cut.folder) == before


# --- what a loss names is what is computed ---


def test_a_pair_loss_that_names_no_reference_has_none(tiny_folder: Path, place: Path, tmp_path: Path) -> None:
    recipe = dpo_recipe(tiny_folder, place, tmp_path, "bare", "without_reference", steps=3)
    assert isinstance(recipe, DpoRecipe)
    assert recipe.reference_source is None
    result = podium.train(recipe)
    assert result.status == "finished"
    assert not (tmp_path / ".cache").exists()
    compared = dpo_recipe(tiny_folder, place, tmp_path, "compared", "sigmoid")
    assert isinstance(compared, DpoRecipe)
    assert compared.reference_source == "cached"


@pytest.mark.parametrize("ties_tokens", [False, True])
def test_a_loss_sees_the_entropy_of_each_token_in_every_chunk(ties_tokens: bool) -> None:
    torch.manual_seed(0)
    hidden_SE, weight_VE = torch.randn(7, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    targets_S, spec = torch.arange(7), HeadSpec(vocab_size=10, chunk_tokens=3)
    logprobs_SV = torch.log_softmax(hidden_SE @ weight_VE.T, -1)
    wanted_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1).detach()
    seen: list[torch.Tensor] = []

    def loss(logprobs_C: torch.Tensor, entropy_C: torch.Tensor, tokens: slice) -> torch.Tensor:
        seen.append(entropy_C.clone())
        return -logprobs_C * entropy_C

    objective = EntropyObjective(loss=loss, watches_entropy=True, ties_tokens=ties_tokens)
    total, _, _ = fused_objective(hidden_SE, weight_VE, targets_S, torch.ones(7), objective, spec)
    assert len(seen) == (1 if ties_tokens else 3)
    torch.testing.assert_close(torch.cat(seen), wanted_S)
    plain = (-logprobs_SV[targets_S, targets_S] * wanted_S).sum()
    found = torch.autograd.grad(total, (hidden_SE, weight_VE))
    torch.testing.assert_close(total.detach(), plain.detach())
    for mine, theirs in zip(found, torch.autograd.grad(plain, (hidden_SE, weight_VE)), strict=True):
        torch.testing.assert_close(mine, theirs)


# --- mistakes ---


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ("of_words", ("algorithm.loss", "words", "entropy_S")),
        ("without_reference", ("algorithm.loss", "chosen_R", "logprobs_S")),
        ("nowhere", ("algorithm.loss", "mine.py", "nowhere")),
    ],
)
def test_a_check_finds_a_loss_with_other_parameters(
    tiny_folder: Path, place: Path, tmp_path: Path, loss: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as caught:
        podium.check(sft_recipe(tiny_folder, place, tmp_path, "wrong", loss))
    assert all(part in str(caught.value) for part in parts)


def test_a_check_finds_a_grpo_loss_that_cannot_be_called(tiny_folder: Path, place: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "program": "grpo", "model": {"path": tiny_folder}, "data": {"train": [{"path": place / "pairs.jsonl"}]},
        "optimizer": {"lr": 1e-3}, "steps": 1, "reward": [lambda answer: 1.0], "run": {"name": "r"},
        "algorithm": {"loss": f"{place}/mine.py:sigmoid"},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"algorithm\.loss.*mine\.py:sigmoid"):
        podium.check(values)


@pytest.mark.parametrize("key", ["reference", "reference_model"])
def test_a_check_refuses_a_reference_that_nothing_reads(
    tiny_folder: Path, place: Path, tmp_path: Path, key: str
) -> None:
    value = {"reference": "cached", "reference_model": str(tiny_folder)}[key]
    recipe = dpo_recipe(tiny_folder, place, tmp_path, "idle", "without_reference")
    with pytest.raises(RecipeError, match=f"preference.{key}"):
        podium.check(recipe, overrides=[f"preference.{key}={value}"])


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ("one_number", ("algorithm.loss", "mine.py:one_number", "()")),
        ("no_gradient", ("algorithm.loss", "mine.py:no_gradient", "logprobs_S")),
        ("raising", ("algorithm.loss", "KeyError", "mine.py, line")),
    ],
)
def test_a_loss_that_is_wrong_is_reported_with_its_place(
    tiny_folder: Path, place: Path, tmp_path: Path, loss: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as caught:
        podium.train(sft_recipe(tiny_folder, place, tmp_path, "wrong", loss))
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("loss", "parts"),
    [
        ("pairs_raise", ("preference.loss", "ValueError: no pairs today", "mine.py, line")),
        ("no_metrics_dict", ("preference.loss", "list")),
    ],
)
def test_a_pair_loss_that_is_wrong_is_found_before_the_first_step(
    tiny_folder: Path, place: Path, tmp_path: Path, loss: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as caught:
        podium.train(dpo_recipe(tiny_folder, place, tmp_path, "wrong", loss))
    assert all(part in str(caught.value) for part in parts)
    assert not (tmp_path / "wrong" / "metrics.jsonl").exists() or not losses(tmp_path / "wrong")


def test_a_loss_may_be_given_as_a_function(tiny_folder: Path, place: Path, tmp_path: Path) -> None:
    values = sft_recipe(tiny_folder, place, tmp_path, "given", None, steps=3).model_dump(mode="json")
    plain = podium.train({**values, "run": {**values["run"], "name": "plain"}})
    given = podium.train({**values, "algorithm": {"loss": lambda logprobs_S: -logprobs_S}})
    assert losses(given.folder) == losses(plain.folder)
