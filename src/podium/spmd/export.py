# SPDX-License-Identifier: Apache-2.0
"""From a sharded checkpoint to a plain Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import torch
import transformers

from podium.data.tokenizer import load_tokenizer
from podium.engine.checkpoint import CheckpointReader, best_step, newest_usable, saved_steps
from podium.errors import CheckpointError, RunFolderError
from podium.models.causal_lm import build, load_config, persistent_buffers, restore_buffers
from podium.models.folder import local_folder
from podium.models.weights import Box, Piece
from podium.recipe import Recipe
from podium.spmd.folder import RunFolder

Which = Literal["last", "best"] | int
ExportDtype = Literal["float32", "bfloat16"]


def export_checkpoint(folder: RunFolder, out: Path, *, which: Which, dtype: ExportDtype | None) -> int:
    """Writes weights (padding rows cut off), config, tokenizer and generation config; returns the exported step.

    The folder appears under its name only when it is complete.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} exists already and is not empty. Give a new folder.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    recipe, reader = folder.recipe(), _chosen(folder, which)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(recipe, reader, partial, dtype)
        if out.exists():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return reader.step


def _chosen(folder: RunFolder, which: Which) -> CheckpointReader:
    if which == "best":
        best = best_step(saved_steps(folder.checkpoints))
        if best is None:
            raise CheckpointError(
                f"no checkpoint of {folder.path} has a held-out loss, so none is the best. Export the last one, or "
                "train with data.heldout and checkpoint.keep_best."
            )
        return newest_usable(folder.checkpoints, best.step)
    return newest_usable(folder.checkpoints, None if which == "last" else which)


def _write(recipe: Recipe, reader: CheckpointReader, out: Path, dtype: ExportDtype | None) -> None:
    source = local_folder(recipe.model.path, "model.path")
    config = load_config(source, trust_remote_code=recipe.model.trust_remote_code)
    unpadded = recipe.model.model_copy(update={"pad_vocab_to": 1})
    model = build(unpadded, config, device=torch.device("meta"), dtype=torch.float32)
    model.to_empty(device="cpu")
    model.hf.tie_weights()
    restore_buffers(model.hf)
    stored = reader.shapes()
    wanted = {f"weight/{name}": parameter.detach() for name, parameter in model.hf.named_parameters()}
    wanted |= {f"buffer/{name}": buffer for name, buffer in persistent_buffers(model.hf).items()}
    pieces = []
    for key, tensor in wanted.items():
        if key not in stored:
            raise CheckpointError(
                f"{reader.folder} has no {key}: it belongs to another model than {recipe.model.path}."
            )
        pieces.append(Piece(name=key, local=tensor, box=Box.whole(tensor.shape), shape=stored[key]))
    reader.load(pieces)
    kept = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    hf = model.hf.to(getattr(torch, kept))
    hf.config.dtype = getattr(torch, kept)
    if (source / "generation_config.json").is_file():
        hf.generation_config = transformers.GenerationConfig.from_pretrained(source)
    hf.save_pretrained(out)
    load_tokenizer(recipe.model).save_pretrained(out)
