# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose matrix products run in fp8 (e4m3), with scales per row that are computed as the products are.

Each operand is rounded along the dim that the product sums over: one scale for each token or output of the forward,
others for the two products of the backward pass. Scales are powers of two, so that rounding to e4m3 is the only
rounding, and a weight is rounded alike for the forward and the backward pass unless it is tiny within its row or
column. Gradients are e4m3 as well: a scale per row leaves them a range of 2^17, and e5m2 would keep a bit less of each
number. Parameters, masters, optimizer state and all other operations are what they are without fp8.

On CUDA a product is one `torch._scaled_mm`; elsewhere it is emulated, which only tests ask for: `require_fp8` refuses
such devices."""

# T tokens · K inputs · N outputs · R rows of a product · C its summed dim

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.errors import ModelError

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32; its inverse is finite
_MULTIPLE = 16  # of the dims of a product
_OLDEST = (8, 9)  # compute capability with fp8: Ada, then Hopper
_NAMES = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
)

Products = Literal["plain", "fp8", "generation"]
"""What linear layers compute with: their parameters; these rounded to fp8 anew; their fp8 copies for generation."""


def require_fp8(device: torch.device, key: str) -> None:
    """Raises an error if the device has no products in fp8."""
    if device.type != "cuda":
        raise ModelError(
            f"{key}: {device.type} has no products in fp8. Remove it, or use a GPU of Ada, Hopper or newer."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        raise ModelError(
            f"{key}: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and "
            f"products in fp8 need {_OLDEST[0]}.{_OLDEST[1]} or newer (Ada, Hopper). Remove it."
        )


def quantized_rows(matrix_RC: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in fp8 and their scales [R, 1]: powers of two with which the largest number of a row is at most 448."""
    largest_R1 = matrix_RC.abs().amax(dim=-1, keepdim=True).float()
    scale_R1 = _power_of_two((largest_R1 / LARGEST).clamp(min=_SMALLEST_SCALE))
    return (matrix_RC.float() * (1.0 / scale_R1)).to(FP8).contiguous(), scale_R1


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """left @ right.T of two matrices in fp8 with their scales, both with the summed dim last."""
    (left_RC, left_scale), (right_RC, right_scale) = left, right
    if not left_RC.is_cuda:
        return emulated_product(left, right, dtype)
    return torch._scaled_mm(
        left_RC,
        right_RC.t(),
        scale_a=left_scale,
        scale_b=right_scale.reshape(1, -1),
        out_dtype=dtype,
        # The other way of summing is slower than bfloat16 where scales are per row.
        use_fast_accum=True,
    )


def emulated_product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """The same from the rounded numbers, with sums in float32."""
    (left_RC, left_scale), (right_RC, right_scale) = left, right
    return (left_RC.float() @ right_RC.float().t() * left_scale * right_scale.t()).to(dtype)


