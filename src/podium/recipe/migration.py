# SPDX-License-Identifier: Apache-2.0
"""Keys of verl, TRL, OpenRLHF, prime-rl and others, and what stands for them in a Podium recipe. Tables only:
`suggesting` picks the hint that fits a program. A key of Podium inside `how` is written in backticks.
`migration_values` has their values, `migration_programs` their programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIXED = ("sft", "dpo", "reward_model", "distill", "fixed")
"""Programs that learn from fixed data; `fixed` and `on_policy` are the signals of custom programs."""
ON_POLICY = ("grpo", "ppo", "on_policy_distill", "expert_iteration", "on_policy")


@dataclass(frozen=True, slots=True)
class KeyHint:
    """Podium's key for a key of another project, and how the value translates."""

    key: str
    how: str = ""
    programs: tuple[str, ...] = ()  # empty: all that have the key


def _same(names: str, *hints: KeyHint) -> dict[str, tuple[KeyHint, ...]]:
    return dict.fromkeys(names.split(), hints)


_ON_REWARDS = ("grpo", "ppo", "on_policy")
_PROMPTS = "rollout.prompts_per_step"
_COLUMNS = "a mapping of Podium's column to yours: {prompt: question}"

_SIZES = {
    **_same("val_kwargs.n", KeyHint("evaluation.generation.samples", "the same number")),
    **_same("val_kwargs.temperature", KeyHint("evaluation.generation.temperature", "of these samples")),
    **_same(
        "n num_generations n_samples_per_prompt num_samples_per_prompt rollouts_per_example rollouts_per_prompt "
        "group_size rloo_k num_return_sequences",
        KeyHint("rollout.samples_per_prompt", "the same number"),
    ),
    **_same(
        "train_batch_size",
        KeyHint(
            _PROMPTS,
            "verl counts prompts, the same number; OpenRLHF counts the samples of one optimizer step: "
            "prompts times `rollout.samples_per_prompt` / `algorithm.mini_batches`",
        ),
        KeyHint("rows_per_step", "rows of one optimizer step over all devices"),
    ),
    **_same("rollout_batch_size gen_batch_size num_prompts_per_step", KeyHint(_PROMPTS, "the same number of prompts")),
    **_same(
        "generation_batch_size",
        KeyHint(_PROMPTS, "it counts completions: divide by `rollout.samples_per_prompt`"),
    ),
    **_same(
        "batch_size global_batch_size",
        KeyHint(_PROMPTS, "prime-rl counts rollouts: divide by `rollout.samples_per_prompt`"),
        KeyHint("rows_per_step", "rows of one optimizer step over all devices; or `tokens_per_step`"),
    ),
    **_same(
        "per_device_train_batch_size",
        KeyHint(
            _PROMPTS,
            "completions of all devices and accumulation steps, divided by `rollout.samples_per_prompt`; what fits the "
            "memory is `micro_batch_tokens`",
        ),
        KeyHint(
            "rows_per_step",
            "times devices and accumulation steps; what fits the memory is `micro_batch_tokens`",
        ),
    ),
    **_same("per_device_eval_batch_size", KeyHint("micro_batch_tokens", "tokens, not rows", FIXED)),
    **_same("gradient_accumulation_steps", KeyHint("micro_batch_tokens", "accumulation follows from it")),
    **_same(
        "micro_train_batch_size micro_batch_size micro_batch_size_per_gpu ppo_micro_batch_size "
        "ppo_micro_batch_size_per_gpu log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        KeyHint("micro_batch_tokens", "tokens of one forward, not rows"),
    ),
    **_same(
        "ppo_max_token_len_per_gpu max_token_len_per_gpu log_prob_max_token_len_per_gpu",
        KeyHint("micro_batch_tokens", "the same number"),
    ),
    **_same("use_dynamic_bsz", KeyHint("micro_batch_tokens", "micro-batches are always packed by tokens")),
    **_same("micro_rollout_batch_size max_num_seqs", KeyHint("rollout.max_running", "answers at the same time")),
    **_same(
        "ppo_mini_batch_size",
        KeyHint("algorithm.mini_batches", "their number: train_batch_size / ppo_mini_batch_size"),
    ),
    **_same("mini_batch_size", KeyHint("algorithm.mini_batches", "their number in a step, not their size")),
    **_same("num_mini_batches", KeyHint("algorithm.mini_batches", "the same number")),
    **_same(
        "steps_per_generation",
        KeyHint("algorithm.mini_batches", "steps_per_generation / gradient_accumulation_steps"),
    ),
    **_same("ppo_epochs num_ppo_epochs num_iterations", KeyHint("algorithm.epochs", "the same number")),
}

