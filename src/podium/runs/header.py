# SPDX-License-Identifier: Apache-2.0
"""The first lines that a run prints: program, model and devices."""

from __future__ import annotations

from podium.models.cpu_settings import CpuSettings
from podium.recipe import Recipe
from podium.runs.folder import RunFolder


def header_lines(
    recipe: Recipe, folder: RunFolder, *, resume_step: int, step_size: str, model: str, devices: str,
    cpu: CpuSettings | None,
) -> list[str]:  # fmt: skip
    """Header of a run. `step_size` is the size of one step ("8192 tokens"); the caller describes `model` and
    `devices`."""
    lines = [
        f"run: {folder.path}" + (f" (resumed after step {resume_step})" if resume_step else ""),
        f"program: {recipe.program}, {recipe.steps} steps of {step_size}",
        f"model: {model}",
        f"devices: {devices}",
    ]
    if cpu is not None:
        lines.append(f"cpu: {cpu} ({cpu.measured})")
    return lines


def model_line(architecture: str, num_parameters: int, num_trained: int, dtype: str) -> str:
    """Architecture, size and precision."""
    part = "" if num_trained == num_parameters else f" ({num_trained / 1e6:.3g}M of them trained, the others frozen)"
    return f"{architecture}, {num_parameters / 1e6:.2f}M parameters{part}, {dtype} compute, float32 masters"
