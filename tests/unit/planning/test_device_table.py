# SPDX-License-Identifier: Apache-2.0
"""Which device is meant, and what a calibration changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from podium.errors import RecipeError
from podium.planning import devices
from podium.planning.devices import GIB, Efficiency, device_named, device_names, found_device, keep_calibration


@pytest.mark.parametrize(
    ("told", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("nvidia-h200", "H200"),
    ],
)
def test_a_drivers_name_finds_its_entry(told: str, entry: str) -> None:
    assert device_named(told).name == entry


@pytest.mark.parametrize("name", device_names())
def test_every_entry_is_found_by_its_own_name(name: str) -> None:
    device = device_named(name)

    assert device.name == name
    assert device.matrix_flops > 100 * device.bandwidth / 1000 > 0


def test_memory_can_be_given_with_the_name() -> None:
    assert device_named("H100:94").memory_bytes == 94 * GIB

    with pytest.raises(RecipeError, match="does not end in GiB"):
        device_named("H100:lots")


def test_an_unknown_name_lists_the_table() -> None:
    with pytest.raises(RecipeError, match=r"'TPU v5' is not in the device table. It has H200, H100 SXM"):
        device_named("TPU v5")


def test_the_driver_files_tell_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA L40S\nIRQ: 12\n")
    monkeypatch.setattr(devices, "_GPUS", tmp_path)

    found = found_device(cache=tmp_path / "none.json")
    assert found is not None
    assert found.name == "L40S"
    other = found_device("cpu", cache=tmp_path / "none.json")
    assert other is not None
    assert other.kind == "cpu"


def test_a_machine_with_more_gpus_than_usual_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(16):
        (tmp_path / f"gpu{number}").mkdir()
        (tmp_path / f"gpu{number}" / "information").write_text("Model: NVIDIA H200\n")
        if number in (0, 15):
            monkeypatch.setattr(devices, "_GPUS", tmp_path)
            found = found_device(cache=tmp_path / "none.json")
            assert found is not None
            assert found.per_machine == (8 if number == 0 else 16)


def test_a_gpu_that_is_asked_for_and_not_there_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_GPUS", tmp_path / "absent")

    assert found_device("cuda") is None


def test_a_calibration_of_this_machine_is_preferred(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "calibration.json"
    plain = found_device("cpu", cache=file)
    assert plain is not None
    measured = replace(plain, matrix_flops=123e9, efficiency=Efficiency(matrix=0.5), memory_bytes=1)
    keep_calibration(measured, file)

    again = found_device("cpu", cache=file)

    assert again == replace(measured, is_measured=True, memory_bytes=plain.memory_bytes)
    assert json.loads(file.read_text())["version"] == devices.CALIBRATION_VERSION


@pytest.mark.parametrize("text", ["", "[]", '{"version": 0, "devices": {}}', '{"version": 1, "devices": 3}'])
def test_a_broken_or_older_file_counts_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)

    assert found_device("cpu", cache=file) == found_device("cpu", cache=tmp_path / "absent.json")


def test_a_calibration_of_another_device_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    plain = found_device("cpu", cache=file)
    assert plain is not None
    keep_calibration(replace(plain, name="CPU (another)"), file)

    assert found_device("cpu", cache=file) == plain
