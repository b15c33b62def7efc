# SPDX-License-Identifier: Apache-2.0
"""Workers of the cluster layer on one CUDA device: shared in halves, killed and replaced, and a dense recipe on Ray."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from helpers.clusters import next_death
from podium.cluster import Layout, MeshShape, Pool, RayCluster, Resources, RoleSpec, WorkerContext, open_ray
from podium.errors import PlacementError, WorkerDiedError
from podium.observe import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


class Multiplier:
    """Holds a matrix on its device."""

    def __init__(self, context: WorkerContext, size: int) -> None:
        self._context = context
        self._matrix = torch.ones(size, size, device=context.device)

    def multiply(self) -> float:
        return float((self._matrix @ self._matrix)[0, 0])

    def place(self) -> tuple[int, str, bool, int]:
        return os.getpid(), self._context.device, self._matrix.is_cuda, torch.cuda.device_count()

    def broadcast(self, link: str) -> float:
        """Over NCCL: all of the link get the source's number."""
        tensor = torch.full((1000,), 3.0, device=self._context.device)
        return float(self._context.transfer(link).broadcast(tensor, 0).sum())


def halves(slots: int) -> Layout:
    """Each worker has half of a device; two roles share each worker."""
    return Layout(
        pools=(Pool(name="gpu", slots=slots, each=Resources(gpus=0.5), collectives=False),),
        roles=(
            RoleSpec(name="policy", kind=Multiplier, pool="gpu", mesh=MeshShape(replica=slots), arguments=(64,)),
            RoleSpec(name="reference", kind=Multiplier, pool="gpu", mesh=MeshShape(replica=slots), arguments=(32,)),
        ),
    )


def test_two_workers_share_a_device_and_one_that_is_killed_is_replaced_there() -> None:
    async def main() -> None:
        async with open_ray(RayCluster(cpus=4, gpus=1, show_output=False)) as cluster:
            workers = await cluster.start(halves(2), deadline_s=120)
            policy, reference = workers.role("policy", Multiplier), workers.role("reference", Multiplier)
            assert [answer.value for answer in await policy.call_all(Multiplier.multiply)] == [64.0, 64.0]
            assert [answer.value for answer in await reference.call_all(Multiplier.multiply)] == [32.0, 32.0]
            places = [answer.value for answer in await policy.call_all(Multiplier.place)]
            assert [(device, is_cuda, visible) for _, device, is_cuda, visible in places] == [("cuda:0", True, 1)] * 2
            assert [worker.device for worker in policy.workers] == ["gpu0", "gpu0"]
            pids = [answer.value[0] for answer in await reference.call_all(Multiplier.place)]
            assert pids == [pid for pid, *_ in places], "colocated roles share a process"

            began = time.monotonic()
            os.kill(pids[1], signal.SIGKILL)
            died = await next_death(workers, within_s=10)
            assert died.worker == policy.workers[1]
            assert time.monotonic() - began < 2
            with pytest.raises(WorkerDiedError):
                await policy.call_all(Multiplier.multiply)
            (new,) = await workers.recover("gpu", deadline_s=120)
            assert (new.incarnation, new.device) == (1, "gpu0")
            assert [answer.value for answer in await policy.call_all(Multiplier.multiply)] == [64.0, 64.0]
            assert (await policy.call_one(0, Multiplier.place)).value[0] == pids[0], "the other one lives on"

    asyncio.run(main())


def test_more_devices_than_there_are_is_refused_with_the_count() -> None:
    async def main() -> None:
        async with open_ray(RayCluster(cpus=4, gpus=1, show_output=False)) as cluster:
            with pytest.raises(PlacementError, match="too small") as refused:
                await cluster.start(
                    Layout(
                        pools=(Pool(name="gpu", slots=2, each=Resources(gpus=1), one_node=True),),
                        roles=(RoleSpec(name="policy", kind=Multiplier, pool="gpu", mesh=MeshShape(shard=2)),),
                    )
                )
            assert "1 slot " in str(refused.value).splitlines()[-1]

    asyncio.run(main())


def test_a_link_over_nccl_carries_a_tensor_on_the_device() -> None:
    """One rank: NCCL refuses two on a device, and there is one here."""

    async def main() -> None:
        async with open_ray(RayCluster(cpus=4, gpus=1, show_output=False)) as cluster:
            workers = await cluster.start(halves(1), deadline_s=120)
            await workers.connect("weights", ["policy"])
            assert (await workers.role("policy", Multiplier).call_one(0, Multiplier.broadcast, "weights")).value == 3000

    asyncio.run(main())


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A tiny model and data in a folder of their own."""
    words = [f"w{number}" for number in range(60)]
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path / "model")
    config = transformers.Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(words, k=draw.randint(5, 60)))} for _ in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_dense_recipe_on_ray_gives_the_losses_of_the_local_launcher(task: Path) -> None:
    found = {}
    for launcher in ("local", "ray"):
        recipe = {
            "program": "sft",
            "model": {"path": "model", "init": "random", "compile": "off"},
            "data": {"train": [{"path": "train.jsonl"}]},
            "optimizer": {"lr": 1e-3},
            "steps": 5,
            "tokens_per_step": 512,
            "placement": {"launcher": launcher, "device": "cuda"},
        }
        (task / f"{launcher}.yaml").write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "podium", "train", f"{launcher}.yaml"]
        done = subprocess.run(command, cwd=task, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        metrics = read_metrics(task / "runs" / launcher / "metrics.jsonl")
        found[launcher] = [line.values["loss"] for line in metrics if "loss" in line.values]
    assert len(found["ray"]) == 5
    assert found["ray"] == pytest.approx(found["local"], rel=1e-4)
