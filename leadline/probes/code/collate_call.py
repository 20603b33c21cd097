"""A collator of any trainer, called with samples: what its parameters take, and what the keys of its batch mean."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from leadline.probes.code import collating

COLLATE_WORDS = {
    "samples": "samples examples features batch items rows data instances rollouts sequences",
    "prompts": "prompt_ids prompts prompt_token_ids queries",
    "completions": "completion_ids completions response_ids responses completion_token_ids",
    "pad": "pad_token_id pad_id padding_value pad pad_token",
    "advantages": "advantages",
    "logprobs": "logprobs old_logprobs old_log_probs rollout_logprobs log_probs sampling_logps",
    "tokenizer": "tokenizer processing_class processor",
}
OUTPUTS = {
    "input_ids": "input_ids sequences tokens ids",
    "attention_mask": "attention_mask",
    "loss_mask": "loss_mask action_mask labels_mask",
    "labels": "labels",
    "position_ids": "position_ids positions",
    "prompt_ids": "prompt_ids prompts",
    "prompt_mask": "prompt_mask",
    "completion_ids": "completion_ids responses response_ids",
    "advantages": "advantages",
    "old_logprobs": "old_logprobs old_log_probs logprobs log_probs rollout_logprobs rollout_log_probs",
}


def arguments(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """By parameter: the value of what it means, or the value that `--arg` gave."""
    return {name: m[1] if isinstance(m, tuple) else values[m] for name, m in parameters.items()}


class Sample(dict[str, Any]):
    """A sample whose fields can be had as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def collate_call(function: Any, parameters: Mapping[str, Any], tensors: bool) -> Callable[[collating.CollateCase], Any]:
    """The function of a case, by the reference's keys; its sequences are lists or `tensors`."""

    def call(case: collating.CollateCase) -> dict[str, Any]:
        samples = [_sample(case, i, tensors) for i in range(len(case.samples))]
        values = {
            "samples": samples,
            "prompts": [sample["prompt_ids"] for sample in samples],
            "completions": [sample["completion_ids"] for sample in samples],
            "pad": case.pad,
            "advantages": collating.advantages_of(case),
            "logprobs": [sample["completion_logprobs"] for sample in samples],
            "tokenizer": SimpleNamespace(pad_token_id=case.pad, eos_token_id=collating.EOS, padding_side="right"),
        }
        if hasattr(function, "pad_token_id"):  # a collator that was built with it
            function.pad_token_id = case.pad
        return collating.outcome(function(**arguments(parameters, values)), _output_names)

    return call


def _sample(case: collating.CollateCase, index: int, tensors: bool) -> Sample:
    import torch

    prompt, completion = map(list, case.samples[index])
    logprobs = collating.logprobs_of(len(completion))
    inside = [0] * len(prompt) + [1] * len(completion)
    both = [0.0] * len(prompt) + logprobs
    sequences: dict[str, list[Any]] = {
        "prompt_ids": prompt,
        "prompt_token_ids": prompt,
        "completion_ids": completion,
        "response_ids": completion,
        "token_ids": completion,
        "input_ids": prompt + completion,
        "attention_mask": [1] * len(inside),
        "completion_mask": inside,
        "loss_mask": inside,
        "labels": [-100] * len(prompt) + completion,
        "completion_logprobs": logprobs,
        "logprobs": logprobs,
        "rollout_logprobs": logprobs,
        "old_log_probs": both,
        "old_logprobs": both,
    }
    advantage = collating.advantages_of(case)[index]
    numbers = {"advantage": advantage, "advantages": advantage, "reward": advantage}
    return Sample({name: torch.tensor(v) if tensors else v for name, v in sequences.items()} | numbers)


def _output_names(keys: Sequence[str]) -> dict[str, str]:
    """Their keys -> ours; masks and logprobs belong to completions where these stand alone."""
    apart = bool({"completion_ids", "responses", "response_ids"} & {*keys})
    names = {key: ours for key in keys for ours, spelled in OUTPUTS.items() if key in spelled.split()}
    if apart and "input_ids" not in keys:
        names |= {key: "completion_logprobs" for key, ours in names.items() if ours == "old_logprobs"}
    return names | {
        key: "completion_mask" if apart else "loss_mask" for key in keys if key in ("completion_mask", "response_mask")
    }
