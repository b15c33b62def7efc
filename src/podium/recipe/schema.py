# SPDX-License-Identifier: Apache-2.0
"""Sections that recipes of several programs share. Torch-free: a mistake is found before anything heavy is imported."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from podium.progress import WATCH_SLACK_S
from podium.recipe.fields import Count, NonNegative, OneOrMore, PathSection, Place, Real, Section, Switch, Text
from podium.recipe.generator_mesh import GeneratorMeshSection
from podium.recipe.plugins import Plugin
from podium.recipe.policy_mesh import MeshSizes, PolicyMesh, with_experts


class LoraSection(Section):
    """Low-rank adapters: the base stays frozen in the compute dtype, only the adapter is trained and saved."""

    rank: Count = Field(16, description="Rows of A and columns of B: the size of the adapter of one layer.")
    alpha: Real = Field(32.0, gt=0, description="The adapter's product is scaled by alpha / rank.")
    dropout: Real = Field(
        0.0, ge=0, lt=1, description="Dropout on the adapter's input during training; sft and reward_model only."
    )
    targets: Annotated[Literal["all-linear"] | tuple[Text, ...], OneOrMore(not_an_item=("all-linear",))] = Field(
        "all-linear", description="Names of linear layers, such as [q_proj, v_proj]; all-linear: all but the head."
    )
    rank_stabilized: Switch = Field(False, description="Scale by alpha / sqrt(rank) instead.")
    adapter: Place | None = Field(
        None, description="Folder of an adapter of this base to continue from; its config sets rank, alpha and targets."
    )


class NewTokensSection(Section):
    """Tokens that the tokenizer gets beside its own, such as the items of a catalogue."""

    tokens: Annotated[tuple[Text, ...], OneOrMore()] = Field((), description="The tokens themselves.")
    file: Place | None = Field(None, description="A text file with one token a line, beside or instead of `tokens`.")
    special: Switch = Field(False, description="Special tokens are left out of decoded text.")
    init: Literal["pieces", "mean"] = Field(
        "pieces",
        description="A new token's embedding begins as the mean of those of the pieces that it was written with "
        "before, or of all.",
    )


ActivationCheckpointing = Literal["none", "selective", "all_but_attention", "layers"]
"""What is recomputed in the backward pass, from nothing to whole layers."""


class ModelSection(PathSection):
    """Which model is trained, and how it computes."""

    path: Place = Field(description="Folder of a Hugging Face checkpoint, or a hub id.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="`random` takes only the config from `path` and draws the weights from the seed."
    )
    tokenizer: Place | None = Field(None, description="Where the tokenizer is, when it is not in `path`.")
    chat_template: Place | None = Field(None, description="A Jinja file that replaces the tokenizer's chat template.")
    control_tokens_in_content: Literal["text", "control"] = Field(
        "text",
        description="What the name of a control token, such as <|im_end|>, becomes in a message, an observation or a "
        "tool: ordinary text, or the control token.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute dtype; auto is bfloat16 on CUDA, float32 on CPU. Masters are float32 always."
    )
    fp8: Switch = Field(
        False,
        description="Matrix products of the linear layers of attention and MLPs in fp8, forward and backward; on GPUs "
        "of Ada, Hopper or newer. Masters and all else stay as they are.",
    )
    compile: Literal["auto", "on", "off"] = Field("auto", description="torch.compile per layer; auto: on CUDA only.")
    activation_checkpointing: ActivationCheckpointing = Field(
        "none",
        description="What the backward pass computes again to save memory. selective: norms, activations and rotary "
        "embeddings; all_but_attention: all of a decoder layer but attention; layers: all of it, about 1/3 slower.",
    )
    offload_activations: Switch = Field(
        False,
        description="With activation_checkpointing layers: the layers' inputs wait in host memory for the backward "
        "pass. Nothing is saved on CPU.",
    )
    dropout: Switch = Field(
        False,
        description="Train with the dropout and router noise of the checkpoint's config; sft and reward_model only.",
    )
    router_aux_loss_coef: Real = Field(
        0.0,
        ge=0,
        description="Mixtures of experts: coefficient of the load-balancing loss, over all tokens of a step. 0: off.",
    )
    pad_vocab_to: Count = Field(64, description="Vocabulary rows are padded to a multiple of this inside the run.")
    trust_remote_code: Switch = Field(False, description="Run Python code that the checkpoint ships. Off unless asked.")
    lora: LoraSection | None = Field(None, description="Train a low-rank adapter instead of all weights.")
    new_tokens: NewTokensSection | None = Field(None, description="Tokens to add to the vocabulary.")
    self_check: Switch = Field(
        True, description="Before step 1, compare Podium's packed forward with plain transformers on random tokens."
    )

    def for_checkpoint(self, path: str) -> ModelSection:
        """How another checkpoint (a reference, teacher, critic or reward model) computes beside this model: without its
        adapter, and without `trust_remote_code`. Trust in this model's code is not trust in the other's."""
        changes = {
            "path": path, "init": "pretrained", "lora": None, "trust_remote_code": False, "router_aux_loss_coef": 0.0,
        }  # fmt: skip
        return self.model_copy(update=changes)


class SourceSection(PathSection):
    """One data source."""

    path: Place = Field(description="File, glob, folder, fsspec URL, or Hugging Face datasets id.")
    format: Literal["auto", "jsonl", "parquet", "csv", "datasets"] = Field(
        "auto", description="Format of the files; auto tells by their names."
    )
    split: Text = Field("train", description="Split of a Hugging Face dataset.")
    weight: Real = Field(1.0, gt=0, description="Share of the documents drawn, relative to the other sources.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Renames columns: {prompt: question} reads `question` as the prompt."
    )
    map: Plugin | None = Field(None, description="`file.py:function`, row -> row or None (None drops the row).")


class DataSection(Section):
    """Which rows are read. On-policy programs read prompts."""

    train: Annotated[tuple[SourceSection, ...], Field(min_length=1), OneOrMore()] = Field(
        description="Sources to train on, mixed by their weights."
    )
    heldout: Annotated[tuple[SourceSection, ...], OneOrMore()] = Field(
        (), description="Sources of evaluations, which are never trained on."
    )
    max_length: Count | None = Field(
        None, description="Longest document in tokens; default: what fits the step and the model."
    )
    overlong: Literal["truncate", "drop", "error"] = Field("truncate", description="What happens to longer documents.")
    on_error: Literal["fail", "skip"] = Field(
        "fail", description="Rows that cannot be read, tokenized or rendered end the run, or are skipped and named."
    )
    max_skipped_share: Real = Field(
        0.01,
        ge=0,
        le=1,
        description="on_error skip: a larger share of skipped rows ends the run; the first 1000 rows count together.",
    )
    shuffle: Switch = Field(True, description="Read rows in a random order, which the seed determines.")
    shuffle_rows: Count = Field(65_536, description="Rows that are shuffled together; larger files stream by this.")


class PackedDataSection(DataSection):
    """Rows that are tokenized and packed into steps ahead of time: fixed data."""

    packing_window: Count = Field(512, description="Documents waiting to be packed; a wider window fills steps better.")
    workers: NonNegative = Field(
        0, description="Tokenizer processes per rank. 0: a background thread, enough for most single-node runs."
    )
    prefetch: Count = Field(4, description="Steps that are prepared ahead.")


class DocumentDataSection(PackedDataSection):
    """Documents, and which of their tokens are trained."""

    trained: Literal["assistant", "last_turn", "everything"] = Field(
        "assistant", description="Which tokens of a chat are trained. Raw `text` rows are trained on everything."
    )


class OptimizerSection(Section):
    """AdamW and its schedule."""

    lr: Real = Field(gt=0, description="Learning rate, after the warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate changes from the end of the warm-up to the last step."
    )
    warmup_steps: NonNegative = Field(0, description="Steps over which the learning rate rises linearly from 0.")
    warmup_ratio: Real | None = Field(
        None, ge=0, lt=1, description="Share of all steps that warm up, instead of warmup_steps."
    )
    final_lr_ratio: Real = Field(0.0, ge=0, le=1, description="Where linear and cosine end, as a share of lr.")
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Decay rates of AdamW's two moments."
    )
    eps: Real = Field(1e-8, gt=0, description="Added to the denominator of AdamW.")
    weight_decay: Real = Field(0.0, ge=0, description="Not applied to biases, norms and other vectors.")
    clip_norm: Real | None = Field(1.0, gt=0, description="Global gradient norm; null switches clipping off.")
    offload: Switch = Field(
        False,
        description="Moments and float32 masters stay in host memory and pass through the device in every update: "
        "less memory, slower steps, the same weights. Nothing is saved on CPU.",
    )
    max_skipped_in_a_row: Count = Field(
        5, description="A step with a non-finite loss or gradient is skipped; after this many in a row the run stops."
    )


class PlacementSection(Section):
    """Which devices the run takes."""

    devices: Count = Field(
        1, description="Devices of this machine, or of the Ray cluster. Under torchrun its world size is used instead."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Kind of device; auto: CUDA where there is one.")
    timeout_s: Real = Field(
        600.0,
        gt=0,
        description="Longest time in which a rank of a program on fixed data, or a call of an on-policy worker, does "
        "not advance: it counts as dead then. Collectives wait 30 s longer, so that the rank that hangs is reported, "
        "and not one that waits for it.",
    )
    heartbeat_timeout_s: Real = Field(
        60.0,
        gt=0,
        description="On Ray: a worker (or a process of a local Ray) without any sign of life for this long is killed. "
        "Workers send heartbeats while they compute; on the controller's machine use of the processor counts as well. "
        "With launcher `local`: a rank that is stopped (SIGSTOP) for this long.",
    )
    fork_workers: Switch = Field(
        True,
        description="On a local Ray: one process imports torch and Podium and forks the workers, which start sooner. "
        "false: each worker imports them itself.",
    )
    threads: Count | None = Field(None, description="Torch threads per CPU rank; default: chosen by measuring.")
    onednn: Switch | None = Field(None, description="oneDNN on CPU; default: chosen by measuring.")
    policy: PolicyMesh | None = Field(
        None,
        description="Axes over which the devices that train hold the model; default: all of them shard. auto: "
        "the planner chooses by memory, then by time of collectives and optimizer; the run folder's recipe has the "
        "sizes and the reason.",
    )
    experts: Count = Field(
        1,
        description="Expert parallelism, for mixtures of experts: so many neighbours among the ranks of shard × "
        "context hold the experts between them, and tokens travel to their experts. Divides shard × context; with "
        "tensor, which divides experts too, both together divide the number of experts.",
    )

    @property
    def training_devices(self) -> int:
        """Number of devices that train."""
        return self.devices

    @property
    def collective_s(self) -> float:
        """Longest wait in a collective, or for another process that does not advance."""
        return self.timeout_s + WATCH_SLACK_S

    @property
    def mesh_sizes(self) -> MeshSizes:
        """The axes of the devices that train, which are known: not `auto`. Raises a PlacementError if those of `policy`
        do not give them, or do not allow `experts`."""
        return self.sizes_of(self.training_devices)

    def sizes_of(self, devices: int) -> MeshSizes:
        """The axes of so many devices."""
        assert self.policy != "auto", "the planner chooses before a run starts"
        sizes = MeshSizes(shard=devices) if self.policy is None else self.policy.sizes(devices)
        return with_experts(sizes, self.experts)


class SpmdPlacementSection(PlacementSection):
    """Ranks that all run the same program."""

    launcher: Literal["auto", "local", "ray"] = Field(
        "auto",
        description="`local` starts ranks as processes; `ray` runs them on a Ray cluster: RAY_ADDRESS's, the submitted "
        "job's, or a local one. auto: local.",
    )
    restarts: NonNegative = Field(
        0,
        description="How often all ranks are restarted when one dies before another step must be completed. They go on "
        "after the last step, which is then kept in memory (on a GPU after one of the last, if a copy of each would "
        "take over 2% of the time), or from the last checkpoint where memory does not suffice. 0: a death ends the "
        "run.",
    )


class OnPolicyPlacementSection(PlacementSection):
    """Workers of a controller."""

    launcher: Literal["auto", "ray", "inline"] = Field(
        "auto",
        description="`ray` runs the workers on a Ray cluster: RAY_ADDRESS's, the submitted job's, or a local one; "
        "`inline` runs the program in one process, for a debugger. auto: ray.",
    )
    layout: Literal["colocated", "split", "elastic"] = Field(
        "colocated",
        description="colocated: all roles share all devices, in turns. split: generators have their own. elastic: they "
        "have, and the learner's devices generate too while it waits for episodes.",
    )
    rollout_devices: Count | None = Field(
        None, description="layout split and elastic: how many of `devices` generate always; default: half of them."
    )
    max_rollout_devices: Count | None = Field(
        None,
        description="layout split and elastic: most devices that generate. Generators beyond `rollout_devices` join "
        "the running job when the Ray cluster has free devices for them, for instance those of a new node. Default: "
        "`rollout_devices`.",
    )
    generator: GeneratorMeshSection | None = Field(None, description="Devices of each generator; default: one.")
    grace_s: Real = Field(
        30.0,
        gt=0,
        description="layout split and elastic: how long a generator goes on after SIGTERM, so that its running "
        "sequences can move to others. It counts as dead afterwards.",
    )
    restarts: NonNegative = Field(
        3,
        description="How often a worker that died is replaced before a step must be committed: learners together, and "
        "every generator, grader and episode runner alone. Where a learner died, the run goes on from the last "
        "committed step, which is kept in memory. 0: a death ends the run.",
    )

    @property
    def training_devices(self) -> int:
        """Number of devices that train. With layout split or elastic, the others generate."""
        if self.layout == "colocated":
            return self.devices
        return self.devices - (self.rollout_devices or self.devices // 2)

    @property
    def generator_tensor(self) -> int:
        """Number of devices of each generator."""
        return 1 if self.generator is None else self.generator.tensor

    @property
    def learners_tensor(self) -> int:
        """Number of learners' devices that hold each generator together. With layout split none does."""
        return 1 if self.layout == "split" else self.generator_tensor


