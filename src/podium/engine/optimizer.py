# SPDX-License-Identifier: Apache-2.0
"""AdamW on float32 masters, with clipping and the non-finite guard inside the fused kernel; learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from podium.engine.parameters import TrainedParameter
from podium.engine.state_streams import ParameterState, StateStreams, on_host, zeros_on_host
from podium.recipe import OptimizerSection

Gradients = Mapping[int, Tensor]
"""This rank's part of every gradient, by id of its TrainedParameter. A missing one got no gradient in this step, on any
rank."""


class AdamW:
    """Moments and masters of the parameters that this rank holds, as plain local tensors: it does not handle sharding.

    As in torch, a parameter without a gradient in a step does not change: no weight decay is applied, and its moments
    and its own count of updates, which corrects the moments' bias, stay the same."""

    def __init__(self, trained: Sequence[TrainedParameter], section: OptimizerSection) -> None:
        self._section = section
        self.trained = [each for each in trained if not each.is_frozen]
        self._streams = StateStreams() if section.offload else None
        if self._streams is not None:
            for each in self.trained:
                if each.has_own_master:
                    each.master.data = on_host(each.master)
        self.first_moments = [self._zeros(each) for each in self.trained]
        self.second_moments = [self._zeros(each) for each in self.trained]
        moments = zip(self.trained, self.first_moments, self.second_moments, strict=True)
        # A rank may hold no row of a small tensor.
        held = [_Slot(index, *each) for index, each in enumerate(moments) if each[0].master.numel()]
        self._groups = [
            ([slot for slot in held if _is_decayed(slot.trained)], section.weight_decay),
            ([slot for slot in held if not _is_decayed(slot.trained)], 0.0),
        ]
        device = held[0].trained.parameter.device if held else torch.device("cpu")
        self._one_pass = device.type == "cuda" and find_spec("triton") is not None
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        # How many of the counted updates each parameter had no gradient in.
        self._missed_P = torch.zeros(len(self.trained), dtype=torch.float32, device=device)
        self._have_missed: set[int] = set()
        self._absent: tuple[frozenset[int], Tensor] = (frozenset(), torch.zeros_like(self._missed_P))

    @property
    def is_offloaded(self) -> bool:
        """Whether moments, and masters that are no parameters, stay in host memory."""
        return self._streams is not None

    def _zeros(self, each: TrainedParameter) -> Tensor:
        if self._streams is None:
            return torch.zeros_like(each.master)
        return zeros_on_host(each.master, pinned=each.parameter.is_cuda)

    def set_updates(self, updates: int, missed: Mapping[str, int] | None = None) -> None:
        """Sets the number of updates of the moments, for a resumed run; `missed` comes from `missed_updates`."""
        self._count.fill_(updates)
        missed = missed or {}
        self._have_missed = {index for index, each in enumerate(self.trained) if missed.get(each.name)}
        self._missed_P.copy_(torch.tensor([float(missed.get(each.name, 0)) for each in self.trained]))

    def missed_updates(self) -> dict[str, int]:
        """Names of the parameters that had no gradient in some updates -> number of those updates."""
        if not self._have_missed:
            return {}
        counts = self._missed_P.tolist()
        return {self.trained[index].name: int(counts[index]) for index in sorted(self._have_missed)}

    @property
    def updates(self) -> int:
        """Number of updates of the moments; skipped steps do not count."""
        return int(self._count.item())

    def step(self, gradients: Gradients, *, lr: float, clip: Tensor, skip: Tensor) -> None:
        """One update. `clip` multiplies every gradient; if `skip` is 1, nothing changes. Both stay on the device: the
        host does not wait."""
        update = self._update_in_one_pass if self._one_pass else self._update_with_torch
        for group, weight_decay in self._groups:
            terms = _Terms(lr=lr, weight_decay=weight_decay, clip=clip, skip=skip)
            states = [slot.state(gradients[id(slot.trained)]) for slot in group if id(slot.trained) in gradients]
            if self._streams is not None:
                for state in self._streams.on_device(states):
                    update([state], terms)
            elif states:
                update(states, terms)
        if self._streams is not None:
            self._streams.wait()  # checkpoints and snapshots read the state on the host
        absent = frozenset(index for index, each in enumerate(self.trained) if id(each) not in gradients)
        if absent:
            self._have_missed |= absent
            self._missed_P += self._mask_of(absent) * (1.0 - skip)
        self._count += 1.0 - skip

    def _mask_of(self, absent: frozenset[int]) -> Tensor:
        """Ones at these parameters. Cached: it is usually the same as in the step before."""
        if self._absent[0] != absent:
            mask = torch.tensor([float(index in absent) for index in range(len(self.trained))])
            self._absent = absent, mask.to(self._missed_P.device)
        return self._absent[1]

    def _count_of(self, index: int) -> Tensor:
        """Updates of this parameter's moments, as a separate tensor."""
        if index in self._have_missed:
            return self._count - self._missed_P[index]
        return self._count.clone()

    def _update_in_one_pass(self, states: list[ParameterState], terms: _Terms) -> None:
        from podium.engine.fused_adamw import scalars_for, update

        section = self._section
        common = scalars_for(terms.clip, terms.skip, self._count + 1, section.betas)
        for each in states:
            scalars = common
            if each.index in self._have_missed:
                scalars = scalars_for(terms.clip, terms.skip, self._count_of(each.index) + 1, section.betas)
            update(
                each.master,
                each.gradient,
                each.first,
                each.second,
                each.copy,
                scalars,
                lr=terms.lr,
                betas=section.betas,
                eps=section.eps,
                weight_decay=terms.weight_decay,
            )

    def _update_with_torch(self, states: list[ParameterState], terms: _Terms) -> None:
        section = self._section
        adamw(
            [each.master for each in states],
            [each.gradient.float() for each in states],
            [each.first for each in states],
            [each.second for each in states],
            [],
            [self._count_of(each.index) for each in states],  # the kernel counts up each of them
            fused=True,
            grad_scale=terms.clip.reciprocal(),  # the kernel divides by it
            found_inf=terms.skip,
            amsgrad=False,
            beta1=section.betas[0],
            beta2=section.betas[1],
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            eps=section.eps,
            maximize=False,
        )
        for each in states:
            if each.copy is not None:
                each.copy.copy_(each.master)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Terms:
    """Settings of one update, apart from the gradients."""

    lr: float
    weight_decay: float
    clip: Tensor
    skip: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    index: int  # in the optimizer's list
    trained: TrainedParameter
    first: Tensor
    second: Tensor

    def state(self, gradient: Tensor) -> ParameterState:
        """All that an update of it reads and writes."""
        each = self.trained
        return ParameterState(
            index=self.index, gradient=gradient, master=each.master, first=self.first, second=self.second,
            copy=each.parameter.detach() if each.has_own_master else None,
            device=each.parameter.device,
        )  # fmt: skip


def _is_decayed(trained: TrainedParameter) -> bool:
    """Matrices are decayed; norms and biases are not, even if the biases of all experts are one matrix."""
    return len(trained.shape) >= 2 and not trained.name.endswith("bias")
