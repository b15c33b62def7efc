# SPDX-License-Identifier: Apache-2.0
"""Critics and reward models in packed form, against transformers' own sequence classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from helpers.engines import one_rank, random_documents, relative_l2
from helpers.on_policy import Episodes, block_of_rows, estimate_and_learn, make_episodes
from helpers.tiny import save_tiny_model, tiny_config
from podium.data.documents import Document, pack
from podium.engine.scoring import values
from podium.engine.sharding import place_scalar
from podium.errors import ModelError, UnsupportedModelError
from podium.models.packing import to_device
from podium.models.scalar import PackedScalarLM
from podium.recipe import ModelSection

LENGTHS = (3, 9, 9, 17, 1, 31, 12)
CPU = torch.device("cpu")
PAD = 249


def save_classifier(name: str, folder: Path, *, labels: int = 1) -> Path:
    torch.manual_seed(1)
    config = tiny_config(name, num_labels=labels, pad_token_id=PAD)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def placed(folder: Path, *, labels: int | None = None, **section: Any) -> PackedScalarLM:
    model, _ = place_scalar(ModelSection(path=str(folder), **section), folder, one_rank(), labels=labels)
    return model.eval()


def sequences(seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, PAD, length).astype(np.int32) for length in LENGTHS]


def ending_in_a_target(tokens: np.ndarray) -> Document:
    """The number at the last token is asked for by a target behind it, which the model never sees."""
    trained = np.zeros(len(tokens) + 1, np.bool_)
    trained[-1] = True
    return Document(tokens=np.append(tokens, 0).astype(np.int32), trained=trained)


@torch.no_grad()
def packed_values(model: PackedScalarLM, rows: list[np.ndarray]) -> Tensor:
    found = model(to_device(pack([ending_in_a_target(row) for row in rows]), CPU), None, "values")
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "gemma2", "qwen3_moe"])
def test_the_value_at_the_last_token_is_transformers_own_score(name: str, tmp_path: Path) -> None:
    folder = save_classifier(name, tmp_path / name)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        wanted = torch.cat([classifier(torch.from_numpy(row[None].astype(np.int64))).logits[0] for row in sequences()])
    assert wanted.std() > 0.01

    torch.testing.assert_close(packed_values(placed(folder), sequences()), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_rows_in_one_pack_have_the_values_of_each_alone(name: str, tmp_path: Path) -> None:
    model = placed(save_classifier(name, tmp_path / name))
    together = packed_values(model, sequences())
    alone = torch.cat([packed_values(model, [row]) for row in sequences()])
    backwards = packed_values(model, sequences()[::-1]).flip(0)

    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together, backwards, rtol=1e-5, atol=1e-6)


def test_several_labels_are_several_columns(tmp_path: Path) -> None:
    model = placed(save_classifier("qwen3", tmp_path / "three", labels=3))
    assert packed_values(model, sequences()).shape == (len(LENGTHS), 3)


def test_values_of_sampled_tokens_are_of_the_states_that_they_were_sampled_in(tmp_path: Path) -> None:
    """Of a row a b c d with c and d sampled, those of "a b" and of "a b c"."""
    model = placed(save_classifier("qwen3", tmp_path / "one"))
    rows = sequences()
    block = block_of_rows([(row, np.arange(len(row)) >= len(row) // 2) for row in rows])

    found = values(model, one_rank(), block, max_tokens=20).values_T

    for row, begin in zip(rows, block.offsets[:-1].tolist(), strict=True):
        for place in range(len(row)):
            prompt = row[:place]
            wanted = packed_values(model, [prompt]) if place >= len(row) // 2 and place > 0 else torch.zeros(1)
            assert found[begin + place] == pytest.approx(float(wanted), abs=1e-5)


def test_a_critic_from_a_language_model_begins_at_zero_everywhere_and_can_learn(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path / "causal")
    model = placed(folder, labels=1)
    batch = to_device(pack(random_documents()), CPU)

    assert torch.equal(packed_values(model, sequences()), torch.zeros(len(LENGTHS)))
    total, seen = model(batch, lambda values_S: (values_S - 1) ** 2, "objective")
    total.backward()
    assert torch.equal(seen, torch.zeros(len(batch.trained_S)))
    assert float(total.detach()) == len(batch.trained_S)
    assert model.hf.score.weight.grad.abs().max() > 0
    assert all(bool((each.grad == 0).all()) for each in model.hf.base_model.parameters())


def test_a_critics_body_is_the_checkpoints(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "causal")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder).model.state_dict()
    found = placed(folder, labels=1).hf.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_critic_from_a_reward_model_keeps_its_head(tmp_path: Path) -> None:
    folder = save_classifier("qwen3", tmp_path / "reward")
    assert torch.equal(packed_values(placed(folder, labels=1), sequences()), packed_values(placed(folder), sequences()))


def test_a_critic_from_a_classifier_of_several_labels_gets_a_head_of_one(tmp_path: Path) -> None:
    folder = save_classifier("qwen3", tmp_path / "three", labels=3)
    assert torch.equal(packed_values(placed(folder, labels=1), sequences()), torch.zeros(len(LENGTHS)))


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path / "causal")
    with pytest.raises(ModelError, match=r"/causal .*`score\.weight`"):
        placed(folder)


@pytest.mark.slow
def test_a_model_without_a_classifier_in_transformers_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model("granite", tmp_path / "granite")
    with pytest.raises(UnsupportedModelError, match=r"/granite: .*sequence classifier"):
        placed(folder, labels=1)


def test_gradients_of_a_value_loss_are_those_of_plain_autograd(tmp_path: Path) -> None:
    folder = save_classifier("llama", tmp_path / "one")
    rows, returns = sequences(), torch.linspace(-1, 1, len(LENGTHS))
    model = placed(folder)
    batch = to_device(pack([ending_in_a_target(row) for row in rows]), CPU)
    total, _ = model(batch, lambda values_S: (values_S - returns).square() / 2, "objective")
    total.backward()

    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    plain = torch.stack([classifier(torch.from_numpy(row[None].astype(np.int64))).logits[0, 0] for row in rows])
    ((plain - returns).square() / 2).sum().backward()

    assert float(total.detach()) == pytest.approx(float(((plain - returns).square() / 2).sum().detach()), rel=1e-5)
    found = torch.cat([each.grad.flatten() for each in model.hf.parameters()])
    wanted = torch.cat([each.grad.flatten() for each in classifier.parameters()])
    assert relative_l2(found, wanted) < 1e-5


# --- as a critic ---


@pytest.mark.parametrize("kl", [None, {"coefficient": 0.3, "where": "reward"}])
def test_a_critics_advantages_are_gae_walked_back_token_by_token(tmp_path: Path, kl: dict[str, object] | None) -> None:
    folder, policy = save_classifier("qwen3", tmp_path / "critic"), save_tiny_model("qwen3", tmp_path / "policy")
    episodes = make_episodes(policy, temperature=0.8)
    found = estimate_and_learn(one_rank(), folder, episodes, gamma=0.95, lam=0.9, kl=kl)
    wanted_values, wanted_advantages = walked_back(folder, episodes, gamma=0.95, lam=0.9, kl=kl is not None)

    columns = found.columns
    assert columns.ids.same_as(episodes.block.ids)
    np.testing.assert_allclose(columns.values_T, wanted_values, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(columns.advantages_T, wanted_advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(columns.returns_T, wanted_advantages + wanted_values, rtol=1e-5, atol=1e-5)
    trained = episodes.block.loss_mask_T
    assert found.moments == pytest.approx(
        (trained.sum(), wanted_advantages.sum(), np.square(wanted_advantages).sum()), rel=1e-4
    )
    # Half the mean squared error: values are the old ones still, so nothing is clipped.
    assert found.loss == pytest.approx(np.square(wanted_advantages[trained]).mean() / 2, rel=1e-4)
    assert found.grad_norm > 0


def walked_back(
    folder: Path, episodes: Episodes, *, gamma: float, lam: float, kl: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Values by transformers' own body and head, of each prefix; advantages by the recursion from the last token."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    block = episodes.block
    values, advantages = np.zeros(len(block.tokens_T)), np.zeros(len(block.tokens_T))
    for row, (begin, end) in enumerate(zip(block.offsets[:-1].tolist(), block.offsets[1:].tolist(), strict=True)):
        with torch.no_grad():
            states = model.model(torch.from_numpy(block.tokens_T[begin:end][None].astype(np.int64))).last_hidden_state[
                0
            ]
            of_state = model.score(states)[:, 0].numpy()
        places = [place for place in range(begin + 1, end) if block.loss_mask_T[place]]
        following = coming = 0.0
        for number, place in enumerate(reversed(places)):
            reward = float(episodes.rewards_N[row]) if number == 0 else 0.0
            if kl:
                reward -= 0.3 * float(block.behavior_logprobs_T[place] - episodes.reference_T[place])
            values[place] = of_state[place - begin - 1]
            coming = reward + gamma * following - values[place] + gamma * lam * coming
            advantages[place], following = coming, values[place]
    return values, advantages
