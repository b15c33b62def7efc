# SPDX-License-Identifier: Apache-2.0
"""One published state of a model's weights: its number, its tensors, and a fingerprint of each."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

_ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as it is published: without padding rows."""

    name: str  # inside the Hugging Face model
    shape: tuple[int, ...]
    dtype: str  # of the published values: "float32", "bfloat16"

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Identifies weights. Two models hold the same version exactly if all fingerprints are equal."""

    number: int
    manifest: tuple[TensorSpec, ...]
    fingerprints: tuple[int, ...]  # of each tensor of the manifest

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(spec.nbytes for spec in self.manifest)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all tensors for logs: sixteen hexadecimal digits that do not depend on the number."""
        said = "\n".join(f"{spec} {value}" for spec, value in zip(self.manifest, self.fingerprints, strict=True))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()

    def differing(self, fingerprints: Mapping[str, int]) -> list[str]:
        """Names of the tensors whose fingerprint differs from this version's, missing ones included."""
        wanted = zip(self.manifest, self.fingerprints, strict=True)
        return [spec.name for spec, value in wanted if fingerprints.get(spec.name) != value]
