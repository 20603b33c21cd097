"""What can make engine and trainer differ: each cause once, with what it means and the setting that mends it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cause:
    """Example: Cause("temperature", "The engine's logprobs are of another temperature.", "Send temperature ...")"""

    name: str
    meaning: str
    fix: str


CAUSES: tuple[Cause, ...] = (
    Cause("noise", "Nothing is wrong: the gap is as large as rounding makes it.", ""),
    Cause(
        "off_by_one",
        "The logprobs belong to neighbouring tokens.",
        "Align them: entry t is the logprob of token t, given the tokens before it.",
    ),
    Cause(
        "scaled_logprobs",
        "One side's logprobs are the other's times a constant.",
        "Divide logits, not logprobs, by the temperature; use natural logarithms on both sides.",
    ),
    Cause(
        "probabilities", "The engine's numbers are probabilities, not their logarithms.", "Take the logarithm of them."
    ),
    Cause(
        "raw_logprobs",
        "The engine samples as asked, but reports logprobs from before temperature, penalties and truncation.",
        "Start vLLM with --logprobs-mode processed_logprobs (`leadline serve` does), or set "
        "engine.raw_logprobs = 'convert'.",
    ),
    Cause(
        "temperature",
        "The engine samples at another temperature than the trainer scores with.",
        "Send sampling.temperature with every request, and start vLLM with --generation-config vllm.",
    ),
    Cause(
        "top_p",
        "Engine and trainer do not truncate by the same top_p.",
        "Set top_p = 1 in the request and at the server (--generation-config vllm), or replay it in the trainer.",
    ),
    Cause(
        "top_k",
        "Engine and trainer do not truncate by the same top_k.",
        "Set top_k = 0 (-1 in vLLM) in the request and at the server (--generation-config vllm), or replay it in the "
        "trainer.",
    ),
    Cause(
        "min_p",
        "Engine and trainer do not truncate by the same min_p.",
        "Set min_p = 0 in the request and at the server, or replay it in the trainer.",
    ),
    Cause(
        "repetition_penalty",
        "Engine and trainer do not apply the same repetition penalty.",
        "Set repetition_penalty = 1 in the request and at the server (--generation-config vllm), or replay it in the "
        "trainer.",
    ),
    Cause(
        "generation_config",
        "The engine fills in sampling settings from the model's generation_config.json.",
        "Start vLLM with --generation-config vllm, or send every knob with every request.",
    ),
    Cause(
        "bos",
        "The engine's prompts have one BOS token more or less than the trainer's.",
        "Send token ids, not text; or tokenise the rendered chat template with add_special_tokens=False on both sides.",
    ),
    Cause(
        "prompt_tokens",
        "The engine conditions on other prompt tokens than the trainer.",
        "Send the prompt's token ids to the engine, never its text.",
    ),
    Cause(
        "adapter_missing",
        "The engine samples without the LoRA adapter.",
        "Push the merged weights, or load the adapter into the engine and name it in each request.",
    ),
    Cause(
        "adapter_scale",
        "The engine applies the LoRA adapter with another strength.",
        "Apply alpha / rank once: push merged weights, or unload the adapter before it is loaded again.",
    ),
    Cause(
        "stale_weights",
        "The engine samples from other weights than the trainer scores with.",
        "Push the weights after every step, and check the receipt (engine.load_weights does both).",
    ),
    Cause(
        "stale_head",
        "The engine's output head is from other weights than the rest: a tied head that a reload left behind.",
        "Push with leadline's worker extension (`leadline serve`), or rebuild the head after vLLM's reload_weights.",
    ),
    Cause(
        "stale_experts",
        "The engine's experts are from other weights than the rest: a reload never reached them.",
        "Push with leadline's worker extension (`leadline serve`), or rebuild the experts after vLLM's reload_weights.",
    ),
    Cause(
        "prefix_cache",
        "The engine reads keys and values of the prompt that other weights have left in its prefix cache.",
        "Reset the prefix cache after each push of weights (POST /reset_prefix_cache), or turn it off.",
    ),
    Cause(
        "rope",
        "The engine places tokens by other rotary settings (theta, scaling, partial factor) than the trainer.",
        "Compare rope_parameters in both config.json; a directory that transformers 5 saved loses them in older readers.",
    ),
    Cause(
        "long_rope",
        "The engine takes LongRoPE's factors for another length than the trainer.",
        "Keep vLLM's --max-model-len at or below original_max_position_embeddings, or above it on both sides.",
    ),
    Cause(
        "soft_cap",
        "A soft cap of the logits or of the attention is dropped on one side.",
        "Use an attention implementation that has it (eager, flex_attention) on both sides.",
    ),
    Cause(
        "sliding_window",
        "The sliding window is ignored on one side.",
        "Use an attention implementation that honours it on both sides.",
    ),
    Cause(
        "logit_scale",
        "The model's own scale of logits is dropped on one side.",
        "Update the engine or transformers: one of them does not implement this architecture fully.",
    ),
    Cause(
        "norm_offset",
        "The norms' weights are taken as w on one side and as 1 + w on the other.",
        "Update the engine or transformers: one of them does not implement this architecture rightly.",
    ),
    Cause(
        "attention",
        "The attention implementations of transformers differ for this model.",
        "Set model.attention = 'eager' in the trainer.",
    ),
    Cause(
        "weights_rounded",
        "The engine's weights are rounded to half precision, its arithmetic is not.",
        "Serve the weights in the dtype of training.",
    ),
    Cause(
        "dtype",
        "The engine computes in half precision: the gap is rounding, without bias.",
        "Serve in the dtype of training (--dtype float32), or keep the head in float32; else correct with token weights.",
    ),
    Cause(
        "moe_routing",
        "A few tokens are far off because rounding sends them to other experts.",
        "Serve in float32, replay the engine's routing in the trainer, or mask those tokens "
        "(objective.importance_veto).",
    ),
    Cause(
        "support",
        "Every token is likelier to the engine: it drew from a truncated distribution and reports it renormalised.",
        "Set top_p = 1, top_k = 0 and min_p = 0, or replay them in the trainer.",
    ),
    Cause(
        "staleness",
        "The gap grows with the age of the weights that drew the token: it is staleness, which rollout weights correct.",
        "Lower rollout.max_staleness or the learning rate.",
    ),
    Cause(
        "first_tokens",
        "The gap sits in the first tokens of completions: their context differs.",
        "Compare the prompt's last tokens on both sides: chat template, generation prompt, BOS.",
    ),
    Cause(
        "placeholders",
        "Logprobs of the engine are exactly 0: not probability one, but missing.",
        "Ask the engine for logprobs; pass on a missing one as NaN, never as 0.",
    ),
    Cause(
        "other_weights",
        "The engine finds tokens likely that are out of the question to the trainer: other weights or other tokens.",
        "Compare the model and the version that the engine serves with the trainer's; probe again with --older.",
    ),
    Cause("unexplained", "None of the causes that could be tried closes the gap.", ""),
)
BY_NAME = {cause.name: cause for cause in CAUSES}
ORDER = {cause.name: place for place, cause in enumerate(CAUSES)}
"""Simple causes first: of two that explain a gap alike, the first is named."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A cause, made so definite that it says what the engine's logprobs would be."""

    cause: str
    detail: str
    """What exactly, e.g. `temperature 0.7 instead of 1`."""
    predicted: Tensor
    """By token: the engine's logprob if it were so; NaN where it says nothing."""
    fitted: bool = False
    """A number in it was chosen to fit."""
    second: str = ""
    """A further cause that holds at the same time; empty = none."""

    def __post_init__(self) -> None:
        assert self.cause in BY_NAME, self.cause


