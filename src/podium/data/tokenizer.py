# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a recipe's model, with its chat template."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from podium.errors import ModelError
from podium.importing import collector_off
from podium.recipe.schema import ModelSection, NewTokensSection

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece*.model",
    "tokenizer.model.v*", "tekken.json", "*.tiktoken",
)  # fmt: skip


def load_tokenizer(section: ModelSection) -> Any:
    """AutoTokenizer from `model.tokenizer` or `model.path`; `model.chat_template` replaces its template."""
    key = "model.tokenizer" if section.tokenizer else "model.path"
    path = os.path.expanduser(section.tokenizer or section.path)
    is_local = os.path.isdir(path)
    if is_local:
        require_tokenizer_files(path, key)
    elif path.startswith(("/", ".")) or path.count("/") > 1 or os.path.isdir(path.split("/")[0]):
        raise ModelError(
            f"{key}: there is no folder {path}. Give the folder of a Hugging Face checkpoint, or a hub id."
        )
    template = _template(section)
    with collector_off():
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=section.trust_remote_code, local_files_only=is_local
        )
    except Exception as error:  # from_pretrained raises errors of any type
        raise ModelError(
            f"{key}: the tokenizer of {path} cannot be loaded ({type(error).__name__}: {error}). Check the files, "
            "the network when it is a hub id, and model.trust_remote_code when the checkpoint ships its own code."
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    if section.new_tokens is not None:
        _add_tokens(tokenizer, section.new_tokens)
    return tokenizer


def without_new_tokens(section: ModelSection) -> ModelSection:
    """The model section without new tokens, as in its checkpoint."""
    return section.model_copy(update={"new_tokens": None})


def listed_tokens(section: NewTokensSection) -> list[str]:
    """The new tokens in the order of their ids."""
    tokens = list(section.tokens)
    if section.file is not None:
        try:
            lines = Path(section.file).expanduser().read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"model.new_tokens.file: {section.file} cannot be read ({error}). Give a UTF-8 text file with one "
                "token a line."
            ) from error
        tokens += [line.strip() for line in lines if line.strip()]
    repeated = [token for token, count in Counter(tokens).items() if count > 1]
    if repeated:
        raise ModelError(f"model.new_tokens: {repeated[0]!r} is listed twice. Name every token once.")
    if not tokens:
        raise ModelError(f"model.new_tokens.file: {section.file} names no token. Write one a line.")
    return tokens


def _add_tokens(tokenizer: Any, section: NewTokensSection) -> None:
    """Adds tokens after the tokenizer's own; an existing token keeps its id."""
    from tokenizers import AddedToken

    tokens = listed_tokens(section)
    tokenizer.add_tokens(
        [AddedToken(token, special=section.special, normalized=False) for token in tokens],
        special_tokens=section.special,
    )
    apart = [token for token in tokens if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id)]
    if apart:
        raise ModelError(f"model.new_tokens: the tokenizer does not take {apart[0]!r} as a token. Choose another name.")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a local folder holds some tokenizer's files."""
    return any(glob.glob(os.path.join(glob.escape(str(folder)), name)) for name in _TOKENIZER_FILES)


def require_tokenizer_files(folder: str, key: str) -> None:
    """A local folder must hold some tokenizer's files."""
    if has_tokenizer(folder):
        return
    raise ModelError(
        f"{key}: {folder} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}). Save one there with "
        "tokenizer.save_pretrained, or set model.tokenizer to a folder or hub id that has one."
    )


def _template(section: ModelSection) -> str | None:
    if section.chat_template is None:
        return None
    try:
        with open(os.path.expanduser(section.chat_template), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"model.chat_template: {section.chat_template} cannot be read ({error}). Give a Jinja file in UTF-8."
        ) from error


def require_embeddings(tokenizer: Any, rows: int) -> None:
    """Every token of the tokenizer must have an embedding row."""
    if len(tokenizer) > rows:
        raise ModelError(
            f"model.path: the tokenizer has {len(tokenizer)} tokens and the model {rows} embedding rows, so some "
            "tokens have no embedding. They do not belong together."
        )


def require_same_tokens(policy: Any, other: Any, path: str) -> None:
    """Every token of the policy must have the same id in the other tokenizer. Otherwise that model would score
    different words, without any visible error."""
    theirs = other.get_vocab()
    differing = [token for token, number in policy.get_vocab().items() if theirs.get(token) != number]
    if differing:
        raise ModelError(
            f"{path}: its tokenizer gives {len(differing)} of the policy's tokens another id (or none), "
            f"{differing[0]!r} for one. It would score other words than were said. Teacher, reference and "
            "policy must share their tokenizer."
        )


def answer_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of generated tokens for everything that reads an answer: rewards, environments, stop strings, evaluation,
    files of answers. Special tokens are left out; everything else is verbatim."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def marked_text(tokenizer: Any, tokens: Sequence[int], trained: Sequence[bool]) -> str:
    """All tokens as one line of text, special ones included, with the trained ones in double brackets."""
    parts = []
    for is_trained, places in groupby(range(len(tokens)), key=lambda place: bool(trained[place])):
        text = tokenizer.decode([int(tokens[place]) for place in places])
        parts.append(f"[[{text}]]" if is_trained else text)
    return "".join(parts).replace("\n", "\\n")


def special_ids(tokenizer: Any) -> set[int]:
    """Every token that `answer_text` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}


def parted_stops(tokenizer: Any, stops: Sequence[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Splits stop texts into (stop tokens, stop strings). The name of a special token never appears in an answer's
    text, so it stands for the token."""
    ids = sorted(special_ids(tokenizer)) if stops else []
    by_name = dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True)) if ids else {}
    return (
        frozenset(int(by_name[text]) for text in stops if text in by_name),
        tuple(text for text in stops if text not in by_name),
    )


def stop_tokens(tokenizer: Any, folder: Path) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's end token and those of the model's generation config."""
    stops: set[int] = set()
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(
                f"{file} does not hold a JSON object ({error}), so where answers end is not known. Restore it from "
                "where the model came from, or remove it."
            ) from error
        stops |= {int(end) for end in (ends if isinstance(ends, list) else [ends] if ends is not None else [])}
    return frozenset(stops)
