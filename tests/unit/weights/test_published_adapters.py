# SPDX-License-Identifier: Apache-2.0
"""What a learner with an adapter publishes: the adapter alone, into engines that have read the same base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.adapters import save_peft_adapter
from helpers.engines import LENGTHS, make_engine, num_trained, one_rank, random_documents
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.cluster.objects import InlineStored
from podium.data.documents import pack
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.errors import WeightMismatchError
from podium.models.causal_lm import PackedCausalLM, load_config
from podium.models.packing import to_device
from podium.recipe import ModelSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.weights.held import all_tensors, held_tensors
from podium.weights.published import PublishedWeights
from podium.weights.transports import received, send_by_store
from podium.weights.weight_transfers import ByStore
from podium.weights.whole_copy import WholeCopy

CPU = torch.device("cpu")
# Rank 4 on all linear layers of two blocks: rows and columns of four and three matrices.
ADAPTER = 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
LORA = {"rank": 4}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "llama")


def published(engine: TrainEngine, dtype: torch.dtype = torch.float32) -> PublishedWeights:
    return PublishedWeights(engine.language_model, engine.optimizer.trained, one_rank(), dtype)


def learned(folder: Path) -> TrainEngine:
    engine = make_engine(folder, lora=LORA)
    for seed in (0, 1):
        documents = random_documents(LENGTHS, seed=seed)
        engine.train_step([pack(documents)], token_cross_entropy, normalizer=num_trained(documents), lr=1e-2).resolve()
    return engine


def generator(folder: Path) -> tuple[PackedCausalLM, NativeEngine]:
    """As a generator on a device of its own builds it: another seed, so another adapter."""
    model, _ = place(ModelSection(path=str(folder), lora=LORA), folder, one_rank(), seed=99)
    section = RolloutSection(max_length=64, max_running=2, memory_gib=0.01)
    return model, NativeEngine(model, CPU, section, decode=lambda tokens: "")


@torch.no_grad()
def scores(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(to_device(pack(random_documents(LENGTHS)), CPU), None, "scores")
    return found


def test_a_version_is_the_adapter_in_the_compute_dtype_and_nothing_of_the_base(llama: Path) -> None:
    engine = make_engine(llama, lora=LORA)
    version = published(engine).describe(1)
    assert [spec.name for spec in version.manifest] == [each.name for each in engine.optimizer.trained]
    assert version.nbytes == 4 * ADAPTER
    assert published(engine, torch.bfloat16).describe(1).nbytes == 2 * ADAPTER
    whole = published(make_engine(llama)).describe(1)
    frozen = published(engine).describe_frozen()
    assert frozen.nbytes == whole.nbytes
    assert [spec.name.replace(".base_layer", "") for spec in frozen.manifest] == [spec.name for spec in whole.manifest]
    assert frozen.fingerprints == whole.fingerprints


@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])
def test_an_engine_with_the_same_base_takes_the_adapter_and_only_its_bytes_travel(tmp_path: Path, kind: str) -> None:
    """The mixture has a buffer in its checkpoint: with an adapter it belongs to the base, and does not travel."""
    folder = save_tiny_model(kind, tmp_path / kind)
    learner, (model, engine) = learned(folder), generator(folder)
    weights = published(learner)
    transfer = ByStore(version=weights.describe(2))
    transfer = replace(transfer, stored=tuple(InlineStored(bucket) for bucket in send_by_store(transfer, weights)))
    arrival = received(transfer, device=CPU, link=lambda _: pytest.fail("no link"))
    assert arrival is not None
    before = {name: tensor.clone() for name, tensor in all_tensors(model).items()}
    engine.install(transfer.version, arrival)
    assert arrival.moved_bytes == sum(bucket.nbytes for bucket in transfer.buckets)
    changed = {name for name, tensor in all_tensors(model).items() if not torch.equal(tensor, before[name])}
    assert changed == set(held_tensors(model)) == {spec.name for spec in transfer.version.manifest}
    assert torch.equal(scores(model.eval()), scores(learner.model.eval()))


def test_an_engine_that_read_another_base_is_found_out(llama: Path, tmp_path: Path) -> None:
    described = published(make_engine(llama, lora=LORA)).describe_frozen()
    generator(llama)[1].check_frozen(described)
    other = save_tiny_model("llama", tmp_path / "other", seed=8)
    with pytest.raises(WeightMismatchError, match=r"\d+ of \d+ .*version 0\b"):
        generator(other)[1].check_frozen(described)


def test_a_version_of_all_weights_does_not_fit_an_engine_with_an_adapter(llama: Path) -> None:
    _, engine = generator(llama)
    whole = published(make_engine(llama)).describe(1)
    with pytest.raises(WeightMismatchError, match="lora_A"):
        engine.install(whole, None)


def test_a_whole_copy_that_was_released_gets_its_base_again(llama: Path) -> None:
    adapter = save_peft_adapter(llama, llama.parent / "adapter")
    engine = make_engine(llama, lora={"adapter": str(adapter)})
    config = load_config(llama, trust_remote_code=False)
    section = ModelSection(path=str(llama), lora={"adapter": str(adapter)})
    copy = WholeCopy(published(engine), section, config, device=CPU, dtype=torch.float32)
    copy.refill()
    wanted = scores(engine.model.eval())
    assert torch.equal(scores(copy.model), wanted)
    released = copy.release()
    assert released == sum(tensor.nbytes for tensor in all_tensors(engine.language_model).values())
    copy.restore()
    for tensor in all_tensors(copy.model).values():
        tensor.fill_(7.0)
    copy.refill()
    assert torch.equal(scores(copy.model), wanted)
