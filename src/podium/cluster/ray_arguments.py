# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls on Ray. Stored objects anywhere in them become arguments of their own, which Ray fetches before it
calls the method.

A reference inside an argument would be fetched by the worker itself. That is slower (a question to the owner for every
object), and in Ray 2.60 unsafe where several threads of a worker read one object: when one of them drops its reference
while another gets one, the second may wait forever."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray.actor import ActorHandle

from podium.cluster.objects import InlineStored, Stored
from podium.cluster.transport import ByReference
from podium.errors import StoreError

# Longest wait for an object from another node.
_FETCH_S = 120.0


# What Ray raises when objects find no room, in its store or on the disk that it moves them to.
STORE_IS_FULL = (ray.exceptions.OutOfDiskError, ray.exceptions.ObjectStoreFullError)


def full_store() -> StoreError:
    """The error for objects that find no room."""
    return StoreError(
        "Ray's object store is full, and the disk that it moves objects to has no room either (the folder of Ray's "
        "session, /tmp/ray unless RAY_TMPDIR says otherwise). Make room there, give the store more (start a Ray with "
        "`ray start --head --object-store-memory BYTES` and name it in RAY_ADDRESS), or let a step hold less: "
        "rollout.prompts_per_step, rollout.samples_per_prompt or rollout.max_new_tokens."
    )


class RayStored(Stored[Any]):
    """An object of Ray's store, owned by the calling process: it outlives the worker that created it."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref
        self._gone = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayStored, (self.reference(),)

    def reference(self) -> Any:
        """Ray's reference; a StoreError after the object was freed."""
        if self._ref is None:
            raise StoreError(
                f"a stored object cannot be used: {self._gone}. Use it before, or let a later step hold it."
            )
        if not ray.is_initialized():
            raise StoreError("a stored object is used after its cluster was closed. Read it before.")
        return self._ref

    def read(self) -> Any:
        """Fetches the object; a StoreError if it is lost or late."""
        try:
            return ray.get(self.reference(), timeout=_FETCH_S)
        except ray.exceptions.GetTimeoutError:
            raise StoreError(
                f"an object did not come from the store in {_FETCH_S:.0f} s: its node is overloaded, or cut off."
            ) from None
        except ray.exceptions.ObjectLostError as error:
            raise StoreError(f"an object is lost with the node that held it: {str(error).splitlines()[0]}") from error
        except STORE_IS_FULL:
            raise full_store() from None

    def free(self, reason: str) -> None:
        """Drops the reference; `reason` is for errors of later reads."""
        self._ref, self._gone = None, reason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedArguments:
    """The pickled arguments of a call, without the objects that travel beside them."""

    data: bytes
    buffers: Sequence[pickle.PickleBuffer]


def pack(arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[PackedArguments, list[Any]]:
    """Pickles arguments. Returns them, and the references that Ray must replace by their objects."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    packer = _Packer(file, buffers)
    packer.dump((tuple(arguments), dict(named)))
    return PackedArguments(data=file.getvalue(), buffers=buffers), packer.references


def unpack(packed: PackedArguments, objects: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in its worker."""
    _UNPACKING.objects = objects
    try:
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = pickle.loads(packed.data, buffers=packed.buffers)
    finally:
        del _UNPACKING.objects
    return arguments


class _Unpacking(threading.local):
    """The objects of the call that this thread unpacks."""

    objects: Sequence[Any]


_UNPACKING = _Unpacking()


class _Packer(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Replaces references by their numbers."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        self.references: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case RayStored():
                return _stored_at, (self._number(obj.reference()),)
            case ByReference(stored=RayStored() as stored):
                return _object_at, (self._number(stored.reference()),)
            case ActorHandle():
                return _object_at, (self._number(obj),)
            case _:
                return super().reducer_override(obj)

    def _number(self, reference: Any) -> int:
        if reference not in self._numbers:
            self._numbers[reference] = len(self.references)
            self.references.append(reference)
        return self._numbers[reference]


def _object_at(number: int) -> Any:
    return _UNPACKING.objects[number]


def _stored_at(number: int) -> Stored[Any]:
    return InlineStored(_UNPACKING.objects[number])
