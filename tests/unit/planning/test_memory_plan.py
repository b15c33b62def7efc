# SPDX-License-Identifier: Apache-2.0
"""Predicted memory against what the engines hold: to the byte for state, to 5% for activations and recorded peaks."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint

from helpers.engines import make_engine, random_documents
from helpers.recipes import make_recipe
from helpers.tiny import save_tiny_model
from podium.algorithms.dense import token_cross_entropy
from podium.data.documents import pack
from podium.planning import memory
from podium.planning.activations import activation_bytes, head_bytes, layer_bytes
from podium.planning.devices import GIB, Device, device_named
from podium.planning.memory import MemoryPlan, memory_of, refusal
from podium.planning.model_shape import ModelShape, shape_from_config, shape_of, with_adapter
from podium.recipe import ModelSection, Recipe, apply_overrides, parse_recipe
from podium.recipe.schema import LoraSection

QWEN = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True, "max_position_embeddings": 40_960,
}  # fmt: skip
LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
CPU = Device(name="CPU", kind="cpu", memory_bytes=8 * GIB, matrix_flops=1e9, bandwidth=1e9)


def qwen(size: str) -> ModelShape:
    wider = {"hidden_size": 2048, "intermediate_size": 6144} if size == "1.7b" else {}
    return shape_from_config({**QWEN, **wider}, where=size)


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_of(folder: Path, device: Device, *overrides: str) -> tuple[MemoryPlan, Recipe]:
    recipe = make_recipe(f"model.path={folder}", *overrides)
    return memory_of(recipe, device), recipe


def live_bytes(engine: Any) -> tuple[int, int]:
    """Bytes of an engine's weights with their masters, and of its moments, each storage once."""
    weights = {}
    for parameter in engine.model.parameters():
        weights[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
    for each in engine.optimizer.trained:
        weights[each.master.untyped_storage().data_ptr()] = each.master.untyped_storage().nbytes()
    moments = [*engine.optimizer.first_moments, *engine.optimizer.second_moments]
    return sum(weights.values()), sum(each.untyped_storage().nbytes() for each in moments)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_weights_masters_and_moments_are_counted_to_the_byte(
    tmp_path: Path, family: str, dtype: Any, lora: dict[str, int] | None
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    folder = save_tiny_model(family, tmp_path)
    engine = make_engine(folder, dtype=dtype, lora=lora)

    overrides = [f"model.dtype={dtype}"] + ([] if lora is None else ["model.lora.rank=4"])
    phase = plan_of(folder, CPU, *overrides)[0].peak

    assert (phase.of("weights") + phase.of("float32 masters"), phase.of("optimizer moments")) == live_bytes(engine)


def kept_bytes(engine: Any, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that autograd keeps of one forward, each storage once, without parameters and buffers."""
    batch = pack([replace(each, trained=np.arange(len(each.tokens)) > 0) for each in random_documents(lengths)])
    own = {each.untyped_storage().data_ptr() for each in (*engine.model.parameters(), *engine.model.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        alive.append(tensor)  # so that no address is used twice
        if where not in own:
            kept[where] = tensor.untyped_storage().nbytes()
        return tensor

    class Kept(checkpoint._VersionWrapper):  # type: ignore[misc]
        """What a selective policy keeps does not pass autograd."""

        def __init__(self, value: object) -> None:
            if isinstance(value, Tensor):
                note(value)
            super().__init__(value)

    monkeypatch.setattr(checkpoint, "_VersionWrapper", Kept)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        engine.model.train()
        engine._forward(_batch_of(batch))
    return sum(kept.values())


def _batch_of(batch: Any) -> Any:
    from podium.engine.train_step import ObjectiveBatch
    from podium.models.head import TokenObjective

    return ObjectiveBatch(packed=batch, objective=TokenObjective(token_cross_entropy))


WIDER = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "head_dim": 16}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "all_but_attention", "layers"])
def test_activations_on_cpu_are_counted_to_five_percent(
    tmp_path: Path, family: str, checkpointing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = {**WIDER, **({"moe_intermediate_size": 96} if "moe" in family else {})}
    if family == "gemma3":
        widths["layer_types"] = ["full_attention"] * 4
    if family in ("gemma2", "mistral"):
        widths["sliding_window"] = 256
    folder = save_tiny_model(family, tmp_path, **widths)
    engine = make_engine(folder, activation_checkpointing=checkpointing, dtype="float32")
    shape = shape_of(ModelSection(path=str(folder)))
    lengths = (96,) * 8
    found = kept_bytes(engine, lengths, monkeypatch) - 4 * shape.vocab_rows * shape.hidden  # the head's own gradient

    tokens = sum(lengths)
    told = activation_bytes(shape, tokens, length=96, itemsize=4, compiled=False, checkpointing=checkpointing)
    told -= 4 * tokens * shape.hidden  # the states before the head are there, and not kept for the backward pass
    if checkpointing != "none":  # one layer is computed again in the backward pass, which this forward has not
        told -= int(tokens * layer_bytes(shape, length=96, itemsize=4, compiled=False))
    assert told == pytest.approx(found, rel=0.05)


def test_gradients_of_micro_batches_are_counted_to_the_byte(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path, hidden_size=128, intermediate_size=512)
    engine = make_engine(folder, dtype="bfloat16")
    batches = [pack(random_documents((8, 8))), pack(random_documents((8, 8), seed=1))]
    found = [
        sum(
            each.untyped_storage().nbytes()
            for each in engine.gradients(some, token_cross_entropy, normalizer=1.0)[1].values()
        )
        for some in (batches[:1], batches)
    ]

    one = plan_of(folder, CPU, "model.dtype=bfloat16", "tokens_per_step=16")[0]
    two = plan_of(folder, CPU, "model.dtype=bfloat16", "tokens_per_step=32", "micro_batch_tokens=16")[0]

    assert one.peak.of("gradients") == found[0]  # bfloat16
    assert two.peak.of("gradients") == found[1] + found[0]  # float32 sums, beside those of the last micro-batch


@pytest.mark.parametrize(
    ("size", "rank", "recorded_gib"),
    [("0.6b", None, 33.7), ("0.6b", 16, 26.6), ("1.7b", None, 61.3), ("1.7b", 16, 40.3)],
)
def test_peaks_recorded_on_an_h200_are_met_to_five_percent(size: str, rank: int | None, recorded_gib: float) -> None:
    """docs/benchmarks.md, adapters: torch's peak of the engine's step with 16,384 tokens."""
    shape = qwen(size)
    if rank is not None:
        shape = with_adapter(shape, LoraSection(rank=rank))
    state = 2 * shape.num_parameters + 12 * shape.trained_parameters
    activations = activation_bytes(shape, 16_384, length=4096, itemsize=2, compiled=True)
    told = state + activations + head_bytes(shape, 16_384, itemsize=2, compiled=True)

    assert told / GIB == pytest.approx(recorded_gib, rel=0.05)


def test_the_plan_of_a_recipe_has_the_same_terms(tmp_path: Path) -> None:
    plan, _ = plan_of(folder_of(QWEN, tmp_path), device_named("H200"), "tokens_per_step=16384")

    assert plan.peak.phase == "training step"
    assert plan.peak.num_bytes / GIB == pytest.approx(33.7 + 0.8, rel=0.05)  # and the CUDA context
    assert plan.peak.largest[0].name == "activations"
    assert not plan.cannot_fit


def test_what_cannot_fit_is_refused_with_its_largest_terms(tmp_path: Path) -> None:
    plan, recipe = plan_of(folder_of(LLAMA_70B, tmp_path), device_named("H100"))
    problem = refusal(plan, recipe)

    assert problem is not None
    assert "cannot fit one H100 SXM of 79.1 GiB" in str(problem)
    assert "optimizer moments 525.7 GiB" in str(problem)  # 70.55e9 parameters x 8 bytes
    assert "train an adapter (model.lora)" in str(problem)
    assert "--device" in str(problem)


def test_sharding_divides_state_and_not_activations(tmp_path: Path) -> None:
    folder = folder_of(QWEN, tmp_path)
    one, _ = plan_of(folder, device_named("H200"), "tokens_per_step=8192")
    four, _ = plan_of(folder, device_named("H200"), "tokens_per_step=32768", "placement.devices=4")

    assert four.peak.of("activations") == one.peak.of("activations")
    assert four.peak.of("optimizer moments") == pytest.approx(one.peak.of("optimizer moments") / 4, rel=1e-3)
    assert four.peak.of("weights") == pytest.approx(
        2 * one.peak.of("weights") / 4, rel=1e-3
    )  # float32, their own masters
    assert four.peak.of("gathered layers") > 0


def test_a_context_axis_divides_activations_and_state(tmp_path: Path) -> None:
    folder, h200 = folder_of(QWEN, tmp_path / "model"), device_named("H200")
    given = ("tokens_per_step=65536", "micro_batch_tokens=65536", "placement.devices=4")
    alone, _ = plan_of(folder, h200, "tokens_per_step=65536", "micro_batch_tokens=65536")
    divided, _ = plan_of(folder, h200, *given, "placement.policy={context: 4}")
    sharded, _ = plan_of(folder, h200, *given)
    for name in ("weights", "optimizer moments"):
        assert divided.peak.of(name) == sharded.peak.of(name)
    assert divided.peak.of("activations") == pytest.approx(alone.peak.of("activations") / 4, rel=0.01)


def grpo(folder: Path, *overrides: str) -> Recipe:
    values = {
        "program": "grpo", "model": {"path": str(folder)}, "data": {"train": [{"path": "d.jsonl"}], "max_length": 512},
        "optimizer": {"lr": 1e-6}, "reward": [{"verifier": "exact_match"}], "steps": 3,
    }  # fmt: skip
    return parse_recipe(apply_overrides(values, overrides))


def test_a_colocated_generator_takes_what_the_learner_leaves(tmp_path: Path) -> None:
    recipe = grpo(folder_of(QWEN, tmp_path))
    plan = memory_of(recipe, device_named("H200"))
    rollout, update = plan.phases

    assert (rollout.phase, update.phase) == ("rollout", "update")
    # 256 lanes of 512 tokens in blocks of 64, twice as many blocks as they need and one more, of 114,688 bytes a token.
    assert rollout.of("KV cache") == (2 * 256 * 8 + 1) * 64 * 114_688
    assert update.of("KV cache") == 0  # it sleeps
    assert not plan.cannot_fit


def test_generators_of_their_own_hold_weights_and_a_cache(tmp_path: Path) -> None:
    folder = folder_of(QWEN, tmp_path)
    plan = memory_of(grpo(folder, "placement.devices=2", "placement.layout=split"), device_named("H200"))
    generator, learner = plan.phases

    assert generator.place == "generator"
    assert generator.of("weights") == 2 * 596_049_920
    assert generator.of("optimizer moments") == 0
    assert learner.of("optimizer moments") == 8 * 596_049_920


def test_workers_on_cpu_share_the_memory_of_the_machine(tmp_path: Path) -> None:
    folder = save_tiny_model("qwen3", tmp_path)
    one = memory_of(grpo(folder, "data.max_length=64", "rollout.max_new_tokens=16"), CPU)
    two = memory_of(grpo(folder, "data.max_length=64", "rollout.max_new_tokens=16", "placement.devices=2"), CPU)

    assert two.peak.of("processes") == 2 * one.peak.of("processes")
    assert len(one.phases) == 2


def test_the_kv_cache_is_the_engines_own(tmp_path: Path) -> None:
    from podium.recipe import EngineSection
    from podium.rollout.native.engine import NativeEngine

    folder = save_tiny_model("qwen3", tmp_path)
    engine = make_engine(folder)
    section = EngineSection(max_length=64, max_running=8)
    native = NativeEngine(engine.language_model, torch.device("cpu"), section)
    found = native.capacity.cache_bytes
    native.close()
    gc.collect()

    recipe = grpo(folder, "data.max_length=64", "rollout.max_new_tokens=16", "rollout.max_running=8")
    assert memory_of(recipe, CPU).phases[0].of("KV cache") == found


def test_an_unknown_family_is_said_and_not_refused(tmp_path: Path) -> None:
    from podium.planning.memory import memory_lines

    recipe = make_recipe(f"model.path={folder_of({'model_type': 'mamba'}, tmp_path)}")

    assert memory_lines(recipe, CPU)[0].startswith("memory: not predicted. ")


PROGRAMS: list[tuple[dict[str, Any], set[str]]] = [
    ({"program": "sft"}, {"activations"}),
    ({"program": "dpo", "preference": {"reference": "live"}}, {"reference"}),
    ({"program": "reward_model"}, {"activations"}),
    ({"program": "distill", "teachers": "MODEL"}, {"teachers", "logits"}),
    ({"program": "grpo", "reward": "exact_match", "algorithm": {"kl": {"coefficient": 0.1}}}, {"reference"}),
    ({"program": "ppo", "reward": "exact_match"}, {"critic"}),
    ({"program": "on_policy_distill", "teachers": "MODEL"}, {"teachers"}),
    ({"program": "grpo", "reward": {"model": "MODEL"}}, {"reward models"}),
]


@pytest.mark.parametrize(("values", "names"), PROGRAMS)
@pytest.mark.parametrize("device", ["H100", "CPU core"])
@pytest.mark.parametrize("devices", [1, 2])
def test_every_program_has_a_plan(
    tmp_path: Path, values: dict[str, Any], names: set[str], device: str, devices: int
) -> None:
    folder = str(folder_of(QWEN, tmp_path))
    common = {"model": folder, "data": {"train": "d.jsonl"}, "optimizer": {"lr": 1e-6}, "steps": 3}
    chosen = json.loads(json.dumps({**common, **values}).replace("MODEL", folder))
    recipe = parse_recipe({**chosen, "placement": {"devices": devices}})
    plan = memory_of(recipe, device_named(device))

    assert names <= {term.name for phase in plan.phases for term in phase.terms}
    assert all(term.num_bytes > 0 for phase in plan.phases for term in phase.terms)
    assert plan.lines()[0].startswith("memory, ")


def test_learners_hold_their_part_of_the_model_by_the_axes_of_the_policy(tmp_path: Path) -> None:
    folder, split = folder_of(QWEN, tmp_path), ("placement.layout=split", "placement.rollout_devices=2")
    h100 = device_named("H100")

    def update(policy: str, *changes: str) -> memory.PhaseMemory:
        recipe = grpo(folder, "placement.devices=6", f"placement.policy={policy}", "data.max_length=2048", *changes)
        return next(each for each in memory_of(recipe, h100).phases if each.phase == "update")

    four = update("null", *split).of("optimizer moments")
    assert update("{shard: 2, tensor: 2}", *split).of("optimizer moments") == pytest.approx(four, rel=1e-3)
    assert update("{replicate: 2, tensor: 2}", *split).of("optimizer moments") == pytest.approx(2 * four, rel=1e-3)
    whole = update("{replicate: 3}", "placement.rollout_devices=3", split[0]).of("optimizer moments")
    assert whole == pytest.approx(4 * four, rel=1e-3)


def test_generators_hold_whole_weights_and_heads_beside_learners_that_divide_them(tmp_path: Path) -> None:
    folder, h100 = folder_of(QWEN, tmp_path), device_named("H100")

    def phases(*changes: str) -> tuple[memory.PhaseMemory, ...]:
        return memory_of(grpo(folder, "placement.devices=2", *changes), h100).phases

    rollout, update = phases("placement.policy={tensor: 2}")
    alone, _ = phases()
    assert rollout.of("weight copies") == 2 * 596_049_920
    assert rollout.of("KV cache") == alone.of("KV cache")
    assert rollout.of("logits") == alone.of("logits")
    assert update.of("optimizer moments") == pytest.approx(4 * 596_049_920, rel=1e-3)

    own, _ = phases("placement.devices=3", "placement.layout=split", "placement.policy={tensor: 2}")
    assert own.of("weights") == 2 * 596_049_920


def test_a_critic_is_divided_like_the_policy(tmp_path: Path) -> None:
    folder, h100 = folder_of({**QWEN, "tie_word_embeddings": False}, tmp_path), device_named("H100")

    def critic(policy: str) -> int:
        values = ("program=ppo", "critic={lr: 1e-6}", "placement.devices=2", f"placement.policy={policy}")
        rollout = memory_of(grpo(folder, *values), h100).phases[-1]
        return rollout.of("critic")

    assert critic("{tensor: 2}") == pytest.approx(critic("{shard: 2}"), rel=1e-3)


@pytest.mark.parametrize("layout", ["split", "elastic"])
def test_both_sides_of_a_split_share_the_memory_of_a_cpu_machine(tmp_path: Path, layout: str) -> None:
    folder = save_tiny_model("qwen3", tmp_path)
    changes = ["placement.devices=3", f"placement.layout={layout}", "placement.rollout_devices=1"]
    plan = memory_of(grpo(folder, "data.max_length=64", "rollout.max_new_tokens=16", *changes), CPU)

    (phase,) = plan.phases
    assert phase.of("processes") == 3 * memory.CONTEXT_BYTES["cpu"]
    assert phase.of("KV cache") > 0