def _power_of_two(positive: Tensor) -> Tensor:
    """Rounded up, by clearing the mantissa: exact on every device."""
    return ((positive.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)


class _Fp8Product(torch.autograd.Function):
    """x @ weight.T; this product and both of its backward pass are in fp8."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        return product(quantized_rows(x_TK), quantized_rows(weight_NK), x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TK, weight_NK = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = product(quantized_rows(grad_TN), quantized_rows(weight_NK.t()), x_TK.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = product(_over_tokens(grad_TN), _over_tokens(x_TK), weight_NK.dtype)
        return grad_x, grad_weight


def _over_tokens(matrix_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the transposed matrix. Tokens are the summed dim here, so zeros fill up their number."""
    num_tokens = matrix_TR.shape[0]
    missing = (num_tokens + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE - num_tokens
    return quantized_rows(F.pad(matrix_TR, (0, 0, 0, missing)).t())


class Fp8Mode:
    """What the linear layers of one model compute with now."""

    def __init__(self, products: Products) -> None:
        self.products: Products = products


class Fp8Linear(nn.Linear):
    """A linear layer that follows the mode of its model. Layers become one in place and keep their parameters."""

    mode: Fp8Mode
    copy_NK: Tensor | None  # the weight in fp8, for generation
    copy_scale: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """The layer's outputs."""
        products = self.mode.products
        if products == "plain":
            return F.linear(input, self.weight, self.bias)
        x_TK = input.reshape(-1, self.in_features)
        if products == "fp8":
            out_TN = cast("Tensor", _Fp8Product.apply(x_TK, self.weight))  # type: ignore[no-untyped-call]
        else:
            assert self.copy_NK is not None
            assert self.copy_scale is not None
            out_TN = product(quantized_rows(x_TK), (self.copy_NK, self.copy_scale), input.dtype)
        out = out_TN.reshape(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


class Fp8Layers:
    """The linear layers of a model that can compute in fp8. At most one engine generates with them at a time."""

    def __init__(self, layers: Sequence[Fp8Linear], left_out: Sequence[str], mode: Fp8Mode) -> None:
        self.layers, self.left_out, self._mode = layers, left_out, mode
        self.generation: Products = "plain"  # what an engine's forwards use
        self._addresses: list[int] = []

    @contextmanager
    def computing(self, products: Products) -> Iterator[None]:
        """A context in which the layers compute with something else."""
        before, self._mode.products = self._mode.products, products
        try:
            yield
        finally:
            self._mode.products = before

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Rounds the weights once, for all forwards of generation until the next call. Copies keep their addresses from
        `restore` to `release`, so that captured graphs stay valid."""
        for layer in self.layers:
            values, scale = quantized_rows(layer.weight)
            if layer.copy_NK is None or layer.copy_scale is None:
                layer.copy_NK, layer.copy_scale = values, scale
            else:
                layer.copy_NK.copy_(values)
                layer.copy_scale.copy_(scale)
        self.generation, self._addresses = "generation", self._where()

    def drop_copies(self) -> None:
        """Frees the copies for good: generation uses the parameters again."""
        self.generation = "plain"
        for layer in self.layers:
            layer.copy_NK = layer.copy_scale = None

    @property
    def nbytes(self) -> int:
        """Device memory of the copies while they are allocated."""
        return sum(layer.copy_NK.numel() for layer in self.layers if layer.copy_NK is not None)

    def release(self) -> int:
        """Frees the memory of the copies and returns its size. No engine may run until it is restored and the weights
        are copied again. Scales stay: they are few."""
        for copy_NK in self._copies():
            copy_NK.untyped_storage().resize_(0)
        return self.nbytes

    def restore(self) -> bool:
        """Takes the memory again; values are undefined until `copy_weights`. Returns True if some address changed."""
        for copy_NK in self._copies():
            copy_NK.untyped_storage().resize_(copy_NK.numel())
        before, self._addresses = self._addresses, self._where()
        return self._addresses != before

    def _copies(self) -> list[Tensor]:
        return [layer.copy_NK for layer in self.layers if layer.copy_NK is not None]

    def _where(self) -> list[int]:
        return [copy_NK.data_ptr() for copy_NK in self._copies()]


def require_undivided(is_divided: bool, key: str) -> None:
    """Raises an error if layers are divided over a tensor axis, whose forward passes are their own."""
    if is_divided:
        raise ModelError(
            f"{key}: layers that are divided over a tensor axis do not compute in fp8. Remove it, or use "
            "placement.policy.shard instead of tensor."
        )


def use_fp8(decoder_layers: Sequence[nn.Module], key: str, *, learner: bool) -> Fp8Layers:
    """Makes the linear layers of attention and MLPs able to compute in fp8, in place. Heads, embeddings, norms, routers
    and experts of a mixture stay as they are, and so do layers whose sizes are no multiples of 16. `learner`: they do
    so from now on."""
    mode, layers, left_out = Fp8Mode("fp8" if learner else "plain"), [], []
    for index, decoder_layer in enumerate(decoder_layers):
        for name, module in decoder_layer.named_modules():
            own = name.removesuffix(".base_layer").rpartition(".")[2]
            if type(module) is not nn.Linear or own not in _NAMES:
                continue
            if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
                left_out.append(f"layers.{index}.{name}")
                continue
            module.__class__ = Fp8Linear
            layer = cast("Fp8Linear", module)
            layer.mode, layer.copy_NK, layer.copy_scale = mode, None, None
            layers.append(layer)
    if not layers:
        raise ModelError(
            f"{key}: no linear layer of this model can compute in fp8. These are {', '.join(sorted(_NAMES))} with "
            f"sizes that are multiples of {_MULTIPLE}"
            + (f"; {left_out[0]} and {len(left_out) - 1} others are not. " if left_out else ". ")
            + "Remove it."
        )
    return Fp8Layers(layers, left_out, mode)
