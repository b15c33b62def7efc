# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over micro-batches of unequal size, with a gradient that does not depend on how they were
split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from podium.algorithms.dense import token_cross_entropy
from podium.algorithms.router_statistics import RouterStatistics
from podium.data.documents import Example, PackedBatch, PackedExamples, pack_examples
from podium.engine.mesh import Mesh
from podium.engine.optimizer import AdamW
from podium.engine.parameters import TrainedParameter
from podium.engine.router_watch import RouterWatch, WatchedStep
from podium.engine.sharding import PackedModel, local_tensor
from podium.errors import UnsupportedModelError
from podium.models.causal_lm import PackedCausalLM
from podium.models.head import EntropyObjective, LogitsObjective, Objective, TokenLoss, TokenObjective
from podium.models.packing import on_device, round_tokens, to_device
from podium.models.prefix_sharing import prefix_cost
from podium.models.scalar import PackedScalarLM, ScalarObjective
from podium.progress import mark_progress

_PATTERNS = 1021  # a prime; sums of it over all ranks are exact in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Results of one optimizer step."""

    loss: float  # global mean over the normalizer
    grad_norm: float  # before clipping
    skipped: bool  # non-finite loss or gradient: nothing was changed
    stop_requested: bool  # some rank should stop
    save_failed: bool  # some rank could not write its part of a checkpoint
    sums: Mapping[str, float]  # sums of the step's tally, over all ranks
    routers: RouterStatistics | None = None  # of a mixture of experts


class Tally:
    """Sums that objectives collect beside the loss, over the micro-batches of a step. The report has them for all
    ranks. They stay on the device until it is read."""

    def __init__(self, names: Sequence[str], device: torch.device, sources: Sequence[str] = ()) -> None:
        """`sources`: names of the data's sources, where there are several; their losses are summed too."""
        self._num_names = len(names)
        self.names = (*names, *(source_sum(source) for source in sources))
        self.sums_M = torch.zeros(len(self.names), dtype=torch.float32, device=device)

    @property
    def has_sources(self) -> bool:
        """Whether losses are summed by source."""
        return len(self.names) > self._num_names

    def add(self, *sums: Tensor) -> None:
        """Adds to the sum of each name."""
        self.sums_M[: self._num_names] += torch.stack([each.detach().float() for each in sums])

    def add_losses(self, loss_N: Tensor, source_N: Tensor | None) -> None:
        """Adds losses of tokens or rows to the sums of their sources; nothing without several sources."""
        if self.has_sources and source_N is not None:
            self.sums_M[self._num_names :].index_add_(0, source_N, loss_N.detach().float())


def source_sum(source: str) -> str:
    """The name of a source's loss in a tally."""
    return f"source/{source}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSources:
    """Which source each trained token of a step comes from."""

    names: tuple[str, ...]
    of_micro_batches: tuple[NDArray[np.int64], ...]  # [S] each: positions in `names`


