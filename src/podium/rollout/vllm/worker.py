# SPDX-License-Identifier: Apache-2.0
"""Podium's additions to vLLM's worker: weights that arrive in parts, and samples and log-probs by Podium's definition.

vLLM mixes the class into its own worker by name (`worker_extension_cls`) and calls it on every rank. Written for the
workers of the vLLM versions in docs/vllm.md."""

# N requests of one step · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.data.routed_experts import Experts
from podium.rollout.vllm import compat
from podium.rollout.vllm.routed_experts import ExpertRecord
from podium.rollout.vllm.sampling import HANDLE, SEED, position_seed

_Sampler: Any = compat.sampler_class()


class PodiumWorker:
    """Methods of every worker. The names have a prefix because vLLM refuses names that its worker already has."""

    def podium_use_policy_sampler(self) -> None:
        """Samples with PolicySampler from now on."""
        self._podium_sampler = PolicySampler(self)
        compat.set_sampler(self, self._podium_sampler)

    def podium_record_experts(self) -> None:
        """Records from now on which experts of a mixture tokens go to. Without effect on a dense model."""
        if compat.has_fused_experts(compat.model_of(self)):
            self._podium_sampler.record_experts(compat.ExpertCapture(self))

    def podium_take_experts(self, handles: Sequence[str]) -> list[Experts | None]:
        """Returns the recorded experts of these requests, which have ended, and forgets them."""
        record = self._podium_sampler.record
        return [None if record is None else record.take(handle) for handle in handles]

    def podium_begin_weights(self) -> None:
        """Opens the model for new weights."""
        self._podium_loaded: set[str] = set()
        compat.begin_reload(self)

    def podium_take_weights(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Loads weights by checkpoint names. vLLM keeps them until a layer is complete, so they must not be reused."""
        self._podium_loaded |= compat.load_weights(self, tensors)

    def podium_finish_weights(self) -> list[str]:
        """Closes the model; returns the parameters that got no weights and still hold the old ones."""
        compat.finish_reload(self)
        return sorted({name for name, _ in compat.model_of(self).named_parameters()} - self._podium_loaded)

    def podium_clean_cache(self) -> None:
        """Zeroes the cache. Attention multiplies positions after a sequence in its last block by zero, which NaN
        survives."""
        compat.zero_kv_cache(self)

    def podium_weight_bytes(self) -> int:
        """Size of this rank's weights."""
        return sum(each.numel() * each.element_size() for each in compat.model_of(self).parameters())


class PolicySampler(_Sampler):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's sampler with each token's own generator, by request and position: vLLM's generators count samples, which
    goes wrong when a request is recomputed in parts. Log-probs are those of the distribution that is sampled from."""

    def __init__(self, worker: PodiumWorker) -> None:
        # After temperature, penalties and truncation. vLLM has no truncation at temperature 0, which counts as 1.
        super().__init__(logprobs_mode="processed_logprobs")
        self._worker = worker
        self._generators: dict[int, torch.Generator] = {}
        self._empty_N: Tensor | None = None
        self._capture: compat.ExpertCapture | None = None
        self.record: ExpertRecord | None = None

    def record_experts(self, capture: compat.ExpertCapture) -> None:
        """Takes what `capture` has after every step."""
        self._capture = capture
        self.record = ExpertRecord(capture.shape, num_blocks=capture.num_blocks, block_size=capture.block_size)

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """One step: seeds the generator of each row, then samples as vLLM does."""
        if self._capture is not None and self.record is not None:
            self.record.add(*self._capture.step(HANDLE))
        seeded = compat.with_generators(sampling_metadata, self._seeded(logits.device))
        return super().forward(logits, seeded, *args, **kwargs)

    def apply_logits_processors(self, logits_NV: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Applies vLLM's processors, and records the rows that they leave without any token."""
        processed_NV: Tensor = super().apply_logits_processors(logits_NV, *args, **kwargs)
        self._empty_N = processed_NV.amax(dim=-1).isneginf()
        return processed_NV

    def gather_logprobs(self, logprobs_NV: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        """Log-probs of the sampled tokens only, without their ranks, for which vLLM compiles a kernel. If bias and
        allowed tokens leave nothing to sample, the log-prob is set to infinity, which tells the engine."""
        logprobs_N1 = logprobs_NV.gather(-1, token_ids.unsqueeze(-1))
        if self._empty_N is not None:
            logprobs_N1 = logprobs_N1.masked_fill(self._empty_N.unsqueeze(-1), torch.inf)
        return compat.logprobs_of_sampled(token_ids, logprobs_N1)

    def _seeded(self, device: torch.device) -> dict[int, torch.Generator]:
        chosen = {}
        for at, (num_tokens, extra_args) in enumerate(compat.batch_rows(self._worker)):
            if SEED in extra_args:
                generator = self._generators.get(at) or self._generators.setdefault(at, torch.Generator(device))
                chosen[at] = generator.manual_seed(position_seed(extra_args[SEED], num_tokens))
        return chosen
