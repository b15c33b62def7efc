# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of the rollout benchmark: its own `LLM` in-process, on the same model and workload. Prints seconds."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# vLLM has no other switches for these.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)


def main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    from vllm import LLM, SamplingParams

    from rollout_task import workload

    work = workload(**task["work"])
    longest = max(len(prompt) for prompt in work.prompts) + int(work.answers_NS.max())
    engine = LLM(
        model=task["folder"], dtype="float32", enforce_eager=True, max_model_len=longest, skip_tokenizer_init=True,
        max_num_seqs=task["running"], generation_config="vllm",
    )  # fmt: skip
    torch.set_num_threads(task["threads"])
    torch.backends.mkldnn.set_flags(task["onednn"])
    times = []
    for turn in range(task["turns"] + 1):
        rows = work.rows()
        # Other prompts every time, as on the other sides: nothing is left over from the turn before.
        prompts = [{"prompt_token_ids": [(t - 3 + 7 * turn) % 509 + 3 for t in prompt]} for _, _, prompt, _ in rows]
        asked = [
            SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
            for *_, new in rows
        ]
        began = time.perf_counter()
        done = engine.generate(prompts, asked, use_tqdm=False)
        taken = time.perf_counter() - began
        drawn = sum(len(each.outputs[0].token_ids) for each in done)
        if drawn != work.num_tokens:
            raise SystemExit(f"{drawn} tokens were drawn and {work.num_tokens} wanted")
        if turn:
            times.append(taken)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
