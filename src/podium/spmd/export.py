# SPDX-License-Identifier: Apache-2.0
"""Exports a sharded checkpoint to a plain Hugging Face folder, or to an adapter that plain peft loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from podium.data.tokenizer import load_tokenizer
from podium.engine.checkpoint import CheckpointReader, newest_usable
from podium.engine.checkpoint_files import best_step, saved_steps
from podium.engine.mesh import adopt
from podium.engine.sharding import PackedModel, place, place_scalar
from podium.errors import CheckpointError, RunFolderError
from podium.models.causal_lm import build, load_config
from podium.models.folder import local_folder
from podium.models.lora import merge, save_adapter
from podium.models.precision import set_dtypes, state_dtypes
from podium.models.scalar import build_scalar
from podium.recipe import Recipe, RewardModelRecipe
from podium.runs.folder import RunFolder

Which = Literal["last", "best"] | int
ExportDtype = Literal["float32", "bfloat16"]


def export_checkpoint(
    folder: RunFolder, out: Path, *, which: Which, dtype: ExportDtype | None, adapter: bool = False
) -> int:
    """Writes weights (without padding rows), config, tokenizer and generation config; returns the exported step. An
    adapter is merged into its base, or with `adapter` written alone. The folder appears under its name only when it is
    complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} exists already and is not empty. Give a new folder.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    recipe, reader = folder.recipe(needs_environment=False), chosen_checkpoint(folder, which)
    if adapter and recipe.model.lora is None:
        raise RunFolderError(f"{folder.path} trained all weights, so it has no adapter. Export it without --adapter.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(recipe, reader, partial, dtype, adapter=adapter)
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return reader.step


def chosen_checkpoint(folder: RunFolder, which: Which) -> CheckpointReader:
    """The newest checkpoint, the best one, or that of a step."""
    if which == "best":
        best = best_step(saved_steps(folder.checkpoints))
        if best is None:
            raise CheckpointError(
                f"no checkpoint of {folder.path} has a held-out loss, so none is the best. Take the last one, or "
                "train with data.heldout and checkpoint.keep_best."
            )
        return newest_usable(folder.checkpoints, best.step)
    return newest_usable(folder.checkpoints, None if which == "last" else which)


def _write(recipe: Recipe, reader: CheckpointReader, out: Path, dtype: ExportDtype | None, *, adapter: bool) -> None:
    source = local_folder(recipe.model.path, "model.path")
    hf, tokenizer = _filled(recipe, reader, source).hf, load_tokenizer(recipe.model)
    if adapter:
        save_adapter(hf.to(getattr(torch, dtype or "float32")), out, base=source, base_path=recipe.model.path)
    else:
        if recipe.model.lora is not None:
            merge(hf)
        config = load_config(source, trust_remote_code=recipe.model.trust_remote_code)
        dtype_name = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        _cast(hf, recipe, config, getattr(torch, dtype_name))
        hf.config.dtype = getattr(torch, dtype_name)
        if (source / "generation_config.json").is_file():
            hf.generation_config = transformers.GenerationConfig.from_pretrained(source)
        if isinstance(recipe, RewardModelRecipe):
            # transformers uses it to find the last token of a padded batch, and refuses a batch without it.
            hf.config.pad_token_id = (
                tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
            )
            hf.config.problem_type = "regression"
        hf.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _filled(recipe: Recipe, reader: CheckpointReader, source: Path) -> PackedModel:
    """The model with the checkpoint's weights in float32, without padding rows. Weights that the checkpoint does not
    hold (the base of an adapter) are read from the same place as for training."""
    section = recipe.model.model_copy(
        update={"pad_vocab_to": 1, "dtype": "float32", "compile": "off", "activation_checkpointing": "none"}
    )
    mesh, seed = adopt(rank=0, world=1, device="cpu", devices=None), recipe.run.seed
    if isinstance(recipe, RewardModelRecipe):
        return place_scalar(section, source, mesh, labels=1, seed=seed, checkpoint=reader)[0]
    return place(section, source, mesh, seed=seed, checkpoint=reader)[0]


def _cast(hf: Any, recipe: Recipe, config: Any, dtype: torch.dtype) -> None:
    """Casts to what transformers itself would load in `dtype`: some parameters stay float32."""
    plain = recipe.model.model_copy(update={"pad_vocab_to": 1, "lora": None})
    meta = torch.device("meta")
    if isinstance(recipe, RewardModelRecipe):
        loaded = build_scalar(plain, config, device=meta, dtype=dtype, labels=1).hf
    else:
        loaded = build(plain, config, device=meta, dtype=dtype).hf
    set_dtypes(hf, state_dtypes(loaded))
