# SPDX-License-Identifier: Apache-2.0
"""Settings of a vLLM engine, and its creation."""

from __future__ import annotations

import contextlib
import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from podium.data.tokenizer import require_tokenizer_files
from podium.errors import MissingExtraError, ModelError, RolloutError
from podium.rollout.vllm import compat


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Plain values. `cache_bytes` and `memory_share` both bound the cache: the first by its own size, the second by the
    whole engine's share of the device (cache_bytes None)."""

    folder: str  # a Hugging Face checkpoint
    dtype: Literal["float32", "bfloat16", "float16"]
    max_length: int  # prompt and answer together
    max_running: int = 256
    cache_bytes: int | None = None
    memory_share: float = 0.85
    block_size: int | None = None  # None: vLLM's choice
    step_tokens: int | None = None  # prompt and answer tokens of one step; None: vLLM's choice
    seed: int = 0
    tensor_parallel: int = 1
    compiled: bool = True  # compiled layers and captured graphs: slower to start, faster to run
    sleep_level: Literal[1, 2] = 1  # 1 keeps the weights in host memory; 2 drops them, an install follows waking
    records_experts: bool = False  # completions of a mixture say which experts their tokens went to
    version: int = 0  # the number of the weights in `folder`


def require_vllm() -> None:
    """Raises an error with install instructions if vLLM is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            "the rollout engine vLLM is asked for and not installed. Install it with pip install 'podium[vllm]' (on a "
            "machine without a GPU: `make install-vllm`, see docs/vllm.md), or use the native engine."
        )


def has_tokenizer(folder: str) -> bool:
    """Whether the folder has the files of a tokenizer."""
    try:
        require_tokenizer_files(folder, "folder")
    except ModelError:
        return False
    return True


def make_engine(settings: VllmSettings) -> Any:
    """Creates vLLM's LLMEngine in this process, with Podium's worker methods mixed in."""
    require_vllm()
    if not Path(settings.folder).is_dir():
        raise ModelError(f"there is no folder {settings.folder} to load a model from. Give a Hugging Face checkpoint.")
    with compat.engine_variables(), _unchanged_process():
        from vllm import EngineArgs

        arguments = EngineArgs(
            model=settings.folder,
            skip_tokenizer_init=not has_tokenizer(settings.folder),
            dtype=settings.dtype,
            seed=settings.seed,
            max_model_len=settings.max_length,
            max_num_seqs=settings.max_running,
            max_num_batched_tokens=settings.step_tokens,
            kv_cache_memory_bytes=settings.cache_bytes,
            gpu_memory_utilization=settings.memory_share,
            block_size=settings.block_size,
            tensor_parallel_size=settings.tensor_parallel,
            # Processes of this one. In a placement group of Ray, vLLM would start actors instead, for which there is
            # no room: the devices are this worker's.
            distributed_executor_backend="mp" if settings.tensor_parallel > 1 else None,
            # Routers are asked to report after the model was loaded, which graphs made before would not do.
            enforce_eager=not settings.compiled or settings.records_experts,
            enable_prefix_caching=True,
            enable_sleep_mode=compat.is_cuda(),
            async_scheduling=False,  # a token's step is over when the next begins: its version is the engine's
            generation_config="vllm",  # a checkpoint's own defaults for sampling are ignored
            worker_extension_cls="podium.rollout.vllm.worker.PodiumWorker",
            disable_log_stats=True,
        )
        try:
            engine = compat.make_llm_engine(arguments)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise RolloutError(
                f"vLLM could not start with {settings.folder} ({type(error).__name__}: {error}). See the sizes in its "
                "settings (cache_bytes, memory_share, max_length), and whether vLLM has this architecture."
            ) from error
    engine.collective_rpc("podium_use_policy_sampler")
    if settings.records_experts:
        try:
            engine.collective_rpc("podium_record_experts")
        except Exception as error:
            raise RolloutError(
                f"vLLM does not report which experts tokens of {settings.folder} go to "
                f"({type(error).__name__}: {error}). Set rollout.router_replay to off."
            ) from error
    return engine


@contextlib.contextmanager
def _unchanged_process() -> Iterator[None]:
    """Restores the state of the process. vLLM seeds all random numbers of the process, and on a CPU replaces
    torch.set_num_threads by a no-op."""
    threads, states = torch.set_num_threads, (random.getstate(), np.random.get_state(), torch.get_rng_state())
    try:
        yield
    finally:
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
