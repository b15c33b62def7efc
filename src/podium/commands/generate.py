# SPDX-License-Identifier: Apache-2.0
"""`podium generate`: answers to a file of prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer
from pydantic import ValidationError

from podium import api
from podium.recipe import RolloutSection, SourceSection
from podium.recipe.fields import Section

SectionKind = TypeVar("SectionKind", bound=Section)


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face checkpoint, or a hub id.")],
    prompts: Annotated[
        str, typer.Option(help="Rows with messages, prompt or text: JSONL, Parquet, CSV, a glob, or a datasets id.")
    ],
    out: Annotated[Path, typer.Option(help="JSONL file of the answers. If it was begun before, it is continued.")],
    samples: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    min_p: Annotated[float, typer.Option(help="0: off.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help=r"Text that ends an answer (\n is a new line); as often as needed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Answers depend on seed, row and sample, not on their company.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Also write token ids and their log-probs.")] = False,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option()] = "auto",
    engine: Annotated[Literal["native", "vllm"], typer.Option()] = "native",
    memory_gib: Annotated[
        float | None, typer.Option(help="For keys and values; default: see docs/generating.md.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Prompt and answer; default: what the prompts need.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Answers generated at the same time.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub id, when MODEL has none.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A Jinja file to use instead of the tokenizer's.")] = None,
    control_tokens_in_content: Annotated[
        Literal["text", "control"], typer.Option(help="What messages that spell a control token become.")
    ] = "text",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    column: Annotated[
        list[str] | None, typer.Option(help="prompt=question reads the column question as the prompt.")
    ] = None,
) -> None:
    """Answer every prompt of a file with a model; after an interruption, the same command continues."""
    from podium.rollout.requests import Sampling

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_strings=tuple(_unescaped(text) for text in stop or ()),
    )
    try:
        done = api.generate(
            model,
            _section(SourceSection, path=prompts, columns=_columns(column or [])),
            out,
            sampling=sampling,
            samples=samples,
            seed=seed,
            limit=limit,
            logprobs=logprobs,
            device=device,
            dtype=dtype,
            rollout=_section(
                RolloutSection,
                engine=engine,
                memory_gib=memory_gib,
                max_length=max_length,
                max_running=max_running,
            ),
            tokenizer=tokenizer,
            chat_template=chat_template,
            control_tokens_in_content=control_tokens_in_content,
            trust_remote_code=trust_remote_code,
        )
    except KeyboardInterrupt as error:
        typer.echo("\n".join(getattr(error, "__notes__", ["stopped"])), err=True)
        raise typer.Exit(130) from error
    for line in done.lines():
        typer.echo(line)


def _columns(texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for text, (new, _, old) in zip(texts, pairs, strict=True):
        if not new or not old:
            raise typer.BadParameter(f"{text!r} is not NAME=COLUMN; prompt=question reads `question` as the prompt")
    return {new: old for new, _, old in pairs}


def _section(kind: type[SectionKind], **values: object) -> SectionKind:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + ".".join(map(str, first["loc"])).replace("_", "-")
        raise typer.BadParameter(f"{option}: {first['msg']}") from error


def _unescaped(text: str) -> str:
    """A shell does not turn \\n into a new line, and who types it means one."""
    return re.sub(r"\\([ntr\\])", lambda match: {"n": "\n", "t": "\t", "r": "\r"}.get(match[1], "\\"), text)
