# SPDX-License-Identifier: Apache-2.0
"""Memory and use of the GPUs of this host, as NVIDIA's driver library counts them for all processes. Torch-free: the
process that asks needs no CUDA. Without the library there are no figures."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

_GIB = 1 << 30
_LIBRARY = "libnvidia-ml.so.1"
# More GPUs are not named.
_MOST_GPUS = 16


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuFigures:
    """The GPUs of this host. Only one thread may use it."""

    def __init__(self, library: str = _LIBRARY) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._library = ctypes.CDLL(library)
            count = ctypes.c_uint()
            if self._library.nvmlInit_v2() or self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
                return
            for number in range(min(count.value, _MOST_GPUS)):
                handle = ctypes.c_void_p()
                if self._library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
                    self._handles.append(handle)
        except (OSError, AttributeError):  # no driver, or one without these functions
            self._handles = []

    def read(self) -> dict[str, float]:
        """`machine/gpu0_memory_gib`, and `machine/gpu0_use`: the share of the last moments in which it did something.
        Nothing of a GPU that does not tell."""
        return dict(self._read())

    def _read(self) -> Iterator[tuple[str, float]]:
        for number, handle in enumerate(self._handles):
            memory, use = _Memory(), _Utilization()
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                yield f"machine/gpu{number}_memory_gib", memory.used / _GIB
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0:
                yield f"machine/gpu{number}_use", use.gpu / 100
