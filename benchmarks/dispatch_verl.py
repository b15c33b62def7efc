# SPDX-License-Identifier: Apache-2.0
"""verl's side of the dispatch benchmark: its worker group and its carriers of batches over four local workers.

    .venv-bench-verl/bin/python benchmarks/dispatch_verl.py --lengths lengths.npy     (see requirements-verl.txt)

Each path sends a batch of trajectories to four workers, which add one to a per-token column, and brings that column
back. One JSON object goes to stdout; all else that verl and Ray print goes to stderr. A part that fails leaves its
error's text in place of its figures.

    dataproto            padded DataProto through DP_COMPUTE_PROTO; its default serialization (torch.save)
    dataproto_numpy      the same with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy, which is not its default
    tensordict           what its legacy trainer (trainer.use_v1=false) does around each call: to TensorDict, to "no
                         padding", call, back to padding
    tensordict_call      the call of that alone, the batch converted beforehand
    transfer_queue       what its default trainer (trainer.use_v1=true) does: the batch already lies in TransferQueue,
                         the controller sends keys, the workers read, compute and write, the controller reads the column
    transfer_queue_call  the same, but the column stays in TransferQueue
A hand-off lets the workers of one role, which hold the batch, give it to the workers of another; the column comes back.

wall_s, driver_cpu_s (time.process_time: every thread of the driver) and tree_cpu_s (driver, Ray and all workers, in
steps of 10 ms) are medians. driver_bytes is what the driver serializes and deserializes in one call, by Ray's pickler.
"""

# N trajectories · P prompt width · R response width (padded) · T tokens of all trajectories, packed

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import psutil
import ray
import torch
import transfer_queue as tq
import verl.trainer.config
from omegaconf import OmegaConf
from ray import cloudpickle
from ray.util import remove_placement_group
from tensordict import TensorDict
from verl.protocol import BatchData, DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.utils.transferqueue_utils import kv_batch_meta2batch_meta
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding, response_from_nested

NUM_WORKERS = 4
LONGEST = 2048
PROMPT_WIDTH = LONGEST // 4
RESPONSE_WIDTH = LONGEST - PROMPT_WIDTH
VOCABULARY = 151_643
PARTITION = "train"
SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"
Figures = dict[str, Any]


class Role(Worker):
    """A worker whose only work is to add one to a column."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)
        self._held: Any = None
        self._in_queue = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        """The empty call."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_serialization(self, method: str) -> None:
        os.environ[SERIALIZATION] = method  # verl reads it at every call

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tidy(self) -> None:
        self._held = None
        free_memory()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_one(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"log_probs": batch.batch["old_log_probs"] + 1})

    # The mode that verl's own trainers register for compute_log_prob and update_actor.
    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def add_one_jagged(self, batch: TensorDict) -> TensorDict:
        ids = batch["input_ids"]  # verl's engine gives back a column over prompt and response, in this layout
        column = torch.nested.nested_tensor_from_jagged(ids.values().float() + 1, offsets=ids.offsets())
        return tu.get_tensordict({"log_probs": column})

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def hold(self, part: Any) -> None:
        self._held = part

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def give(self) -> DataProto:
        return self._held

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def give_future(self) -> DataProto:
        return self._held

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def give_to_queue(self, keys: list[str], tags: list[dict[str, Any]]) -> None:
        if not self._in_queue:
            tq.init()
            self._in_queue = True
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=self._held, tags=tags)


