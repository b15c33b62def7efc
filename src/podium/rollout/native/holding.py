# SPDX-License-Identifier: Apache-2.0
"""Device memory that is freed while the engine sleeps and taken again: on CUDA at the same addresses, so that captured
graphs stay valid."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol

import torch
from torch import Tensor

from podium.errors import RolloutError


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device, including unused memory of torch's own pool."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        pooled = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + pooled
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Holding(Protocol):
    """Some bytes on a device. They are zero at first: a mask hides unwritten memory from attention only if it is not
    NaN."""

    nbytes: int
    bytes: Tensor

    def release(self) -> int:
        """Frees the memory and returns its size; the tensor must not be used until `restore`."""

    def restore(self) -> bool:
        """Takes the memory again. Returns True if its address changed."""

    def close(self) -> None:
        """Frees the memory for good."""


def hold(nbytes: int, device: torch.device) -> Holding:
    """Allocates memory in the way that suits the device."""
    return MappedHolding(nbytes, device) if device.type == "cuda" else ResizedHolding(nbytes)


class ResizedHolding:
    """Host memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.bytes: Tensor = torch.zeros(nbytes, dtype=torch.uint8)

    def release(self) -> int:
        """Shrinks the storage to nothing."""
        self.bytes.untyped_storage().resize_(0)
        return self.nbytes

    def restore(self) -> bool:
        """Allocates the storage again, which may move it."""
        self.bytes.untyped_storage().resize_(self.nbytes)
        self.bytes.zero_()
        return True

    def close(self) -> None:
        """Frees the storage."""
        self.bytes.untyped_storage().resize_(0)


class _MemoryLocation(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device, with no handle to share."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("place", _MemoryLocation),
        ("unused", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("place", _MemoryLocation), ("flags", ctypes.c_int)]


_PINNED, _DEVICE, _READ_AND_WRITE, _RECOMMENDED = 1, 1, 3, 1


class _AsArray:
    """The array interface from which torch creates a tensor without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class MappedHolding:
    """Reserves addresses once, and maps physical memory to them while it is held (CUDA's driver API, since torch has no
    call for it)."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        torch.cuda.init()
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        place = _MemoryLocation(_DEVICE, device.index if device.index is not None else torch.cuda.current_device())
        self._properties = _Properties(type=_PINNED, place=place)
        self._access = _Access(place=place, flags=_READ_AND_WRITE)
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), _RECOMMENDED)
        self.nbytes = -(-nbytes // unit.value) * unit.value
        self._size = ctypes.c_size_t(self.nbytes)
        self._address = ctypes.c_uint64()
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._size,
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._memory = ctypes.c_uint64()
        self._mapped = False
        self.restore()
        self.bytes: Tensor = torch.as_tensor(_AsArray(self._address.value, self.nbytes), device=device)[:nbytes]
        self.bytes.zero_()

    def release(self) -> int:
        """Unmaps and frees the memory; the address stays reserved."""
        torch.cuda.synchronize()
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._memory)
        self._mapped = False
        return self.nbytes

    def restore(self) -> bool:
        """Maps new memory at the same address."""
        torch.cuda.empty_cache()  # the driver cannot use memory that torch keeps in its pool
        self._call(
            "cuMemCreate", ctypes.byref(self._memory), self._size, ctypes.byref(self._properties), ctypes.c_uint64(0)
        )
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._memory, ctypes.c_uint64(0))
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(self._access), ctypes.c_size_t(1))
        self._mapped = True
        return False

    def close(self) -> None:
        """Frees memory and address."""
        if self._mapped:
            self.release()
        if self._address.value:
            self._call("cuMemAddressFree", self._address, self._size)
            self._address = ctypes.c_uint64()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RolloutError(
                f"{name} failed with {(text.value or b'an unknown error').decode()!r} on the way to device memory of "
                "the engine (keys and values, merged weights). Lower rollout.memory_gib, or let other roles give up "
                "memory first."
            )