_LENGTHS = {
    **_same(
        "max_steps total_training_steps max_train_steps num_training_steps training_steps num_steps",
        KeyHint("steps", "the same number"),
    ),
    **_same(
        "num_train_epochs total_epochs num_epochs n_epochs num_episodes train_epochs",
        KeyHint("epochs", "the same number, in place of `steps`"),
    ),
    **_same(
        "max_epochs",
        KeyHint("algorithm.epochs", "OpenRLHF's passes over one batch of rollouts"),
        KeyHint("epochs", "the same number, in place of `steps`"),
    ),
    **_same(
        "total_episodes",
        KeyHint("steps", f"episodes / (`{_PROMPTS}` times `rollout.samples_per_prompt`)", ON_POLICY),
    ),
    **_same(
        "max_seq_length max_seq_len max_sequence_length seq_len seq_length max_len cutoff_len model_max_length "
        "max_length",
        KeyHint("data.max_length"),
    ),
    **_same(
        "max_prompt_length max_prompt_len prompt_max_len",
        KeyHint("data.max_length", "prompt and answer together: add `rollout.max_new_tokens`", ON_POLICY),
        KeyHint("data.max_length", "prompt and completion together"),
    ),
    **_same(
        "max_response_length max_completion_length generate_max_len response_length max_tokens max_new_tokens",
        KeyHint("rollout.max_new_tokens"),
        KeyHint("data.max_length", "prompt and completion together", ("dpo",)),
        KeyHint("evaluation.generation.max_new_tokens"),
    ),
    **_same(
        "truncation filter_overlong_prompts truncation_mode",
        KeyHint("data.overlong", "drop or error; fixed data also truncate"),
    ),
    **_same("overlong_buffer_len overlong_buffer.len", KeyHint("algorithm.overlong.buffer_tokens", "the same number")),
    **_same("overlong_penalty_factor penalty_factor", KeyHint("algorithm.overlong.penalty", "the same number")),
}

_OPTIMIZER = {
    **_same("learning_rate actor_learning_rate actor_lr policy_lr optim.lr lr", KeyHint("optimizer.lr")),
    **_same("critic_learning_rate critic_lr critic.optim.lr value_lr", KeyHint("critic.lr")),
    **_same(
        "lr_scheduler_type lr_scheduler warmup_style lr_decay_style scheduler",
        KeyHint("optimizer.schedule", "constant, linear or cosine; warm-up is a key of its own"),
    ),
    **_same("warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio", KeyHint("optimizer.warmup_ratio")),
    **_same("warmup_steps num_warmup_steps lr_warmup_steps", KeyHint("optimizer.warmup_steps")),
    **_same("min_lr_ratio lr_min_ratio min_lr", KeyHint("optimizer.final_lr_ratio", "as a share of `optimizer.lr`")),
    **_same("adam_beta1 adam_beta2 adam_betas", KeyHint("optimizer.betas", "both together: [0.9, 0.999]")),
    **_same("adam_epsilon adam_eps", KeyHint("optimizer.eps")),
    **_same("weight_decay l2", KeyHint("optimizer.weight_decay")),
    **_same(
        "max_grad_norm grad_clip clip_grad max_norm gradient_clipping grad_clip_norm", KeyHint("optimizer.clip_norm")
    ),
}

