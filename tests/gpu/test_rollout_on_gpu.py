# SPDX-License-Identifier: Apache-2.0
"""The native engine on one CUDA device: kernels, captured graphs over updates, memory given back, shared pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import Document, pack
from podium.data.trajectories import TrajectoryBlock, TrajectoryId, TrajectoryIds
from podium.engine.mesh import Mesh, join
from podium.engine.offload import OffloadedTensors, what_can_leave
from podium.engine.optimizer import AdamW
from podium.engine.scoring import score
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.errors import WeightMismatchError
from podium.models.attention import plain_attention
from podium.recipe import ModelSection, OptimizerSection, PlacementSection, RolloutSection
from podium.rollout.native.engine import NativeEngine
from podium.rollout.randomness import stream_key, uniforms
from podium.rollout.requests import Completion, Request, Sampling
from podium.weights.canary import GapLimits, LogprobGap
from podium.weights.published import PublishedWeights
from podium.weights.whole_copy import WholeCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
CUDA = torch.device("cuda")
VOCABULARY = 1000
GIB = 1 << 30


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return join(PlacementSection.model_validate({"device": "cuda"}), rank=0, world=1, local_rank=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    ).save_pretrained(path)  # fmt: skip
    return path


def learner(folder: Path, mesh: Mesh, **model: Any) -> TrainEngine:
    section = ModelSection.model_validate({"path": str(folder), "init": "random", "compile": "off", **model})
    placed, trained = place(section, folder, mesh, seed=0)
    optimizer = OptimizerSection(lr=1e-3)
    return TrainEngine(placed, trained, AdamW(trained, optimizer), mesh, optimizer.clip_norm)


def update(engine: TrainEngine, seed: int) -> None:
    """One real optimizer step, large enough to change every answer."""
    draw = np.random.default_rng(seed)
    trained = np.ones(65, np.bool_)
    trained[0] = False
    documents = [
        Document(tokens=draw.integers(0, VOCABULARY, 65).astype(np.int32), trained=trained.copy()) for _ in range(8)
    ]
    engine.train_step([pack(documents)], token_cross_entropy, normalizer=512, lr=1e-2).resolve()


def ask(draw: int, length: int, new: int, *, sample: int = 0, seed: int = 0, **sampling: Any) -> Request:
    prompt = np.random.default_rng(1000 * seed + draw).integers(0, VOCABULARY, length).astype(np.int32)
    return Request(
        id=TrajectoryId(draw, sample), prompt=prompt, sampling=Sampling(max_new_tokens=new, **sampling), seed=seed
    )


def answers(engine: NativeEngine, requests: Sequence[Request]) -> dict[TrajectoryId, Completion]:
    engine.submit(requests)
    return {each.id: each for each in engine.results(deadline_s=120.0)}


def gap(engine: TrainEngine, found: Sequence[Completion], temperature: float = 1.0) -> LogprobGap:
    """Of the engine's log-probs to those that the learner computes for the same tokens."""
    found = sorted(found, key=lambda each: each.id)
    sizes = [len(each.prompt) + each.num_tokens for each in found]
    block = TrajectoryBlock(
        ids=TrajectoryIds.of([each.id for each in found]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        tokens_T=np.concatenate([np.concatenate([each.prompt, each.tokens_L]) for each in found]),
        loss_mask_T=np.concatenate([np.r_[np.zeros(len(e.prompt), bool), np.ones(e.num_tokens, bool)] for e in found]),
        behavior_logprobs_T=np.concatenate(
            [np.r_[np.zeros(len(e.prompt), np.float32), e.logprobs_L] for e in found]
        ).astype(np.float32),
        versions_T=np.concatenate([np.r_[np.full(len(e.prompt), -1), e.versions_L] for e in found]).astype(np.int32),
    )
    with torch.compiler.set_stance("force_eager"):
        return LogprobGap.between(block, score(engine.model, engine.mesh, block, temperature=temperature))


@pytest.fixture
def opened(mesh: Mesh) -> Iterator[Callable[..., NativeEngine]]:
    """Engines that are closed after the test."""
    made: list[NativeEngine] = []

    def open_(engine: TrainEngine, **section: Any) -> NativeEngine:
        values = {"memory_gib": 1.0, "max_running": 24, "max_length": 1024, **section}
        made.append(NativeEngine(engine.model, mesh.device, RolloutSection.model_validate(values)))
        return made[-1]

    yield open_
    for each in made:
        each.close()


@pytest.mark.parametrize("decode", ["eager", "captured", "compiled"])
def test_logprobs_are_the_learners_within_bfloat16(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine], decode: str
) -> None:
    trainer = learner(folder, mesh, compile="on" if decode == "compiled" else "off")
    requests = [ask(i, n, 60, sample=s) for i, n in enumerate((3, 70, 1, 300, 64, 65)) for s in range(3)]
    found = answers(opened(trainer, decode=decode), requests)
    measured = gap(trainer, list(found.values()))
    print(f"\n{decode}: mean {measured.mean:.5f}, largest {measured.largest:.4f} over {measured.count} tokens")
    assert len(found) == len(requests)
    assert not measured.exceeds(GapLimits.of("bfloat16"))
    assert measured.mean < 0.01


