"""In which shape a function takes the batch, and what it returns brought into one shape."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadline.probes.code.answers import Answers
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.words import TOKEN_QUANTITIES

FLAT = ("completion_of_token", "row_starts")
"""A function that takes one of these takes all tokens on one axis."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes of the arguments."""

    words: str
    flat: bool = False
    """All tokens on one axis."""
    only_trained: bool = False
    """Flat, and only the trained tokens: the function has no mask."""
    advantages: str = "completion"
    """completion [B], or token [B, T]."""
    rewards: str = "completion"
    """completion [B], grouped [prompt, G], or group: called once for each."""
    whole: bool = False
    """Logits and ids of whole sequences: the function itself shifts by one."""

    def parts(self, batch: ProbeBatch) -> Iterator[ProbeBatch]:
        """The batches of the calls: one, or one for each group."""
        if self.rewards != "group":
            yield batch
            return
        for start in range(0, len(batch.rewards), batch.group_size):
            rewards = batch.rewards[start : start + batch.group_size]
            yield replace(batch, rewards=rewards, group_of_completion=torch.zeros(len(rewards), dtype=torch.long))


def layouts(role: str, quantities: Collection[str], names: Sequence[str], style: str) -> Sequence[Layout]:
    """The layouts that a function of this role may mean, likeliest first."""
    flat = any(quantity in quantities for quantity in FLAT)
    if role == "advantages":
        return _reward_layouts(quantities)
    if role == "logprobs":
        aligned = Layout("logits aligned with the token ids, [completion, token, vocabulary]")
        one_axis = Layout("logits aligned with the token ids, [token, vocabulary]", flat=True)
        whole = Layout("logits and ids of whole sequences, shifted inside", whole=True)
        return (
            (whole, aligned, one_axis)
            if {"labels", "input_ids", "sequences"} & {*names}
            else (aligned, whole, one_axis)
        )
    only_trained = "loss_mask" not in quantities
    words = f"all {'trained tokens' if only_trained else 'tokens'} on one axis, [token]"
    one_axis = Layout(words, flat=True, only_trained=only_trained, advantages="token")
    if flat:
        return (one_axis,)
    by_token = Layout("advantages [completion, token]", advantages="token")
    by_completion = Layout("advantages [completion]")
    if "advantages_by_completion" in quantities:
        return (by_completion,)
    if "advantages_by_token" in quantities:
        return (by_token,)
    if "advantages" not in quantities:
        return (Layout("[completion, token]"), one_axis)
    return (by_token, by_completion) if style in ("verl", "OpenRLHF") else (by_completion, by_token)


def _reward_layouts(quantities: Collection[str]) -> Sequence[Layout]:
    if "token_rewards" in quantities:
        return (Layout("rewards [completion, token], on the last token"),)
    if {"group_of_completion", "group_labels", "group_size"} & {*quantities}:
        return (Layout("rewards [completion]"), Layout("rewards [prompt, completion]", rewards="grouped"))
    return (
        Layout("rewards [prompt, completion]", rewards="grouped"),
        Layout("the rewards of one group at a time", rewards="group"),
    )


def argument(quantity: str, batch: ProbeBatch, layout: Layout) -> Any:
    """The value of a quantity in this layout."""
    if quantity == "config":
        return Answers(lambda name: argument(name, batch, layout))
    if quantity in TOKEN_QUANTITIES:
        return _tokens(quantity, batch, layout)
    rows, longest = batch.shape
    row_of_token = torch.arange(rows)[:, None].expand(rows, longest)
    if quantity.startswith("advantages"):
        return _advantages(batch, layout)
    values: Mapping[str, Any] = {
        "group_size": batch.group_size,
        "max_tokens": batch.max_tokens,
        "num_completions": rows,
        "num_groups": int(batch.group_of_completion.max()) + 1,
        "num_tokens": batch.loss_mask.sum(),
        "completion_of_token": _on_one_axis(row_of_token, batch, layout),
        "row_starts": _row_starts(batch, layout),
        "group_of_completion": batch.group_of_completion,
        "group_labels": np.array([f"prompt-{group}" for group in batch.group_of_completion.tolist()]),
        "rewards": batch.rewards.view(-1, batch.group_size) if layout.rewards == "grouped" else batch.rewards,
        "token_rewards": _on_last_token(batch),
    }
    return values[quantity]