_ALGORITHM = {
    **_same(
        "beta",
        KeyHint("preference.beta", "the same number"),
        KeyHint("distill.jsd_beta", "of divergence jsd"),
        KeyHint("algorithm.kl.coefficient", "the same number; leave `algorithm.kl` out for 0", _ON_REWARDS),
    ),
    **_same("kl_loss_coef", KeyHint("algorithm.kl.coefficient", "leave `algorithm.kl` out for 0")),
    **_same(
        "kl_coef init_kl_coef kl_penalty_coef",
        KeyHint("algorithm.kl.coefficient", "PPO usually has it in the reward: `algorithm.kl.where`"),
    ),
    **_same("use_kl_loss", KeyHint("algorithm.kl.where", "true is loss; false: leave `algorithm.kl` out")),
    **_same("use_kl_in_reward", KeyHint("algorithm.kl.where", "true is reward; false: leave `algorithm.kl` out")),
    **_same(
        "kl_loss_type",
        KeyHint(
            "algorithm.kl.estimator",
            "with `algorithm.kl.where` loss: low_var_kl is k3 (the default, k3_straight, has a better gradient), mse "
            "is k2; kl has no counterpart there",
        ),
    ),
    **_same(
        "kl_penalty",
        KeyHint(
            "algorithm.kl.estimator",
            "with `algorithm.kl.where` reward: kl is k1 (the default there), mse is k2, low_var_kl is k3",
        ),
    ),
    **_same(
        "kl_estimator",
        KeyHint("algorithm.kl.estimator", "k1 with `algorithm.kl.where` reward; in the loss k3_straight, k3 or k2"),
    ),
    **_same("kl_target target_kl", KeyHint("algorithm.kl.target", "a KL per token")),
    **_same("kl_horizon horizon", KeyHint("algorithm.kl.horizon", "episodes")),
    **_same("ref_model_sync_steps sync_ref_model", KeyHint("algorithm.kl.refresh_every", "steps")),
    **_same(
        "ref_model ref_model_path ref_pretrain ref_model_name_or_path",
        KeyHint("preference.reference_model"),
        KeyHint("algorithm.kl.reference"),
    ),
    **_same(
        "epsilon clip_ratio eps_clip cliprange clip_range clip_eps",
        KeyHint("algorithm.clip_low", "the same number, also for `algorithm.clip_high`"),
    ),
    **_same("epsilon_low clip_ratio_low", KeyHint("algorithm.clip_low")),
    **_same("epsilon_high clip_ratio_high", KeyHint("algorithm.clip_high")),
    **_same(
        "eps_clip_low_high", KeyHint("algorithm.clip_low", "the first number; the second is `algorithm.clip_high`")
    ),
    **_same("clip_ratio_c delta", KeyHint("algorithm.dual_clip", "the same number")),
    **_same("cliprange_value value_clip vf_clip", KeyHint("critic.value_clip")),
    **_same("entropy_coeff entropy_coef entropy_loss_coef ent_coef", KeyHint("algorithm.entropy", "the same number")),
    **_same(
        "loss_agg_mode",
        KeyHint(
            "algorithm.reduction",
            "token-mean is token_mean, seq-mean-token-sum is sequence_sum_mean, seq-mean-token-mean is "
            "sequence_mean_mean",
        ),
    ),
    **_same(
        "loss_type",
        KeyHint("preference.loss"),
        KeyHint("algorithm.reduction", "grpo is sequence_mean_mean, bnpo and dapo are token_mean, dr_grpo is constant"),
    ),
    **_same(
        "importance_sampling_level loss_mode policy_loss",
        KeyHint("algorithm.loss", "sequence and gspo are sequence_clipped, token and vanilla are clipped", ON_POLICY),
    ),
    **_same(
        "scale_rewards norm_adv_by_std_in_grpo",
        KeyHint("algorithm.advantage", "true is group_relative, false is group_centered"),
    ),
    **_same(
        "adv_estimator advantage_estimator",
        KeyHint("algorithm.advantage", "grpo is group_relative, rloo is leave_one_out; gae is program ppo"),
        KeyHint("program", "ppo estimates advantages by GAE; remove it", ("ppo",)),
    ),
    **_same("filter_groups dynamic_filtering", KeyHint("algorithm.dynamic_sampling")),
    **_same("max_num_gen_batches", KeyHint("algorithm.max_refills")),
    **_same("mask_truncated_completions overlong_filtering", KeyHint("algorithm.mask_truncated")),
    **_same("gae_lambda lambd lambda lam", KeyHint("algorithm.lam")),
    **_same("gamma", KeyHint("algorithm.gamma"), KeyHint("preference.gamma", "of loss simpo")),
    **_same(
        "tis_imp_ratio_cap vllm_importance_sampling_cap rollout_is_threshold tis_clip rollout_rs_threshold "
        "truncated_importance_sampling_ratio truncated_importance_sampling_ratio_cap",
        KeyHint("algorithm.correction.cap", "the same number"),
    ),
    **_same("behav_imp_weight_cap", KeyHint("algorithm.correction.cap", "with `algorithm.correction.kind` token_mask")),
    **_same("rollout_rs_threshold_lower", KeyHint("algorithm.correction.low", "of the masked kinds")),
    **_same("rollout_is", KeyHint("algorithm.correction.kind", "token is token_truncate, sequence sequence_truncate")),
    **_same(
        "rollout_rs",
        KeyHint("algorithm.correction.kind", "token_mask, sequence_mask or sequence_geometric_mask"),
    ),
    **_same("use_decoupled_loss recompute_logprob", KeyHint("algorithm.proximal", "true is always")),
    **_same("rollout_correction.bypass_mode", KeyHint("algorithm.proximal", "true is never, false is always")),
    **_same(
        "vllm_importance_sampling_correction enable_vllm_is_correction use_importance_sampling_correction use_tis "
        "rollout_correction",
        KeyHint("algorithm.correction", "auto, none, a kind, or a section"),
    ),
    **_same("critic_warmup freezing_actor_steps", KeyHint("critic.warmup_steps", "the same number")),
    **_same("critic_pretrain critic_model value_model value_model_path critic.model.path", KeyHint("critic.path")),
    **_same("simpo_gamma", KeyHint("preference.gamma", "the same number")),
    **_same("gamma_beta_ratio", KeyHint("preference.gamma", "times `preference.beta`")),
    **_same(
        "rpo_alpha cpo_alpha nll_loss_coef sft_loss_coef",
        KeyHint("preference.cross_entropy", "a weight of the chosen completion's loss"),
    ),
    **_same("label_smoothing", KeyHint("preference.label_smoothing")),
    **_same("desirable_weight", KeyHint("preference.desirable_weight")),
    **_same("undesirable_weight", KeyHint("preference.undesirable_weight")),
    **_same("precompute_ref_log_probs", KeyHint("preference.reference", "true is cached, false is live")),
    **_same("reference_free", KeyHint("preference.loss", "simpo and orpo have no reference")),
    **_same("center_rewards_coefficient", KeyHint("reward_model.center", "the same number")),
    **_same(
        "teacher_model teacher_model_name_or_path teacher_model_path teacher_path teacher_name",
        KeyHint("teachers.0.path"),
    ),
    **_same("kd_coef", KeyHint("distill.cross_entropy", "the share of the data's own loss: 1 - kd_coef")),
    **_same("kd_temperature", KeyHint("distill.temperature")),
}