def test_in_float32_graphs_and_plain_torch_sample_the_same_tokens(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]
) -> None:
    trainer = learner(folder, mesh, dtype="float32")
    requests = [
        ask(0, 40, 50), ask(1, 3, 50, temperature=0), ask(2, 300, 50, temperature=0.7),
        ask(3, 20, 50, top_k=5), ask(4, 20, 50, top_p=0.5, repetition_penalty=1.2), ask(5, 9, 50, min_new_tokens=5),
    ]  # fmt: skip
    eager, captured = (answers(opened(trainer, decode=way), requests) for way in ("eager", "captured"))
    same = [eager[id].tokens_L.tolist() == captured[id].tokens_L.tolist() for id in eager]
    assert sum(same) >= len(same) - 1  # a random number may lie on the border of two tokens
    assert gap(trainer, [each for each in captured.values() if each.id.prompt_index == 0]).largest < 1e-3


@pytest.mark.parametrize("decode", ["eager", "captured", "compiled"])
def test_speculation_in_float32_samples_the_tokens_of_plain_decoding(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine], decode: str
) -> None:
    """Over epochs, so that whole answers are proposed; with stops and truncated sampling beside them."""
    trainer = learner(folder, mesh, dtype="float32", compile="on" if decode == "compiled" else "off")
    requests = [
        *(ask(0, 40, 60, sample=sample, temperature=0.3 * sample) for sample in range(3)),
        ask(1, 3, 60, temperature=0), ask(2, 300, 60, temperature=0.5), ask(3, 20, 60, top_k=5),
        ask(4, 20, 60, top_p=0.5, repetition_penalty=1.2),
    ]  # fmt: skip
    without = opened(trainer, decode=decode, memory_gib=0.5)
    plain = answers(without, requests)
    without.close()  # its cache is attached to the same modules
    engine = opened(trainer, decode=decode, memory_gib=0.5, speculation={"tokens": 6})
    for epoch in range(3):
        before = engine.load()
        found = answers(engine, requests)
        same = [plain[id].tokens_L.tolist() == found[id].tokens_L.tolist() for id in plain]
        assert sum(same) >= len(same) - 1  # a random number may lie on the border of two tokens
        whole = [each for id, each in found.items() if id.prompt_index in (0, 1) and id.sample == 0]
        assert gap(trainer, whole).largest < 1e-3
        if epoch:
            after = engine.load()
            steps = after.lane_steps - before.lane_steps
            assert after.generated_tokens - before.generated_tokens > 1.3 * steps


def test_speculation_in_bfloat16_reports_the_learners_logprobs(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]
) -> None:
    trainer = learner(folder, mesh)
    engine = opened(trainer, speculation={"tokens": 8})
    requests = [ask(i, 30 + 40 * i, 100, sample=sample) for i in range(2) for sample in range(2)]
    for _ in range(3):
        found = list(answers(engine, requests).values())
        assert gap(trainer, found).mean < 0.01
    assert engine.load().accepted_tokens > 100


def test_captured_graphs_stay_right_over_three_cycles_of_update_and_rollout(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]
) -> None:
    trainer = learner(folder, mesh)
    engine = opened(trainer)
    published = PublishedWeights(trainer.model, trainer.optimizer.trained, mesh, torch.bfloat16)
    away = OffloadedTensors(what_can_leave(trainer.optimizer))
    last: list[int] = []
    for cycle in range(1, 4):
        update(trainer, cycle)
        away.offload()
        slept, woke = engine.sleep(), engine.wake()
        assert slept.measured_bytes == woke.measured_bytes == slept.accounted_bytes > 0.9 * engine.capacity.cache_bytes
        engine.install(published.describe(cycle), None)
        found = answers(engine, [ask(i, 30 + i, 80) for i in range(10)])
        assert {int(v) for each in found.values() for v in each.versions_L} == {cycle}
        tokens = found[TrajectoryId(0, 0)].tokens_L.tolist()
        assert tokens != last
        last = tokens
        assert gap(trainer, list(found.values())).mean < 0.01
        away.restore()


