# SPDX-License-Identifier: Apache-2.0
"""What a trained model publishes on one rank: names, shapes and values without padding, and a copy for generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.engines import LENGTHS, make_engine, num_trained, one_rank, random_documents
from helpers.tiny import VOCABULARY, save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.engine.train_step import TrainEngine
from podium.errors import RolloutError, WeightMismatchError
from podium.models.causal_lm import load_config
from podium.models.packing import to_device
from podium.recipe import ModelSection
from podium.weights.fingerprints import fingerprint
from podium.weights.published import PublishedWeights
from podium.weights.receiving import verify_in_place
from podium.weights.whole_copy import WholeCopy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model("qwen3", tmp_path / "qwen3")


def published(engine: TrainEngine, dtype: torch.dtype = torch.float32) -> PublishedWeights:
    return PublishedWeights(engine.model, engine.optimizer.trained, one_rank(), dtype)


def copy_of(engine: TrainEngine, folder: Path, dtype: torch.dtype = torch.float32) -> WholeCopy:
    section = ModelSection(path=str(folder))
    config = load_config(folder, trust_remote_code=False)
    return WholeCopy(published(engine, dtype), section, config, device=torch.device("cpu"), dtype=dtype)


def one_step(engine: TrainEngine) -> None:
    documents = random_documents(LENGTHS)
    engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2).resolve()


def test_a_tied_head_is_published_once_and_no_padding_row_at_all(folder: Path) -> None:
    engine = make_engine(folder)
    weights = published(engine)
    specs = {spec.name: spec for spec in weights.manifest}
    assert "lm_head.weight" not in specs
    assert specs["model.embed_tokens.weight"].shape == (VOCABULARY, 32)
    assert dict(engine.model.hf.named_parameters())["model.embed_tokens.weight"].shape == (256, 32)
    assert [name for name, _ in weights.tensors()] == list(specs)
    version = weights.describe(3)
    assert version.number == 3
    for (name, tensor), spec, value in zip(weights.tensors(), version.manifest, version.fingerprints, strict=True):
        assert (name, tuple(tensor.shape)) == (spec.name, spec.shape)
        assert fingerprint(tensor) == value
    assert version.nbytes == sum(tensor.nbytes for _, tensor in weights.tensors())


def test_nothing_is_copied_where_the_learner_has_it_in_the_published_dtype(folder: Path) -> None:
    engine = make_engine(folder)
    own = {each.name: each.parameter.data_ptr() for each in engine.optimizer.trained}
    assert {name: tensor.data_ptr() for name, tensor in published(engine).tensors()} == own


def test_buffers_of_the_checkpoint_are_published_in_their_own_dtype(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("glm4_moe", tmp_path / "glm"), dtype="bfloat16")
    specs = {spec.name: spec for spec in published(engine, torch.bfloat16).manifest}
    (bias,) = (name for name in specs if name.endswith("e_score_correction_bias"))
    assert specs[bias].dtype == "float32"
    assert specs["lm_head.weight"].dtype == "bfloat16"


def test_versions_are_equal_exactly_when_the_weights_are(folder: Path) -> None:
    engine, other = make_engine(folder), make_engine(folder)
    first, same = published(engine).describe(1), published(other).describe(2)
    assert (first.fingerprints, first.fingerprint) == (same.fingerprints, same.fingerprint)
    one_step(engine)
    changed = published(engine).describe(2)
    assert changed.fingerprint != first.fingerprint
    assert len(changed.differing(dict(zip((s.name for s in first.manifest), first.fingerprints, strict=True)))) > 10


def test_the_learners_own_tensors_are_verified_in_place(folder: Path) -> None:
    engine = make_engine(folder)
    version = published(engine).describe(7)
    mine = dict(engine.model.hf.named_parameters())
    verify_in_place(mine, version)
    with torch.no_grad():
        mine["model.embed_tokens.weight"][VOCABULARY:] = 1.0  # padding counts for nothing
        verify_in_place(mine, version)
        mine["model.norm.weight"][3] += 1e-6
        mine["model.embed_tokens.weight"][VOCABULARY - 1, 31] *= -1
    with pytest.raises(WeightMismatchError, match=r"\b2 of \d+ .*version 7\b.*embed_tokens"):
        verify_in_place(mine, version)


def test_what_does_not_fit_the_manifest_is_named(folder: Path) -> None:
    engine = make_engine(folder)
    version = published(engine).describe(7)
    mine = {name: parameter.detach() for name, parameter in engine.model.hf.named_parameters()}
    for changed, said in (
        (
            {"model.norm.weight": mine["model.norm.weight"].bfloat16()},
            r"model\.norm\.weight \[32\] float32 .*\[32\] bfloat16",
        ),
        ({"model.norm.weight": mine["model.norm.weight"][:31]}, r"model\.norm\.weight \[32\] float32 .*\[31\] float32"),
        ({"model.norm.weight": torch.zeros(32, 2)}, r"model\.norm\.weight \[32\] float32 .*\[32, 2\] float32"),
    ):
        with pytest.raises(WeightMismatchError, match=said):
            verify_in_place({**mine, **changed}, version)
    with pytest.raises(WeightMismatchError, match=r"version 7\b.* model\.norm\.weight\."):
        verify_in_place({name: each for name, each in mine.items() if name != "model.norm.weight"}, version)


def scores(model: torch.nn.Module) -> torch.Tensor:
    batch = to_device(pack(random_documents(LENGTHS)), torch.device("cpu"))
    with torch.no_grad():
        found: torch.Tensor = model(batch, None, "scores")
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3", "glm4_moe"])
def test_a_whole_copy_computes_what_the_learner_does_and_follows_it(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    engine = make_engine(folder)
    copy = copy_of(engine, folder)
    places = {each: tensor.data_ptr() for each, tensor in copy.tensors.items()}
    for _ in range(2):
        copy.refill()
        engine.model.eval()
        assert torch.equal(scores(copy.model), scores(engine.model))
        verify_in_place(copy.tensors, published(engine).describe(1))
        one_step(engine)
    assert {each: tensor.data_ptr() for each, tensor in copy.tensors.items()} == places
    assert not any(parameter.requires_grad for parameter in copy.model.parameters())
    padded = copy.model.head_weight
    assert padded.shape[0] == 256
    assert not padded[VOCABULARY:].any()


def test_a_released_copy_holds_no_memory_and_comes_back(folder: Path) -> None:
    engine = make_engine(folder)
    copy = copy_of(engine, folder)
    copy.refill()
    wanted = scores(copy.model)
    assert copy.nbytes == sum(tensor.nbytes for tensor in copy.tensors.values())
    assert copy.release() == copy.nbytes > 0
    assert copy.release() == 0
    assert not copy._is_resident
    assert sum(tensor.untyped_storage().nbytes() for tensor in copy.tensors.values()) == 0
    with pytest.raises(RolloutError, match="released"):
        copy.refill()
    before = dict(copy._addresses)
    moved = copy.restore()
    assert moved == ({name: tensor.data_ptr() for name, tensor in copy.tensors.items()} != before)
    assert copy.restore() is False
    copy.refill()
    assert torch.equal(scores(copy.model), wanted)


def test_a_bfloat16_copy_of_float32_masters_has_the_bits_that_are_published(folder: Path) -> None:
    engine = make_engine(folder)
    copy = copy_of(engine, folder, torch.bfloat16)
    copy.refill()
    version = published(engine, torch.bfloat16).describe(1)
    assert {spec.dtype for spec in version.manifest} == {"bfloat16"}
    verify_in_place(copy.tensors, version)
    assert (
        version.fingerprints
        == published(make_engine(folder, dtype="bfloat16"), torch.bfloat16).describe(1).fingerprints
    )


def test_iterating_twice_gives_the_weights_of_each_moment(folder: Path) -> None:
    engine = make_engine(folder)
    weights = published(engine)

    def values() -> Iterator[float]:
        return (float(tensor.double().sum()) for _, tensor in weights.tensors())

    before = list(values())
    one_step(engine)
    assert list(values()) != before
