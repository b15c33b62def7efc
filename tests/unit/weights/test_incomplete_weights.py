# SPDX-License-Identifier: Apache-2.0
"""An install checks the whole model that will sample, not only the tensors that arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.engines import make_engine, one_rank
from helpers.tiny import save_tiny_model
from podium.data.trajectories import TrajectoryId
from podium.errors import PodiumError, WeightMismatchError
from podium.rollout.native.engine import NativeEngine
from podium.rollout.requests import Request, Sampling
from podium.weights.fingerprints import fingerprint
from podium.weights.held import fill_held
from podium.weights.published import PublishedWeights
from podium.weights.receiving import Verified
from podium.weights.versions import TensorSpec, WeightVersion

CPU = torch.device("cpu")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Sent:
    """Tensors, and the version that describes them faithfully."""

    weights: Weights

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    @property
    def version(self) -> WeightVersion:
        specs = [
            TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.weights.items()
        ]
        return WeightVersion(
            number=7, manifest=tuple(specs), fingerprints=tuple(fingerprint(each) for each in self.weights.values())
        )


@dataclass(frozen=True, eq=False)
class World:
    engine: NativeEngine
    published: PublishedWeights

    @property
    def weights(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self.published.tensors()}

    def draw(self) -> list[int]:
        prompt = np.array([5, 6, 7], np.int32)
        self.engine.submit([Request(id=TrajectoryId(0, 0), prompt=prompt, sampling=Sampling(max_new_tokens=4))])
        (found,) = self.engine.results(deadline_s=10.0)
        return [int(version) for version in found.versions_L]


@pytest.fixture
def world(tmp_path: Path) -> World:
    learner = make_engine(save_tiny_model("qwen3", tmp_path / "qwen3"))
    published = PublishedWeights(learner.model, learner.optimizer.trained, one_rank(), torch.float32)
    return World(NativeEngine(learner.model, CPU), published)


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: each for name, each in weights.items() if part not in name}


def cut(part: str, how: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: {name: how(each).clone() if part in name else each for name, each in weights.items()}


NOT_THIS_MODEL: dict[str, Callable[[Weights], Weights]] = {
    "a projection is missing": without("v_proj"),
    "all are missing": without(""),
    "a row where a matrix belongs": cut("0.self_attn.q_proj", lambda weight: weight[0]),
    "fewer rows, which are not padding": cut("0.self_attn.q_proj", lambda weight: weight[:5]),
    "one element of a norm": cut("0.input_layernorm", lambda weight: weight[:1]),
}


@pytest.mark.parametrize("what", list(NOT_THIS_MODEL))
def test_weights_that_are_not_the_whole_model_are_refused(world: World, what: str) -> None:
    sent = Sent(NOT_THIS_MODEL[what](world.weights))
    with pytest.raises(WeightMismatchError):
        world.engine.install(sent.version, sent)
    with pytest.raises(WeightMismatchError):
        world.draw()


@pytest.mark.parametrize("what", ["a projection is missing", "all are missing", "fewer rows, which are not padding"])
def test_a_version_in_place_that_leaves_out_part_of_the_model_is_refused(world: World, what: str) -> None:
    version = Sent(NOT_THIS_MODEL[what](world.weights)).version
    with pytest.raises(WeightMismatchError):
        world.engine.install(version, None)


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(world: World) -> None:
    sent = Sent({**world.weights, "extra.weight": torch.ones(3)})
    with pytest.raises(PodiumError, match=r"extra\.weight"):
        world.engine.install(sent.version, sent)


def test_a_buffer_without_dimensions_is_installed() -> None:
    sent = Sent({"scale": torch.tensor(3.0), "empty": torch.zeros(0, 3)})
    mine = {"scale": torch.zeros(()), "empty": torch.zeros(0, 3)}
    fill_held(mine, Verified(sent, sent.version))
    assert mine["scale"].item() == 3.0