class Batch:
    """N trajectories with the columns that verl's update_actor needs, padded, and jagged as TransferQueue holds them.

    verl's trainers send more (returns, scores, rewards, and per-row objects such as uid); those are left out here.
    """

    def __init__(self, lengths_N: np.ndarray) -> None:
        random = np.random.default_rng(len(lengths_N))
        self.num_rows = len(lengths_N)
        prompts_N = torch.from_numpy(lengths_N // 4)
        responses_N = torch.from_numpy(lengths_N) - prompts_N
        prompt_mask_NP = torch.arange(PROMPT_WIDTH) >= PROMPT_WIDTH - prompts_N[:, None]  # verl pads prompts left
        response_mask_NR = torch.arange(RESPONSE_WIDTH) < responses_N[:, None]  # and responses right
        mask = torch.cat([prompt_mask_NP, response_mask_NR], dim=1)
        ids = torch.from_numpy(random.integers(1, VOCABULARY, mask.shape)) * mask
        old_log_probs = -torch.from_numpy(random.exponential(size=response_mask_NR.shape).astype(np.float32))
        advantages = torch.from_numpy(random.standard_normal(response_mask_NR.shape, dtype=np.float32))
        whole = {"input_ids": ids, "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}
        answers = {
            "responses": ids[:, PROMPT_WIDTH:].contiguous(),
            "response_mask": response_mask_NR.long(),
            "old_log_probs": old_log_probs * response_mask_NR,
            "advantages": advantages * response_mask_NR,
        }
        prompts = ids[:, :PROMPT_WIDTH].contiguous()
        self.padded = DataProto.from_dict(
            tensors={**whole, **answers, "prompts": prompts, "attention_mask": mask.long()}
        )
        jagged = {name: to_jagged(column, mask) for name, column in whole.items()}
        jagged |= {name: to_jagged(column, response_mask_NR) for name, column in answers.items()}
        jagged |= {"prompts": to_jagged(prompts, prompt_mask_NP), "loss_mask": jagged["response_mask"].clone()}
        self.jagged = TensorDict(jagged, batch_size=self.num_rows)
        self.keys = [f"trajectory-{row}_0_0" for row in range(self.num_rows)]
        self.tags = [
            {"status": "success", "prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
            for prompt, response in zip(prompts_N.tolist(), responses_N.tolist(), strict=True)
        ]
        # What the controller sends in the batch's stead when the batch lies in TransferQueue.
        self.queued = tq.KVBatchMeta(keys=self.keys, tags=self.tags, partition_id=PARTITION, fields=list(jagged))


def to_jagged(column: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(dim=1).cumsum(dim=0)])
    return torch.nested.nested_tensor_from_jagged(column[mask], offsets=offsets)


class Bench:
    """The parts, each measured under a deadline of its own; what has been found so far is in `found`."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.groups: list[RayWorkerGroup] = []
        self.found: Figures = {
            "peer": f"verl {version('verl')}",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "versions": {name: version(name) for name in ("torch", "ray", "tensordict", "numpy", "TransferQueue")},
            "settings": {name: getattr(asked, name) for name in ("counts", "repeats", "warmups", "num_cpus")},
        }

    def part(self, path: str, measure: Callable[[], Figures], *, numpy: bool = False) -> None:
        """Run one part and keep its figures, or its error's text, under `path`; `numpy` picks verl's NumPy mode."""
        *folders, name = path.split("/")
        place = self.found
        for folder in folders:
            place = place.setdefault(folder, {})
        started = time.perf_counter()
        try:
            with alarm(self.asked.part_deadline):
                self.set_serialization("numpy" if numpy else "")
                for group in self.groups:
                    group.tidy()
                free_memory()
                settle()
                place[name] = measure()
        except Exception as error:
            place[name] = f"{type(error).__name__}: {error}"[:2000]
        print(f"{path}: {time.perf_counter() - started:.1f} s, {place[name]}", file=sys.stderr, flush=True)

    def timed(self, call: Callable[[], Any], *, driver_bytes: int | None = None, repeats: int = 0) -> Figures:
        """Medians over the repeats, the warm-ups done before."""
        for _ in range(self.asked.warmups):
            call()
        walls: list[float] = []
        driver_cpus: list[float] = []
        tree_cpus: list[float] = []
        for _ in range(repeats or self.asked.repeats):
            tree, cpu, start = tree_cpu_s(), time.process_time(), time.perf_counter()
            result = call()
            walls.append(time.perf_counter() - start)
            driver_cpus.append(time.process_time() - cpu)
            tree_cpus.append(tree_cpu_s() - tree)
            del result  # outside of the clock: verl's caller keeps it
        figures: Figures = {"wall_s": statistics.median(walls), "driver_cpu_s": statistics.median(driver_cpus)}
        figures |= {"tree_cpu_s": statistics.median(tree_cpus), "driver_bytes": driver_bytes}
        return figures | {"wall_s_range": [min(walls), max(walls)], "repeats": len(walls)}

    def run(self) -> None:
        self.part("store_warmup", self.warm_store)
        self.part("group_start", self.group_start)
        if len(self.groups) < 2:
            return  # the error stands under group_start
        self.part("empty_call", lambda: self.timed(self.groups[0].empty, repeats=50))
        self.part("empty_call_ray", lambda: self.timed(self.empty_by_ray, repeats=50))
        self.part("transfer_queue_start", self.start_transfer_queue)
        lengths = np.load(self.asked.lengths).astype(np.int64)
        for count in self.asked.counts:
            if len(lengths) < count or lengths.min() < 4 or lengths.max() > LONGEST:
                self.found["lengths_error"] = f"need {count} lengths from 4 to {LONGEST} in {self.asked.lengths}"
                return
            batch = Batch(lengths[:count])
            self.found.setdefault("tokens", {})[str(count)] = int(lengths[:count].sum())
            self.dispatch(batch)
            self.handoff(batch)

    def warm_store(self) -> Figures:
        """Touch most of the object store's pages once: the first touch costs several times a later one."""
        block = np.ones(2**25)
        count = int(0.75 * self.asked.object_store_gib * 2**30 / block.nbytes)
        touched = [ray.put(block) for _ in range(count)]
        return {"bytes": len(touched) * block.nbytes}

    def group_start(self) -> Figures:
        """From nothing to the first answer of all workers; Ray itself runs already."""
        walls: list[float] = []
        for turn in range(self.asked.starts):
            settle()
            start = time.perf_counter()
            # The default of max_colocate_count is 10 CPUs a worker, which a small machine does not have.
            pool = RayResourcePool([NUM_WORKERS], use_gpu=False, max_colocate_count=1)
            group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Role)), device_name="cpu")
            group.empty()
            walls.append(time.perf_counter() - start)
            if turn < self.asked.starts - 2:
                stop_group(group)
            else:
                self.groups.append(group)
        return {"wall_s": statistics.median(walls), "wall_s_all": walls, "repeats": len(walls)}

    def empty_by_ray(self) -> None:
        """Ray's own floor: the same method of the same actors without verl's group."""
        ray.get([worker.empty.remote() for worker in self.groups[0].workers])

    def start_transfer_queue(self) -> Figures:
        """With the settings that verl's trainer gives it (SimpleStorage over ZMQ, 8 storage units)."""
        config = OmegaConf.load(Path(verl.trainer.config.__file__).parent / "transfer_queue" / "transfer_queue.yaml")
        start = time.perf_counter()
        tq.init(config)
        units = config.backend.SimpleStorage.num_data_storage_units
        return {"wall_s": time.perf_counter() - start, "storage_units": units}

    def dispatch(self, batch: Batch) -> None:
        group, path = self.groups[0], f"dispatch/{batch.num_rows}"

        def dataproto() -> Figures:
            expect_equal(group.add_one(batch.padded).batch["log_probs"], batch.padded.batch["old_log_probs"] + 1)
            column = DataProto.from_dict(tensors={"log_probs": batch.padded.batch["old_log_probs"]})
            moved = sum(pickled_bytes(part) for data in (batch.padded, column) for part in data.chunk(NUM_WORKERS))
            return self.timed(lambda: group.add_one(batch.padded), driver_bytes=moved)

        self.part(f"{path}/dataproto", dataproto)
        self.part(f"{path}/dataproto_numpy", dataproto, numpy=True)
        self.part(f"{path}/tensordict", lambda: self.tensordict(group, batch, convert=True))
        self.part(f"{path}/tensordict_call", lambda: self.tensordict(group, batch, convert=False))

        def put() -> None:
            # For orientation: in verl's trainer the rollout workers put each trajectory, not the controller.
            tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=batch.jagged, tags=batch.tags)

        self.part(f"{path}/transfer_queue_put", lambda: self.timed(put, driver_bytes=nbytes(batch.jagged)))
        self.part(f"{path}/transfer_queue", lambda: self.transfer_queue(group, batch, collect=True))
        self.part(f"{path}/transfer_queue_call", lambda: self.transfer_queue(group, batch, collect=False))

    def tensordict(self, group: RayWorkerGroup, batch: Batch, *, convert: bool) -> Figures:
        def converted() -> TensorDict:
            data = left_right_2_no_padding(batch.padded.to_tensordict())
            tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
            return data

        def call() -> torch.Tensor:
            data = converted()
            return no_padding_2_padding(tu.get(group.add_one_jagged(data), "log_probs"), data).float()

        ready = converted()
        answer = group.add_one_jagged(ready)
        expect_equal(tu.get(answer, "log_probs").values(), batch.jagged["input_ids"].values().float() + 1)
        moved = sum(pickled_bytes(part) for data in (ready, answer) for part in BatchData(data).chunk(NUM_WORKERS))
        return self.timed(call if convert else lambda: group.add_one_jagged(ready), driver_bytes=moved)

    def transfer_queue(self, group: RayWorkerGroup, batch: Batch, *, collect: bool) -> Figures:
        def call() -> torch.Tensor | None:
            group.add_one_jagged(batch.queued)
            return read_column(batch) if collect else None

        group.add_one_jagged(batch.queued)
        expect_equal(read_whole_column(batch).values(), batch.jagged["input_ids"].values().float() + 1)
        return self.timed(call, driver_bytes=queue_bytes(batch, collect=collect))

    def handoff(self, batch: Batch) -> None:
        giver, taker = self.groups
        path = f"handoff/{batch.num_rows}"
        columns = batch.padded
        column = DataProto.from_dict(tensors={"log_probs": columns.batch["old_log_probs"]})

        def measure(give: Callable[[], Any], *, through_driver: bool) -> Figures:
            giver.hold(columns.chunk(NUM_WORKERS))
            expect_equal(taker.add_one(give()).batch["log_probs"], columns.batch["old_log_probs"] + 1)
            back = sum(pickled_bytes(part) for part in column.chunk(NUM_WORKERS))
            whole = sum(pickled_bytes(part) for part in columns.chunk(NUM_WORKERS))
            moved = back + (2 * whole if through_driver else 0)  # in from the giver, and out to the taker
            return self.timed(lambda: taker.add_one(give()), driver_bytes=moved)

        # Futures last: each taker reads the whole batch, several GB between them at 4096. On a machine of 24 GB, Ray
        # once ended storage units of TransferQueue for want of memory; their clients waited until the part was stopped.
        self.part(f"{path}/transfer_queue", lambda: self.handoff_by_queue(giver, taker, batch))
        self.part(f"{path}/driver", lambda: measure(giver.give, through_driver=True))
        self.part(f"{path}/driver_numpy", lambda: measure(giver.give, through_driver=True), numpy=True)
        self.part(f"{path}/futures", lambda: measure(giver.give_future, through_driver=False))
        self.part(f"{path}/futures_numpy", lambda: measure(giver.give_future, through_driver=False), numpy=True)

    def handoff_by_queue(self, giver: RayWorkerGroup, taker: RayWorkerGroup, batch: Batch) -> Figures:
        giver.hold(list(BatchData(batch.jagged).chunk(NUM_WORKERS)))
        keys, tags = in_parts(batch.keys), in_parts(batch.tags)

        def call() -> torch.Tensor:
            giver.give_to_queue(keys, tags)  # one put a worker; verl's rollout workers put every trajectory alone
            taker.add_one_jagged(batch.queued)
            return read_column(batch)

        moved = pickled_bytes(keys) + pickled_bytes(tags) + queue_bytes(batch, collect=True)
        return self.timed(call, driver_bytes=moved)

    def set_serialization(self, method: str) -> None:
        """verl's switch, in the driver and in all workers."""
        if os.environ.get(SERIALIZATION, "") != method:
            os.environ[SERIALIZATION] = method
            for group in self.groups:
                group.set_serialization(method)