class CheckpointSection(Section):
    """When the run is saved and how many saves are kept."""

    every: Count | None = Field(None, description="Steps between checkpoints; default: only at the end and on Ctrl-C.")
    keep: Count = Field(2, description="How many of the newest checkpoints stay.")
    keep_best: Switch = Field(False, description="Also keep the one with the lowest held-out loss.")
    background: Switch = Field(True, description="Write in the background during training.")
    timeout_s: Real = Field(1800.0, gt=0, description="Longest wait for all ranks to have written their part.")


class GenerationSection(Section):
    """Answers generated from held-out prompts during evaluation (greedy)."""

    prompts: Count | None = Field(
        None, description="How many held-out prompts are answered; default: 4, in on-policy programs 512."
    )
    max_new_tokens: Count | None = Field(
        None, description="Longest answer; default: 64, in on-policy programs rollout.max_new_tokens."
    )
    show: NonNegative = Field(3, description="How many answers are printed.")
    score: Literal["exact_match"] | Plugin | None = Field(
        None,
        description="`exact_match`, or `file.py:function` taking (answer, reference, row) -> float. On-policy programs "
        "score with the recipe's rewards unless this is set.",
    )


class SampledGenerationSection(GenerationSection):
    """Greedy answers, and samples of each prompt beside them."""

    samples: Count = Field(1, description="Also sample this many answers a prompt, for pass@k.")
    temperature: Real = Field(1.0, gt=0, description="Of those samples.")