_ROLLOUT = {
    **_same(
        "router_replay routing_replay rollout_routing_replay enable_rollout_routing_replay use_rollout_routing_replay",
        KeyHint("rollout.router_replay", "auto, on or off"),
    ),
    **_same("temperature sampling_temperature", KeyHint("rollout.temperature"), KeyHint("distill.temperature")),
    **_same("top_p", KeyHint("rollout.top_p")),
    **_same("top_k", KeyHint("rollout.top_k", "0 is off, not -1"), KeyHint("distill.top_k", "of cached targets")),
    **_same("min_p", KeyHint("rollout.min_p")),
    **_same("stop stop_token stop_strings stop_sequences", KeyHint("rollout.stop", "texts")),
    **_same("use_vllm rollout.name rollout_backend", KeyHint("rollout.engine", "native or vllm")),
    **_same(
        "gpu_memory_utilization vllm_gpu_memory_utilization", KeyHint("rollout.memory_gib", "GiB for keys and values")
    ),
    **_same("max_num_batched_tokens", KeyHint("rollout.prefill_tokens")),
    **_same("max_model_len vllm_max_model_len", KeyHint("rollout.max_length")),
    **_same("enable_prefix_caching", KeyHint("rollout.reuse_prefixes")),
    **_same("enforce_eager", KeyHint("rollout.decode", "true is eager")),
    **_same("optimizer_offload", KeyHint("rollout.offload_optimizer")),
    **_same("adam_offload", KeyHint("optimizer.offload")),
    **_same("vllm_num_engines num_rollout_gpus", KeyHint("placement.rollout_devices", "with layout split")),
    **_same("colocate_all_models hybrid_engine vllm_mode", KeyHint("placement.layout", "colocated, split or elastic")),
    **_same("max_turns max_assistant_turns max_user_turns", KeyHint("environment.max_turns")),
    **_same("tools tool_config_path", KeyHint("environment.tools", "file.py:function of each tool")),
    **_same("agent_func_path environment_name env env_id", KeyHint("environment.environment", "file.py:Class")),
    **_same(
        "reward_funcs reward_fn reward_function reward_functions custom_reward_function remote_rm_url reward_manager",
        KeyHint("reward.0.function", "file.py:function; verl's and TRL's signatures work"),
    ),
    **_same("reward_weights", KeyHint("reward.0.weight", "a key of each reward")),
    **_same(
        "reward_pretrain reward_model_path reward_model_name_or_path reward_model "
        "reward_model.path reward_model.model.path",
        KeyHint("reward.0.model", "a folder or hub id"),
    ),
}

