# SPDX-License-Identifier: Apache-2.0
"""Where a model is: a local Hugging Face folder or a hub id; what must be in it. Torch-free, so `check` can use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from podium.errors import ModelError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"]


def check_model_folder(path: str, key: str, *, weights: bool, tokenizer: bool) -> None:
    """Looks at a local folder without loading anything; a path that is no folder may be a hub id and is let pass."""
    folder = Path(path)
    if not folder.exists():
        if _looks_like_a_hub_id(path):
            return
        raise ModelError(
            f"{key}: there is no folder {path}. Give a Hugging Face checkpoint folder or a hub id (owner/name)."
        )
    if not folder.is_dir():
        raise ModelError(f"{key}: {path} is a file. Give the folder that holds config.json.")
    read_config(folder, key)
    if weights and not list(folder.glob("*.safetensors")):
        found = ", ".join(sorted(file.name for file in folder.glob("*.bin"))[:3])
        hint = (
            f" It has {found}: convert those to safetensors first."
            if found
            else " Use model.init: random to start from the config alone."
        )
        raise ModelError(f"{key}: {path} has no *.safetensors weights.{hint}")
    if tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{key}: {path} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])} are missing). "
            "Copy the tokenizer files there, or set model.tokenizer to a folder that has them."
        )


def read_config(folder: Path, key: str) -> dict[str, Any]:
    """config.json as plain values."""
    file = folder / "config.json"
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


def _looks_like_a_hub_id(path: str) -> bool:
    parts = path.split("/")
    return len(parts) == 2 and all(parts) and not path.startswith((".", "/", "~"))