class EvaluationSection(Section):
    """Held-out loss or score, during the run and at its end."""

    every: Count | None = Field(None, description="Steps between evaluations; default: only at the end.")
    at_start: Switch = Field(False, description="Also evaluate before the first step.")
    max_documents: Count | None = Field(None, description="Most held-out documents of one evaluation; default: all.")


class GeneratedEvaluationSection(EvaluationSection):
    """Held-out loss, and generated answers."""

    generation: GenerationSection | None = None


class OnPolicyEvaluationSection(EvaluationSection):
    """Held-out score of generated answers."""

    generation: SampledGenerationSection | None = None


class SpeculationSection(Section):
    """Tokens that the native engine proposes from earlier answers, and verifies several at a time."""

    tokens: NonNegative = Field(
        0,
        description="Most tokens proposed for a sequence in a step; 0: off. Samples stay the same, up to rounding.",
    )
    history_tokens: Count = Field(
        16_777_216, description="Tokens of earlier answers that an engine keeps, at 4 bytes each."
    )


class EngineSection(Section):
    """The sizes of the engine that generates tokens."""

    memory_gib: Real | None = Field(
        None,
        gt=0,
        description="Device memory for keys and values. Default: on CUDA 80% of what is free, on CPU at most 2 GiB.",
    )
    max_length: Count | None = Field(
        None, description="Longest prompt and answer together, in tokens; default: what the model was made for."
    )
    max_running: Count | None = Field(
        None, description="Answers sampled at the same time; default: 256 on CUDA, 64 on CPU, as far as memory goes."
    )
    prefill_tokens: Count | None = Field(
        None, description="Most prompt tokens of one step beside the answers; default: 8192 on CUDA, 1024 on CPU."
    )
    block_size: Count | None = Field(
        None,
        description="Tokens of a block of the KV cache; default: 64 on CUDA (a power of two there, 16 at least), "
        "a whole sequence on CPU.",
    )
    reuse_prefixes: Switch = Field(True, description="Keep what is computed, for prompts that begin alike.")
    decode: Literal["auto", "compiled", "captured", "eager"] = Field(
        "auto",
        description="On CUDA: `compiled` layers in captured graphs are fastest and take half a minute to compile, "
        "`captured` graphs start at once, `eager` has neither. auto: compiled, but captured for a small evaluation.",
    )
    fp8: Switch = Field(
        False,
        description="The native engine computes in fp8 what model.fp8 says, with weights that are rounded once for "
        "each version. One H200 generated more slowly with it.",
    )
    speculation: SpeculationSection = SpeculationSection()
    offload_optimizer: Switch | None = Field(
        None,
        description="Optimizer state leaves the device while tokens are generated, and comes back after. Default: "
        "where roles of a controlled program share a CUDA device.",
    )

    def running_on(self, kind: Literal["cpu", "cuda"]) -> int:
        """Answers sampled at the same time on such a device, as far as memory goes."""
        return self.max_running or (256 if kind == "cuda" else 64)


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class RunSection(Section):
    """Where the run is recorded."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        None, description="Name of the run folder; default: the recipe file's name."
    )
    folder: Place = Field("runs", description="Folder that holds the run folders.")
    cache: Place | None = Field(
        None, description="Where what is computed once before training is kept for other runs; default: folder/.cache."
    )
    seed: NonNegative = Field(0, description="Seed of all random numbers of the run.")
    loggers: Annotated[tuple[TrackerName | Plugin, ...], OneOrMore()] = Field(
        (),
        description="Where metrics go beside metrics.jsonl: `tensorboard`, `wandb`, `mlflow`, `trackio`, or "
        "`file.py:Class`.",
    )
    log_every: Count = Field(1, description="Steps between lines on the console.")


class RolloutsSection(Section):
    """Which episodes stay in the run folder, to look at and to compute with."""

    keep: Literal["all", "sample", "none"] = Field(
        "sample",
        description="`sample` keeps a few whole groups of every step, `all` every episode; `none` writes no files.",
    )
    per_step: Count = Field(
        32, description="keep sample: most episodes of one step. One group is kept always, and none is cut."
    )


class OnPolicyRunSection(RunSection):
    """Where the run is recorded, and which of its episodes."""

    rollouts: RolloutsSection = RolloutsSection()
