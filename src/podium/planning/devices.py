# SPDX-License-Identifier: Apache-2.0
"""What devices can do: peaks of their datasheets, and what share of them Podium reaches. Torch-free."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from podium.cgroups import memory_limit
from podium.errors import RecipeError

GIB = 1 << 30
CALIBRATION_VERSION = 1
_GPUS = Path("/proc/driver/nvidia/gpus")
# A GPU whose name is in no file that is read here: of another maker, or in a container or a subsystem.
_OTHER_GPUS = (Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/nvidiactl"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Which share of a device's peaks the engines reach, and times that do not depend on the model's size. The values
    of a GPU come from runs on an H200 (docs/planning.md) and are taken for the others too."""

    matrix: float = 0.685  # of matrix_flops, in products of training and prefill
    attention: float = 0.18  # of matrix_flops, in attention over packed documents, whole tiles counted
    copying: float = 0.80  # of bandwidth, in passes over large arrays: optimizer, logits, activations
    activation_passes: float = 3.0  # how often an update moves the bytes that it keeps for the backward pass
    decoding: float = 0.71  # of bandwidth, in reading weights, keys and values
    decode_matrix: float = 0.0  # of matrix_flops, in decoding; 0: computing is hidden behind reading
    decode_layer_s: float = 46e-6  # of one layer in one decoding step, beyond what it reads
    decode_s: float = 60e-6  # of one decoding step: sampling, scheduling
    prefill_layer_s: float = 300e-6  # of one layer in a step that takes in prompts: some 60 kernels of 5 µs, one by one
    rollout_s: float = 0.010  # of one generation: messages, tokenizing, collecting the episodes
    grading_s: float = 0.010  # until the last episodes are graded: messages, their text
    update_s: float = 0.027  # of one update: messages, packing, statistics; the controller between phases
    switch_s: float = 0.010  # roles that share a device: messages and fingerprints, from the update to generating again
    memory_s: float = 1.0e-12  # for each byte that changes hands between roles on a shared device, on either side


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU worker."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int  # of a CPU: of the whole machine, which all its workers share
    matrix_flops: float  # dense, in the compute dtype: bfloat16 on CUDA, float32 on CPU
    bandwidth: float  # bytes per second
    link: float = 25e9  # bytes per second between devices of one machine
    network: float | None = None  # bytes per second of a device to other machines; None: as fast as `link`
    per_machine: int = 8  # devices
    workspace_bytes: int = 0  # of cuBLAS and cuBLASLt, which torch's allocator gives them
    efficiency: Efficiency = Efficiency()
    is_measured: bool = False  # by `podium plan --calibrate` on this machine

    @property
    def memory_gib(self) -> float:
        """Its memory in GiB."""
        return self.memory_bytes / GIB

    def link_between(self, devices: int) -> float:
        """Bytes per second of the slowest link among so many devices."""
        return self.link if self.network is None or devices <= self.per_machine else min(self.link, self.network)


# 400 Gbit/s for each device: assumed, because it belongs to a cluster and not to a device.
_NETWORK = 50e9


def _gpu(name: str, gib: float, tflops: float, tb_s: float, link_gb_s: float, workspace_mib: int = 4) -> Device:
    """`gib`: what the driver reports, a little less than the name says. `workspace_mib`: what NVIDIA's reference of
    cuBLAS recommends for each of two libraries."""
    return Device(
        name=name, kind="cuda", memory_bytes=int(gib * GIB), matrix_flops=tflops * 1e12, bandwidth=tb_s * 1e12,
        link=link_gb_s * 1e9, network=_NETWORK, workspace_bytes=2 * workspace_mib << 20,
    )  # fmt: skip


# Processors differ: one core of a server, until the machine is calibrated.
_CPU_EFFICIENCY = Efficiency(
    matrix=0.6, attention=0.15, copying=0.5, activation_passes=3.0, decoding=0.5, decode_matrix=0.3,
    decode_layer_s=400e-6, decode_s=800e-6, prefill_layer_s=0.0, rollout_s=0.005, update_s=0.02, switch_s=0.0,
    memory_s=0.0,
)  # fmt: skip
# Datasheets: dense bfloat16 without sparsity, memory bandwidth, and links between devices in one direction.
_TABLE: tuple[Device, ...] = (
    _gpu("H200", 139.8, 989, 4.8, 450, 32),
    _gpu("H100 SXM", 79.1, 989, 3.35, 450, 32),
    _gpu("H100 PCIe", 79.1, 756, 2.0, 64, 32),
    _gpu("A100 80GB", 79.1, 312, 2.04, 300),
    _gpu("A100 40GB", 39.4, 312, 1.555, 300),
    _gpu("L40S", 44.4, 362, 0.864, 32),
    _gpu("RTX 4090", 23.5, 165, 1.008, 32),
    _gpu("B200", 178.0, 2250, 8.0, 900, 32),
    _gpu("MI300X", 191.5, 1307, 5.3, 448, 0),
    Device(
        name="CPU core", kind="cpu", memory_bytes=8 * GIB, matrix_flops=50e9, bandwidth=12e9, link=2e9,
        efficiency=_CPU_EFFICIENCY,
    ),
)  # fmt: skip
# Words of a driver's name that tell which entry it is; the first entry whose words are all in it.
_WORDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("h200",), "H200"),
    (("h100", "pcie"), "H100 PCIe"),
    (("h100",), "H100 SXM"),
    (("a100", "40gb"), "A100 40GB"),
    (("a100",), "A100 80GB"),
    (("l40s",), "L40S"),
    (("4090",), "RTX 4090"),
    (("b200",), "B200"),
    (("mi300x",), "MI300X"),
    (("cpu",), "CPU core"),
)


