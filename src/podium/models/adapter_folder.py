# SPDX-License-Identifier: Apache-2.0
"""The folder of an adapter, and which base it belongs to. Torch-free, so that a recipe can be checked with it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from podium.data.fingerprints import files_fingerprint, text_fingerprint
from podium.errors import MissingExtraError, ModelError
from podium.models.folder import is_hub_id, read_config
from podium.recipe import ModelSection

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_NOTE = "podium_base.json"
# Keys of a config that name its writer and do not describe the model.
_NOT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")


def check_adapter(model: ModelSection) -> None:
    """Checks model.lora without loading anything: peft is installed, and an adapter to continue from fits the base, if
    both are local folders."""
    if model.lora is None:
        return
    require_peft()
    adapter, key = model.lora.adapter, "model.lora.adapter"
    if adapter is not None and not is_hub_id(adapter):
        check_adapter_folder(Path(adapter), key)
        if (Path(model.path) / "config.json").is_file():
            require_base(Path(adapter), Path(model.path), model.path, key)


def require_peft() -> None:
    """Raises an error with install instructions if peft is missing."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            "model.lora needs the peft package, which is not installed. Install it with: pip install 'podium[lora]'"
        )


def check_adapter_folder(folder: Path, key: str) -> dict[str, Any]:
    """adapter_config.json as plain values; raises an error if the folder cannot be an adapter."""
    file = folder / ADAPTER_CONFIG
    if not folder.is_dir():
        raise ModelError(f"{key}: there is no folder {folder}. Give one with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}.")
    if not file.is_file():
        whole = " It is a whole checkpoint: put it in model.path." if (folder / "config.json").is_file() else ""
        raise ModelError(f"{key}: {folder} has no {ADAPTER_CONFIG}, so it is not an adapter.{whole}")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{key}: {folder} has no {ADAPTER_WEIGHTS}. Save the adapter as safetensors.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{key}: {file} is not valid JSON ({error}). Save the adapter again.") from error
    if not isinstance(values, dict):
        raise ModelError(f"{key}: {file} does not hold an object.")
    return values


def base_identity(folder: Path) -> dict[str, str]:
    """The identity of a base: its config and its weights, wherever they are stored."""
    config = read_config(folder, "model.path")
    said = {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}
    return {
        "config": text_fingerprint(json.dumps(said, sort_keys=True)),
        "weights": files_fingerprint(sorted(folder.glob("*.safetensors"))),
    }


def write_base(adapter: Path, base: Path, path: str) -> None:
    """Writes the identity of an adapter's base into its folder."""
    note = {"path": path, **base_identity(base)}
    (adapter / BASE_NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def require_base(adapter: Path, base: Path, path: str, key: str) -> None:
    """Raises an error if the folder says that the adapter was trained on another base. A folder written by peft has
    only a path. That path is compared if both are hub ids, or if it still leads to a base; else names and shapes
    decide. `path` is model.path as in the recipe, `base` the folder that it stands for."""
    values = check_adapter_folder(adapter, key)
    note = adapter / BASE_NOTE
    if note.is_file():
        _require_noted(note, base, path, key)
        return
    named = str(values.get("base_model_name_or_path") or "")
    if is_hub_id(named) and is_hub_id(path):
        if named != path:
            raise _other(adapter, key, named, path, "the names differ")
    elif named and (Path(named) / "config.json").is_file() and base_identity(Path(named)) != base_identity(base):
        raise _other(adapter, key, named, path, "their config or weights differ")


def _require_noted(note: Path, base: Path, path: str, key: str) -> None:
    try:
        wanted = json.loads(note.read_text(encoding="utf-8"))
        parts = {part: str(wanted[part]) for part in ("config", "weights")}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{key}: {note} is damaged ({error}). Export the adapter again.") from error
    identity = base_identity(base)
    differing = [part for part in parts if parts[part] != identity[part]]
    if differing:
        raise _other(note.parent, key, str(wanted.get("path")), path, f"the {' and the '.join(differing)} differ")


def _other(adapter: Path, key: str, named: str, path: str, why: str) -> ModelError:
    return ModelError(
        f"{key}: {adapter} is an adapter of another base: it was trained on {named}, and model.path is {path} ({why}). "
        f"Set model.path to its own base. (If it is the same base in other files, remove {BASE_NOTE} from the "
        "adapter's folder.)"
    )
