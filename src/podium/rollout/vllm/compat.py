# SPDX-License-Identifier: Apache-2.0
"""Every use of vLLM that is not its public API: submodules, environment variables, and the insides of its engine.

vLLM promises none of this between versions. It was tested with TESTED_VERSIONS; with another one, run `make test-vllm`
and read each function here beside vLLM's source. vLLM is imported inside the functions: this module loads without it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from podium.data.routed_experts import RouterShape
from podium.rollout.vllm.routed_experts import FedTokens

TESTED_VERSIONS = ("0.32.0",)

# vLLM has no other switches for these, so they are set while an engine is created and restored afterwards.
_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, so that Podium times its steps
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # worker.py's sampler is written for the first one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the thread count and cores of this process stay as they are
    "VLLM_NO_USAGE_STATS": "1",  # no usage report is sent
}


# The engine, in the process that steps it.


@contextlib.contextmanager
def engine_variables() -> Iterator[None]:
    """Environment variables that an engine reads while it is created."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(_VARIABLES)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_cuda() -> bool:
    """Whether vLLM was built for CUDA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def make_llm_engine(arguments: Any) -> Any:
    """An LLMEngine whose core runs in this process, from EngineArgs."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config = arguments.create_engine_config()
    # A cache smaller than max_model_len is allowed: requests that do not fit are refused one by one.
    config.model_config.original_max_model_len = -1
    return LLMEngine(
        vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False
    )


def shut_down(engine: Any) -> None:
    """Ends the engine's core and frees its model."""
    engine.engine_core.shutdown()


def token_prompt(tokens: Sequence[int], *, cache_salt: str) -> Any:
    """A prompt of token ids. Only prompts with the same salt share its cached prefixes."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(tokens), cache_salt=cache_salt)


def vocab_size(engine: Any) -> int:
    """Rows of the model's logits."""
    return int(engine.model_config.get_vocab_size())


def world_size(engine: Any) -> int:
    """Ranks that share the model."""
    return int(engine.vllm_config.parallel_config.world_size)


