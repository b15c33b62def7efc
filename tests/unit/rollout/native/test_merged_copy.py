# SPDX-License-Identifier: Apache-2.0
"""An engine that generates with the adapter merged into copies of its weights, beside a learner that keeps both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_world import CPU, Learner, ask, sequence

from helpers.engines import LENGTHS, one_rank, random_documents
from helpers.thread_axis import ThreadAxis
from helpers.tiny import save_tiny_model, tiny_tokenizer
from podium.data.documents import pack
from podium.engine.mesh import Mesh
from podium.engine.sharding import place
from podium.errors import RolloutError, WeightMismatchError
from podium.models.causal_lm import PackedCausalLM, load_config
from podium.models.cpu_settings import CpuSettings
from podium.models.packing import to_device
from podium.recipe import ModelSection, RolloutSection
from podium.rollout.checkpoints import open_engine
from podium.rollout.native.engine import NativeEngine
from podium.rollout.native.merged_copy import MergedCopy
from podium.weights.held import all_tensors
from podium.weights.published import PublishedWeights
from podium.weights.whole_copy import WholeCopy

REQUEST = ask(0, 5, new=12)
LORA = {"rank": 4, "alpha": 12.0}
SIZES: dict[str, Any] = {"max_length": 64, "max_running": 2, "memory_gib": 0.01}
# Rows times columns of four matrices of attention and three of the MLP, in two layers.
ADAPTED = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("model"))


def section_of(folder: Path, **values: Any) -> ModelSection:
    return ModelSection(path=str(folder), lora=LORA, **values)


def learner_of(folder: Path, seed: int = 0, **values: Any) -> Learner:
    learner = Learner(*place(section_of(folder, **values), folder, one_rank(), seed=0))
    retrain(learner, seed)
    return learner


@torch.no_grad()
def retrain(learner: Learner, seed: int) -> None:
    """Another adapter, in place."""
    draw = torch.Generator().manual_seed(seed)
    for each in learner.trained:
        each.parameter.copy_(torch.randn(each.parameter.shape, generator=draw) * 0.1)


def merged_of(model: PackedCausalLM, folder: Path, **values: Any) -> MergedCopy:
    return MergedCopy(model, section_of(folder, **values), load_config(folder, trust_remote_code=False), CPU)


def engine_of(model: PackedCausalLM, folder: Path, **values: Any) -> tuple[NativeEngine, MergedCopy]:
    merged = merged_of(model, folder)
    return NativeEngine(model, CPU, RolloutSection(**SIZES), merged=merged, **values), merged


def base_of(model: PackedCausalLM) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in all_tensors(model).items() if ".lora_" not in name}


def assert_base_is(model: PackedCausalLM, wanted: dict[str, torch.Tensor]) -> None:
    found = base_of(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


@torch.no_grad()
def scores(model: PackedCausalLM) -> torch.Tensor:
    found: torch.Tensor = model.eval()(to_device(pack(random_documents(LENGTHS)), CPU), None, "scores")
    return found


_SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "gpt_oss")]


# Mixtures have adapters in their attention alone; the experts are shared.
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", *_SLOW])
def test_the_engine_computes_what_the_learner_does_apart(tmp_path: Path, kind: str) -> None:
    folder = save_tiny_model(kind, tmp_path / kind)
    learner = learner_of(folder)
    engine, merged = engine_of(learner.model, folder)
    torch.testing.assert_close(scores(merged.model), scores(learner.model), atol=1e-5, rtol=1e-5)
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    with learner.model.without_adapter():
        assert learner.gap(sequence(engine, ask(1, 5, new=12))) > 1e-3  # the adapter matters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_is_summed_in_float32_and_rounded_once(llama: Path, dtype: Any) -> None:
    learner = learner_of(llama, dtype=dtype)
    merged = merged_of(learner.model, llama)
    merged.fill()
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        layer: Any = learner.model.hf.get_submodule(name)
        base = layer.get_base_layer().weight.double()
        product = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        exact = base + (12.0 / 4) * product  # alpha / rank
        found = merged.model.hf.get_submodule(name).weight
        assert found.dtype == getattr(torch, dtype)
        if dtype == "float32":
            torch.testing.assert_close(found.double(), exact, atol=1e-6, rtol=1e-6)
        else:  # sums on the border between two numbers may go to either
            assert (found == exact.bfloat16()).double().mean() > 0.999
            assert (found.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_everything_but_the_adapted_weights_is_the_learners_own(llama: Path) -> None:
    learner = learner_of(llama)
    merged = merged_of(learner.model, llama)
    own = {each.untyped_storage().data_ptr() for each in all_tensors(learner.model).values()}
    copied = {name for name, each in all_tensors(merged.model).items() if each.untyped_storage().data_ptr() not in own}
    assert len(copied) == 7 * 2
    assert all("_proj.weight" in name for name in copied)
    assert merged.nbytes == 4 * ADAPTED
    assert {id(each) for each in merged.model.hf.buffers()} <= {id(each) for each in learner.model.hf.buffers()}


def test_versions_follow_one_another_and_the_base_stays_to_the_bit(llama: Path) -> None:
    """Colocated: the engine adopts what the learner has changed in place, and only then generates with it."""
    learner = learner_of(llama)
    base, (engine, _) = base_of(learner.model), engine_of(learner.model, llama)
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    for number in (1, 2):
        retrain(learner, seed=number)
        assert learner.gap(sequence(engine, REQUEST)) > 1e-3  # of the version before, still
        engine.adopt(learner.describe(number))
        assert engine.version == number
        assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    assert_base_is(learner.model, base)


class _Sent:
    def __init__(self, learner: Learner) -> None:
        self._weights = PublishedWeights(learner.model, learner.trained, one_rank(), torch.float32)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._weights.tensors()


def test_a_generator_of_its_own_merges_what_arrives_and_refuses_what_is_wrong(llama: Path) -> None:
    learner, other = learner_of(llama), learner_of(llama, seed=99)
    base, (engine, _) = base_of(other.model), engine_of(other.model, llama)
    engine.check_frozen(PublishedWeights(learner.model, learner.trained, one_rank(), torch.float32).describe_frozen())
    for number in (1, 2):
        retrain(learner, seed=number)
        engine.install(learner.describe(number), _Sent(learner))
        assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    assert_base_is(other.model, base)
    described = learner.describe(3)
    retrain(learner, seed=3)
    with pytest.raises(WeightMismatchError, match="weight version 3"):
        engine.install(described, _Sent(learner))
    with pytest.raises(WeightMismatchError, match="does not generate"):
        sequence(engine, REQUEST)


@pytest.mark.parametrize("merges", [False, True])
def test_an_opened_engine_merges_if_it_is_asked_to(llama: Path, merges: bool) -> None:
    """As a generator opens it that reads its own base."""
    section, learner = section_of(llama), learner_of(llama)
    opened = open_engine(
        section, llama, one_rank(), RolloutSection(**SIZES), tokenizer=tiny_tokenizer(), max_length=64,
        cpu=CpuSettings(threads=1, onednn=True), merges_adapter=merges,
    )  # fmt: skip
    engine: Any = opened.engine
    names = {name for name, _ in engine._model.hf.named_parameters()}
    assert any(".lora_" in name for name in names) is not merges
    engine.install(learner.describe(1), _Sent(learner))
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    engine.close()


def test_a_running_sequence_goes_on_with_new_weights(llama: Path) -> None:
    """Staleness: an install between two steps. Tokens have the log-probs of the weights that sampled them."""
    learner, other = learner_of(llama), learner_of(llama)
    engine, _ = engine_of(other.model, llama)
    engine.submit([REQUEST])
    results = engine.results(deadline_s=30.0, tick_s=0.0)
    assert next(results) is None
    sampled = len(engine.partial_answers([REQUEST.id])[REQUEST.id].tokens_L)
    assert 0 < sampled < 12
    before = learner_of(llama)
    retrain(learner, seed=1)
    engine.install(learner.describe(1), _Sent(learner))
    answer = next(each for each in results if each is not None)
    switch = answer.versions_L.tolist().index(1)
    assert 0 < switch < 12
    np.testing.assert_allclose(answer.logprobs_L[:switch], before.logprobs_L(answer)[:switch], atol=1e-5)
    np.testing.assert_allclose(answer.logprobs_L[switch:], learner.logprobs_L(answer)[switch:], atol=1e-5)


def test_a_sleeping_engine_has_no_merged_weights_and_merges_them_again(llama: Path) -> None:
    learner = learner_of(llama)
    engine, merged = engine_of(learner.model, llama)
    first = sequence(engine, REQUEST)
    released = engine.sleep().accounted_bytes
    weight = merged.model.hf.get_submodule("model.layers.0.self_attn.k_proj").weight
    assert weight.untyped_storage().nbytes() == 0
    assert released == engine.capacity.cache_bytes + merged.nbytes
    assert engine.wake().accounted_bytes == released
    assert sequence(engine, REQUEST).logprobs_L.tolist() == first.logprobs_L.tolist()
    engine.sleep()
    retrain(learner, seed=1)
    engine.wake()
    engine.adopt(learner.describe(1))
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    assert engine.score(first.tokens_L).logprobs_T.shape == (11,)
    engine.close()
    assert weight.untyped_storage().nbytes() == 0
    assert scores(learner.model).isfinite().all()


def test_it_lies_over_the_whole_copy_of_a_sharded_learner(llama: Path) -> None:
    learner = learner_of(llama)
    published = PublishedWeights(learner.model, learner.trained, one_rank(), torch.float32)
    config = load_config(llama, trust_remote_code=False)
    copy = WholeCopy(published, section_of(llama), config, device=CPU, dtype=torch.float32)
    copy.refill()
    merged = merged_of(copy.model, llama)
    engine = NativeEngine(copy.model, CPU, RolloutSection(**SIZES), copy=copy, merged=merged)
    assert learner.gap(sequence(engine, REQUEST)) < 1e-5
    assert engine.sleep().accounted_bytes == engine.capacity.cache_bytes + merged.nbytes + copy.nbytes
    retrain(learner, seed=1)
    engine.wake()
    with pytest.raises(WeightMismatchError, match="none has been installed since"):
        engine.score(REQUEST.prompt)
    copy.refill()
    engine.install(published.describe(1), None)
    assert learner.gap(sequence(engine, ask(1, 5, new=12))) < 1e-5


def test_what_cannot_be_merged_is_refused(llama: Path) -> None:
    with pytest.raises(RolloutError, match=r"^rollout.adapter: the generator's model has no adapter"):
        merged_of(Learner.of(llama).model, llama)
    axis: Any = ThreadAxis(0, 1, None, {})  # type: ignore[arg-type]
    mesh = Mesh(rank=0, world=1, device=CPU, devices=None, tensor=axis)
    divided = place(section_of(llama), llama, mesh, seed=0)[0]
    with pytest.raises(RolloutError, match=r"^rollout.adapter: merged weights are whole on one device"):
        merged_of(divided, llama)
