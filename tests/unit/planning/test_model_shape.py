# SPDX-License-Identifier: Apache-2.0
"""The shape that config.json tells is the shape of the model that transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from podium.errors import UnsupportedModelError
from podium.models.causal_lm import build, load_config
from podium.models.cost import model_cost
from podium.models.scalar import build_scalar
from podium.planning.model_shape import ModelShape, shape_of
from podium.recipe import ModelSection

SMALL: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ("gemma", {"head_dim": 16}),
    ("gemma2", {"head_dim": 16, "sliding_window": 16}),
    ("gemma3_text", {"head_dim": 16, "sliding_window": 16}),
    ("granite", {}),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("olmo2", {}),
    ("phi3", {"sliding_window": None}),
    ("smollm3", {}),
]


def saved(folder: Path, family: str, changes: dict[str, Any]) -> ModelSection:
    AutoConfig.for_model(family, **{**SMALL, **changes}).save_pretrained(folder)
    return ModelSection(path=str(folder))


def real_counts(section: ModelSection, *, labels: int | None = None) -> tuple[int, int, Any]:
    """Parameters, trained ones, and cost of the real model on the meta device."""
    config = load_config(Path(section.path), trust_remote_code=False)
    meta = torch.device("meta")
    if labels is None:
        model: Any = build(section, config, device=meta, dtype=torch.bfloat16).hf
    else:
        model = build_scalar(section, config, device=meta, dtype=torch.bfloat16, labels=labels).hf
    parameters = list(model.parameters())
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return sum(each.numel() for each in parameters), trained, model_cost(model)


def counts(shape: ModelShape) -> tuple[int, int, Any]:
    return shape.num_parameters, shape.trained_parameters, shape.cost()


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_parameters_and_flops_are_those_of_the_built_model(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    section = saved(tmp_path, family, changes)

    assert counts(shape_of(section)) == real_counts(section)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_an_adapter_is_what_peft_injects(tmp_path: Path, family: str, targets: Any) -> None:
    pytest.importorskip("peft")
    changes = next(changes for name, changes in CASES if name == family)
    plain = saved(tmp_path, family, changes)
    section = ModelSection.model_validate({"path": plain.path, "lora": {"rank": 4, "targets": targets}})

    assert counts(shape_of(section)) == real_counts(section)


def test_a_scalar_head_replaces_that_of_the_vocabulary(tmp_path: Path) -> None:
    section = saved(tmp_path, "qwen3", {"head_dim": 16})

    assert counts(shape_of(section).with_labels(1)) == real_counts(section, labels=1)


def test_the_largest_qwen3_mixture_has_as_many_parameters_as_its_name_says() -> None:
    from podium.planning.model_shape import shape_from_config

    config = {
        "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = shape_from_config(config, where="here")

    assert round(shape.num_parameters / 1e9, 1) == 30.5
    assert round(shape.active_parameters() / 1e9, 1) == 3.0  # 3.3 with the embedding, which is a look-up
    assert shape.cache_elements == 2 * 48 * 4 * 128


def test_a_rank_holds_whole_rows() -> None:
    from podium.planning.model_shape import TensorShape

    tensor = TensorShape(part="mlp", name="up_proj", shape=(10, 3), count=2)

    assert [tensor.numel_of_rank(world) for world in (1, 4, 16)] == [60, 18, 6]


def test_an_unknown_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')

    with pytest.raises(UnsupportedModelError, match="does not know the shape of model_type 'mamba'"):
        shape_of(ModelSection(path=str(tmp_path)))
