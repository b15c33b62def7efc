# SPDX-License-Identifier: Apache-2.0
"""Linear layers in fp8, with emulated products: error bounds by hand, gradients of the formula, and nothing else
changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.engines import full_gradient, make_engine, random_documents, relative_l2
from helpers.tiny import save_tiny_model
from podium.errors import ModelError
from podium.models.fp8 import FP8, Fp8Layers, Fp8Linear, quantized_rows, require_fp8, require_undivided, use_fp8

CPU = torch.device("cpu")
KEY = "model.fp8"


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.engine.sharding.require_fp8", lambda device, key: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


def rounded(matrix: Tensor) -> Tensor:
    """Each row to the nearest numbers of e4m3 times the power of two that makes its largest at most 448, by hand."""
    rows = []
    for row in matrix.double():
        largest = float(row.abs().max())
        exponent = -126
        while largest > 448 * 2.0**exponent:
            exponent += 1
        rows.append((row / 2.0**exponent).float().to(FP8).double() * 2.0**exponent)
    return torch.stack(rows).float()


def layer_of(inputs: int, outputs: int, *, bias: bool = False, learner: bool = True) -> Fp8Linear:
    torch.manual_seed(0)
    block = nn.Module()
    block.q_proj = nn.Linear(inputs, outputs, bias=bias)
    return use_fp8([block], KEY, learner=learner).layers[0]


# Rounding


def test_scales_are_the_least_powers_of_two() -> None:
    rows = torch.tensor([[448.0, -1.0], [449.0, 0.0], [3.5, 1.75], [-7.0 * 2.0**-20, 0.0]])
    values, scale = quantized_rows(rows)
    assert scale.flatten().tolist() == [1.0, 2.0, 2.0**-7, 2.0**-26]
    assert values.float().tolist() == [[448.0, -1.0], [224.0, 0.0], [448.0, 224.0], [-448.0, 0.0]]


def test_every_number_is_within_the_bound_of_its_row() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 48, generator=draw) * torch.logspace(-30, 30, 64)[:, None]
    values, scale = quantized_rows(rows)
    found = values.float() * scale
    # 4 bits: half a unit is 2^-4 of a number; below the smallest normal, 2^-6, numbers are 2^-9 apart.
    bound = torch.maximum(rows.abs() * 2.0**-4, scale * 2.0**-10)
    assert ((found - rows).abs() <= bound).all()
    assert torch.equal(found, rounded(rows))


@pytest.mark.parametrize("largest", [3e38, 1e-30])
def test_huge_and_tiny_rows_stay_finite_and_precise(largest: float) -> None:
    row = torch.linspace(-1, 1, 33)[None] * largest
    values, scale = quantized_rows(row)
    assert torch.isfinite(scale).all()
    found = values.double() * scale.double()
    assert ((found - row.double()).abs() <= largest * 2.0**-4).all()


def test_zeros_stay_zero_beside_anything() -> None:
    rows = torch.zeros(3, 16)
    rows[1, 3] = 5.0
    values, scale = quantized_rows(rows)
    assert torch.isfinite(scale).all()
    assert values.float()[0].count_nonzero() == values.float()[2].count_nonzero() == 0
    assert values.float()[1].count_nonzero() == 1
    assert (
        quantized_rows(torch.full((1, 16), 1e-44))[0].float().count_nonzero() == 0
    )  # below all that float32 divides by


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_what_is_no_number_shows_in_its_row_alone(broken: float) -> None:
    layer, inputs = layer_of(16, 32), torch.randn(4, 16)
    inputs[2, 5] = broken
    out = layer(inputs)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


# Products


@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_a_product_is_within_the_bound_of_its_rows(tokens: int) -> None:
    layer, inputs = layer_of(48, 32), torch.randn(tokens, 48)
    exact, found = inputs.double() @ layer.weight.double().T, layer(inputs).double()
    # (1 + e)(1 + f) - 1 with |e|, |f| <= 2^-4, over the sum of absolute products; small numbers have a bound of rows.
    one = torch.maximum(inputs.abs() * 2.0**-4, quantized_rows(inputs)[1] * 2.0**-10).double()
    other = torch.maximum(layer.weight.abs() * 2.0**-4, quantized_rows(layer.weight)[1] * 2.0**-10).double()
    bound = one @ layer.weight.abs().double().T + inputs.abs().double() @ other.T + one @ other.T
    assert ((found - exact).abs() <= bound + 1e-5).all()
    assert (found - exact).abs().max() > 1e-4  # it is rounded at all
    torch.testing.assert_close(layer(inputs), rounded(inputs) @ rounded(layer.weight.detach()).T)


@pytest.mark.parametrize("tokens", [1, 7, 32])
def test_gradients_are_those_of_the_rounded_formula(tokens: int) -> None:
    layer, inputs = layer_of(48, 32, bias=True), torch.randn(2, tokens, 48, requires_grad=True)
    out = layer(inputs)
    grad = torch.randn_like(out)
    out.backward(grad)
    x, g = inputs.detach().reshape(-1, 48), grad.reshape(-1, 32)
    weight = layer.weight.detach()
    assert inputs.grad is not None
    torch.testing.assert_close(inputs.grad.reshape(-1, 48), rounded(g) @ rounded(weight.T).T)
    torch.testing.assert_close(layer.weight.grad, rounded(g.T) @ rounded(x.T).T)
    torch.testing.assert_close(layer.bias.grad, g.sum(0))  # in full precision
    assert relative_l2(layer.weight.grad, g.T @ x) < 0.06


def test_where_rounding_changes_nothing_gradients_are_autograds() -> None:
    layer = layer_of(32, 16)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-3, 4, layer.weight.shape).float())
    inputs = torch.randint(-3, 4, (5, 32)).float().requires_grad_()
    grad = torch.randint(-3, 4, (5, 16)).float()
    layer(inputs).backward(grad)
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, grad @ layer.weight)
    assert torch.equal(layer.weight.grad, grad.T @ inputs)


def test_a_frozen_weight_gets_no_gradient() -> None:
    layer, inputs = layer_of(16, 16), torch.randn(3, 16, requires_grad=True)
    layer.weight.requires_grad_(False)
    layer(inputs).sum().backward()
    assert layer.weight.grad is None
    assert inputs.grad is not None


# Which layers


class Block(nn.Module):
    """A layer with all kinds of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
        self.mlp = nn.ModuleDict(
            {"gate_proj": nn.Linear(32, 40), "up_proj": nn.Linear(32, 48), "gate": nn.Linear(32, 4)}
        )
        self.norm = nn.LayerNorm(32)