def device_names() -> tuple[str, ...]:
    """Names of the table."""
    return tuple(device.name for device in _TABLE)


def device_named(name: str) -> Device:
    """An entry of the table, by its name or by what a driver calls it (NVIDIA H100 80GB HBM3). `NAME:GIB` gives it
    other memory."""
    base, _, gib = name.partition(":")
    words = base.lower().replace("-", " ").replace("_", " ")
    for needed, entry in _WORDS:
        if all(word in words for word in needed):
            found = next(device for device in _TABLE if device.name == entry)
            return found if not gib else replace(found, memory_bytes=_memory(gib, name))
    raise RecipeError(
        f"--device: {name!r} is not in the device table. It has {', '.join(device_names())}; memory can be given too, "
        "as in H100:94."
    )


def _memory(gib: str, name: str) -> int:
    try:
        value = float(gib)
    except ValueError:
        value = 0.0
    if not 0 < value < 1 << 20:
        raise RecipeError(f"--device: {name!r} does not end in GiB of memory. Write it as in H100:94.")
    return int(value * GIB)


def found_device(kind: Literal["auto", "cpu", "cuda"] = "auto", *, cache: Path | None = None) -> Device | None:
    """The device of this machine that a run would take: as it was calibrated here, or as the table has it. None: a GPU
    is asked for and there is none, or it is not in the table."""
    if kind != "cpu":
        gpu = _found_gpu()
        if gpu is not None:
            return _calibrated(gpu, cache)
        if kind == "cuda" or _GPUS.is_dir() or any(file.exists() for file in _OTHER_GPUS):
            return None
    core = next(device for device in _TABLE if device.kind == "cpu")
    return _calibrated(replace(core, name=_cpu_name(), memory_bytes=host_memory()), cache)


def host_memory() -> int:
    """Bytes that processes of this machine or container may take together."""
    whole, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    return whole if limit is None else min(whole, limit)


def _found_gpu() -> Device | None:
    """The first GPU that the driver lists. Its files say the name and not the memory, which the table has."""
    files = sorted(_GPUS.glob("*/information"))
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                try:
                    found = device_named(value.strip())
                except RecipeError:
                    return None
                return replace(found, per_machine=max(found.per_machine, len(files)))  # a run may have other machines
    return None


def _cpu_name() -> str:
    return f"CPU ({platform.machine()}, {os.cpu_count() or 1} cores)"


# Calibration: what was measured here, in a file of the user's cache.


def calibration_file() -> Path:
    """Where `podium plan --calibrate` keeps its result: `~/.cache/podium/calibration.json`."""
    return Path("~/.cache/podium/calibration.json").expanduser()


def keep_calibration(device: Device, cache: Path | None = None) -> Path:
    """Stores what was measured; other devices' entries stay."""
    file = cache or calibration_file()
    entries = _entries(file)
    entries[_key(device.kind)] = asdict(replace(device, is_measured=True))
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"version": CALIBRATION_VERSION, "devices": entries}, indent=1), encoding="utf-8")
    partial.replace(file)
    return file


def _calibrated(device: Device, cache: Path | None) -> Device:
    """The stored measurement of this machine's device, with the memory and the neighbours that it has now."""
    stored = _entries(cache or calibration_file()).get(_key(device.kind))
    if not isinstance(stored, Mapping) or stored.get("name") != device.name:
        return device
    try:
        efficiency = Efficiency(**stored["efficiency"])
        values = {field.name: stored[field.name] for field in fields(Device) if field.name in stored}
        now = {key: getattr(device, key) for key in ("memory_bytes", "per_machine", "workspace_bytes")}
        return Device(**{**values, "efficiency": efficiency, **now})
    except (KeyError, TypeError):
        return device


def _entries(file: Path) -> dict[str, Any]:
    """Entries of a file of this version; a broken or other file has none, and the next calibration replaces it."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict) or values.get("version") != CALIBRATION_VERSION:
        return {}
    entries = values.get("devices")
    return dict(entries) if isinstance(entries, dict) else {}


def _key(kind: str) -> str:
    """A home folder can be shared by several machines."""
    return f"{platform.node()}/{kind}"
