# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on one CUDA device through `podium.train`: MFU, tokens/s and the loader's share of the step.

    python benchmarks/sft_gpu.py --shapes 0.6b 1.7b

Random-init Qwen3 shapes, a text data set with log-normal document lengths (median about 550 tokens, at most 4096), a
new packed layout every step, bf16 compute with float32 masters and clipping, compiled layers. The first steps compile
and are left out. MFU is against the matrix peak that the run itself measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import podium
from podium.observe import read_metrics
from sft_step_gpu import SHAPES

_WORDS = 20_000


def make_model(folder: Path, shape: str) -> None:
    """A config and a tokenizer; the weights are drawn in the run."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = min(_WORDS, SHAPES[shape]["vocab_size"] - 1)
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, **{f"w{i}": i + 1 for i in range(words)}}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def make_data(file: Path, tokens: int, words: int) -> None:
    rng = np.random.default_rng(0)
    with file.open("w") as out:
        while tokens > 0:
            length = int(np.clip(rng.lognormal(np.log(550), 1.0), 16, 4096))
            text = " ".join(f"w{i}" for i in rng.integers(0, words, length))
            out.write(json.dumps({"text": text}) + "\n")
            tokens -= length


def recipe_of(folder: Path, shape: str, *, steps: int, tokens: int, device: str) -> podium.Recipe:
    """The recipe of the files in this folder."""
    return podium.parse_recipe(
        {
            "program": "sft",
            "model": {"path": str(folder / "model"), "init": "random"},
            "data": {"train": [{"path": str(folder / "train.jsonl")}], "max_length": min(4097, tokens)},
            "tokens_per_step": tokens,
            "optimizer": {"lr": 1e-5},
            "steps": steps,
            "placement": {"device": device},
            "run": {"name": shape, "folder": str(folder / "runs"), "log_every": 10},
        }
    )


def measure(shape: str, steps: int, warmup: int, tokens: int, device: str) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", shape)
        make_data(
            folder / "train.jsonl", (steps + 4) * tokens + 512 * 1000, min(_WORDS, SHAPES[shape]["vocab_size"] - 1)
        )
        result = podium.train(recipe_of(folder, shape, steps=steps, tokens=tokens, device=device))
        timed = [m.values for m in read_metrics(result.folder / "metrics.jsonl") if "loss" in m.values][warmup:-1]
        seconds = sum(values["step_s"] for values in timed)
        return {
            "shape": shape,
            "step_ms": 1e3 * statistics.median(values["step_s"] for values in timed),
            "tokens_per_s": sum(values["tokens"] for values in timed) / seconds,
            "mfu": statistics.mean(values["mfu"] * values["step_s"] for values in timed) * len(timed) / seconds,
            "loader_share": sum(values["data_wait_s"] for values in timed) / seconds,
            "filled": statistics.mean(values["tokens"] for values in timed) / tokens,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6b", "1.7b"], choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    for shape in args.shapes:
        row = measure(shape, args.steps, args.warmup, args.tokens, args.device)
        print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
