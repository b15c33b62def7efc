# SPDX-License-Identifier: Apache-2.0
"""`podium verify`: compares the loaded, packed, sharded, compiled model with plain transformers, on any number of
ranks."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
import transformers

from podium.engine.mesh import check_devices, join, leave
from podium.engine.sharding import compute_dtype, place
from podium.models.causal_lm import load_config, unbuildable
from podium.models.folder import local_folder
from podium.models.packing import to_device
from podium.models.plain import PlainKind, plain_outputs
from podium.models.verify import Comparison, compare, random_batch, refusing
from podium.recipe import ModelSection, PlacementSection
from podium.spmd.launch import RankPlace


def verify_rank(where: RankPlace, section: ModelSection, placement: PlacementSection) -> Comparison:
    """Collective. transformers itself loads the reference, so loading is checked too. A folder without weights is
    compared with random ones, and the result says so."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    check_devices(placement, where.local_world or 1)
    torch.set_num_threads(placement.threads or 1)
    mesh = join(placement, rank=where.rank, world=where.world, local_rank=where.local_rank, meeting=where.meeting)
    folder = local_folder(section.path, "MODEL")
    dtype = compute_dtype(section, mesh.device)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            config_only = None if any(folder.glob("*.safetensors")) else str(section.path)
            if config_only is not None:
                folder = _with_random_weights(folder, Path(scratch), section.trust_remote_code)
            model, _ = place(section, folder, mesh, seed=0)
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", trust_remote_code=section.trust_remote_code
            )
        reference = reference.to(mesh.device).eval()
        batch = to_device(random_batch(model.vocab_size), mesh.device)
        model.eval()
        with torch.no_grad(), refusing(type(reference).__name__):
            ours = model(batch, None, kind="scores")
            theirs, padded = (
                plain_outputs(reference, batch, lambda tokens_DL: reference(input_ids=tokens_DL).logits, kind)
                for kind in get_args(PlainKind)
            )
        vocabulary = slice(0, model.vocab_size)
        comparison = compare(type(reference).__name__, ours, theirs[:, vocabulary], padded[:, vocabulary], dtype)
        return replace(comparison, config_only=config_only)
    finally:
        leave(mesh)


def _with_random_weights(folder: Path, scratch: Path, trust_remote_code: bool) -> Path:
    """Samples weights from a fixed seed to verify a config without weights."""
    torch.manual_seed(0)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a model's own code raises
        raise unbuildable(str(folder), error) from error
    model.save_pretrained(scratch)
    return scratch