def test_layers_of_attention_and_mlps_alone_that_are_round() -> None:
    block = Block()
    before = dict(block.named_parameters())
    found = use_fp8([block], KEY, learner=True)
    assert found.left_out == ["layers.0.mlp.gate_proj"]
    assert len(found.layers) == 5
    assert type(block.mlp["gate"]) is type(block.mlp["gate_proj"]) is nn.Linear
    assert all(parameter is before[name] for name, parameter in block.named_parameters())


def test_a_model_without_such_layers_is_refused() -> None:
    block = nn.Module()
    block.c_fc = nn.Linear(32, 32)
    with pytest.raises(ModelError, match=r"^model.fp8: no linear layer"):
        use_fp8([block], KEY, learner=True)


def test_devices_without_fp8_and_divided_layers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^model.fp8: cpu has no products in fp8"):
        require_fp8(CPU, KEY)
    with pytest.raises(ModelError, match=r"^model.fp8: layers that are divided"):
        require_undivided(True, KEY)


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if is_refused:
            with pytest.raises(ModelError, match=r"A100 has compute capability 8.0.*8.9 or newer"):
                require_fp8(torch.device("cuda"), KEY)
        else:
            require_fp8(torch.device("cuda"), KEY)


# Modes and copies


def test_plain_products_are_those_of_the_layer_to_the_bit() -> None:
    torch.manual_seed(0)
    block = nn.Module()
    block.q_proj = nn.Linear(32, 32)
    inputs = torch.randn(5, 32)
    plain = block.q_proj(inputs)
    layers = use_fp8([block], KEY, learner=False)
    assert torch.equal(block.q_proj(inputs), plain)
    with layers.computing("fp8"):
        assert not torch.equal(block.q_proj(inputs), plain)
    assert torch.equal(block.q_proj(inputs), plain)