def by_source(objective: TokenObjective | EntropyObjective, tally: Tally, source_S: Tensor) -> EntropyObjective:
    """The same objective, whose losses are also summed by source. `source_S`: of each trained token."""

    def loss(logprobs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
        if isinstance(objective, EntropyObjective):
            loss_C = objective(logprobs_C, entropy_C, tokens)
        else:
            loss_C = objective(logprobs_C, tokens)
        tally.add_losses(loss_C, source_S[tokens])
        return loss_C

    return EntropyObjective(loss=loss, watches_entropy=objective.watches_entropy, ties_tokens=objective.ties_tokens)


class PendingReport:
    """A step's report that may still be in transfer from the device: reading it waits."""

    def __init__(self, values: Tensor, names: Sequence[str] = (), routers: RouterWatch | None = None) -> None:
        """`values`: the report, the sums of these names, and those of the routers."""
        self._names, self._routers = tuple(names), routers
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values

    def resolve(self) -> StepReport:
        """Waits for the device and returns the report."""
        if self._event is not None:
            self._event.synchronize()
        loss, grad_norm, skipped, stops, differs, failed, *sums = self._values.tolist()
        sums, routed = sums[: len(self._names)], sums[len(self._names) :]
        if differs:
            raise UnsupportedModelError(
                "some parameters got a gradient on one rank and none on another, so their sum over the ranks would be "
                "wrong: layers that only some tokens reach must get a gradient of zeros when none does. Train this "
                "architecture on one device."
            )
        return StepReport(
            loss=loss, grad_norm=grad_norm, skipped=skipped > 0, stop_requested=stops > 0,
            save_failed=failed > 0, sums=dict(zip(self._names, sums, strict=True)),
            routers=None if self._routers is None else self._routers.statistics(routed),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveBatch:
    """A micro-batch and the objective over its trained tokens."""

    packed: PackedBatch
    objective: Objective | EntropyObjective | LogitsObjective | ScalarObjective
    kind: Literal["objective", "divergence"] = "objective"  # divergence: the objective is one of whole distributions


class ObjectiveBatches(Protocol):
    """The micro-batches of a step: a list, or created one by one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ObjectiveBatch]: ...


class LazyBatches:
    """Micro-batches that are created when they are needed: outputs of a second model in `make` (hidden states of a
    teacher) are held for one of them at a time. Iterated once."""

    def __init__(self, parts: Sequence[Sequence[Example]], make: Callable[[PackedExamples], ObjectiveBatch]) -> None:
        self._parts, self._make = parts, make

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[ObjectiveBatch]:
        return (self._make(pack_examples(part)) for part in self._parts)

    @property
    def packed(self) -> Iterator[PackedBatch]:
        """The micro-batches without their objectives, which are not created for this."""
        return (pack_examples(part).packed for part in self._parts)


class TrainEngine:
    """Model, optimizer and mesh of one rank. Depends on losses, not on methods or on where it runs."""

    def __init__(
        self,
        model: PackedModel,
        trained: Sequence[TrainedParameter],
        optimizer: AdamW,
        mesh: Mesh,
        clip_norm: float | None,
        *,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.mesh = mesh
        self.frozen = [each for each in trained if each.is_frozen]  # saved and published, never changed
        self._trained = [each for each in trained if not each.is_frozen]
        # Held whole by every rank of a sharded model, because they compute in another dtype.
        own = self._trained if mesh.is_sharded else []
        self._replicated = [each for each in own if not isinstance(each.parameter, DTensor)]
        self._summed = [each for each in self._trained if each.has_part_of_gradient]
        self._clip_norm = clip_norm
        self._multiple = round_tokens(mesh.device)
        self._routers = RouterWatch.of(model, mesh, router_aux_loss_coef)  # None: no mixture of experts
        self.save_failed = False  # whether this rank tells the others that a checkpoint failed, with its next step
        self.num_optimizer_steps = 0  # of this process, begun: skipped ones count too
        self.prefixes = prefix_cost(model, mesh.device)  # None: documents do not share prefixes
        self.before_update: Callable[[], None] = _nothing  # called before weights and moments change

    @property
    def language_model(self) -> PackedCausalLM:
        """The model, if it is one that generates."""
        assert isinstance(self.model, PackedCausalLM)
        return self.model

    def train_step(
        self,
        micro_batches: Sequence[PackedBatch],
        loss: TokenLoss,
        *,
        normalizer: float,
        lr: float,
        stop_requested: bool = False,
        sources: TokenSources | None = None,
    ) -> PendingReport:
        """Forward and backward over this rank's micro-batches (equal in number on all ranks), then one update.
        `sources`: where the tokens come from; the report then has the sum of the loss of each source."""
        batches, tally = _of_tokens(micro_batches, loss), None
        if sources is not None:
            device = self.mesh.device
            tally = Tally((), device, sources.names)
            batches = [
                replace(batch, objective=by_source(TokenObjective(loss), tally, on_device(source_S, device)))
                for batch, source_S in zip(batches, sources.of_micro_batches, strict=True)
            ]
        return self.objective_step(batches, normalizer=normalizer, lr=lr, stop_requested=stop_requested, tally=tally)[0]

    def objective_step(
        self,
        micro_batches: ObjectiveBatches,
        *,
        normalizer: float,
        lr: float,
        stop_requested: bool = False,
        tally: Tally | None = None,
    ) -> tuple[PendingReport, list[tuple[Tensor, ...]]]:
        """Like `train_step`, with an objective for each micro-batch. Also returns results of the forward passes for
        each trained token: log-probs and entropies of a language model, values of a critic. `tally`: collects sums of
        the objectives."""
        self.model.train()
        total, gradients, seen, routed = self._gradients(micro_batches, normalizer)
        report = self._apply(
            total, gradients, normalizer=normalizer, lr=lr, stop_requested=stop_requested, tally=tally, routed=routed
        )
        return report, seen

    def _apply(
        self,
        total: Tensor,
        gradients: dict[int, Tensor],
        *,
        normalizer: float,
        lr: float,
        stop_requested: bool,
        tally: Tally | None,
        routed: Tensor | None,
    ) -> PendingReport:
        squares = self._norms(gradients, total).square().sum()
        # `new_full` fills on the device; `new_tensor` would copy from the host and wait for all work in flight.
        pattern = self._pattern(gradients)
        flags = [total.new_full((), float(each)) for each in (stop_requested, pattern, self.save_failed)]
        # Of a tensor group, one rank counts the loss, the tally and the routers of their tokens.
        own = [total, *([] if tally is None else [tally.sums_M]), *([] if routed is None else [routed])]
        counted = own if self.mesh.counts_tokens else [torch.zeros_like(each) for each in own]
        mine = torch.stack([counted[0], squares, *flags])
        sums = self.mesh.sum(torch.cat([mine, *counted[1:]]) if counted[1:] else mine)
        norm = sums[1].sqrt()
        skip = (~torch.isfinite(sums[:2]).all()).float()
        limit = self._clip_norm or float("inf")
        clip = torch.where(norm > limit, limit / (norm + 1e-6), 1.0)
        self.num_optimizer_steps += 1
        self.before_update()
        self.optimizer.step(gradients, lr=lr, clip=clip, skip=skip)
        differs = sums[3] - self.mesh.world * pattern
        values = torch.cat([torch.stack([sums[0] / normalizer, norm, skip, sums[2], differs, sums[4]]), sums[5:]])
        return PendingReport(values, () if tally is None else tally.names, self._routers)

    def _norms(self, gradients: Mapping[int, Tensor], total: Tensor) -> Tensor:
        """Norm of each parameter's gradient that this rank counts: a part that several ranks hold is counted by
        one."""
        held = [each for each in self._trained if each.master.numel()]
        counted = [id(each) for each in held if id(each) in gradients and not each.is_copy]
        norms = torch._foreach_norm([gradients[key] for key in counted], 2, dtype=torch.float32) if counted else []
        by_id, zero = dict(zip(counted, norms, strict=True)), total.new_zeros(())
        return torch.stack([by_id.get(id(each), zero) for each in held] or [zero])

    def _pattern(self, gradients: Mapping[int, Tensor]) -> int:
        """A small number that encodes which parameters got no gradient; equal on all ranks if these are the same
        ones."""
        absent = (at for at, each in enumerate(self._trained, start=1) if id(each) not in gradients)
        return sum(at * at for at in absent) % _PATTERNS

    def gradients(
        self, micro_batches: Sequence[PackedBatch], loss: TokenLoss, *, normalizer: float
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns (sum of the loss on this rank, gradient of this rank's part of each parameter that got one, by id of
        the trained parameter). Everything is divided by the step's global count, never by a local one."""
        return self._gradients(_of_tokens(micro_batches, loss), normalizer)[:2]

    def trial(self, batch: PackedBatch) -> None:
        """One forward and backward for timing; the gradients are discarded."""
        objective: Objective | ScalarObjective = TokenObjective(token_cross_entropy)
        if isinstance(self.model, PackedScalarLM):
            objective = lambda values_S: values_S.square()  # noqa: E731
        self._gradients([ObjectiveBatch(packed=batch, objective=objective)], 1.0)

    def _gradients(
        self, micro_batches: ObjectiveBatches, normalizer: float
    ) -> tuple[Tensor, dict[int, Tensor], list[tuple[Tensor, ...]], Tensor | None]:
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        sums: dict[int, Tensor] = {}
        seen: list[tuple[Tensor, ...]] = []
        watched = None if self._routers is None else self._routers.begin(_packed(micro_batches), self._multiple)
        for batch in micro_batches:
            value, *rest = self._forward(batch, watched)
            (value / normalizer).backward()
            self.model.route(None)
            total += value.detach()
            seen.append(tuple(rest))
            if len(micro_batches) > 1:
                self._add_in_float32(sums)
            mark_progress()
        by_parameter = {id(each): self._gradient(each, sums) for each in self._trained}
        gradients = {key: gradient for key, gradient in by_parameter.items() if gradient is not None}
        self._add_up(gradients, self._replicated, self.mesh.sum_over_data)
        if self.mesh.tensor is not None:
            self._add_up(gradients, self._summed, self.mesh.tensor.sum)
        return total, gradients, seen, None if watched is None else watched.sums

    def _forward(self, batch: ObjectiveBatch, watched: WatchedStep | None = None) -> tuple[Tensor, ...]:
        tokens = to_device(batch.packed, self.mesh.device, multiple=self._multiple, prefixes=self.prefixes)
        if watched is None:
            result: tuple[Tensor, ...] = self.model(tokens, batch.objective, batch.kind)
            return result
        with watched.watching(tokens, batch.packed) as tokens:
            result = self.model(tokens, batch.objective, batch.kind)
        return result

    def _add_in_float32(self, sums: dict[int, Tensor]) -> None:
        """A single device computes in the model's dtype; its gradients over several micro-batches are summed in
        float32. (Elsewhere torch accumulates in float32 itself.)"""
        for each in self._trained:
            gradient = each.parameter.grad
            if not each.has_own_master or gradient is None:
                continue
            if id(each) in sums:
                sums[id(each)].add_(gradient)
            else:
                sums[id(each)] = gradient.float()
            each.parameter.grad = None

    def _gradient(self, each: TrainedParameter, sums: dict[int, Tensor]) -> Tensor | None:
        """None: nothing computed in the step depends on the parameter. (In a tensor of several experts, those that no
        token reached have zeros.)"""
        if id(each) in sums:
            return sums[id(each)]
        gradient, each.parameter.grad = each.parameter.grad, None
        return None if gradient is None else local_tensor(gradient)

    def _add_up(
        self, gradients: dict[int, Tensor], chosen: Sequence[TrainedParameter], add_up: Callable[[Tensor], Tensor]
    ) -> None:
        """Sums gradients over ranks that each have a summand, all at once: of parameters that every rank holds whole
        and has only the gradient of its own tokens, or of its own heads."""
        if not chosen:
            return
        mine = [gradients.get(id(each)) for each in chosen]
        flat = torch.cat(
            [
                torch.zeros_like(each.master).flatten() if gradient is None else gradient.flatten()
                for each, gradient in zip(chosen, mine, strict=True)
            ]
        )
        parts = add_up(flat).split([each.master.numel() for each in chosen])
        for each, part in zip(chosen, parts, strict=True):
            if id(each) in gradients:
                gradients[id(each)] = part.view(each.master.shape)

    @torch.no_grad()
    def loss_sum(self, micro_batches: Sequence[PackedBatch], loss: TokenLoss) -> Tensor:
        """The loss summed over this rank's trained tokens; for evaluation."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for batch in micro_batches:
            total += self.model(to_device(batch, self.mesh.device, multiple=self._multiple), loss)
        self.model.train()
        return total

    @torch.no_grad()
    def objective_sum(self, micro_batches: ObjectiveBatches) -> Tensor:
        """The objectives summed over this rank's micro-batches (equal in number on all ranks); for evaluation."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        for batch in micro_batches:
            total += self._forward(batch)[0]
            mark_progress()
        self.model.train()
        return total


def _nothing() -> None:
    """Nobody reads the weights meanwhile."""


def _packed(micro_batches: ObjectiveBatches) -> Iterator[PackedBatch]:
    if isinstance(micro_batches, LazyBatches):
        return micro_batches.packed
    return (batch.packed for batch in micro_batches)


def _of_tokens(micro_batches: Sequence[PackedBatch], loss: TokenLoss) -> list[ObjectiveBatch]:
    return [ObjectiveBatch(packed=packed, objective=TokenObjective(loss)) for packed in micro_batches]