def kv_cache_size(engine: Any) -> tuple[int, int]:
    """Size of the KV cache that requests can use, in tokens and in bytes."""
    cache = engine.vllm_config.cache_config
    tensors = _scheduler(engine).kv_cache_config.kv_cache_tensors
    num_blocks = cache.num_gpu_blocks - 1  # vLLM keeps one block for itself
    return num_blocks * _block_size(engine), sum(each.size for each in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """Requests of the scheduler, and the tokens of their KV cache."""

    running: int
    waiting: int
    cache_tokens_used: int
    cache_tokens_kept: int  # of finished requests, for prefixes
    preemptions: int  # of requests under way


def scheduler_state(engine: Any) -> SchedulerState:
    """The scheduler's requests and cache, now."""
    scheduler, block_size = _scheduler(engine), _block_size(engine)
    running, waiting = scheduler.get_request_counts()
    pool = scheduler.kv_cache_manager.block_pool
    kept_blocks = sum(block.block_hash is not None and block.ref_cnt == 0 for block in pool.blocks)
    return SchedulerState(
        running=running,
        waiting=waiting,
        cache_tokens_used=(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) * block_size,
        cache_tokens_kept=kept_blocks * block_size,
        preemptions=sum(request.num_preemptions for request in scheduler.requests.values()),
    )


def computed_tokens(engine: Any) -> int:
    """Tokens of the running requests that are in the KV cache."""
    return sum(request.num_computed_tokens for request in _scheduler(engine).running)


def num_preemptions(engine: Any, request_id: str) -> int:
    """Preemptions of one running request; 0 for a finished one."""
    internal_ids = engine.output_processor.external_req_ids.get(request_id)
    request = _scheduler(engine).requests.get(internal_ids[0]) if internal_ids else None
    return int(request.num_preemptions) if request is not None else 0


def _scheduler(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def _block_size(engine: Any) -> int:
    return int(engine.vllm_config.cache_config.block_size)


# A worker: `worker` is vLLM's own, with `PodiumWorker` mixed in.


def is_cpu() -> bool:
    """Whether vLLM was built for CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def model_of(worker: Any) -> torch.nn.Module:
    """The worker's model."""
    model: torch.nn.Module = worker.model_runner.get_model()
    return model


def has_fused_experts(model: torch.nn.Module) -> bool:
    """Whether the model is a mixture of experts whose weights vLLM repacks."""
    return any(hasattr(module, "w13_weight") for module in model.modules())


def begin_reload(worker: Any) -> None:
    """Opens the model for new weights. vLLM repacks some layers, so its own bookkeeping must be updated."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model_of(worker))
    if is_cpu():
        _forget_expert_kernels(worker)


def _forget_expert_kernels(worker: Any) -> None:
    """On a CPU vLLM packs experts only where a layer makes its kernel, which it does once: without this, new weights
    would be read as packed ones and are not. The kernels of layers that get no weights are restored at the end."""
    forgotten = []
    for method in _expert_methods(model_of(worker)):
        if method.moe_kernel is not None:
            forgotten.append((method, method.moe_kernel))
            method.moe_kernel = None
    worker.podium_expert_kernels = forgotten


def _expert_methods(model: torch.nn.Module) -> list[Any]:
    methods = (getattr(module, "quant_method", None) for module in model.modules())
    return [each for each in methods if hasattr(each, "moe_kernel")]


def load_weights(worker: Any, tensors: Sequence[tuple[str, Tensor]]) -> set[str]:
    """Loads weights by checkpoint names; returns the parameters that they filled. vLLM keeps the tensors until a layer
    is complete, so they must not be reused."""
    from vllm.config import set_current_vllm_config

    model: Any = model_of(worker)
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        return set(model.load_weights(iter(tensors)) or ())


def finish_reload(worker: Any) -> None:
    """Closes the model, repacks its layers, and clears everything computed with the old weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    model = model_of(worker)
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        for method, kernel in getattr(worker, "podium_expert_kernels", ()):
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        _repack_tied_head(model)
    worker.model_runner.reset_encoder_cache()


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Renews the packed copy of a tied head. On a CPU vLLM computes with a packed copy of a head's weights, and renews
    it only for heads that are loaded: one tied to the embedding would keep the old copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if not is_cpu():
        return
    embeddings = [each for each in model.modules() if isinstance(each, VocabParallelEmbedding)]
    heads: list[Any] = [each for each in embeddings if isinstance(each, ParallelLMHead)]
    inputs: list[Any] = [each for each in embeddings if not isinstance(each, ParallelLMHead)]
    for head in heads:
        if any(head.weight is each.weight for each in inputs):
            head.quant_method.process_weights_after_loading(head)


class ExpertCapture:
    """What the routers of a worker's model choose, step by step. vLLM's own hooks fill its buffer."""

    def __init__(self, worker: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        config, model = worker.vllm_config, model_of(worker)
        with_router = (each for each in model.modules() if isinstance(each, MoERunner))
        self._layers = torch.tensor(sorted({int(each.layer_id) for each in with_router}))
        self._worker = worker
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(model, self._capturer)
        self.shape = RouterShape(
            num_layers=len(self._layers),
            num_experts=config.model_config.get_num_experts(),
            per_token=config.model_config.get_num_experts_per_tok(),
        )
        cache = worker.model_runner.kv_cache_config
        self.num_blocks = int(cache.num_blocks)
        self.block_size = int(cache.kv_cache_groups[0].kv_cache_spec.block_size)

    def step(self, handle_key: str) -> tuple[list[FedTokens], Any]:
        """The tokens of this step whose requests have a handle in their extra_args, and the experts [T, L, K] of all
        its tokens."""
        runner = self._worker.model_runner
        starts = runner.query_start_loc.np
        fed = []
        for row, request_id in enumerate(runner.input_batch.req_ids):
            state = runner.requests[request_id]
            if (handle := (state.sampling_params.extra_args or {}).get(handle_key)) is not None:
                begin, end = int(starts[row]), int(starts[row + 1])
                position = int(runner.input_batch.num_computed_tokens_cpu[row])
                blocks = state.block_ids[0]
                fed.append(FedTokens(handle=handle, begin=begin, count=end - begin, position=position, blocks=blocks))
        num_tokens = int(starts[len(runner.input_batch.req_ids)])
        return fed, self._capturer.device_buffer[:num_tokens, self._layers].cpu().numpy()


def zero_kv_cache(worker: Any) -> None:
    """Zeroes every block of every layer."""
    for layer in worker.model_runner.kv_caches:
        for cache in layer if isinstance(layer, list | tuple) else [layer]:
            cache.zero_()


# The sampler.


def sampler_class() -> Any:
    """vLLM's Sampler, used as a base class."""
    from vllm.v1.sample.sampler import Sampler

    return Sampler


def set_sampler(worker: Any, sampler: Any) -> None:
    """Replaces the sampler of the worker's model runner."""
    worker.model_runner.sampler = sampler


def batch_rows(worker: Any) -> list[tuple[int, dict[str, Any]]]:
    """For each request of this step, in the order of the logits' rows: tokens so far, prompt and answer, and the
    extra_args of its SamplingParams."""
    runner = worker.model_runner
    states = [runner.requests[request_id] for request_id in runner.input_batch.req_ids]
    return [(state.num_tokens, state.sampling_params.extra_args or {}) for state in states]


def with_generators(sampling_metadata: Any, generators: dict[int, torch.Generator]) -> Any:
    """The step's SamplingMetadata with these generators, by row."""
    return replace(sampling_metadata, generators=generators)


def logprobs_of_sampled(token_ids_N: Tensor, logprobs_N1: Tensor) -> Any:
    """vLLM's LogprobsTensors with the sampled token only. Its rank is not computed."""
    from vllm.v1.outputs import LogprobsTensors

    return LogprobsTensors(token_ids_N.unsqueeze(-1).int(), logprobs_N1, torch.zeros_like(token_ids_N))
