# SPDX-License-Identifier: Apache-2.0
"""A calibration finds what the formulas were computed with, and measures this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from podium.planning.calibration import (
    _BATCHES,
    _CONTEXT,
    _DOCUMENT,
    _LANES,
    _NEW_TOKENS,
    _QWEN,
    _SHAPES,
    _Timed,
    calibrate,
    fit,
)
from podium.planning.devices import Device, Efficiency, device_named, found_device
from podium.planning.model_shape import ModelShape, shape_from_config
from podium.planning.shape_costs import generation_cost, training_step

CONTEXT = _CONTEXT + _NEW_TOKENS / 2


def timed(shape: ModelShape, device: Device) -> _Timed:
    """What a machine would show that is exactly as the formulas say."""
    few, many = (
        training_step(shape, device, [float(_DOCUMENT)] * count).total_s + device.efficiency.update_s
        for count in _BATCHES["cpu"]
    )
    decode = generation_cost(shape, device, CONTEXT)
    slow, slower = (decode.token_s(lanes) for lanes in _LANES["cpu"])
    return _Timed(shape=shape, updates_s=(few, many), decodes_s=(slow, slower))


def test_a_machine_that_follows_the_formulas_is_found() -> None:
    table = device_named("CPU core")
    truth = Efficiency(
        matrix=0.3, attention=0.075, copying=0.25, activation_passes=3.0, decoding=0.5, decode_matrix=0.2,
        decode_layer_s=0.002, decode_s=0.0, update_s=0.05, switch_s=0.0,
    )  # fmt: skip
    machine = replace(table, efficiency=truth)
    small, large = (shape_from_config({**_QWEN, **values}, where="here") for values in _SHAPES["cpu"])

    found = fit(table, timed(small, machine), timed(large, machine)).efficiency

    assert found.matrix == pytest.approx(0.3)
    assert found.copying == pytest.approx(0.25)
    assert found.update_s == pytest.approx(0.05)
    assert found.decode_matrix == pytest.approx(0.2)
    assert found.decode_layer_s == pytest.approx(0.002)


@pytest.mark.slow
def test_this_machine_is_measured_and_then_preferred(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    result = calibrate("cpu", cache=file)

    assert found_device("cpu", cache=file) == result.device
    assert 1e8 < result.device.matrix_flops < 1e13
    assert 0.02 < result.device.efficiency.matrix < 3
    assert 0 < result.device.efficiency.decode_layer_s < 0.1
    assert result.lines()[-1].endswith(str(file))
