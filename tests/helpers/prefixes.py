# SPDX-License-Identifier: Apache-2.0
"""Documents and episodes that share prefixes, and models that always share them: tiny ones by themselves never do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np

from helpers.engines import make_engine
from helpers.on_policy import Episodes, UpdateResult, UpdateTask, make_episodes, update_on
from helpers.ranks import mesh_of
from podium.data import prefix_splitting, prefixes
from podium.data.costs import SequenceCost
from podium.data.documents import Document
from podium.data.prefixes import PrefixCost
from podium.engine.scoring import score
from podium.models import packing, prefix_sharing
from podium.spmd.launch import RankPlace

ALWAYS = PrefixCost(sequence=SequenceCost(per_token=1.0), per_segment=0.0)


@contextmanager
def sharing_always() -> Iterator[Counter[str]]:
    """Models that can share prefixes do, however little it saves. Counts the tokens of micro-batches that shared, as
    they were packed and as they were computed."""
    counts: Counter[str] = Counter()
    shared = packing._shared

    def counting(batch: Any, tree: Any, device: Any) -> Any:
        counts["batches"] += 1
        counts["packed"] += batch.num_tokens
        counts["computed"] += tree.num_tokens
        return shared(batch, tree, device)

    with (
        patch.multiple(prefix_sharing, _PER_SEGMENT=0.0, _PER_NUMBER=0.0, _COSTS=WeakKeyDictionary()),
        patch.object(prefixes, "LEAST_SAVED", 0.0),
        patch.object(prefix_splitting, "LEAST_SAVED", 0.0),
        patch.object(packing, "_shared", counting),
    ):
        yield counts


def random_tree(seed: int, *, count: int = 11, vocabulary: int = 250) -> list[Document]:
    """Documents that begin like others: some part within a document, some continue a whole one, some are equal, some
    share only their first tokens with others, some nothing. About two in three tokens are trained, also shared ones."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(0, 3, draw.integers(1, 12)) for _ in range(2)]
    while len(texts) < count:
        begun = texts[draw.integers(len(texts))]
        kept = begun[: draw.integers(0, len(begun) + 1)]
        texts.append(np.concatenate([kept, draw.integers(0, vocabulary, draw.integers(0, 14))]))
    documents = []
    for text in texts:
        tokens = np.concatenate([text, draw.integers(0, vocabulary, 2)]).astype(np.int32)
        trained = draw.random(len(tokens)) < 0.67
        trained[0], trained[-1] = False, True
        documents.append(Document(tokens=tokens, trained=trained))
    return documents


def episodes_with_prefixes(folder: Path) -> Episodes:
    """Made-up episodes of which each second one begins like the one before it, for most of the shorter one."""
    episodes = make_episodes(folder, temperature=0.8)
    block = episodes.block
    tokens_T = block.tokens_T.copy()
    for row in range(0, len(block.ids), 2):
        one, other = (int(block.offsets[row + at]) for at in (0, 1))
        count = max(1, int(block.lengths_N[row : row + 2].min()) - 2)
        tokens_T[other : other + count] = tokens_T[one : one + count]
    block = replace(block, tokens_T=tokens_T)
    engine = make_engine(folder)
    own_T = score(engine.language_model, engine.mesh, block, temperature=episodes.temperature).values_T
    noise_T = np.random.default_rng(1).normal(0, 0.25, len(own_T))
    behavior_T = np.where(block.loss_mask_T, own_T + noise_T, 0).astype(np.float32)
    return replace(episodes, block=replace(block, behavior_logprobs_T=behavior_T))


def shared_update_rank(place: RankPlace, task: UpdateTask) -> tuple[UpdateResult, Counter[str]]:
    """Updates, scores and a critic on one group of ranks, all with shared prefixes."""
    with mesh_of(place) as mesh, sharing_always() as counts:
        return update_on(mesh, task), counts
