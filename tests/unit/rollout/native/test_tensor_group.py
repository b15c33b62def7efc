# SPDX-License-Identifier: Apache-2.0
"""An engine over two ranks answers as one rank does. The ranks are threads; tests/spmd has processes over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.tensor_engines import engine_on_threads
from helpers.tiny import save_tiny_model
from podium.errors import RolloutError, WeightMismatchError
from podium.recipe import RolloutSection
from podium.recipe.schema import LoraSection
from podium.rollout.native.engine import NativeEngine
from rollout.judge import DEADLINE_S, Weights, answer, answers, ask
from rollout.scripts import SCRIPTS, Script, require_same, section_of

MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tensor")
    dense = ("llama", "qwen3", "gemma3")
    return {name: save_tiny_model(name, folder / name) for name in (*dense, *MIXTURES)}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Other weights of the Qwen3."""
    from rollout.judge import Judge

    return Weights.of(Judge(save_tiny_model("qwen3", tmp_path_factory.mktemp("other"), seed=1)).model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scripts"),
    [
        ("qwen3", SCRIPTS[1:2]),
        ("qwen3_moe", SCRIPTS[1:2]),
        *(pytest.param(name, SCRIPTS, marks=pytest.mark.slow) for name in ("llama", "qwen3", "gemma3", *MIXTURES)),
    ],
)
def test_batches_prefixes_preemption_and_stops_are_those_of_one_rank(
    folders: dict[str, Path], name: str, scripts: Sequence[Script]
) -> None:
    entry = 3 if name == "deepseek_v3" else 1  # its keys are longer
    for script in scripts:
        sections = [(size, section_of(script, size, entry=entry)) for size in (1, 2)]
        engines = [engine_on_threads(folders[name], section, size=size) for size, section in sections]
        alone, together = (script.run(engine) for engine in engines)
        require_same(together, alone)
        for engine in engines:
            engine.close()


def test_experts_are_recorded_as_on_one_rank(folders: dict[str, Path]) -> None:
    found = []
    for size in (1, 2):
        section = section_of(SCRIPTS[1], size)
        engine = engine_on_threads(folders["qwen3_moe"], section, size=size, records_experts=True)
        found.append(answers(engine, [ask(0, range(30), new=8), ask(1, new=12, temperature=0.0)]))
        engine.close()
    for id, completion in found[0].items():
        assert completion.experts is not None
        assert np.array_equal(np.sort(found[1][id].experts), np.sort(completion.experts))


def pair(folder: Path, lora: LoraSection | None = None) -> tuple[NativeEngine, NativeEngine]:
    section = RolloutSection(max_length=64, max_running=4, memory_gib=0.01)
    return engine_on_threads(folder, section, size=1, lora=lora), engine_on_threads(folder, section, lora=lora)


def test_a_rank_has_its_part_of_weights_and_cache(folders: dict[str, Path]) -> None:
    section = RolloutSection(max_length=64, max_running=4, block_size=16)
    alone, together = (engine_on_threads(folders["llama"], section, size=size) for size in (1, 2))
    assert together.capacity.cache_tokens == alone.capacity.cache_tokens
    assert together.capacity.cache_bytes == alone.capacity.cache_bytes  # of both ranks
    assert together._memory.cache.layers[0].keys.shape[1] == 1
    assert alone._memory.cache.layers[0].keys.shape[1] == 2
    whole, part = (sum(each.numel() for each in engine._model.parameters()) for engine in (alone, together))
    assert part == pytest.approx(whole / 2, rel=0.02)  # norms are whole on each
    together.close()


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_weights_installed_under_way_are_those_of_one_rank(
    folders: dict[str, Path], other: Weights, in_flight: str
) -> None:
    found = []
    for engine in pair(folders["qwen3"]):
        engine.submit([ask(0, new=4, temperature=0.0), ask(1, new=30, temperature=0.0), ask(2, new=30)])
        results = engine.results(deadline_s=DEADLINE_S)
        first = next(results)
        engine.install(other.version(3), other, in_flight=in_flight)  # type: ignore[arg-type]
        found.append({each.id: each for each in (first, *results)})
        engine.install(other.version(4), None)  # those in place are verified
        assert engine.version == 4
        engine.close()
    require_same(found[1], found[0])
    assert set(found[0][ask(1).id].versions_L.tolist()) == {0, 3}


