# SPDX-License-Identifier: Apache-2.0
"""Times from shapes: by hand, and against what docs/benchmarks.md records of an H200."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podium.controller.simulation.costs import LogNormal
from podium.planning.devices import Device, Efficiency, device_named
from podium.planning.model_shape import ModelShape, shape_from_config, with_adapter
from podium.planning.shape_costs import (
    Episodes,
    UpdateShape,
    attention_flops,
    cost_model,
    first_tokens_s,
    gathering_s,
    generation_cost,
    matrix_flops,
    publish_s,
    scoring_s,
    training_step,
)
from podium.recipe.schema import LoraSection

QWEN = {
    "model_type": "qwen3", "vocab_size": 151_936, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
WIDTHS = {"0.6b": (1024, 3072), "1.7b": (2048, 6144)}
H200 = device_named("H200")
GRPO = Episodes(prompt_tokens=141, answer_tokens=LogNormal(median=256), samples_per_prompt=8)


def qwen(size: str, rank: int | None = None) -> ModelShape:
    hidden, width = WIDTHS[size]
    shape = shape_from_config({**QWEN, "hidden_size": hidden, "intermediate_size": width}, where=size)
    return shape if rank is None else with_adapter(shape, LoraSection(rank=rank))


def sft_step_s(shape: ModelShape, device: Device = H200) -> float:
    """16,384 tokens of documents as benchmarks/sft_gpu.py draws them, on average over many."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(550), 1.0, 2000), 16, 4096).astype(int)
    step = training_step(shape, device, [float(length) for length in lengths])
    return step.token_s_sum * 16_384 / float(lengths.sum()) + step.optimizer_s


@pytest.mark.parametrize(
    ("size", "rank", "recorded_ms", "within"),
    [("0.6b", None, 180, 0.03), ("1.7b", None, 362, 0.03), ("0.6b", 16, 175, 0.10), ("1.7b", 16, 315, 0.10)],
)
def test_sft_steps_recorded_on_an_h200(size: str, rank: int | None, recorded_ms: float, within: float) -> None:
    """The efficiencies were chosen by the first two; adapters were not looked at."""
    assert 1e3 * sft_step_s(qwen(size, rank)) == pytest.approx(recorded_ms, rel=within)


@pytest.mark.parametrize(
    ("size", "lanes", "context", "recorded_ms"),
    [("0.6b", 256, 460, 5.64), ("0.6b", 64, 447, 2.69), ("1.7b", 256, 460, 6.31), ("1.7b", 64, 447, 3.35)],
)
def test_decoding_steps_recorded_on_an_h200(size: str, lanes: int, context: int, recorded_ms: float) -> None:
    cost = generation_cost(qwen(size), H200, context)

    assert 1e3 * cost.token_s(lanes) == pytest.approx(recorded_ms, rel=0.03)


def test_a_grpo_step_recorded_on_an_h200_and_its_misses() -> None:
    """64 answers of 256 tokens: recorded 650 ms of rollout, 277 ms of update, 65 ms of publish and 1.036 s of step, of
    which 42 ms are grading, which a shape does not tell. The update has two micro-batches of 12.7k
    tokens, whose activations, logits and sums of gradients take 23.6 GiB; the KV cache has 28 GiB."""
    shape = qwen("0.6b")
    update = UpdateShape(passes=2, update_bytes=int(23.6 * 2**30), cache_bytes=28 * 2**30)
    costs = cost_model(shape, H200, GRPO, layout="colocated", update=update)
    latency_s = first_tokens_s(shape, H200)
    rollout_s = latency_s + 256 * costs.generation.token_s(64)
    update_s, publish_s = costs.update.update_s(64 * 256, devices=1), 2 * costs.switch_s - latency_s

    assert rollout_s / 0.650 == pytest.approx(0.93, abs=0.02)  # still too low
    assert update_s / 0.277 == pytest.approx(0.95, abs=0.02)  # still too low, with 7 ms of the controller
    assert publish_s == pytest.approx(0.065, rel=0.03)  # chosen by it
    assert rollout_s + update_s + publish_s + 0.042 == pytest.approx(1.036, rel=0.08)


