# SPDX-License-Identifier: Apache-2.0
"""A deep model in bfloat16 was refused for its rounding, and GRPO warned of it at every step. Both limits follow the
noise that is measured on the model itself, and a wrong attention mask is still caught. Deep models: tests/gpu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.engines import make_engine
from helpers.tiny import SUPPORTED, save_tiny_model
from podium.errors import UnsupportedModelError
from podium.models import packing
from podium.models.packing import Run
from podium.models.verify import compare, self_check
from podium.weights.canary import GapLimits, GapWatch, LogprobGap

CPU = torch.device("cpu")


def gap(mean: float) -> LogprobGap:
    return LogprobGap(count=1000, sum_abs=1000 * mean, sum_ratio=1000.0, largest=3 * mean)


def warnings(watch: GapWatch, *means: float) -> list[int]:
    """Steps, from 1, that warn."""
    return [step for step, mean in enumerate(means, start=1) if watch.look(gap(mean)) is not None]


class TestSelfCheck:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", SUPPORTED)
    def test_two_plain_forwards_differ_by_rounding_alone(self, tmp_path: Path, name: str) -> None:
        """Else the floor would hide what the check looks for."""
        comparison = self_check(make_engine(save_tiny_model(name, tmp_path)).model, CPU, torch.float32)
        assert comparison.floor_largest < 1e-4

    def test_a_difference_of_the_size_of_the_floor_is_rounding(self) -> None:
        draw = torch.Generator().manual_seed(0)
        theirs = torch.randn(50, 100, generator=draw)
        noise = [0.3 * torch.randn(50, 100, generator=draw) for _ in range(2)]

        assert not compare("deep", theirs + noise[0], theirs, theirs, torch.bfloat16).agrees
        assert compare("deep", theirs + noise[0], theirs, theirs + noise[1], torch.bfloat16).agrees

    def test_other_scores_are_no_rounding_however_high_the_floor_is(self) -> None:
        draw = torch.Generator().manual_seed(0)
        theirs, others, noise = (torch.randn(50, 100, generator=draw) for _ in range(3))

        comparison = compare("deep", others, theirs, theirs + noise, torch.bfloat16)

        assert comparison.mean_limit == 0.5
        assert not comparison.agrees

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_a_wrong_mask_is_caught_in_bfloat16(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = make_engine(save_tiny_model(name, tmp_path), dtype="bfloat16").model
        assert self_check(model, CPU, torch.bfloat16).agrees

        def one_document(offsets: np.ndarray) -> tuple[Run, ...]:
            return (Run(num_documents=1, length=int(offsets[-1])),)

        monkeypatch.setattr(packing, "runs_of", one_document)
        with pytest.raises(UnsupportedModelError, match="DIFFERS"):
            self_check(model, CPU, torch.bfloat16)


class TestLogprobGap:
    def test_the_limit_follows_the_floor_of_the_model(self) -> None:
        assert warnings(GapWatch(GapLimits.of("bfloat16")), 0.056) == [1]
        assert warnings(GapWatch(GapLimits.of("bfloat16", floor=0.05)), *[0.056] * 30) == []
        assert warnings(GapWatch(GapLimits.of("bfloat16", floor=0.05)), 0.2) == [1]
        assert warnings(GapWatch(GapLimits.of("bfloat16", floor=0.001)), 0.056) == [1]

    def test_one_warning_and_then_a_count(self) -> None:
        watch = GapWatch(GapLimits.of("bfloat16"))

        assert warnings(watch, *[0.2] * 150) == [1, 10, 100]
        assert watch.num_alarms == 150

    def test_a_gap_that_grows_is_noticed_below_the_limit(self) -> None:
        grown = [0.004] * 8 + [0.02] * 3

        assert warnings(GapWatch(GapLimits.of("bfloat16")), *grown) == [9]

    def test_rounding_may_grow_where_it_is_small(self) -> None:
        assert warnings(GapWatch(GapLimits.of("bfloat16")), *[0.001] * 8, *[0.006] * 8) == []

    def test_a_gap_that_is_not_a_number_is_noticed(self) -> None:
        assert warnings(GapWatch(GapLimits.of("float32")), 1e-6, float("nan"), 1e-6) == [2]