_OVERLAPPED = ("grpo", "ppo", "on_policy_distill", "on_policy")
_OVERLAP = {
    **_same(
        "max_head_offpolicyness max_async_level async_level max_off_policy_steps max_staleness max_staleness_steps "
        "max_trajectory_age_steps async_steps async_generation_ratio",
        KeyHint("rollout.staleness", "the same number, with `placement.layout` split", _OVERLAPPED),
    ),
    **_same(
        "staleness_threshold",
        KeyHint("rollout.staleness", "a number of versions, where verl has a share of samples", _OVERLAPPED),
    ),
    **_same("async_train", KeyHint("rollout.staleness", "1 or more, with `placement.layout` split", _OVERLAPPED)),
    **_same(
        "async_training.partial_rollout",
        KeyHint("rollout.on_new_weights", "true is recompute, false is finish", _OVERLAPPED),
    ),
    **_same(
        "in_flight_weight_updates inflight_updates",
        KeyHint("rollout.on_new_weights", "true is keep, false is finish", _OVERLAPPED),
    ),
    **_same(
        "recompute_kv_cache_after_weight_updates",
        KeyHint("rollout.on_new_weights", "true is recompute, false is keep", _OVERLAPPED),
    ),
}

_MODEL = {
    **_same(
        "router_aux_loss_coef moe_aux_loss_coeff aux_loss_coef aux_loss_alpha",
        KeyHint("model.router_aux_loss_coef", "over all tokens of a step"),
    ),
    **_same(
        "model_name_or_path model_name pretrain pretrained pretrained_model_name_or_path base_model sft_model_path "
        "hf_model_path model.name actor_rollout_ref.model.path partial_pretrain",
        KeyHint("model.path"),
    ),
    **_same("tokenizer_name_or_path tokenizer_name tokenizer_path", KeyHint("model.tokenizer")),
    **_same("chat_template chat_template_path", KeyHint("model.chat_template", "a Jinja file")),
    **_same("bf16", KeyHint("model.dtype", "true is bfloat16, false is float32")),
    **_same("fp16", KeyHint("model.dtype", "bfloat16; there is no float16")),
    **_same("torch_dtype param_dtype precision mixed_precision dtype", KeyHint("model.dtype", "float32 or bfloat16")),
    **_same(
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpoint ac",
        KeyHint("model.activation_checkpointing", "true is layers"),
    ),
    **_same(
        "activation_offloading enable_activation_offload enable_activation_offloading activation_offload",
        KeyHint("model.offload_activations", "with model.activation_checkpointing layers"),
    ),
    **_same("torch_compile use_torch_compile", KeyHint("model.compile", "on, off or auto")),
    **_same("disable_dropout", KeyHint("model.dropout", "off unless asked")),
    **_same("lora_r lora_rank r lora.r", KeyHint("model.lora.rank")),
    **_same("lora_alpha", KeyHint("model.lora.alpha")),
    **_same("lora_dropout", KeyHint("model.lora.dropout")),
    **_same(
        "target_modules lora_target_modules lora_modules",
        KeyHint("model.lora.targets", "all-linear, or names of layers"),
    ),
    **_same("use_rslora", KeyHint("model.lora.rank_stabilized")),
    **_same("use_peft use_lora peft_config lora_config lora", KeyHint("model.lora", "a section: {rank: 16}")),
    **_same("lora_path adapter_name_or_path lora_adapter_path", KeyHint("model.lora.adapter")),
}

_DATA = {
    **_same(
        "dataset dataset_name datasets dataset_path train_file train_files train_data train_dataset prompt_data",
        KeyHint("data.train", "files, or hub ids"),
    ),
    **_same(
        "val_files val_file eval_dataset eval_data eval_file validation_file test_file valid validation test",
        KeyHint("data.heldout", "files, or hub ids"),
    ),
    **_same(
        "input_key prompt_key answer_key label_key output_key chosen_key rejected_key dataset_text_field reward_fn_key",
        KeyHint("data.train.0.columns", _COLUMNS),
    ),
    **_same("dataset_weights prompt_data_probs probabilities", KeyHint("data.train.0.weight", "a key of each source")),
    **_same("dataloader_num_workers dataset_num_proc", KeyHint("data.workers")),
    **_same("packing sample_packing packing_samples", KeyHint("data.packing_window", "rows are always packed")),
    **_same(
        "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt",
        KeyHint("data.trained", "assistant, last_turn or everything"),
    ),
    **_same("shuffle_buffer_size", KeyHint("data.shuffle_rows")),
}