FLAT = Device(
    name="flat", kind="cuda", memory_bytes=1, matrix_flops=1e12, bandwidth=1e9, link=1e9,
    efficiency=Efficiency(
        matrix=0.5, attention=0.25, copying=1.0, activation_passes=0.0, decoding=0.5, decode_layer_s=0.001,
        decode_s=0.01, prefill_layer_s=0.002, rollout_s=0.03, update_s=0.1, switch_s=0.2, memory_s=1e-10,
    ),
)  # fmt: skip


def test_parts_of_a_step_by_hand() -> None:
    shape = qwen("0.6b")
    step = training_step(shape, FLAT, [128.0, 130.0], head_tokens=100)
    body = 596_049_920 - 151_936 * 1024 - 28 * (2 * 1024 + 2 * 128) - 1024

    assert matrix_flops(shape, 258, 100) == 6 * body * 258 + 6 * 151_936 * 1024 * 100
    assert step.products_s == pytest.approx(matrix_flops(shape, 258, 100) / 5e11)
    # One tile for 128 tokens, three for 130.
    assert attention_flops(shape, [128.0, 130.0]) == 12 * 2048 * 28 * 4 * 128 * 128
    assert step.attention_s == pytest.approx(attention_flops(shape, [128.0, 130.0]) / 2.5e11)
    assert step.logits_s == pytest.approx(100 * 151_936 * (3 * 4 + 3 * 2) / 1e9)
    # Masters and moments are read and written; the gradient is read for its norm and the update, the weights written.
    assert step.optimizer_s == pytest.approx((3 * 8 + 2 * 2 + 2) * 596_049_920 / 1e9)
    assert step.sums_s == 0.0


def test_every_further_micro_batch_adds_its_gradients_to_a_sum() -> None:
    shape, head = qwen("0.6b"), 151_936 * 1024
    one, three = (training_step(shape, FLAT, [128.0], passes=passes) for passes in (1, 3))

    # The first is turned into float32, two are added, and the head begins and casts its own gradient twice more.
    assert three.sums_s == pytest.approx(((2 + 4) + 2 * (2 + 4 + 4)) * 596_049_920 / 1e9 + 2 * head * (4 + 4 + 2) / 1e9)
    assert three.optimizer_s - one.optimizer_s == pytest.approx(2 * (4 - 2) * 596_049_920 / 1e9)
    assert three.token_s_sum == one.token_s_sum
    sharded = training_step(shape, FLAT, [128.0], passes=3, world=2)
    assert sharded.sums_s == pytest.approx(2 * (4 + 4 + 4) * 596_049_920 / 2 / 1e9 + 2 * head * (4 + 4 + 2) / 1e9)


def test_every_micro_batch_gathers_sharded_layers_twice_and_sums_gradients() -> None:
    shape, outside = qwen("0.6b"), 151_936 * 1024 + 1024  # embedding and last norm are gathered once
    each = ((2 * 2 + 4) * 596_049_920 - 2 * outside) * 3 / 4 / 1e9

    assert gathering_s(shape, FLAT, world=4, passes=2) == pytest.approx(2 * each)
    assert gathering_s(shape, FLAT, world=1, passes=2) == 0.0
    network = replace(FLAT, network=1e8)
    assert gathering_s(shape, network, world=8, passes=1) == gathering_s(shape, FLAT, world=8, passes=1)
    # A ring over two machines of 8: the eight devices of one pass it on together.
    assert gathering_s(shape, network, world=16, passes=1) == pytest.approx(
        10 / 8 * gathering_s(shape, FLAT, world=16, passes=1)
    )


def test_scores_are_a_forward_pass() -> None:
    shape = qwen("0.6b")
    flops = 2 * (matrix_flops(shape, 128, 100) / 6)
    seconds = flops / 5e11 + attention_flops(shape, [128.0]) / 3 / 2.5e11 + 100 * 151_936 * 8 / 1e9

    assert scoring_s(shape, FLAT, [128.0], head_tokens=100) == pytest.approx(seconds)
    plain, scored = (
        cost_model(shape, FLAT, GRPO, layout="split", update=UpdateShape(scores=count)).update.token_s
        for count in (0, 2)
    )
    assert scored - plain == pytest.approx(2 * scoring_s(shape, FLAT, [397.0], head_tokens=256) / 256)