def by_alignment(trainer: Tensor, owner: Tensor) -> list[Hypothesis]:
    """The trainer's own logprobs, one token late or early within each completion."""
    missing = trainer.new_full((1,), torch.nan)
    later = torch.where(owner == owner.roll(-1), torch.cat([trainer[1:], missing]), torch.nan)
    earlier = torch.where(owner == owner.roll(1), torch.cat([missing, trainer[:-1]]), torch.nan)
    return [
        Hypothesis("off_by_one", "entry t is the logprob of token t + 1", later),
        Hypothesis("off_by_one", "entry t is the logprob of token t - 1", earlier),
    ]


def by_scale(engine: Tensor, trainer: Tensor) -> list[Hypothesis]:
    """The trainer's logprobs times the constant that fits best, and their exponentials."""
    both = engine.isfinite() & trainer.isfinite()
    square = float(trainer[both].square().sum())
    scale = float((engine[both] * trainer[both]).sum()) / square if square else 1.0
    return [
        Hypothesis(
            "scaled_logprobs",
            f"the engine's are {scale:.3g} times the trainer's{_known(scale)}",
            trainer * scale,
            fitted=True,
        ),
        Hypothesis("probabilities", "the engine's entries are exp of the trainer's", trainer.exp()),
    ]


def _known(scale: float) -> str:
    for factor, name in ((0.4343, "base 10"), (1.4427, "base 2")):
        if abs(scale - factor) < 0.005:
            return f": logarithms to {name}"
    return ""
