# SPDX-License-Identifier: Apache-2.0
"""What `podium.generate` is given, checked: model folder, prompts and sampling."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from podium.data.python_rows import write_rows
from podium.data.tokenizer import require_tokenizer_files
from podium.errors import ModelError, RecipeError, RunFolderError
from podium.recipe import SourceSection
from podium.recipe.explaining import explained
from podium.recipe.fields import Section
from podium.recipe.loading import not_valid

if TYPE_CHECKING:
    from podium.rollout.requests import Sampling

SectionT = TypeVar("SectionT", bound=Section)


def generating_folder(model: str, *, needs_tokenizer: bool) -> Path:
    """The model's folder, fetched where it is a hub id; what lacks something to generate with is refused."""
    from podium.models.folder import check_model_folder, check_speaks, local_folder

    path = Path(model)
    if (path / "recipe.yaml").is_file() or (path / "checkpoint.json").is_file():
        run = path if (path / "recipe.yaml").is_file() else path.parent.parent
        raise RunFolderError(
            f"MODEL: {model} belongs to a run of Podium and is not a Hugging Face checkpoint. Export it first with "
            f"`podium export {run} OUT`, then give OUT."
        )
    check_model_folder(model, "MODEL", weights=False, tokenizer=False)
    check_speaks(model, "MODEL")
    folder = local_folder(model, "MODEL")
    if not list(folder.glob("*.safetensors")):
        raise ModelError(
            f"MODEL: {model} has no *.safetensors weights to generate with. Convert other weights with transformers' "
            "save_pretrained."
        )
    if needs_tokenizer:
        try:
            require_tokenizer_files(str(folder), "MODEL")
        except ModelError as error:
            raise ModelError(
                f"MODEL: {model} has no tokenizer, and prompts are text. Save one there with "
                "tokenizer.save_pretrained, or give --tokenizer a folder or hub id that has one."
            ) from error
    return folder


def section_of(kind: type[SectionT], /, **values: Any) -> SectionT:
    """A section of a recipe; values that do not fit are a RecipeError."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise not_valid("what was given", explained(error, kind)) from error


def prompt_source(prompts: Any, out: Path) -> SourceSection:
    """The source of a path, or of rows that are written beside `out`."""
    if isinstance(prompts, SourceSection):
        return prompts
    if isinstance(prompts, str | os.PathLike):
        return section_of(SourceSection, path=os.fspath(prompts))
    return section_of(SourceSection, path=str(write_rows(prompts, out.parent / ".cache", "prompts")))


def sampling_of(value: Sampling | Mapping[str, Any]) -> Sampling:
    """The sampling, given as itself or as a dict of its fields."""
    from podium.rollout.requests import Sampling

    try:
        sampling = value if isinstance(value, Sampling) else Sampling(**value)
    except TypeError as error:
        raise RecipeError(f"sampling: expected a Sampling, or a dict of its fields ({error}).") from error
    for field in dataclasses.fields(sampling):
        if field.type in ("int", "float"):
            require_number(getattr(sampling, field.name), f"sampling.{field.name}")
    return sampling


def require_number(value: Any, name: str) -> None:
    """Raises an error unless the value is a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RecipeError(f"{name}: expected a number, found {value!r}.")
