# SPDX-License-Identifier: Apache-2.0
"""Exactness where kernels cut their sums into parts: sequences of hundreds of tokens, and models whose products are
wider than those of other tests."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from native_world import Learner, ask, sequence, sequences

from helpers.tiny import save_tiny_model
from podium.data.trajectories import TrajectoryId
from podium.models.attention import plain_attention
from podium.models.exact_products import make_products_exact
from podium.rollout.native.sizing import padded_keys
from podium.rollout.requests import Completion

# At the places where a sequence gets another number of keys, and in the middle between them.
LENGTHS = (100, 180, 250, 300, 505, 520, 700)
NEW = 16
ROOM: dict[str, Any] = {"max_length": 1024, "max_running": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "narrow": ("qwen3", {}),
    "heads of 64": ("qwen3", {"hidden_size": 416, "intermediate_size": 800, "head_dim": 64}),
    "heads of 128": ("qwen3", {"hidden_size": 96, "head_dim": 128, "num_key_value_heads": 1}),
    "soft caps": ("gemma2", {}),
    "sinks": ("gpt_oss", {}),
}
is_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="MKL's kernels for few rows are those of x86")


@pytest.fixture(scope="module", params=list(MODELS))
def learner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    name, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("long")
    return Learner.of(save_tiny_model(name, folder, max_position_embeddings=1024, **changes))


@pytest.fixture(scope="module")
def alone(learner: Learner) -> dict[TrajectoryId, Completion]:
    """Each in an engine of its own, its prompt in one piece."""
    requests = [ask(draw, length, new=NEW, temperature=0) for draw, length in enumerate(LENGTHS)]
    engine = learner.engine(**{**ROOM, "max_running": 1}, reuse_prefixes=False)
    return {each.id: sequence(engine, each) for each in requests}


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"prefill_tokens": 70}, {"block_size": 64, "prefill_tokens": 70}], ids=str)
def test_company_changes_no_bit(learner: Learner, alone: dict[TrajectoryId, Completion], way: dict[str, int]) -> None:
    requests = [ask(draw, length, new=NEW, temperature=0) for draw, length in enumerate(LENGTHS)]
    found = sequences(learner.engine(**ROOM, **way), requests)
    for id, wanted in alone.items():
        assert found[id].tokens_L.tolist() == wanted.tokens_L.tolist(), id
        assert found[id].logprobs_L.tobytes() == wanted.logprobs_L.tobytes(), id


@pytest.mark.slow
def test_what_was_decoded_has_the_same_bits_when_it_is_prefilled(
    learner: Learner, alone: dict[TrajectoryId, Completion]
) -> None:
    """As when a sequence moves to another generator."""
    engine = learner.engine(**ROOM, reuse_prefixes=False)
    for draw, wanted in enumerate(alone.values()):
        so_far = np.concatenate([wanted.prompt, wanted.tokens_L[:-2]])
        found = sequence(engine, ask(draw, so_far, new=2, temperature=0))
        assert found.tokens_L.tolist() == wanted.tokens_L[-2:].tolist()
        assert found.logprobs_L.tobytes() == wanted.logprobs_L[-2:].tobytes(), len(wanted.prompt)


@pytest.mark.parametrize(
    ("keys", "with_mkl", "without"),
    [(1, 16, 16), (192, 192, 192), (193, 512, 208), (512, 512, 512), (513, 1024, 528), (1025, 1536, 1040)],
)
def test_keys_are_whole_vectors_and_with_mkl_beyond_192_whole_stretches(keys: int, with_mkl: int, without: int) -> None:
    assert padded_keys(keys, has_mkl=True) == with_mkl
    assert padded_keys(keys, has_mkl=False) == without


def test_values_are_added_up_in_stretches() -> None:
    """One query of 6 keys with equal scores, in stretches of 4: the mean of the values that it sees."""
    import torch

    v = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 99.0]).view(1, 1, 6, 1)
    q, k = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 6, 1)
    visible = torch.tensor([True] * 5 + [False])
    out = plain_attention(q, k, v, visible, scaling=None, softcap=50.0, sinks=None, key_stretch=4)
    assert out.shape == (1, 1, 1, 1)
    assert out.item() == pytest.approx(3.0, abs=1e-6)


def test_products_are_exact_in_this_process() -> None:
    assert make_products_exact()


# Rows of products of several numbers of rows, and the first row of each of them.
PROGRAM = """
import sys, torch
from podium.models.exact_products import make_products_exact
torch.set_num_threads(1)
if sys.argv[1] == "exact":
    assert make_products_exact()
elif sys.argv[1] == "late":
    torch.ones(3, 100) @ torch.ones(100, 3)
    assert not make_products_exact()
torch.manual_seed(0)
x, w = torch.randn(300, 400), torch.randn(400, 96)
print(sum(not torch.equal(x[:rows] @ w, (x @ w)[:rows]) for rows in range(1, 64)))
"""


def counted(how: str, **environment: str) -> tuple[int, str]:
    """For how many numbers of rows a product differs, in a new process, and what it logs."""
    known = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | environment
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env=known, capture_output=True, text=True, timeout=120, check=True
    )
    return int(ended.stdout), ended.stderr


@pytest.mark.slow
@is_x86
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_rows_of_a_product_do_not_depend_on_their_number(instructions: str) -> None:
    """MKL takes the best instructions of the processor up to those named."""
    assert counted("exact", MKL_ENABLE_INSTRUCTIONS=instructions)[0] == 0
    assert counted("as it is", MKL_ENABLE_INSTRUCTIONS=instructions)[0] > 0, "then this module is needed no more"


@pytest.mark.slow
@is_x86
def test_a_process_that_has_multiplied_before_is_told_so() -> None:
    differing, log = counted("late")
    assert differing > 0
    assert "MKL is not in strict mode" in log
    assert "MKL_CBWR=AUTO,STRICT" in log


@pytest.mark.slow
@is_x86
def test_what_the_environment_says_is_kept() -> None:
    assert counted("exact", MKL_CBWR="AVX2,STRICT")[0] == 0
    assert counted("late", MKL_CBWR="AVX2")[0] > 0