def test_weights_that_are_not_those_of_the_version_are_refused(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]
) -> None:
    trainer = learner(folder, mesh)
    published = PublishedWeights(trainer.model, trainer.optimizer.trained, mesh, torch.bfloat16)
    engine, version = opened(trainer), published.describe(1)
    with torch.no_grad():
        trainer.model.layers[2].mlp.up_proj.weight[3, 5] += 1
    with pytest.raises(WeightMismatchError, match=r"layers\.2\.mlp\.up_proj"):
        engine.install(version, None)
    engine.submit([ask(0, 5, 5)])
    with pytest.raises(WeightMismatchError):
        next(engine.results(deadline_s=10.0))


def test_eight_samples_hold_their_prompt_once(folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]) -> None:
    """A prompt of 650 tokens is ten full pages of 64 and a part. Eight answers have that part and 10 tokens of their
    own in a page each; apart they would hold 88 pages."""
    engine = opened(learner(folder, mesh))
    engine.submit([ask(0, 650, 10, sample=sample) for sample in range(8)])
    most = 0
    for _ in engine.results(deadline_s=60.0):
        most = max(most, engine.load().cache_tokens_used)
    assert engine.load().prefilled_tokens == 650 + 7
    assert 10 * 64 < most <= (10 + 8) * 64


def test_a_full_cache_puts_answers_back_and_ends_them_all(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]
) -> None:
    """4 layers x 2 x 2 heads x 64 x 2 bytes = 2048 bytes a token: 40 pages of 64 hold 2560 tokens, 24 answers want
    6000."""
    trainer = learner(folder, mesh)
    engine = opened(trainer, memory_gib=41 * 64 * 2048 / GIB)
    found = answers(engine, [ask(i, 50, 200) for i in range(24)])
    assert engine.load().preemptions > 0
    assert all(each.num_tokens == 200 for each in found.values())
    assert gap(trainer, list(found.values())).mean < 0.01