def test_wrong_weights_are_refused_on_all_ranks_and_right_ones_go_on(folders: dict[str, Path], other: Weights) -> None:
    alone, together = pair(folders["qwen3"])
    name = next(name for name in other.tensors_by_name if "o_proj" in name)  # divided by columns
    damaged = other.tensors_by_name[name].clone()
    damaged[-1, -1] += 1  # in the part of rank 1
    broken = [
        Weights(other.tensors_by_name, sent={name: damaged}),
        Weights(other.tensors_by_name, stop_after=3),
        Weights(other.tensors_by_name, stop_after=5, error=ConnectionError("the sender is gone")),
    ]
    for weights in broken:
        with pytest.raises((WeightMismatchError, ConnectionError)):
            together.install(other.version(1), weights)
        with pytest.raises(WeightMismatchError, match="does not generate"):
            answer(together, ask(0))
        together.cancel([ask(0).id])
        list(together.results(deadline_s=DEADLINE_S))
    for engine in (alone, together):
        engine.install(other.version(2), other)
    require_same(answers(together, [ask(1, new=20)]), answers(alone, [ask(1, new=20)]))
    together.close()


def test_weights_in_place_that_differ_on_another_rank_are_found(folders: dict[str, Path], other: Weights) -> None:
    _, together = pair(folders["qwen3"])
    with pytest.raises(WeightMismatchError, match="tensors are not those"):
        together.install(other.version(1), None)
    together.close()


@pytest.mark.slow
def test_sleeping_ranks_give_up_their_cache_and_answer_the_same_afterwards(folders: dict[str, Path]) -> None:
    alone, together = pair(folders["llama"])
    expected = answers(alone, [ask(0, new=20)])
    require_same(answers(together, [ask(0, new=20)]), expected)
    assert together.sleep().accounted_bytes == together.capacity.cache_bytes
    assert together.wake().accounted_bytes == together.capacity.cache_bytes
    require_same(answers(together, [ask(0, new=20)]), expected)
    together.close()


@pytest.mark.slow
def test_an_adapter_is_installed_over_a_base_that_is_checked(folders: dict[str, Path]) -> None:
    alone, together = pair(folders["llama"], LoraSection(rank=2))
    adapter = {
        name: torch.randn_like(each) * 0.1 for name, each in alone._model.hf.named_parameters() if "lora_" in name
    }
    base = {name: each.detach() for name, each in alone._model.hf.named_parameters() if "lora_" not in name}
    weights, frozen = Weights(adapter), Weights(_real(base))
    for engine in (alone, together):
        engine.check_frozen(frozen.version(0))
        engine.install(weights.version(1), weights)
    require_same(answers(together, [ask(0, new=20)]), answers(alone, [ask(0, new=20)]))
    base["model.norm.weight"] = base["model.norm.weight"] + 1
    with pytest.raises(WeightMismatchError, match=r"model\.norm"):
        together.check_frozen(Weights(_real(base)).version(0))
    together.close()


def _real(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the padding rows of the vocabulary."""
    return {name: each[:250] if len(each) == 256 else each for name, each in tensors.items()}


@pytest.mark.slow
def test_logits_that_are_no_numbers_end_their_sequence_and_leave_no_trace(folders: dict[str, Path]) -> None:
    alone, together = pair(folders["qwen3"])
    weights = Weights.of_engine(alone)
    poisoned = {name: each.clone() for name, each in weights.tensors_by_name.items()}
    poisoned["model.layers.0.self_attn.v_proj.weight"][:] = torch.nan
    expected = answers(alone, [ask(1, new=20)])
    together.install(Weights(poisoned).version(1), Weights(poisoned))
    assert answer(together, ask(0)).finish == "error"
    together.install(weights.version(0), weights)
    require_same(answers(together, [ask(1, new=20)]), expected)
    together.close()


def test_a_group_that_has_failed_says_why_and_does_not_wait(folders: dict[str, Path]) -> None:
    _, together = pair(folders["llama"])
    together.submit([ask(0, new=20)])
    assert together._group is not None
    together._group.fail("rank 1 (process 77) ended with exit code -9")
    with pytest.raises(RolloutError, match="exit code -9"):
        list(together.results(deadline_s=DEADLINE_S))
    with pytest.raises(RolloutError, match="make a new one"):
        together.submit([ask(1)])
    together.close()


@pytest.mark.slow
def test_hidden_states_of_the_ranks_are_summed_and_not_sampled_apart(folders: dict[str, Path]) -> None:
    """Four ranks of one head each: greedy tokens stay those of one rank."""
    folder = save_tiny_model("llama", folders["llama"].parent / "four", num_key_value_heads=4)
    section = RolloutSection(max_length=64, max_running=4, memory_gib=0.01)
    found = []
    for size in (1, 4):
        engine = engine_on_threads(folder, section, size=size)
        found.append(answers(engine, [ask(n, range(3 + n, 9 + 2 * n), new=20, temperature=0.0) for n in range(4)]))
        engine.close()
    require_same(found[1], found[0])
    assert all(np.isfinite(each.logprobs_L).all() for each in found[1].values())
