"""The gap between engine and trainer while a run is under way, in three numbers that call for three different things.

The trainer's own log shows one number, |log pi_old - log mu|, in which rounding, age and faults are mixed. Here a few
completions are drawn right after a push, so that no age is in them: what they differ by is rounding and faults.
"""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leadline.compute import computed
from leadline.config import Config
from leadline.engines.base import Engine
from leadline.models import plain_model
from leadline.policy.batch import Batch, build_batch
from leadline.policy.policy import Policy
from leadline.probes.engine.judge import FLOAT32_FLOOR, NOISE_FACTOR
from leadline.probes.engine.scoring import sampled_logprobs
from leadline.types import Completion, Group, Prompt, Rollout

PROMPTS = 4
TOKENS = 32
FRESH = 1 << 40
"""Added to a prompt's index: the draws are no completions that training or an evaluation has drawn."""


async def measure_mismatch(
    policy: Policy, engine: Engine, prompts: Sequence[Prompt], log_ratio_abs_mean: float | None, config: Config
) -> dict[str, float]:
    """`mismatch/numerics`, `mismatch/staleness`, `mismatch/bug`: nats a token. The engine must hold the policy's weights.

    With F = mean |log pi - log mu| of fresh completions and T that of the step's batch: numerics is the part of F that
    rounding in the engine's dtype makes, bug the rest of F, staleness T - F. Nothing is measured where the engine scores
    nothing.
    """
    sampling = config.sampling.model_copy(update={"max_tokens": min(TOKENS, config.sampling.max_tokens)})
    asked = [Prompt(FRESH + prompt.index, prompt.text, prompt.token_ids) for prompt in prompts[:PROMPTS]]
    drawn = await asyncio.gather(*(engine.generate(prompt, 1, sampling) for prompt in asked))
    groups = [_group(prompt, completion) for prompt, [completion] in zip(asked, drawn, strict=True)]
    batch = build_batch(groups, config, policy.version)
    return await computed(compare, policy, batch, log_ratio_abs_mean, config)


def _group(prompt: Prompt, completion: Completion) -> Group:
    return Group(prompt, [Rollout(completion, text="", reward=0.0)])


def compare(policy: Policy, batch: Batch, log_ratio_abs_mean: float | None, config: Config) -> dict[str, float]:
    """The numbers of `measure_mismatch` for a batch of completions that were drawn from the policy's weights."""
    drawn = [i for i, length in enumerate(batch.lengths.tolist()) if length]
    if not drawn:
        return {}
    engine = batch.rollout_logprobs[batch.tokens_of(drawn)]
    with torch.no_grad():
        trainer = policy.logprobs(batch, drawn).logprobs.cpu()
    scored = engine.isfinite()
    if not bool(scored.any()):
        return {}
    fresh = float((trainer - engine)[scored].abs().mean())
    rounding = _rounding(policy, batch, drawn, _engine_dtype(policy, config))
    numerics = min(fresh, max(FLOAT32_FLOOR, NOISE_FACTOR * rounding))
    found = {"mismatch/numerics": numerics, "mismatch/bug": fresh - numerics}
    if log_ratio_abs_mean is not None:
        found["mismatch/staleness"] = max(0.0, log_ratio_abs_mean - fresh)
    return found


def _rounding(policy: Policy, batch: Batch, drawn: Sequence[int], engine: torch.dtype) -> float:
    """Mean nats by which the policy's own logprobs change in the other precision: 0 if both sides are in float32.

    Autocast rounds as the engine's dtype does, without a copy of the weights. A policy in half precision is compared with
    itself in the other half precision, which is off by as much or by less.
    """
    own = next(policy.model.parameters()).dtype
    if own == engine == torch.float32:
        return 0.0
    other = engine if own == torch.float32 else torch.float16 if own == torch.bfloat16 else torch.bfloat16
    plain = _alone(policy, batch, drawn)
    with torch.autocast(policy.device.type, dtype=other):
        rounded = _alone(policy, batch, drawn)
    return float((rounded - plain).abs().nanmean())


@torch.no_grad()
def _alone(policy: Policy, batch: Batch, drawn: Sequence[int]) -> Tensor:
    """log pi of the completions' tokens, each sequence by itself through the whole model."""
    model: Any = policy.model
    keeps = "logits_to_keep" in inspect.signature(plain_model(model).forward).parameters
    scored = []
    for place in drawn:
        prompt = batch.prompt_ids[int(batch.group_of_completion[place])].tolist()
        tokens = batch.token_ids[batch.tokens_of([place])].tolist()
        few = {"logits_to_keep": len(tokens) + 1} if keeps else {}
        ids = torch.tensor([[*prompt, *tokens]], device=policy.device)
        logits = model(input_ids=ids, use_cache=False, **few).logits[0, -len(tokens) - 1 : -1]
        scored.append(sampled_logprobs(logits.float().cpu(), prompt, tokens, policy.config.sampling))
    return torch.cat(scored)


def _engine_dtype(policy: Policy, config: Config) -> torch.dtype:
    """What the engine computes in: as set, as the policy, or what a vLLM server takes by default."""
    if config.engine.dtype is not None:
        return getattr(torch, config.engine.dtype)  # type: ignore[no-any-return]
    if config.engine.kind.startswith("vllm") and policy.device.type != "cpu":
        return torch.bfloat16
    return next(policy.model.parameters()).dtype
