# SPDX-License-Identifier: Apache-2.0
"""The folder of a model: a local Hugging Face folder or a hub id, and its required files. Torch-free, so `check` can
use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from podium.data.tokenizer import require_tokenizer_files
from podium.errors import ModelError

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.model.v*", "*.tiktoken", "*.jinja", "*.txt", "*.py"]


def check_model_folder(path: str, key: str, *, weights: bool, tokenizer: bool) -> None:
    """Checks a local folder without loading anything; a path that can only be a hub id passes."""
    folder = Path(path)
    if is_hub_id(path):
        return
    if not folder.exists():
        raise ModelError(
            f"{key}: there is no folder {path}. Give a Hugging Face checkpoint folder or a hub id (owner/name)."
        )
    if not folder.is_dir():
        raise ModelError(f"{key}: {path} is a file. Give the folder that holds config.json.")
    read_config(folder, key)
    if weights and not list(folder.glob("*.safetensors")):
        other_files = ", ".join(sorted(file.name for file in folder.glob("*.bin"))[:3])
        hint = (
            f" It has {other_files}: convert those to safetensors first."
            if other_files
            else " Use model.init: random to start from the config alone."
        )
        raise ModelError(f"{key}: {path} has no *.safetensors weights.{hint}")
    if tokenizer:
        require_tokenizer_files(path, key)


def check_speaks(path: str, key: str) -> None:
    """Refuses a classifier, which has the body of a language model and no language-model head. With a tied head nothing
    else would reveal it."""
    if not (Path(path) / "config.json").is_file():
        return
    kinds = read_config(Path(path), key).get("architectures") or []
    if kinds and all("ForSequenceClassification" in str(kind) for kind in kinds):
        raise ModelError(f"{key}: {path} is a {kinds[0]}, which scores and does not speak. Give a language model.")


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """config.json as plain values."""
    file = folder / "config.json"
    if not file.is_file() and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{key}: {folder} is an adapter, not a model. Set model.path to the base that it was trained on, and "
            f"model.lora.adapter to {folder}."
        )
    if not file.is_file():
        raise ModelError(f"{key}: {folder} has no config.json, so it is not a Hugging Face checkpoint.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{key}: {file} is not valid JSON ({error}). Restore it from where the model came from."
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"{key}: {file} does not hold an object.")
    return values


def local_folder(path: str, key: str) -> Path:
    """The folder itself, or a downloaded snapshot of a hub id."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    check_model_folder(path, key, weights=False, tokenizer=False)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=_HUB_PATTERNS))
    except Exception as error:
        raise ModelError(
            f"{key}: {path} is no local folder, and as a hub id it could not be fetched ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}). Check the name, or download it first and "
            "give the folder."
        ) from error


def is_hub_id(path: str) -> bool:
    """Whether it is owner/name, with no local folder of the owner's name that it could refer to."""
    owner, _, name = path.partition("/")
    return bool(owner and name) and "/" not in name and not path.startswith((".", "~")) and not Path(owner).exists()
