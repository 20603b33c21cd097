"""Scores of drawn tokens, and which of their logits are kept."""

import torch
from torch import Tensor

from leadline.probes.engine.drawn import Drawn
from leadline.probes.engine.scoring import MOST_KEPT_TOKENS, score_and_keep
from leadline.settings.rollout import Sampling


def rows(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Tensor:
    return torch.randn(len(completion), 50, generator=torch.Generator().manual_seed(len(completion)))


def test_logits_are_kept_of_tokens_spread_over_all_completions_also_where_most_are_short() -> None:
    lengths = [700, 1, 1, 1, 2, 900, 1, 3, 800]
    completions = tuple(tuple(i % 50 for i in range(length)) for length in lengths)
    drawn = Drawn(((1, 2),) * len(lengths), completions, torch.arange(float(sum(lengths))))
    logprobs, entropies, kept = score_and_keep(drawn, rows, Sampling())
    assert len(logprobs) == len(entropies) == sum(lengths)
    places = kept.engine.long()  # of this test: each token's own place
    assert 0 < len(places) <= MOST_KEPT_TOKENS
    assert len(places.diff().unique()) == 1, "evenly spread"
