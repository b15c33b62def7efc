# SPDX-License-Identifier: Apache-2.0
"""Weights read part by part from safetensors: padding, tied embeddings, converted experts, damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.engines import make_engine, one_rank
from helpers.tiny import save_tiny_model
from podium.engine.sharding import place
from podium.errors import ModelError, UnsupportedModelError
from podium.models.causal_lm import build, load_config, padded_vocabulary
from podium.models.tensor_shards import Box, TensorShard
from podium.models.weights import MemoryWeights, fill
from podium.recipe import ModelSection


def loaded(folder: Path, **model: Any) -> dict[str, Tensor]:
    return {each.name: each.master for each in make_engine(folder, **model).optimizer.trained}


@pytest.mark.parametrize(("size", "multiple", "padded"), [(250, 64, 256), (256, 64, 256), (1, 64, 64), (250, 1, 250)])
def test_the_vocabulary_is_padded_up_to_the_multiple(size: int, multiple: int, padded: int) -> None:
    assert padded_vocabulary(size, multiple) == padded


def test_building_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    config = load_config(save_tiny_model("llama", tmp_path), trust_remote_code=False)
    section = ModelSection(path=str(tmp_path))
    for _ in range(2):
        model = build(section, config, device=torch.device("meta"), dtype=torch.float32)
        assert (model.vocab_size, model.hf.config.vocab_size, config.vocab_size) == (250, 256, 250)


def test_padding_rows_are_zero_and_the_others_as_in_the_file(tmp_path: Path) -> None:
    stored = load_file(save_tiny_model("llama", tmp_path) / "model.safetensors")
    found = loaded(tmp_path)
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert tensor.shape == (256, 32)
            assert torch.equal(tensor[:250], stored[name])
            assert not tensor[250:].any()
        else:
            assert torch.equal(tensor, stored[name]), name


def test_padding_rows_of_random_weights_are_zero_too(tmp_path: Path) -> None:
    found = loaded(save_tiny_model("llama", tmp_path), init="random")
    assert not found["lm_head.weight"][250:].any()
    assert found["lm_head.weight"][:250].any(dim=1).all()
    # The seed alone decides.
    again = loaded(tmp_path, init="random")
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())


def test_tied_embeddings_are_one_parameter(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model("qwen3", tmp_path))
    hf = engine.model.hf
    assert hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
    names = [each.name for each in engine.optimizer.trained]
    assert "lm_head.weight" not in names
    assert names.count("model.embed_tokens.weight") == 1


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma3"])
def test_every_tensor_is_what_transformers_itself_loads(tmp_path: Path, name: str) -> None:
    """Experts lie one by one in the file and fused in the model."""
    save_tiny_model(name, tmp_path)
    found = loaded(tmp_path, pad_vocab_to=1)
    wanted = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


def test_a_checkpoint_in_several_files_is_read_through_its_index(tmp_path: Path) -> None:
    whole = loaded(save_tiny_model("qwen3_moe", tmp_path / "whole"))
    parts = loaded(save_tiny_model("qwen3_moe", tmp_path / "parts", shard_size="20KB"))
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    edit(save_tiny_model("llama", tmp_path), lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no tensor .*\bmodel\.layers\.1\.mlp\.up_proj\.weight"):
        make_engine(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    edit(save_tiny_model("llama", tmp_path), lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight .*\[31\].*\[32\]"):
        make_engine(tmp_path)


def test_an_embedding_with_more_rows_than_the_config_says_is_refused(tmp_path: Path) -> None:
    edit(
        save_tiny_model("llama", tmp_path),
        lambda tensors: tensors.update({"lm_head.weight": torch.ones(256, 32)}),
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight .*\[256, 32\].*\[250, 32\]"):
        make_engine(tmp_path)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    cut(save_tiny_model("llama", tmp_path) / "model.safetensors")
    with pytest.raises(ModelError, match=r"/model\.safetensors .*damaged"):
        make_engine(tmp_path)


def test_one_of_several_files_that_is_cut_off_is_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, shard_size="20KB")
    damaged = sorted(tmp_path.glob("*.safetensors"))[1]
    cut(damaged)
    with pytest.raises(ModelError, match=damaged.name):
        make_engine(tmp_path)


def test_a_file_that_the_index_names_and_is_not_there_is_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, shard_size="20KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelError, match=rf"model\.safetensors\.index\.json .*{gone.name}"):
        make_engine(tmp_path)


def test_an_index_that_is_not_json_is_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        make_engine(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (save_tiny_model("llama", tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"{tmp_path} .*\*\.safetensors\b"):
        make_engine(tmp_path)


def test_a_rank_reads_only_its_rows_and_zeroes_the_padding_in_them() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    local = torch.full((4, 2), -1.0)
    place = TensorShard(name="rows", local=local, box=Box((3, 0), (7, 2)), shape=(8, 2))
    fill(iter([place]), MemoryWeights({"rows": whole}), padded_rows={"rows": 5})
    assert local.tolist() == [[6, 7], [8, 9], [0, 0], [0, 0]]


def test_a_rank_that_holds_only_padding_gets_zeros() -> None:
    local = torch.full((2, 2), -1.0)
    place = TensorShard(name="rows", local=local, box=Box((6, 0), (8, 2)), shape=(8, 2))
    fill(iter([place]), MemoryWeights({"rows": torch.ones(5, 2)}), padded_rows={"rows": 5})
    assert local.tolist() == [[0, 0], [0, 0]]


def test_boxes_overlap_where_both_are() -> None:
    shared = Box((2, 0), (6, 3)).overlap(Box((4, 1), (9, 9)))
    assert (shared.starts, shared.stops, shared.shape) == ((4, 1), (6, 3), (2, 2))
    assert shared.slices((4, 0)) == (slice(0, 2), slice(1, 3))
    assert Box((0,), (2,)).overlap(Box((2,), (4,))).is_empty


def test_rotary_frequencies_are_rebuilt_though_no_file_holds_them(tmp_path: Path) -> None:
    model = make_engine(save_tiny_model("gemma3", tmp_path)).model.hf
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    buffers = dict(wanted.named_buffers())
    assert buffers
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


def test_a_config_that_is_no_causal_language_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UnsupportedModelError, match=rf"{tmp_path}: .*causal.*T5Config"):
        place(ModelSection(path=str(tmp_path)), tmp_path, one_rank(), seed=0)


def test_a_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    values = {
        "model_type": "phi",
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_config(tmp_path, trust_remote_code=False)
    with pytest.raises(UnsupportedModelError, match=r"\bbias\b"):
        build(ModelSection(path=str(tmp_path)), config, device=torch.device("meta"), dtype=torch.float32)


def test_an_unknown_model_type_is_named_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match=rf"{tmp_path}: .*config.*no_such_model"):
        load_config(tmp_path, trust_remote_code=False)
