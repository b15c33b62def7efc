# SPDX-License-Identifier: Apache-2.0
"""Adapters in the module tree: what they compute, what is trained, how they begin, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.adapters import ALPHA, RANK, save_peft_adapter, with_peft
from helpers.engines import full_gradient, make_engine, one_rank, random_documents
from helpers.tiny import save_tiny_model
from podium.data.documents import pack
from podium.engine.sharding import place
from podium.engine.train_step import TrainEngine
from podium.errors import MissingExtraError, ModelError
from podium.models.adapter_folder import write_base
from podium.models.causal_lm import PackedCausalLM
from podium.models.lora import merge
from podium.models.packing import to_device
from podium.models.verify import self_check
from podium.recipe import ModelSection

CPU = torch.device("cpu")
Q = "model.layers.0.self_attn.q_proj"
# Query and output 32×32, key and value 32×16, three 32×48: rows and columns of each, in two layers.
SUMS = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("lora") / "llama")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_peft_adapter(base, base.parent / "adapter")


def placed(folder: Path, **lora: Any) -> PackedCausalLM:
    model, _ = place(ModelSection(path=str(folder), lora=lora), folder, one_rank(), seed=3)
    return model.eval()


@torch.no_grad()
def scores(model: torch.nn.Module) -> Tensor:
    found: Tensor = model(to_device(pack(random_documents()), CPU), None, "scores")
    return found


@pytest.mark.parametrize(("stabilized", "scale"), [(False, 6.0 / 4), (True, 6.0 / 2)])
def test_a_layer_gives_the_base_plus_alpha_over_rank_times_the_product(
    base: Path, stabilized: bool, scale: float
) -> None:
    layer = placed(base, rank=4, alpha=6.0, rank_stabilized=stabilized).hf.get_submodule(Q)
    weights: dict[str, Tensor] = {name: each.detach() for name, each in layer.named_parameters()}
    w, a, b = (weights[name] for name in ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight"))
    assert (tuple(a.shape), tuple(b.shape)) == ((4, 32), (32, 4))
    b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(layer(x), x @ w.T + scale * (x @ a.T) @ b.T, atol=1e-5)


def test_all_linear_adapts_every_linear_layer_of_the_body_and_trains_nothing_else(base: Path) -> None:
    engine = make_engine(base, lora={"rank": 4})
    assert sum(each.master.numel() for each in engine.optimizer.trained) == 4 * SUMS
    assert {name.rpartition(".lora_")[0] for name in (each.name for each in engine.optimizer.trained)} == {
        f"model.layers.{layer}.{part}"
        for layer in (0, 1)
        for part in (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        )
    }
    # With B at zero only B has a gradient.
    full_gradient(engine, random_documents())
    gradient = dict(zip((each.name for each in engine.optimizer.trained), _gradients(engine), strict=True))
    assert all(bool(part.any()) == (".lora_B." in name) for name, part in gradient.items())
    assert all(each.grad is None for each in engine.model.parameters() if not each.requires_grad)


def _gradients(engine: TrainEngine) -> list[Tensor]:
    flat = full_gradient(engine, random_documents())
    return list(flat.split([each.master.numel() for each in engine.optimizer.trained]))


def test_a_step_changes_the_adapter_and_leaves_the_base_bit_for_bit(base: Path) -> None:
    from podium.algorithms.dense import token_cross_entropy

    engine = make_engine(base, lora={"rank": 4, "targets": ["q_proj"]})
    before = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
    engine.train_step([pack(random_documents())], token_cross_entropy, normalizer=50.0, lr=1e-2).resolve()
    changed = {name for name, each in engine.model.named_parameters() if not torch.equal(each, before[name])}
    # A has no gradient in the first step, and no decay moves it: weight_decay is 0 here.
    assert changed == {f"hf.model.layers.{layer}.self_attn.q_proj.lora_B.default.weight" for layer in (0, 1)}


def test_a_new_adapter_changes_nothing_and_its_a_depends_on_the_seed_alone(base: Path) -> None:
    plain, _ = place(ModelSection(path=str(base)), base, one_rank(), seed=3)
    fresh = placed(base, rank=4)
    assert torch.equal(scores(fresh), scores(plain.eval()))
    weights, again = dict(fresh.hf.named_parameters()), dict(placed(base, rank=4).hf.named_parameters())
    other, _ = place(ModelSection(path=str(base), lora={"rank": 4}), base, one_rank(), seed=4)
    name = f"{Q}.lora_A.default.weight"
    assert torch.equal(weights[name], again[name])
    assert not torch.equal(weights[name], dict(other.hf.named_parameters())[name])
    # Uniform within 1/√32, so its standard deviation is that over √3.
    assert float(weights[name].detach().abs().max()) <= 1 / math.sqrt(32)
    assert float(weights[name].detach().std()) == pytest.approx(1 / math.sqrt(3 * 32), rel=0.2)
    assert not torch.equal(weights[name], weights[name.replace("q_proj", "o_proj")])


def test_an_adapter_that_peft_wrote_gives_what_peft_computes(base: Path, adapter: Path) -> None:
    """Rank, alpha and targets come from its config, not from the recipe."""
    model = placed(base, rank=16, adapter=str(adapter))
    assert dict(model.hf.named_parameters())[f"{Q}.lora_A.default.weight"].shape == (RANK, 32)
    assert model.hf.get_submodule(Q).scaling["default"] == ALPHA / RANK  # type: ignore[union-attr,index]
    reference, wanted = with_peft(base, adapter), []
    with torch.no_grad():
        for document in random_documents():
            logits = reference(torch.from_numpy(document.tokens[:-1].astype("int64"))[None]).logits[0]
            wanted.append(logits[torch.from_numpy(document.trained[1:])])
    assert torch.allclose(scores(model), torch.cat(wanted), atol=1e-5)
    assert self_check(model, CPU, torch.float32, max_length=64).largest < 1e-4


def test_without_its_adapter_the_model_is_its_base_again_and_back_afterwards(base: Path, adapter: Path) -> None:
    plain, _ = place(ModelSection(path=str(base)), base, one_rank(), seed=3)
    model = placed(base, adapter=str(adapter))
    before, trainable = scores(model), [each.requires_grad for each in model.parameters()]
    with model.without_adapter():
        assert torch.equal(scores(model), scores(plain.eval()))
    assert torch.equal(scores(model), before)
    with pytest.raises(AttributeError), model.without_adapter():
        model(None, None)  # also after an error
    assert torch.equal(scores(model), before)
    assert not torch.allclose(before, scores(plain))
    assert [each.requires_grad for each in model.parameters()] == trainable
    with pytest.raises(ModelError, match=r"model\.lora\b"), plain.without_adapter():
        pass


def test_merging_gives_a_plain_model_of_the_same_scores(base: Path, adapter: Path) -> None:
    model = placed(base, adapter=str(adapter))
    before = scores(model)
    merge(model.hf)
    assert not any("lora" in name or "base_layer" in name for name, _ in model.hf.named_parameters())
    assert not hasattr(model.hf, "peft_config")
    assert torch.allclose(scores(model), before, atol=1e-5)


def test_dropout_acts_in_training_and_not_in_evaluation(base: Path, adapter: Path) -> None:
    model = placed(base, adapter=str(adapter), dropout=0.5)
    quiet = scores(model)
    assert torch.equal(quiet, scores(placed(base, adapter=str(adapter))))
    torch.manual_seed(0)
    assert not torch.allclose(scores(model.train()), quiet, atol=1e-3)


def test_in_bfloat16_the_base_has_no_master_and_the_adapter_has(base: Path) -> None:
    engine = make_engine(base, lora={"rank": 4}, dtype="bfloat16")
    assert {each.dtype for each in engine.model.parameters()} == {torch.bfloat16}
    assert {each.master.dtype for each in engine.optimizer.trained} == {torch.float32}
    assert all(each.has_own_master for each in engine.optimizer.trained)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", pytest.param("glm4_moe", marks=pytest.mark.slow), "phimoe", "gemma3"]
)
def test_mixtures_are_adapted_outside_of_their_experts(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(name, tmp_path / name)
    engine = make_engine(folder, lora={"rank": 2})
    parts = {each.name.split(".")[-4] for each in engine.optimizer.trained}
    assert parts >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert ("gate_proj" in parts) == (name == "gemma3")
    assert self_check(engine.language_model, CPU, torch.float32, max_length=40).largest < 1e-4
    assert full_gradient(engine, random_documents()).norm() > 0


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["wrong_proj"], ["q_proj", "wrong_proj"]])
def test_targets_that_are_no_linear_layers_of_the_body_are_refused(base: Path, targets: list[str]) -> None:
    with pytest.raises(ModelError, match=rf"model\.lora\.targets: LlamaForCausalLM .* {targets[-1]}\b.*q_proj"):
        placed(base, targets=targets)


def test_an_adapter_of_another_base_is_refused_by_its_note_its_path_its_names_or_its_shapes(
    base: Path, tmp_path: Path
) -> None:
    other = save_tiny_model("llama", tmp_path / "other", seed=9)
    small = save_tiny_model("llama", tmp_path / "small", hidden_size=16)
    long = save_tiny_model("llama", tmp_path / "long", num_hidden_layers=3)
    noted = save_peft_adapter(base, tmp_path / "noted")
    write_base(noted, base, str(base))
    placed(base, adapter=str(noted))
    with pytest.raises(ModelError, match=r"model\.lora\.adapter: .*/noted .*/other \((?![^)]*config)[^)]*weights"):
        placed(other, adapter=str(noted))
    with pytest.raises(ModelError, match=r"/small \([^)]*config and [^)]*weights"):
        placed(small, adapter=str(noted))
    # Without a note its own path still leads to its base.
    named = save_peft_adapter(base, tmp_path / "named")
    with pytest.raises(ModelError, match=rf"model\.lora\.adapter: .*/named .* {base}\b.*/other \("):
        placed(other, adapter=str(named))
    # And where that path is gone, names and shapes decide.
    config = json.loads((named / "adapter_config.json").read_text())
    (named / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/gone"}))
    placed(other, adapter=str(named))
    with pytest.raises(ModelError, match=r"down_proj\.lora_B\.default\.weight .*\[32, 3\].*\[16, 3\]"):
        placed(small, adapter=str(named))
    with pytest.raises(ModelError, match=r"model\.layers\.2\..* \(6 tensors\b"):
        placed(long, adapter=str(named))


def test_an_adapter_with_layers_that_the_base_does_not_have_is_refused(base: Path, tmp_path: Path) -> None:
    folder = save_peft_adapter(base, tmp_path / "more")
    tensors = load_file(folder / "adapter_model.safetensors")
    extra = "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, extra: torch.zeros(3, 32)}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.7\.self_attn\.q_proj.*LlamaForCausalLM"):
        placed(base, adapter=str(folder))


@pytest.mark.parametrize(
    ("config", "named"), [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias: all")], ids=["dora", "bias"]
)
def test_kinds_of_adapters_that_podium_does_not_train_are_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    folder = save_peft_adapter(base, tmp_path / "other-kind", **config)
    with pytest.raises(ModelError, match=rf"model\.lora\.adapter: .*/other-kind .*{named}\b"):
        placed(base, adapter=str(folder))


def test_a_folder_without_adapter_and_an_adapter_as_the_model_have_different_errors(base: Path, adapter: Path) -> None:
    from podium.models.folder import check_model_folder

    with pytest.raises(ModelError, match=r"model\.lora\.adapter: .*adapter_config\.json.* model\.path\b"):
        placed(base, adapter=str(base))
    with pytest.raises(
        ModelError, match=rf"model\.path: {adapter} .* model\.path .*model\.lora\.adapter to {adapter}\b"
    ):
        check_model_folder(str(adapter), "model.path", weights=True, tokenizer=False)
    damaged = adapter.parent / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(ModelError, match=r"/damaged .*no adapter_model\.safetensors"):
        placed(base, adapter=str(damaged))
    (damaged / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"/damaged/adapter_model\.safetensors .*Error: "):
        placed(base, adapter=str(damaged))


def test_without_peft_the_error_says_what_to_install(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'podium\[lora\]'"):
        placed(base, rank=4)


def test_a_recipe_can_be_checked_without_loading_anything(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium.models.adapter_folder import check_adapter

    other = save_tiny_model("llama", tmp_path / "other", seed=9)
    check_adapter(ModelSection(path=str(base)))
    check_adapter(ModelSection(path=str(base), lora={"adapter": str(adapter)}))
    check_adapter(ModelSection(path="owner/base", lora={"adapter": "owner/adapter"}))
    with pytest.raises(ModelError, match="another base"):
        check_adapter(ModelSection(path=str(other), lora={"adapter": str(adapter)}))
    with pytest.raises(ModelError, match=r"model\.lora\.adapter: .*no folder none\b"):
        check_adapter(ModelSection(path=str(base), lora={"adapter": "./none"}))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match="peft"):
        check_adapter(ModelSection(path=str(base), lora={"rank": 2}))