def _tokens(name: str, batch: ProbeBatch, layout: Layout) -> Tensor:
    values: Tensor = getattr(batch, name)
    if layout.whole and name == "logits":  # what the last token would predict
        values = torch.cat([values, values[:, :1]], 1)
    elif layout.whole:  # the last token of the prompt
        values = torch.cat([torch.zeros_like(values[:, :1]), values], 1)
    return _on_one_axis(values, batch, layout) if layout.flat else values


def _on_one_axis(values: Tensor, batch: ProbeBatch, layout: Layout) -> Tensor:
    return values[batch.loss_mask] if layout.only_trained else values.flatten(0, 1)


def _advantages(batch: ProbeBatch, layout: Layout) -> Tensor:
    if layout.advantages == "completion":
        return batch.advantages
    by_token = batch.advantages[:, None].expand(batch.shape)
    return _on_one_axis(by_token, batch, layout) if layout.flat else by_token


def _row_starts(batch: ProbeBatch, layout: Layout) -> Tensor:
    rows, longest = batch.shape
    lengths = batch.loss_mask.sum(-1) if layout.only_trained else torch.full((rows,), longest)
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(torch.int32)


def _on_last_token(batch: ProbeBatch) -> Tensor:
    last = batch.loss_mask & (batch.loss_mask.cumsum(-1) == batch.loss_mask.sum(-1, keepdim=True))
    return torch.where(last, batch.rewards[:, None], 0.0)


def returned(output: Any, batch: ProbeBatch, layout: Layout, role: str) -> Tensor:
    """The tensor that counts: one number, [completion], or the trained tokens on one axis.

    Raises ValueError for any other shape.
    """
    values = first_tensor(output)
    rows, longest = batch.shape
    if values.numel() == 1:
        return values.reshape(())
    if role == "advantages":
        return _by_completion(values, batch)
    if layout.only_trained and values.shape == (int(batch.loss_mask.sum()),):
        return values
    if layout.flat and values.shape[:1] == (rows * longest,):
        values = values.unflatten(0, (rows, longest))
    if values.shape == (rows, 1) and role == "importance":
        values = values[:, 0]
    if values.shape == (rows, longest):
        return values[batch.loss_mask]
    if values.shape == (rows,):
        return values
    raise ValueError(f"it returned a tensor of shape {list(values.shape)} for {rows} completions of {longest} tokens")


def _by_completion(values: Tensor, batch: ProbeBatch) -> Tensor:
    rows = len(batch.rewards)
    if values.shape == batch.shape:  # one a token: the same on all trained tokens of a completion
        first = values[:, 0]
        differs = (values != first[:, None]) & batch.loss_mask & values.isfinite()
        if bool(differs.any()):
            raise ValueError("its advantages differ among the tokens of a completion, though the reward is one number")
        return first
    if values.numel() == rows:
        return values.reshape(rows)
    raise ValueError(f"it returned a tensor of shape {list(values.shape)} for {rows} rewards")


def first_tensor(output: Any) -> Tensor:
    """Of what a function returned, the tensor that counts: the first, or the one named so."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        named = [value for key, value in output.items() if "loss" in str(key) or str(key) in ("advantages", "logprobs")]
        return first_tensor((named or list(output.values()))[0])
    if hasattr(output, "loss"):
        return first_tensor(output.loss)
    if isinstance(output, tuple | list) and output and not isinstance(output[0], int | float):
        return first_tensor(output[0])
    return torch.as_tensor(output, dtype=torch.float64)
