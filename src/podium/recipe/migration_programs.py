# SPDX-License-Identifier: Apache-2.0
"""Programs of verl, TRL, OpenRLHF and prime-rl: what stands for their names, and which one keys belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramHint:
    """The program that stands for one of another project, and the keys that make it so."""

    program: str
    keys: Mapping[str, str] = field(default_factory=dict)


PROGRAMS: Mapping[str, ProgramHint] = {
    **dict.fromkeys(("finetune", "finetuning", "supervised", "instruct"), ProgramHint(program="sft")),
    **{name: ProgramHint(program="dpo", keys={"preference.loss": name}) for name in ("kto", "orpo", "simpo", "ipo")},
    "preference": ProgramHint(program="dpo"),
    **dict.fromkeys(
        ("rm", "reward", "rewardmodel", "rewardmodeling", "bradleyterry"), ProgramHint(program="reward_model")
    ),
    **dict.fromkeys(
        ("opd", "onpolicydistillation", "onpolicydistill", "gkd", "minillm"), ProgramHint(program="on_policy_distill")
    ),
    **dict.fromkeys(("kd", "distillation", "knowledgedistillation"), ProgramHint(program="distill")),
    **dict.fromkeys(
        ("raft", "rft", "rejectionsampling", "bestofn", "star", "restem", "expertiteration"),
        ProgramHint(program="expert_iteration"),
    ),
    "rloo": ProgramHint(program="grpo", keys={"algorithm.advantage": "leave_one_out"}),
    **dict.fromkeys(
        ("reinforce++", "reinforcepp", "reinforceplusplus", "reinforce"),
        ProgramHint(program="grpo", keys={"algorithm.advantage": "reinforce_pp"}),
    ),
    **dict.fromkeys(
        ("reinforce++baseline", "reinforceppbaseline", "reinforceplusplusbaseline"),
        ProgramHint(program="grpo", keys={"algorithm.advantage": "reinforce_pp_baseline"}),
    ),
    "drgrpo": ProgramHint(
        program="grpo", keys={"algorithm.advantage": "group_centered", "algorithm.reduction": "constant"}
    ),
    "dapo": ProgramHint(program="grpo", keys={"algorithm.dynamic_sampling": "true", "algorithm.clip_high": "0.28"}),
    "gspo": ProgramHint(program="grpo", keys={"algorithm.loss": "sequence_clipped"}),
    "cispo": ProgramHint(program="grpo", keys={"algorithm.loss": "clipped_weights"}),
}
"""Name of a method or trainer, in small letters and without signs between them -> program."""

_AROUND = re.compile(r"^(main|train|run|podium)[_-]|([_-]?(trainer|training|config|ray|recipe))+$")


def program_hint(name: str, built_in: Mapping[str, object]) -> ProgramHint | None:
    """The program that a name of another project means: GRPOTrainer, train_ppo_ray, kto. None: unknown."""
    bare = _AROUND.sub("", name.rpartition(".")[2].lower())
    squeezed = re.sub(r"[_\s-]", "", bare)
    own = next((program for program in built_in if program.replace("_", "") == squeezed), None)
    return ProgramHint(program=own) if own is not None else PROGRAMS.get(squeezed)


_ESTIMATORS = ("adv_estimator", "advantage_estimator")
_VERL = "actor_rollout_ref"
TELLING: Mapping[str, frozenset[str]] = {
    program: frozenset(names.split())
    for program, names in {
        "sft": "dataset_text_field completion_only_loss assistant_only_loss train_on_inputs sample_packing "
        "max_seq_length partial_pretrain",
        "dpo": "rpo_alpha precompute_ref_log_probs reference_free desirable_weight undesirable_weight simpo_gamma "
        "gamma_beta_ratio",
        "reward_model": "center_rewards_coefficient",
        "distill": "kd_coef",
        "grpo": "num_generations n_samples_per_prompt rollouts_per_example rollouts_per_prompt rloo_k scale_rewards "
        "num_prompts_per_step generation_batch_size steps_per_generation reward_funcs mask_truncated_completions",
        "ppo": "num_ppo_epochs vf_coef value_loss_coef cliprange_value critic_pretrain critic_learning_rate",
    }.items()
}
"""Program -> keys of other projects that only trainers of this kind have."""
# Sections whose keys are the user's own words.
_FREE = ("options", "columns")


def guessed_program(values: Mapping[str, Any]) -> str | None:
    """The program that keys of another project belong to; None: they do not tell."""
    keys = dict(_all_values(values))
    estimator = next((keys[name] for name in _ESTIMATORS if keys.get(name) is not None), None)
    if estimator is not None:
        return "ppo" if str(estimator).lower() == "gae" else "grpo"
    if _VERL in values:
        return "ppo" if "critic" in values else "grpo"
    programs = [program for program, names in TELLING.items() if names & keys.keys()]
    if programs == ["grpo", "ppo"]:  # PPO may sample several answers of a prompt; GRPO has no critic
        return "ppo"
    return programs[0] if len(programs) == 1 else None


def _all_values(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield str(name), value
        if isinstance(value, Mapping) and name not in _FREE:
            yield from _all_values(value)
