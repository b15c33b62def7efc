# SPDX-License-Identifier: Apache-2.0
"""What Podium adds to vLLM's worker: weights that arrive in parts, and draws and log-probs in Podium's meaning.

vLLM mixes the class into its own worker by name (`worker_extension_cls`) and calls it on every rank. Written for the
workers of the vLLM versions in docs/vllm.md.
"""

# N requests of one step · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from podium.rollout.vllm.sampling import SEED, position_seed

# Below this vLLM takes the most likely token.
_GREEDY_BELOW = 1e-5


class PodiumWorker:
    """Methods of every worker. The names carry a prefix because vLLM refuses those that its worker has already."""

    model_runner: Any
    vllm_config: Any

    def podium_use_policy_sampler(self) -> None:
        self.model_runner.sampler = PolicySampler(self.model_runner)

    def podium_why_no_weights(self) -> str | None:
        """Why this model's weights cannot be renewed, or None."""
        modules = self.model_runner.get_model().modules()
        if current_platform.is_cpu() and any(hasattr(module, "w13_weight") for module in modules):
            # Seen with 0.32.0: reloading the very same weights changes log-probs by 0.1.
            return "vLLM's CPU build does not renew the experts of a mixture rightly. Use the native engine, or a GPU."
        return None

    def podium_begin_weights(self) -> None:
        """Opens the model for new weights. vLLM repacks some layers, so its own bookkeeping has to know."""
        self._podium_loaded: set[str] = set()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def podium_take_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Checkpoint names and values. vLLM keeps them until all of a layer is there, so they must not be reused."""
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            loaded = self.model_runner.get_model().load_weights(iter(tensors))
        self._podium_loaded.update(loaded or ())

    def podium_finish_weights(self) -> list[str]:
        """Closes the model; says which of its parameters got no weights and still hold the old ones."""
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_head(model)
        self.model_runner.reset_encoder_cache()
        return sorted({name for name, _ in model.named_parameters()} - self._podium_loaded)

    def podium_clean_cache(self) -> None:
        """Zeroes. Attention multiplies what lies behind a sequence in its last block by nought, which NaN survives."""
        for held in self.model_runner.kv_caches:
            for cache in held if isinstance(held, (list, tuple)) else [held]:
                cache.zero_()

    def podium_weight_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.model_runner.get_model().parameters())


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU vLLM computes with a packed copy of a head's weights, and renews it only for heads that are loaded: one
    that is tied to the embedding would keep the old copy."""
    if not current_platform.is_cpu():
        return
    for head in [module for module in model.modules() if isinstance(module, ParallelLMHead)]:
        if any(head.weight is other.weight for other in model.modules() if _is_plain_embedding(other)):
            head.quant_method.process_weights_after_loading(head)


def _is_plain_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


class PolicySampler(Sampler):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's sampler with two changes. Log-probs are those of softmax(logits / temperature) before anything is cut off
    or penalised, which none of vLLM's modes gives. And each draw has its own generator, seeded by request and position:
    vLLM's generators count draws, which goes wrong when a request is computed anew in parts."""

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode="raw_logprobs")
        self._runner = runner
        self._generators: dict[int, torch.Generator] = {}
        self._temperature_N: Tensor | None = None
        self._empty_N: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> SamplerOutput:
        self._temperature_N = sampling_metadata.temperature
        seeded = replace(sampling_metadata, generators=self._seeded(logits.device))
        return super().forward(logits, seeded, *args, **kwargs)

    def compute_logprobs(self, logits_NV: Tensor) -> Tensor:
        logits_NV = logits_NV.float()
        if self._temperature_N is not None:
            greedy_N = self._temperature_N < _GREEDY_BELOW
            logits_NV = logits_NV / self._temperature_N.masked_fill(greedy_N, 1.0).unsqueeze(1)
        return torch.log_softmax(logits_NV, dim=-1)

    def apply_logits_processors(self, logits_NV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        processed_NV: Tensor = super().apply_logits_processors(logits_NV, *args, **kwargs)
        self._empty_N = processed_NV.amax(dim=-1).isneginf()
        return processed_NV

    def gather_logprobs(self, logprobs_NV: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Of the drawn tokens only; their ranks, for which vLLM compiles a kernel, are wanted by nobody. Where bias and
        allowed tokens leave nothing to draw the log-prob is made infinite, which tells the engine."""
        drawn_N1 = token_ids.unsqueeze(-1)
        logprobs_N1 = logprobs_NV.gather(-1, drawn_N1)
        if self._empty_N is not None:
            logprobs_N1 = logprobs_N1.masked_fill(self._empty_N.unsqueeze(-1), torch.inf)
        return LogprobsTensors(drawn_N1.int(), logprobs_N1, torch.zeros_like(token_ids))

    def _seeded(self, device: torch.device) -> dict[int, torch.Generator]:
        chosen = {}
        for row, name in enumerate(self._runner.input_batch.req_ids):
            state = self._runner.requests[name]
            if SEED in (extra := state.sampling_params.extra_args or {}):
                generator = self._generators.get(row) or self._generators.setdefault(row, torch.Generator(device))
                chosen[row] = generator.manual_seed(position_seed(extra[SEED], state.num_tokens))
        return chosen
