# SPDX-License-Identifier: Apache-2.0
"""Values of verl, TRL, OpenRLHF and prime-rl, by Podium's key, and what stands for them in a recipe. A key of Podium
inside `how` is written in backticks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ValueHint:
    """Podium's value for one of another project. None: there is no such value, and `how` says what to do."""

    value: str | None
    how: str = ""


def _same(names: str, value: str | None, how: str = "") -> dict[str, ValueHint]:
    return dict.fromkeys(names.split(), ValueHint(value, how))


VALUES: Mapping[str, Mapping[str, ValueHint]] = {
    "algorithm.advantage": {
        **_same("grpo group_norm group_mean_std", "group_relative"),
        **_same("rloo", "leave_one_out"),
        **_same("dr_grpo drgrpo", "group_centered", "with `algorithm.reduction` constant"),
        **_same("opo", "length_weighted"),
        **_same("reinforce reinforce_plus_plus reinforce++ reinforce_plusplus", "reinforce_pp"),
        **_same(
            "reinforce_baseline reinforce_plus_plus_baseline reinforce++-baseline reinforce++_baseline",
            "reinforce_pp_baseline",
        ),
        **_same("gae ppo critic", None, "GAE needs a critic, which is `program` ppo"),
    },
    "algorithm.loss": {
        **_same("ppo grpo vanilla token clip ppo_clip", "clipped"),
        **_same("dapo", "clipped", "with `algorithm.clip_high` 0.28"),
        **_same("dr_grpo drgrpo", "clipped", "with `algorithm.reduction` constant"),
        **_same("gspo sequence", "sequence_clipped"),
        **_same("cispo", "clipped_weights"),
        **_same("reinforce pg gpg vpg", "policy_gradient"),
    },
    "algorithm.reduction": {
        **_same("token-mean bnpo dapo", "token_mean"),
        **_same("seq-mean-token-sum", "sequence_sum_mean"),
        **_same("seq-mean-token-mean grpo", "sequence_mean_mean"),
        **_same("seq-mean-token-sum-norm dr_grpo drgrpo", "constant"),
        **_same("cispo", None, "it is not a reduction but a loss: set `algorithm.loss` to clipped_weights"),
        **_same("gspo", None, "it is not a reduction but a loss: set `algorithm.loss` to sequence_clipped"),
    },
    "algorithm.kl.estimator": {
        **_same("low_var_kl", "k3"),
        **_same("low_var_kl+ k3+", "k3_straight"),
        **_same("mse k2+", "k2"),
        **_same("kl", None, "it is k1 where `algorithm.kl.where` is reward; in the loss use k3_straight or k2"),
        **_same("abs full", None, "it has no counterpart; in the loss use k3_straight, in the reward k1"),
    },
    "algorithm.correction": {
        **_same("true", None, "use auto (on above `rollout.staleness` 0) or {} (always on)"),
    },
    "algorithm.correction.kind": {
        **_same("tis token", "token_truncate"),
        **_same("sequence", "sequence_truncate"),
        **_same("icepop", "token_mask", "with `algorithm.correction.low`"),
        **_same("geometric", "sequence_geometric_mask"),
    },
    "preference.loss": {
        **_same("dpo", "sigmoid"),
        **_same("robust", "sigmoid", "with `preference.label_smoothing`"),
        **_same("kto_pair", "kto", "which reads rows with a label"),
    },
    "optimizer": {
        **_same(
            "adamw adam adamw_torch adamw_torch_fused adamw_hf fused_adam",
            None,
            "the optimizer is always AdamW; write `optimizer.lr` and its other keys here",
        ),
    },
    "optimizer.schedule": {
        **_same("constant_with_warmup", "constant", "with `optimizer.warmup_steps`"),
        **_same("linear_with_warmup", "linear", "with `optimizer.warmup_steps`"),
        **_same("polynomial", "linear"),
        **_same("cosine_with_warmup cosine_annealing cosine_with_restarts", "cosine"),
        **_same("cosine_with_min_lr", "cosine", "with `optimizer.final_lr_ratio`"),
        **_same("none off", "constant"),
    },
    "model.dtype": {
        **_same("bf16 torch.bfloat16", "bfloat16"),
        **_same("fp32 float torch.float32", "float32"),
        **_same("fp16 float16 half torch.float16", "bfloat16", "there is no float16"),
    },
    "model.activation_checkpointing": {
        **_same("true full", "layers"),
        **_same("false off", "none"),
        **_same("op", "selective"),
    },
    "model.compile": {
        **_same("true", "on", "in quotes, because YAML reads on as true"),
        **_same("false", "off", "in quotes, because YAML reads off as false"),
    },
    "data.overlong": _same("left right middle keep_start keep_end", "truncate"),
    "data.trained": {
        **_same("all full", "everything"),
        **_same("completion completions response assistant_only", "assistant"),
        **_same("last last_assistant", "last_turn"),
    },
    "distill.divergence": {
        **_same("kl fkl forward", "forward_kl"),
        **_same("rkl reverse", "reverse_kl"),
        **_same("js jensen_shannon", "jsd"),
    },
    "rollout.engine": {
        **_same("hf transformers huggingface", "native"),
        **_same("sglang", "native", "or vllm"),
    },
    "placement.layout": {
        **_same("colocate hybrid shared", "colocated"),
        **_same("server separate disaggregated async", "split"),
    },
    "placement.device": _same("gpu cuda:0", "cuda"),
    "run.loggers": {
        **_same("console none", None, "the console and metrics.jsonl always have the metrics; remove it"),
        **_same("all", "wandb", "or tensorboard, mlflow, trackio, each by its name"),
        **_same("weights_and_biases", "wandb"),
        **_same("ml_flow", "mlflow"),
        **_same("tensorboardx tb", "tensorboard"),
        **_same(
            "swanlab comet_ml neptune clearml azure_ml codecarbon dagshub dvclive flyte rich file vemlp_wandb",
            None,
            "write a logger and give it as file.py:Class",
        ),
    },
}
"""Key -> value in small letters -> what stands for it."""


def value_hint(key: str, value: Any) -> ValueHint | None:
    """What stands for a value of another project at a key of Podium; None: it is unknown."""
    bare = ".".join(part for part in key.split(".") if not part.isdigit())
    return VALUES.get(bare, {}).get(str(value).lower())