def test_a_whole_copy_generates_beside_its_learner(folder: Path, mesh: Mesh) -> None:
    """As under FSDP, on one device: another module with its own tensors, refilled after an update."""
    trainer = learner(folder, mesh)
    published = PublishedWeights(trainer.model, trainer.optimizer.trained, mesh, torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(folder)
    copy = WholeCopy(published, ModelSection(path=str(folder)), config, device=CUDA, dtype=torch.bfloat16)
    engine = NativeEngine(
        copy.model, CUDA, RolloutSection(memory_gib=1.0, max_length=512, decode="captured"), copy=copy
    )
    for cycle in range(3):
        update(trainer, cycle)
        copy.refill()
        engine.install(published.describe(cycle), None)
        found = answers(engine, [ask(i, 20, 40) for i in range(8)])
        assert gap(trainer, list(found.values())).mean < 0.01
        freed = engine.sleep()
        assert freed.accounted_bytes > copy.nbytes
        engine.wake()
    engine.close()


def test_an_in_flight_update_splits_an_answer_between_versions(
    folder: Path, mesh: Mesh, opened: Callable[..., NativeEngine]
) -> None:
    trainer = learner(folder, mesh)
    engine = opened(trainer)
    published = PublishedWeights(trainer.model, trainer.optimizer.trained, mesh, torch.bfloat16)
    engine.submit([ask(0, 20, 20), ask(1, 20, 100)])
    results = engine.results(deadline_s=60.0)
    assert next(results).id.prompt_index == 0
    update(trainer, 5)
    engine.install(published.describe(1), None)
    (found,) = list(results)
    cut = int((found.versions_L == 0).sum())
    assert 20 <= cut < 100
    assert (np.diff(found.versions_L) >= 0).all()
    whole = gap(trainer, [found])
    assert whole.largest > 0.05  # the first part is of other weights
    later = Completion(
        id=found.id, prompt=np.concatenate([found.prompt, found.tokens_L[:cut]]), tokens_L=found.tokens_L[cut:],
        logprobs_L=found.logprobs_L[cut:], versions_L=found.versions_L[cut:], finish="length",
    )  # fmt: skip
    assert gap(trainer, [later]).mean < 0.01


@pytest.mark.parametrize(
    ("shared", "group", "width", "depth", "page", "window", "cap", "sunk"),
    [
        (8, 2, 128, 128, 64, 0, 0.0, False), (2, 4, 64, 32, 64, 0, 0.0, False), (1, 3, 24, 24, 32, 50, 0.0, True),
        (2, 1, 16, 16, 16, 0, 5.0, False), (2, 8, 96, 96, 64, 300, 0.0, False), (2, 2, 8, 8, 16, 0, 0.0, False),
    ],
)  # fmt: skip
def test_the_paged_kernel_attends_as_plain_attention_does(
    shared: int, group: int, width: int, depth: int, page: int, window: int, cap: float, sunk: bool
) -> None:
    from podium.rollout.native.kernels import cut_for, paged_decode

    torch.manual_seed(0)
    lengths = torch.tensor([1, 17, 70, 300, 2600])
    needed = [-(-int(n) // page) for n in lengths]
    pages = torch.randperm(sum(needed)).split(needed)
    table = torch.zeros(8, max(needed), dtype=torch.int32)
    rows = torch.tensor([3, 1, 0, 7, 5])
    for row, own in zip(rows.tolist(), pages, strict=True):
        table[row, : len(own)] = own
    heads, lanes = shared * group, len(lengths)

    def sampled(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)

    keys, values = sampled(sum(needed), shared, page, width), sampled(sum(needed), shared, page, depth)
    q, k, v = (sampled(1, lanes, n, e).transpose(1, 2) for n, e in ((heads, width), (shared, width), (shared, depth)))
    sinks = torch.randn(heads, device=CUDA) if sunk else None
    out = paged_decode(
        q, k, v, keys, values, table.cuda(), rows.cuda(), lengths.int().cuda(), cut_for(2600, CUDA), sinks,
        width**-0.5, cap, window,
    )  # fmt: skip
    for lane, (own, length) in enumerate(zip(pages, lengths.tolist(), strict=True)):
        whole_k, whole_v = (
            store[own.cuda()].transpose(0, 1).reshape(shared, -1, store.shape[-1])[:, :length]
            for store in (keys, values)
        )
        assert torch.equal(whole_k[:, -1], k[0, :, lane])
        visible = torch.arange(length, device=CUDA)[None] >= length - (window or length)
        wanted = plain_attention(
            q[:, :, lane : lane + 1].float(), whole_k[None].float(), whole_v[None].float(), visible,
            scaling=None, softcap=cap or None, sinks=sinks,
        )[0, :, 0]  # fmt: skip
        torch.testing.assert_close(out[0, lane].float(), wanted, atol=2e-2, rtol=2e-2)


def test_random_streams_are_those_of_the_cpu() -> None:
    keys = torch.tensor([stream_key(0, TrajectoryId(i, 1)) - (1 << 63) for i in range(1000)])
    positions = torch.arange(1000)
    assert torch.equal(uniforms(keys.cuda(), positions.cuda()).cpu(), uniforms(keys, positions))


def test_the_sampling_kernel_samples_what_torch_samples() -> None:
    from podium.rollout.native.kernels import sample_on_device
    from podium.rollout.native.sampling import sample

    torch.manual_seed(0)
    logits = torch.randn(64, 151_936 + 64, device=CUDA) * 3
    temperatures = torch.where(torch.arange(64, device=CUDA) % 4 == 0, 0.0, 0.8)
    marks = torch.rand(64, dtype=torch.float64, device=CUDA)
    tokens, logprobs = torch.zeros(64, dtype=torch.int64, device=CUDA), torch.zeros(64, device=CUDA)
    sample_on_device(
        logits, temperatures, marks, vocab_size=151_936, scale=1.0, softcap=None, tokens_B=tokens, logprobs_B=logprobs
    )
    wanted = sample(logits[:, :151_936].clone(), temperatures, marks)
    same = tokens == wanted.tokens_B
    assert same.float().mean() > 0.95  # float32 sums on one side, float64 on the other
    torch.testing.assert_close(logprobs[same], wanted.logprobs_B[same], atol=1e-4, rtol=1e-4)