def read_whole_column(batch: Batch) -> torch.Tensor:
    return tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=["log_probs"])["log_probs"]


def read_column(batch: Batch) -> torch.Tensor:
    """Read the column and cut out the responses, as verl's default trainer does after compute_log_prob."""
    fields = ["log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=fields)
    return response_from_nested(data["log_probs"], data["response_mask"])


def queue_bytes(batch: Batch, *, collect: bool) -> int:
    """Metadata from the controller, to the workers and back, keys, and with `collect` the column and its mask."""
    meta = kv_batch_meta2batch_meta(batch.queued)
    parts = sum(pickled_bytes(part) for part in meta.chunk(NUM_WORKERS))
    moved = pickled_bytes(meta) + 2 * parts + pickled_bytes(batch.keys)
    if collect:
        mask_bytes = nbytes(batch.jagged.select("response_mask"))
        moved += pickled_bytes(meta) + 4 * batch.jagged["input_ids"].values().numel() + mask_bytes
    return moved


def nbytes(data: TensorDict) -> int:
    return sum(column.values().nbytes for column in data.values())


def pickled_bytes(value: Any) -> int:
    """What Ray would write for `value`: the pickle and its out-of-band buffers."""
    buffers: list[Any] = []
    head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(buffer.raw().nbytes for buffer in buffers)


def in_parts(rows: list[Any]) -> list[list[Any]]:
    size = len(rows) // NUM_WORKERS
    return [rows[part * size : (part + 1) * size] for part in range(NUM_WORKERS)]


def expect_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(found, expected):
        raise AssertionError("the column that came back is not the one that was sent, plus one")


def tree_cpu_s() -> float:
    """CPU seconds of the driver and of everything that it started and that is still alive."""
    me = psutil.Process()
    total = time.process_time()
    for process in me.children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def free_memory() -> None:
    """Give back what earlier parts left: seventeen processes and 4096 trajectories can fill a machine of 24 GB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def settle(patience_s: float = 30.0) -> None:
    """Wait until what was started is at rest: Ray starts workers ahead, and ended groups take a while to go."""
    end = time.monotonic() + patience_s
    before = tree_cpu_s()
    while time.monotonic() < end:
        time.sleep(0.5)
        now = tree_cpu_s()
        if now - before < 0.1:
            return
        before = now


def stop_group(group: RayWorkerGroup) -> None:
    for worker in group.workers:
        ray.kill(worker)
    for placement in group.resource_pool.pgs:
        remove_placement_group(placement)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread; verl's own waits have no deadline."""

    late = TimeoutError(f"not done within {seconds:g} s")
    rang = False

    def ring(_signal: int, _frame: FrameType | None) -> None:
        nonlocal rang
        rang = True
        raise late

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception as error:
        if rang and error is not late:
            raise late from error  # Ray's compiled code makes another error of it
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def end_processes(started: list[psutil.Process], patience_s: float) -> None:
    """End what is left of the processes that this run started, once they had time to go by themselves."""
    _, alive = psutil.wait_procs(started, timeout=patience_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="an .npy of whole trajectories' token counts")
    parser.add_argument("--counts", type=int, nargs="+", default=[256, 1024, 4096], help="trajectories in a batch")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each part")
    parser.add_argument("--warmups", type=int, default=2, help="calls before those")
    parser.add_argument("--starts", type=int, default=3, help="groups to start, two at least; the last two stay")
    parser.add_argument("--num-cpus", type=int, default=24, help="what Ray is told that it has")
    parser.add_argument("--object-store-gib", type=float, default=3.0)
    parser.add_argument("--part-deadline", type=float, default=180.0, help="seconds for one part")
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds for the whole run")
    asked = parser.parse_args()
    if asked.starts < 2 or any(count % NUM_WORKERS for count in asked.counts):
        parser.error(f"--starts must be at least 2, and every count a multiple of {NUM_WORKERS}")

    stdout = os.dup(1)
    os.dup2(2, 1)  # verl and Ray print; stdout is for the one JSON object
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.pop(SERIALIZATION, None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the finally below runs
    bench = Bench(asked)

    def give_up() -> None:
        bench.found["error"] = f"the run was not done within {asked.deadline:g} s"
        os.write(stdout, (json.dumps(bench.found) + "\n").encode())
        end_processes(psutil.Process().children(recursive=True), patience_s=0)
        os._exit(3)

    watchdog = threading.Timer(asked.deadline, give_up)
    watchdog.daemon = True
    watchdog.start()
    scratch = tempfile.mkdtemp(prefix="dv-", dir="/tmp")  # short: Ray's socket paths are limited
    try:
        start = time.perf_counter()
        ray.init(
            address="local",
            num_cpus=asked.num_cpus,
            num_gpus=0,
            object_store_memory=int(asked.object_store_gib * 2**30),
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=scratch,
        )
        bench.found["ray_init_s"] = time.perf_counter() - start
        bench.run()
    except Exception as error:
        bench.found["error"] = f"{type(error).__name__}: {error}"[:2000]
    finally:
        started = psutil.Process().children(recursive=True)
        try:
            with alarm(60):
                tq.close()
                ray.shutdown()
        except Exception as error:
            bench.found["shutdown_error"] = f"{type(error).__name__}: {error}"[:2000]
        end_processes(started, patience_s=5)
        watchdog.cancel()
        shutil.rmtree(scratch, ignore_errors=True)
        os.write(stdout, (json.dumps(bench.found) + "\n").encode())


if __name__ == "__main__":
    # By its name, so that Ray's workers import the class, as they import verl's, and do not get it by value.
    import dispatch_verl

    dispatch_verl.main()
