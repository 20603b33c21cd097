"""Completions of given lengths from transformers' `generate`."""

import torch


class ForcedLengths:
    """Logits processor: row i ends with its `lengths[i]`-th token, and not before."""

    def __init__(self, lengths: list[int], eos: int, prompt: int) -> None:
        self.lengths, self.eos, self.prompt = torch.tensor(lengths), eos, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = -torch.inf
        ending = self.lengths <= ids.shape[1] - self.prompt + 1
        scores[ending] = -torch.inf
        scores[ending, self.eos] = 0.0
        return scores
