# SPDX-License-Identifier: Apache-2.0
"""The shape of a model from its config.json alone: which tensors it has, and what a token costs. Torch-free."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from podium.data.tokenizer import listed_tokens
from podium.errors import UnsupportedModelError
from podium.models.cost import ModelCost
from podium.models.folder import is_hub_id, read_config
from podium.recipe import ModelSection
from podium.recipe.schema import LoraSection

Part = Literal["embedding", "head", "attention", "mlp", "router", "experts", "norms", "adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Parameters of one shape."""

    part: Part
    name: str  # of the module or tensor inside its layer: q_proj, gate_up_proj
    shape: tuple[int, ...]
    count: int = 1  # so many of them in the whole model
    in_layer: bool = True
    is_linear: bool = False  # a layer that an adapter can be attached to
    is_trained: bool = True

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return math.prod(self.shape) * self.count

    def numel_of_rank(self, world: int) -> int:
        """Elements that a rank holds at most: FSDP gives each rank the same number of rows, the last ones fewer."""
        return -(-self.shape[0] // world) * math.prod(self.shape[1:]) * self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder and all its parameters."""

    family: str  # model_type of the config
    vocab_size: int  # without padding rows
    vocab_rows: int  # with them
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int  # of one token: of a mixture, that of all its experts
    experts_per_token: int  # 0: no mixture
    num_experts: int
    norms_queries: bool
    windows: tuple[int | None, ...]  # one per layer; None: all earlier tokens are visible
    context: int
    tensors: tuple[TensorShape, ...]
    num_labels: int | None = None  # None: a language model, whose head is the vocabulary's

    @property
    def num_parameters(self) -> int:
        """All of them; a tied head counts once."""
        return sum(each.numel for each in self.tensors)

    @property
    def trained_parameters(self) -> int:
        """Without the frozen base of an adapter."""
        return sum(each.numel for each in self.tensors if each.is_trained)

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer, on average."""
        return sum(each.numel for each in self.tensors if each.in_layer) // self.num_layers

    @property
    def has_adapter(self) -> bool:
        """Whether only an adapter is trained."""
        return any(each.part == "adapter" for each in self.tensors)

    @property
    def adapted_parameters(self) -> int:
        """Of the weights that have an adapter, without the adapter."""
        adapted = {each.name.removesuffix(".lora_A") for each in self.tensors if each.part == "adapter"}
        return sum(each.numel for each in self.tensors if each.is_linear and each.name in adapted)

    @property
    def query_width(self) -> int:
        """Query heads × head width."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Key-value heads × head width."""
        return self.num_kv_heads * self.head_dim

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.key_width * self.num_layers

    def parameters_by_part(self) -> dict[Part, int]:
        """Parameters of each part."""
        counts: Counter[Part] = Counter()
        for each in self.tensors:
            counts[each.part] += each.numel
        return dict(counts)

    def of_rank(self, world: int, *, trained: bool | None = None) -> int:
        """Parameters that a rank holds at most; `trained`: only those that are, or are not."""
        chosen = (each for each in self.tensors if trained is None or each.is_trained == trained)
        return sum(each.numel_of_rank(world) for each in chosen)

    def cost(self) -> ModelCost:
        """What `podium.models.cost.model_cost` finds in the built model."""
        head = next((each for each in self.tensors if each.part == "head"), None)
        tied = next(each for each in self.tensors if each.part == "embedding")
        share = self.experts_per_token / self.num_experts if self.num_experts else 1.0
        trained = frozen = 0
        for each in self.tensors:
            if len(each.shape) < 2 or each.part in ("embedding", "head"):
                continue
            one = math.prod(each.shape)
            active = each.count * int(one * (share if each.part == "experts" else 1.0))
            if each.is_trained:
                trained += active
            else:
                frozen += active
        return ModelCost(
            trained_matrix=trained,
            frozen_matrix=frozen,
            head_matrix=(head or tied).numel,
            head_trained=(head or tied).is_trained,
            attention_width=self.query_width,
            windows=self.windows,
        )

    def active_parameters(self) -> int:
        """Parameters that one decoded token reads at least: all matrices with the active experts, and the head."""
        cost = self.cost()
        return cost.trained_matrix + cost.frozen_matrix + cost.head_matrix

    def with_labels(self, labels: int) -> ModelShape:
        """The same body with a scalar head, as reward models and critics have; their vocabulary is not padded."""
        kept = [each for each in self.tensors if each.part != "head"]
        kept = [
            replace(each, shape=(self.vocab_size, self.hidden)) if each.part == "embedding" else each for each in kept
        ]
        head = TensorShape(part="head", name="score", shape=(labels, self.hidden), in_layer=False)
        return replace(self, tensors=(*kept, head), vocab_rows=self.vocab_size, num_labels=labels)


def shape_of(section: ModelSection, key: str = "model.path") -> ModelShape:
    """The shape of a recipe's model. Raises UnsupportedModelError for an architecture that is not known here, and for
    a hub id that is not a local folder."""
    if is_hub_id(section.path):
        raise UnsupportedModelError(
            f"{key}: {section.path} is on the hub, and its shape is read from a local config.json. Download it first."
        )
    shape = shape_from_config(read_config(Path(section.path).expanduser(), key), where=section.path)
    vocab_size = shape.vocab_size
    if section.new_tokens is not None:  # as many as there can be: the tokenizer may know some already
        vocab_size += len(listed_tokens(section.new_tokens))
    shape = _with_vocabulary(shape, vocab_size, section.pad_vocab_to)
    return shape if section.lora is None else with_adapter(shape, section.lora)


def with_adapter(shape: ModelShape, lora: LoraSection) -> ModelShape:
    """The same model, frozen, with a low-rank adapter at each of the targeted linear layers."""
    rank, targets = lora.rank, lora.targets
    if lora.adapter is not None and (Path(lora.adapter) / "adapter_config.json").is_file():
        saved = json.loads((Path(lora.adapter) / "adapter_config.json").read_text(encoding="utf-8"))
        rank, found = int(saved.get("r", rank)), saved.get("target_modules", targets)
        targets = tuple(found) if isinstance(found, list) else "all-linear"
    adapters: list[TensorShape] = []
    for each in shape.tensors:
        if each.is_linear and (targets == "all-linear" or each.name in targets):
            rows, columns = each.shape
            adapters += [
                replace(each, part="adapter", name=f"{each.name}.lora_A", shape=(rank, columns), is_linear=False),
                replace(each, part="adapter", name=f"{each.name}.lora_B", shape=(rows, rank), is_linear=False),
            ]
    frozen = (replace(each, is_trained=False) for each in shape.tensors)
    return replace(shape, tensors=(*frozen, *adapters))


def shape_from_config(config: Mapping[str, Any], *, where: str) -> ModelShape:
    """The shape by the values of a config.json; a model with a vision tower is not known here."""
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise UnsupportedModelError(
            f"{where}: the planner does not know the shape of model_type {config.get('model_type')!r}. It knows "
            f"{', '.join(_FAMILIES)}. `podium train` itself may well train it."
        )
    try:
        return _Reader(config, family).shape()
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UnsupportedModelError(
            f"{where}: config.json lacks a size that every {config['model_type']} has ({error!r})."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What configs of one model_type leave unsaid."""

    is_tied: bool = False
    head_dim: int | None = None  # None: hidden / heads
    qkv_bias: bool = False  # also without attention_bias
    o_bias: bool = True  # where attention_bias is set
    query_norms: Literal["none", "head", "all"] = "none"  # over each head, or over all heads together
    norms: int = 2  # of a layer, over the hidden width
    experts: Literal["none", "plain", "biased"] = "none"
    is_fused: bool = False  # q, k and v are one matrix, and so are gate and up
    has_sinks: bool = False
    pattern: int | None = None  # every so many layers see all tokens, the others a window
    window_is_opted: bool = False  # only with use_sliding_window


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True, o_bias=False, window_is_opted=True),
    "qwen3": _Family(head_dim=128, query_norms="head", window_is_opted=True),
    "qwen3_moe": _Family(query_norms="head", experts="plain", window_is_opted=True),
    "mixtral": _Family(experts="plain"),
    "gemma": _Family(is_tied=True, head_dim=256),
    "gemma2": _Family(is_tied=True, head_dim=256, norms=4, pattern=2),
    "gemma3_text": _Family(is_tied=True, head_dim=256, norms=4, query_norms="head", pattern=6),
    "granite": _Family(),
    "gpt_oss": _Family(head_dim=64, qkv_bias=True, experts="biased", has_sinks=True, pattern=2),
    "olmo2": _Family(query_norms="all"),
    "phi3": _Family(is_fused=True),
    "smollm3": _Family(is_tied=True, window_is_opted=True),
}


class _Reader:
    """Reads one config."""

    def __init__(self, config: Mapping[str, Any], family: _Family) -> None:
        self._config, self._family = config, family
        self._hidden = int(config["hidden_size"])
        self._layers = int(config["num_hidden_layers"])
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)
        self._head_dim = int(config.get("head_dim") or family.head_dim or self._hidden // self._heads)
        self._width = int(config["intermediate_size"])
        self._experts = self._per_token = 0
        if family.experts != "none":
            self._experts = int(config.get("num_experts") or config["num_local_experts"])
            self._per_token = int(config["num_experts_per_tok"])
        self._expert_width = int(config.get("moe_intermediate_size") or self._width)
        self._sparse = sum(self._is_sparse(layer) for layer in range(self._layers))

    def shape(self) -> ModelShape:
        config, vocab = self._config, int(self._config["vocab_size"])
        return ModelShape(
            family=str(config["model_type"]),
            vocab_size=vocab,
            vocab_rows=vocab,
            hidden=self._hidden,
            num_layers=self._layers,
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            mlp_width=self._per_token * self._expert_width if self._sparse else self._width,
            experts_per_token=self._per_token,
            num_experts=self._experts,
            norms_queries=self._family.query_norms != "none",
            windows=self._windows(),
            context=int(config.get("max_position_embeddings") or 1 << 30),
            tensors=tuple(self._tensors(vocab)),
        )

    def _tensors(self, vocab: int) -> Iterator[TensorShape]:
        hidden, dense, family = self._hidden, self._layers - self._sparse, self._family
        yield TensorShape(part="embedding", name="embed_tokens", shape=(vocab, hidden), in_layer=False)
        if not self._config.get("tie_word_embeddings", family.is_tied):
            yield TensorShape(part="head", name="lm_head", shape=(vocab, hidden), in_layer=False)
        yield TensorShape(part="norms", name="norm", shape=(hidden,), in_layer=False)
        yield TensorShape(part="norms", name="layernorm", shape=(hidden,), count=family.norms * self._layers)
        yield from self._attention()
        if dense:
            names = {"gate_up_proj": 2 * self._width} if family.is_fused else dict.fromkeys(
                ("gate_proj", "up_proj"), self._width
            )  # fmt: skip
            for name, width in names.items():
                yield self._linear("mlp", name, width, hidden, dense)
            yield self._linear("mlp", "down_proj", hidden, self._width, dense)
            if self._config.get("mlp_bias", False):
                yield TensorShape(part="mlp", name="bias", shape=(self._width,), count=2 * dense)
                yield TensorShape(part="mlp", name="bias", shape=(hidden,), count=dense)
        if self._sparse:
            yield from self._mixture()

    def _attention(self) -> Iterator[TensorShape]:
        hidden, layers, family = self._hidden, self._layers, self._family
        queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
        widths = {"qkv_proj": queries + 2 * keys} if family.is_fused else {
            "q_proj": queries, "k_proj": keys, "v_proj": keys
        }  # fmt: skip
        biased = family.qkv_bias or bool(self._config.get("attention_bias", False))
        for name, width in widths.items():
            yield self._linear("attention", name, width, hidden, layers)
            if biased:
                yield TensorShape(part="attention", name="bias", shape=(width,), count=layers)
        yield self._linear("attention", "o_proj", hidden, queries, layers)
        if biased and family.o_bias:
            yield TensorShape(part="attention", name="bias", shape=(hidden,), count=layers)
        if family.has_sinks:
            yield TensorShape(part="attention", name="sinks", shape=(self._heads,), count=layers)
        if family.query_norms == "head":
            yield TensorShape(part="norms", name="qk_norm", shape=(self._head_dim,), count=2 * layers)
        elif family.query_norms == "all":
            yield TensorShape(part="norms", name="q_norm", shape=(queries,), count=layers)
            yield TensorShape(part="norms", name="k_norm", shape=(keys,), count=layers)

    def _mixture(self) -> Iterator[TensorShape]:
        hidden, experts, width, count = self._hidden, self._experts, self._expert_width, self._sparse
        yield TensorShape(part="router", name="router", shape=(experts, hidden), count=count)
        if self._family.experts == "plain":
            yield self._expert("gate_up_proj", (experts, 2 * width, hidden))
            yield self._expert("down_proj", (experts, hidden, width))
            return
        yield TensorShape(part="router", name="router.bias", shape=(experts,), count=count)
        yield self._expert("gate_up_proj", (experts, hidden, 2 * width))
        yield self._expert("gate_up_proj_bias", (experts, 2 * width))
        yield self._expert("down_proj", (experts, width, hidden))
        yield self._expert("down_proj_bias", (experts, hidden))

    def _expert(self, name: str, shape: tuple[int, ...]) -> TensorShape:
        return TensorShape(part="experts", name=name, shape=shape, count=self._sparse)

    def _linear(self, part: Part, name: str, rows: int, columns: int, count: int) -> TensorShape:
        # In a mixture, peft takes these names for those of the experts (podium/models/lora.py).
        is_linear = not (part == "mlp" and self._family.experts != "none")
        return TensorShape(part=part, name=name, shape=(rows, columns), count=count, is_linear=is_linear)

    def _is_sparse(self, layer: int) -> bool:
        if self._family.experts == "none":
            return False
        every = int(self._config.get("decoder_sparse_step") or 1)
        return layer not in (self._config.get("mlp_only_layers") or ()) and (layer + 1) % every == 0

    def _windows(self) -> tuple[int | None, ...]:
        config, family = self._config, self._family
        window = config.get("sliding_window")
        if family.window_is_opted and not config.get("use_sliding_window", False):
            window = None
        kinds = config.get("layer_types")
        if kinds is not None:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        if family.pattern is not None:
            every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or family.pattern)
            return tuple(None if (layer + 1) % every == 0 else window for layer in range(self._layers))
        first = int(config.get("max_window_layers") or 0) if family.window_is_opted else 0
        if config["model_type"] == "qwen3_moe":
            first = 0
        return tuple(window if layer >= first else None for layer in range(self._layers))


def _with_vocabulary(shape: ModelShape, vocab_size: int, multiple: int) -> ModelShape:
    rows = -(-vocab_size // multiple) * multiple
    tensors = tuple(
        replace(each, shape=(rows, shape.hidden)) if each.part in ("embedding", "head") else each
        for each in shape.tensors
    )
    return replace(shape, vocab_size=vocab_size, vocab_rows=rows, tensors=tensors)