_RUN = {
    **_same(
        "output_dir save_path default_local_dir ckpt_path ckpt_dir", KeyHint("run.folder", "and `run.name` below it")
    ),
    **_same("run_name experiment_name exp_name wandb_run_name", KeyHint("run.name")),
    **_same("report_to logger log_with use_wandb wandb", KeyHint("run.loggers")),
    **_same("seed data_seed", KeyHint("run.seed")),
    **_same("logging_steps log_interval", KeyHint("run.log_every")),
    **_same(
        "save_steps save_freq save_interval checkpoint_interval ckpt.interval", KeyHint("checkpoint.every", "steps")
    ),
    **_same("save_total_limit max_ckpt_num max_actor_ckpt_to_keep keep_last", KeyHint("checkpoint.keep")),
    **_same("load_best_model_at_end metric_for_best_model", KeyHint("checkpoint.keep_best")),
    **_same(
        "eval_steps test_freq eval_interval eval_every eval_strategy evaluation_strategy",
        KeyHint("evaluation.every", "steps"),
    ),
    **_same("val_before_train eval_on_start", KeyHint("evaluation.at_start")),
    **_same("eval_n_samples_per_prompt", KeyHint("evaluation.generation.samples")),
    **_same("eval_temperature", KeyHint("evaluation.generation.temperature")),
    **_same(
        "num_gpus n_gpus_per_node num_gpus_per_node actor_num_gpus_per_node num_processes nproc_per_node world_size "
        "nnodes num_nodes actor_num_nodes",
        KeyHint("placement.devices", "of all nodes and roles together"),
    ),
    **_same("tensor_parallel_size", KeyHint("placement.policy.tensor", "of the devices that train")),
    **_same(
        "tensor_model_parallel_size vllm_tensor_parallel_size",
        KeyHint("placement.generator.tensor", "devices of each generator"),
    ),
    **_same("use_cpu no_cuda", KeyHint("placement.device", "cpu, cuda or auto")),
    **_same("ddp_timeout", KeyHint("placement.timeout_s", "seconds")),
}

KEYS: Mapping[str, tuple[KeyHint, ...]] = (
    _SIZES | _LENGTHS | _OPTIMIZER | _ALGORITHM | _ROLLOUT | _OVERLAP | _MODEL | _DATA | _RUN
)
"""Name, or the end of a key path -> what stands for it; the first hint that fits the program counts."""

WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_model_parallel_size"),
        "layers are not spread over devices in stages. Remove it",
    ),
    **dict.fromkeys(
        ("deepspeed", "zero_stage", "fsdp", "fsdp_config", "strategy", "param_offload", "fsdp_size"),
        "weights and optimizer state are sharded over all devices by themselves. Remove it",
    ),
    **dict.fromkeys(
        ("flash_attn", "attn_implementation", "use_remove_padding", "use_flash_attention_2"),
        "batches are always packed without padding. Remove it",
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization"), "weights are not quantized. Remove it"),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_mode", "load_checkpoint"), "a run is continued by `podium resume RUN`"
    ),
    **dict.fromkeys(
        ("ulysses_sequence_parallel_size", "context_parallel_size", "ring_attn_size", "sequence_parallel_size"),
        "only programs on fixed data divide a sequence, by their context axis. Remove it",
    ),
    **dict.fromkeys(
        ("project_name", "wandb_project"),
        "trackers take the project from their environment variables: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, "
        "TRACKIO_PROJECT",
    ),
    **dict.fromkeys(
        ("wandb_entity", "wandb_org"), "Weights & Biases takes it from the environment variable WANDB_ENTITY"
    ),
    **dict.fromkeys(
        ("optim", "optimizer_type", "optim.optimizer", "optimizer.name", "optimizer.type", "optimizer.optimizer"),
        "the optimizer is AdamW. Remove it",
    ),
    **dict.fromkeys(("vf_coef", "value_loss_coef"), "the critic has its own weights and optimizer. Remove it"),
    "apply_chat_template": "rows with messages always go through the chat template. Remove it",
}
"""Names, or ends of key paths, that nothing stands for, and the reason. The sentences name no key."""

SECTIONS = (
    "actor_rollout_ref", "actor", "ref", "trainer", "custom_reward_function", "orchestrator", "inference",
    "training_args", "kl_ctrl", "sampling_params", "sampling", "ckpt", "optim", "multi_turn", "overlong_buffer",
    "async_training", "async_grpo", "fully_async",
)  # fmt: skip
"""Sections of other projects whose keys have their places elsewhere."""