def test_epochs_and_optimizer_steps_of_an_update() -> None:
    shape = qwen("0.6b")
    once = cost_model(shape, FLAT, GRPO, layout="split").update
    more = cost_model(shape, FLAT, GRPO, layout="split", update=UpdateShape(epochs=2, optimizer_steps=3)).update

    assert more.token_s == pytest.approx(2 * once.token_s)
    assert more.constant_s - 0.1 == pytest.approx(6 * (once.constant_s - 0.1))


def test_collectives_hide_behind_the_products_of_the_batch_that_there_is() -> None:
    shape = qwen("0.6b")
    fast = replace(FLAT, link=1e11)

    def constant_s(episodes: float) -> float:
        update = UpdateShape(num_learners=4, episodes=episodes)
        return cost_model(shape, fast, GRPO, layout="split", update=update).update.constant_s

    products_s = matrix_flops(shape, 397.0, 256.0) / 5e11
    moved_s = gathering_s(shape, fast, world=4, passes=1)
    assert constant_s(0.001) - constant_s(1e6) == pytest.approx(moved_s - 0.001 * products_s)


def test_a_window_bounds_attention_and_the_cache() -> None:
    values = {**QWEN, "model_type": "mistral", "hidden_size": 1024, "intermediate_size": 3072, "sliding_window": 256}
    narrow, wide = (
        shape_from_config(values, where="m"),
        shape_from_config({**values, "sliding_window": None}, where="m"),
    )

    assert attention_flops(narrow, [4096.0]) < attention_flops(wide, [4096.0]) / 4
    assert attention_flops(narrow, [256.0]) == attention_flops(wide, [256.0])
    assert generation_cost(narrow, FLAT, 4096).lane_s == generation_cost(wide, FLAT, 256).lane_s


def test_decoding_by_hand() -> None:
    cost = generation_cost(qwen("0.6b"), FLAT, 100)
    body_and_head = qwen("0.6b").active_parameters()

    assert cost.weights_s == pytest.approx(2 * body_and_head / 5e8 + 28 * 0.001 + 0.01)
    assert cost.lane_s == pytest.approx(100 * 114_688 / 5e8 + 2 * 4 * 151_936 / 1e9)  # keys and values, and logits


def test_generators_of_their_own_pay_the_publish_and_shared_ones_the_switch() -> None:
    shape, update = qwen("0.6b"), UpdateShape(update_bytes=10**9, cache_bytes=3 * 10**9)
    split = cost_model(shape, FLAT, GRPO, layout="split", update=update)
    shared = cost_model(shape, FLAT, GRPO, layout="colocated", update=update)
    latency_s = 0.03 + 28 * 0.002

    assert first_tokens_s(shape, FLAT) == pytest.approx(latency_s)
    assert (split.switch_s, shared.publish_s) == (0.0, 0.0)
    assert shared.switch_s == pytest.approx((0.2 + 4e9 * 1e-10 + latency_s) / 2)  # half of it each way
    assert split.publish_s - latency_s == pytest.approx(publish_s(shape, FLAT))
    assert publish_s(shape, FLAT) == pytest.approx(3 * 2 * 596_049_920 / 1e9)
    assert publish_s(qwen("0.6b", 16), FLAT) < publish_s(shape, FLAT) / 50
    # An update on a shared device begins without memory of its own.
    assert shared.update.constant_s - split.update.constant_s == pytest.approx(1e9 * 1e-10)


def test_more_devices_share_the_optimizer_and_pay_for_collectives() -> None:
    alone = training_step(qwen("0.6b"), FLAT, [128.0])
    four = training_step(qwen("0.6b"), FLAT, [128.0], world=4)

    # Sharded parameters are their own masters, and their gradients are float32.
    assert four.optimizer_s == pytest.approx((3 * 8 + 2 * 4) * 596_049_920 / 4 / 1e9)
    assert alone.collectives_s == 0.0 < four.collectives_s
