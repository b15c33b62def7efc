# SPDX-License-Identifier: Apache-2.0
"""The native engine with linear layers in fp8 (emulated): what it computes with, and when its copies change."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_world import Learner, ask, sequence

from helpers.engines import one_rank
from helpers.tiny import save_tiny_model
from podium.engine.sharding import place
from podium.errors import ModelError
from podium.recipe import ModelSection

REQUEST = ask(0, 5, new=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("podium.engine.sharding", "podium.rollout.native.engine_weights"):
        monkeypatch.setattr(f"{module}.require_fp8", lambda device, key: None)


def learner_of(folder: Path, *, fp8: bool) -> Learner:
    return Learner(*place(ModelSection(path=str(folder), fp8=fp8), folder, one_rank(), seed=0))


def test_a_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"^rollout.fp8: cpu has no products in fp8"):
        Learner.of(folder).engine(fp8=True)
    with pytest.raises(ModelError, match=r"^model.fp8: cpu has no products in fp8"):
        learner_of(folder, fp8=True)


def test_off_is_what_it_was_to_the_bit(folder: Path) -> None:
    learner = Learner.of(folder)
    one, other = sequence(learner.engine(), REQUEST), sequence(learner.engine(fp8=False), REQUEST)
    assert one.tokens_L.tolist() == other.tokens_L.tolist()
    assert one.logprobs_L.tolist() == other.logprobs_L.tolist()
    assert learner.model.fp8 is None


def test_an_engine_in_fp8_beside_a_learner_that_is_not(folder: Path, emulated: None) -> None:
    learner = Learner.of(folder)
    engine = learner.engine(fp8=True)
    found = sequence(engine, REQUEST)
    gap = learner.gap(found)
    assert 1e-4 < gap < 0.3  # its own rounding, and the learner's own forward without it
    engine.close()
    plain = sequence(learner.engine(fp8=False), REQUEST)
    assert learner.gap(plain) < 1e-5


def test_both_in_fp8_agree(folder: Path, emulated: None) -> None:
    learner = learner_of(folder, fp8=True)
    engine = learner.engine(fp8=True)
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    engine.close()
    plain = sequence(learner.engine(fp8=False), REQUEST)
    assert learner.gap(plain) > 1e-4


def test_new_weights_are_rounded_when_they_are_taken(folder: Path, emulated: None) -> None:
    learner = learner_of(folder, fp8=True)
    engine = learner.engine(fp8=True)
    before = sequence(engine, REQUEST)
    learner.change(1.5)
    assert sequence(engine, ask(1, 5, new=4)).error is None
    engine.adopt(learner.describe(1))
    after = sequence(engine, REQUEST)
    assert learner.gap(after) < 1e-5
    assert before.logprobs_L.tolist() != after.logprobs_L.tolist()


def test_installed_weights_are_rounded(folder: Path, emulated: None) -> None:
    learner = learner_of(folder, fp8=True)
    engine = learner.engine(fp8=True)
    learner.change(1.5)
    engine.install(learner.describe(1), None)
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5


def test_a_sleeping_engine_has_no_copies_and_makes_them_again(folder: Path, emulated: None) -> None:
    learner = learner_of(folder, fp8=True)
    engine = learner.engine(fp8=True)
    layers = learner.model.fp8
    assert layers is not None
    with_copies = engine.sleep().accounted_bytes
    assert layers.nbytes > 0
    assert all(each.untyped_storage().nbytes() == 0 for each in layers._copies())
    learner.change(0.5)
    assert engine.wake().accounted_bytes == with_copies
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    engine.close()
    assert layers.nbytes == 0
