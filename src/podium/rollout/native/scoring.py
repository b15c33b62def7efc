# SPDX-License-Identifier: Apache-2.0
"""Scores given tokens with the engine's model: a packed forward pass, and the head in pieces."""

# T tokens · S scored positions · E hidden width · V vocabulary

from __future__ import annotations

import numpy as np
import torch

from podium.data.documents import Document, Tokens, pack
from podium.models.causal_lm import PackedCausalLM
from podium.models.head import next_token_scores
from podium.models.packing import round_tokens, to_device
from podium.rollout.engine import TokenScores

_ROWS = 256  # of the head at a time: logits of a whole prompt would take gigabytes


def score_tokens(model: PackedCausalLM, device: torch.device, tokens_T: Tokens) -> TokenScores:
    """Log-probs of all tokens but the first."""
    count = len(tokens_T) - 1
    if count < 1:
        return TokenScores(
            logprobs_T=np.empty(0, np.float32), best_T=np.empty(0, np.int32), best_logprobs_T=np.empty(0, np.float32)
        )
    trained = np.ones(len(tokens_T), np.bool_)
    trained[0] = False
    document = Document(tokens=tokens_T.astype(np.int32), trained=trained)
    batch = to_device(pack([document]), device, multiple=round_tokens(device))
    model.eval()
    hidden_SE = model.hidden(batch).index_select(0, batch.trained_S)
    targets_S = torch.from_numpy(tokens_T[1:].astype(np.int64)).to(device)
    parts = []
    for begin in range(0, count, _ROWS):
        rows = slice(begin, begin + _ROWS)
        logprobs_SV = next_token_scores(hidden_SE[rows], model.head_weight, model.head_spec).log_softmax(-1)
        best_S = logprobs_SV.max(-1)
        own_S = logprobs_SV.gather(1, targets_S[rows, None])[:, 0]
        parts.append((own_S.cpu().numpy(), best_S.indices.cpu().numpy(), best_S.values.cpu().numpy()))
    own, best, best_logprobs = (np.concatenate(each) for each in zip(*parts, strict=True))
    return TokenScores(
        logprobs_T=own.astype(np.float32),
        best_T=best.astype(np.int32),
        best_logprobs_T=best_logprobs.astype(np.float32),
    )
