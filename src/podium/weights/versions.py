# SPDX-License-Identifier: Apache-2.0
"""One published state of a model's weights: its number, what it consists of, and a fingerprint of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor as it is published: without padding rows."""

    name: str  # inside the Hugging Face model
    shape: tuple[int, ...]
    dtype: str  # of the published values: "float32", "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """Which weights these are. Two models hold the same version exactly when all fingerprints are equal."""

    number: int
    manifest: tuple[TensorSpec, ...]
    fingerprints: tuple[int, ...]  # of each tensor of the manifest

    def differing(self, found: Mapping[str, int]) -> list[str]:
        """Names of the tensors whose fingerprint was not found to be this version's, missing ones included."""
        wanted = zip(self.manifest, self.fingerprints, strict=True)
        return [spec.name for spec, value in wanted if found.get(spec.name) != value]
