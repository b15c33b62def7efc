# SPDX-License-Identifier: Apache-2.0
"""Verifies that weights, received or already in place, are those of their version."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping

import torch
from torch import Tensor

from podium.errors import WeightMismatchError
from podium.models.tensor_shards import Box
from podium.weights.fingerprints import Piece, partial_fingerprint, piece_fingerprints, unsigned
from podium.weights.transports import Delivery, torch_dtype
from podium.weights.versions import TensorSpec, WeightVersion

_NAMED = 5


class Verified:
    """A delivery that checks tensors as they pass. A tensor of another name, shape or dtype is refused before it is
    passed on. Fingerprints are computed on the device and compared after the last tensor, without waiting in
    between."""

    def __init__(self, delivery: Delivery, version: WeightVersion) -> None:
        self._delivery, self._version = delivery, version

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Raises an error after the last tensor if any differs. An engine that installed them must not generate with
        them."""
        sums: list[Tensor] = []
        arriving = self._delivery.tensors()
        try:
            for spec in self._version.manifest:
                tensor = self._checked(spec, next(arriving, None))
                sums.append(partial_fingerprint(tensor, first=0, dtype=tensor.dtype))
                yield spec.name, tensor
            extra = next(arriving, None)
            if extra is not None:
                raise _wrong(self._version, f"{extra[0]} comes after the manifest's last tensor")
        finally:
            if isinstance(arriving, Generator):
                arriving.close()  # now, not when the error is garbage-collected: others may wait for this end
        if sums:
            compare_sums(self._version, torch.stack(sums))

    def _checked(self, spec: TensorSpec, came: tuple[str, Tensor] | None) -> Tensor:
        if came is None:
            raise _wrong(self._version, f"the delivery ends before {spec.name}")
        name, tensor = came
        if name != spec.name:
            raise _wrong(self._version, f"{name} comes where the manifest has {spec.name}")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
            raise _wrong(self._version, f"{spec} comes as {list(tensor.shape)} {_short(tensor.dtype)}")
        return tensor


def check_manifest(version: WeightVersion, tensors: Mapping[str, Tensor], real_rows: Mapping[str, int]) -> None:
    """Checks that a version belongs to exactly this model: every tensor, whole, in its dtype. `tensors` are the
    model's, `real_rows` gives for some of them the number of rows without padding."""
    wanted = {
        name: TensorSpec(
            name=name, shape=(real_rows.get(name, shape[0]), *shape[1:]) if shape else (), dtype=_short(dtype)
        )
        for name, shape, dtype in ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    }
    came = {spec.name: spec for spec in version.manifest}
    for name in [*wanted, *came]:
        if name not in came:
            raise _wrong(version, f"it has no {name}, and the model does")
        if name not in wanted:
            raise _wrong(version, f"it has {name}, and the model does not")
        if came[name] != wanted[name]:
            raise _wrong(version, f"it has {came[name]}, and the model {wanted[name]}")


def verify_in_place(tensors: Mapping[str, Tensor], version: WeightVersion) -> None:
    """Verifies tensors that an engine already has: the learner's own, or a copy of them. Whole tensors by name; rows
    beyond the manifest's are padding and do not count."""
    pieces = []
    for spec in version.manifest:
        held = tensors.get(spec.name)
        tensor = require_tensor(held, None if held is None else tuple(held.shape), spec, version)
        pieces.append(Piece.of_rows(tensor, Box.whole(tensor.shape), spec.shape, tensor.dtype))
    if pieces:
        compare_sums(version, piece_fingerprints(pieces, pieces[0].values.device))


def require_tensor(
    tensor: Tensor | None, shape: tuple[int, ...] | None, spec: TensorSpec, version: WeightVersion
) -> Tensor:
    """The model's tensor, if it is there and is of this spec. `shape`: of the whole tensor, padding rows included."""
    if tensor is None or shape is None:
        raise _wrong(version, f"the model has no {spec.name}")
    if not _fits(shape, tensor.dtype, spec):
        raise _wrong(version, f"{spec} is {list(shape)} {_short(tensor.dtype)} in the model")
    return tensor


def _fits(shape: tuple[int, ...], dtype: torch.dtype, spec: TensorSpec) -> bool:
    same = shape == spec.shape or (bool(shape) and shape[1:] == spec.shape[1:] and shape[0] > spec.shape[0])
    return same and dtype == torch_dtype(spec.dtype)


def compare_sums(version: WeightVersion, sums: Tensor) -> None:
    """Raises unless these are the fingerprints of the version's tensors, in the order of its manifest."""
    fingerprints = {spec.name: value for spec, value in zip(version.manifest, unsigned(sums), strict=True)}
    differing = version.differing(fingerprints)
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise WeightMismatchError(
            f"{len(differing)} of {len(version.manifest)} tensors are not those of weight version {version.number} "
            f"({version.fingerprint}): {', '.join(differing[:_NAMED])}{more}. Tokens sampled from them would belong to "
            "no version, so nothing is generated until weights are installed that are right. Publish again; if the "
            "same tensors differ again, the learner has changed them since it described the version, or the way they "
            "travel changes them."
        )


def _wrong(version: WeightVersion, what: str) -> WeightMismatchError:
    return WeightMismatchError(
        f"weight version {version.number} does not fit: {what}. The sender's model and this one are not the same, or "
        "the transfer is of another version. Build both from the same model folder, and publish again."
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