def test_copies_hold_the_weights_of_their_time_at_one_address() -> None:
    block = nn.Module()
    block.q_proj = nn.Linear(32, 16)
    layers, inputs = use_fp8([block], KEY, learner=True), torch.randn(3, 32)
    layers.copy_weights()
    learned = block.q_proj(inputs)
    with layers.computing("generation"):
        assert torch.equal(block.q_proj(inputs), learned)
        with torch.no_grad():
            block.q_proj.weight.mul_(4)
        assert torch.equal(block.q_proj(inputs), learned)
        where = layers.layers[0].copy_NK.data_ptr()  # type: ignore[union-attr]
        layers.copy_weights()
        # Rounding commutes with powers of two.
        bias = block.q_proj.bias
        torch.testing.assert_close(block.q_proj(inputs) - bias, 4 * (learned - bias))
    assert layers.layers[0].copy_NK.data_ptr() == where  # type: ignore[union-attr]
    assert layers.release() == layers.nbytes == 32 * 16
    assert layers.layers[0].copy_NK.untyped_storage().nbytes() == 0  # type: ignore[union-attr]
    layers.restore()
    layers.copy_weights()
    with layers.computing("generation"):
        assert torch.equal(block.q_proj(inputs), learner_outputs(layers, block, inputs))
    layers.drop_copies()
    assert layers.generation == "plain"


def learner_outputs(layers: Fp8Layers, block: nn.Module, inputs: Tensor) -> Tensor:
    with layers.computing("fp8"):
        return block.q_proj(inputs)  # type: ignore[no-any-return, operator]


# Models


def test_a_model_trains_with_masters_of_float32(folder: Path) -> None:
    documents = random_documents()
    plain, found = make_engine(folder), make_engine(folder, fp8=True)
    off = make_engine(folder, fp8=False)
    exact = full_gradient(plain, documents)
    assert torch.equal(full_gradient(off, documents), exact)
    assert 1e-3 < relative_l2(full_gradient(found, documents), exact) < 0.25
    assert found.model.fp8 is not None
    assert len(found.model.fp8.layers) == 2 * 7
    for ours, theirs in zip(found.optimizer.trained, plain.optimizer.trained, strict=True):
        assert (ours.name, ours.master.dtype, ours.parameter.dtype) == (
            theirs.name, torch.float32, theirs.parameter.dtype,
        )  # fmt: skip
        assert torch.equal(ours.master, theirs.master)
    assert plain.model.fp8 is None
    assert not any(isinstance(each, Fp8Linear) for each in plain.model.modules())


@pytest.mark.parametrize("way", ["selective", "all_but_attention", "layers"])
def test_recomputed_layers_have_the_same_gradient_to_the_bit(folder: Path, way: str) -> None:
    documents = random_documents()
    wanted = full_gradient(make_engine(folder, fp8=True), documents)
    assert torch.equal(full_gradient(make_engine(folder, fp8=True, activation_checkpointing=way), documents), wanted)


def test_the_base_of_an_adapter_computes_in_fp8(folder: Path) -> None:
    pytest.importorskip("peft")
    engine = make_engine(folder, fp8=True, lora={"rank": 4})
    assert engine.model.fp8 is not None
    assert len(engine.model.fp8.layers) == 2 * 7
    assert full_gradient(engine, random_documents()).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "selective"])
def test_compiled_layers_have_the_same_gradient(folder: Path, way: str) -> None:
    documents = random_documents()
    wanted = full_gradient(make_engine(folder, fp8=True), documents)
    found = full_gradient(make_engine(folder, fp8=True, compile="on", activation_checkpointing=way), documents)
    assert relative_l2(found, wanted) < 1e-5
