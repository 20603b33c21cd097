"""Preflight with the engine: the weights that it holds, what it says of its tokens, and a step that is not taken."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from leadline.engines.base import Engine
from leadline.errors import EngineError, TrainingError
from leadline.metrics import LEDGER_STAGES
from leadline.policy.batch import build_batch
from leadline.probes.engine.attribute import PolicyModel, attribute
from leadline.probes.engine.causes import BY_NAME
from leadline.probes.engine.drawn import drawn_from
from leadline.probes.engine.live import FRESH, compare
from leadline.probes.preflight.parts import Parts, Undecided
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

PROMPTS, PER_PROMPT, TOKENS = 2, 2, 24
LEAST_FAULT = 2e-3
"""Mean nats a token; a gap below it harms nothing, whatever it comes from: hardly any ratio leaves 0.99 to 1.01."""
BEYOND_ROUNDING = 2.0
"""... and so often must a gap be what rounding in the engine's dtype may make: few tokens are looked at."""


async def draw(parts: Parts, engine: Engine) -> list[Group]:
    """Groups of fresh completions with made-up rewards, so that each has a signal. Raises EngineError."""
    sampling = parts.config.sampling
    sampling = sampling.model_copy(update={"max_tokens": min(TOKENS, sampling.max_tokens)})
    prompts = [replace(prompt, index=FRESH + prompt.index) for prompt in parts.first_prompts[:PROMPTS]]
    drawn = await asyncio.gather(*(engine.generate(prompt, PER_PROMPT, sampling) for prompt in prompts))
    return [_group(prompt, completions) for prompt, completions in zip(prompts, drawn, strict=True)]


def _group(prompt: Prompt, completions: Sequence[Completion]) -> Group:
    """A completion that was cut at our own limit is none that the run would call truncated."""
    whole = [replace(c, finish_reason=FinishReason.EOS) if c.truncated else c for c in completions]
    return Group(prompt, [Rollout(c, "", reward=float(i)) for i, c in enumerate(whole)])


def weights(parts: Parts, groups: Sequence[Group]) -> str:
    """Every token that was drawn after the push carries the version of the weights that were pushed. Raises EngineError."""
    version = parts.policy.version
    versions = [v for c in _completions(groups) for v in c.policy_versions]
    if not versions:
        raise Undecided("the engine drew no token")
    if set(versions) != {version}:
        others = sorted(set(versions) - {version})
        raise EngineError(
            f"engine.kind is {parts.config.engine.kind!r}, but after version {version} was pushed it draws tokens of "
            f"version {others[0]}. Importance weights would be of other weights than those that sampled. Restart the engine."
        )
    return f"the engine took the weights of version {version}: all {len(versions)} tokens drawn since say so"


def parity(parts: Parts, groups: Sequence[Group]) -> str:
    """Engine and policy give the same tokens the same logprobs, up to rounding in the engine's dtype. Raises EngineError."""
    batch = build_batch(groups, parts.config, parts.policy.version)
    found = compare(parts.policy, batch, None, parts.config)
    if not found:
        raise Undecided("the engine scores none of its tokens")
    rounding, fault = found["mismatch/numerics"], found["mismatch/bug"]
    fresh, tokens = rounding + fault, int(batch.rollout_logprobs.isfinite().sum())
    limit = max(LEAST_FAULT, BEYOND_ROUNDING * rounding)
    if fault > 0 and fresh > limit:
        raise EngineError(
            f"engine.kind is {parts.config.engine.kind!r}, but on {tokens} tokens its logprobs are {fresh:.2g} nats a token "
            f"from the policy's, and {limit:.2g} is the most that rounding makes. The ratio would carry that fault into "
            f"every step. {_cause(parts, groups)}"
        )
    return f"engine and policy differ by {fresh:.1g} nats a token on {tokens} tokens; up to {limit:.1g} is allowed"


def _cause(parts: Parts, groups: Sequence[Group]) -> str:
    """What the engine probe makes of it, and its fix."""
    drawn = drawn_from([(group.prompt, rollout.completion) for group in groups for rollout in group.rollouts])
    dtype = parts.config.engine.dtype or parts.config.model.dtype
    policy = PolicyModel(
        parts.policy.model, parts.tokenizer, parts.config.sampling, dtypes=(parts.config.model.dtype, dtype)
    )
    verdict = attribute(drawn, policy).verdict
    cause = BY_NAME[verdict.cause]
    more = "Ask `leadline probe engine` for more."
    if verdict.cause in ("noise", "unexplained"):
        return f"No known cause explains it on so few tokens. {more}"
    return f"{cause.meaning} ({cause.name}: {verdict.detail}). {cause.fix or more}"


def dry_step(parts: Parts, groups: Sequence[Group]) -> str:
    """The gradient of a step on these groups is finite, and the signal reaches it. Nothing is changed.

    Raises TrainingError.
    """
    batch = build_batch(groups, parts.config, parts.policy.version)
    if not batch.forwarded or all(_alike(group) for group in groups):
        raise Undecided("the completions that were drawn are alike: their gradients cancel")
    found = parts.policy.rehearse(batch).metrics
    norm, reached = found["optimizer/grad_norm"], found["ledger/reached_share"]
    if not math.isfinite(norm):
        raise TrainingError(
            f"model.dtype is {parts.config.model.dtype!r}, but the gradient of a first step has the norm {norm}. Every step "
            "would be discarded. Use float32 or bfloat16, or another model.attention; a model that overflows at the start "
            "may be broken."
        )
    if norm == 0 or reached <= 0:
        raise TrainingError(
            f"objective.loss is {parts.config.objective.loss!r}, but of a first step nothing reaches the gradient (norm "
            f"{norm:.2g}): {_taken(found)}. Nothing would be learned. Change the setting of that stage "
            "(objective.importance_action and its bounds, objective.entropy_quantile, objective.on_unscored)."
        )
    lost = f" ({_taken(found)})" if reached < 0.995 else ""
    return f"a step on {len(batch.token_ids)} tokens, not taken: {reached:.0%} of the signal reaches a gradient of norm {norm:.2g}{lost}"


def _alike(group: Group) -> bool:
    return len({rollout.completion.token_ids for rollout in group.rollouts}) < 2


def _taken(metrics: dict[str, float]) -> str:
    """Which stages of the ledger took the signal, the largest first."""
    shares = {stage: metrics.get(f"ledger/{stage}_share", 0.0) for stage in LEDGER_STAGES if stage != "reached"}
    taken = sorted(((share, stage) for stage, share in shares.items() if share > 0.001), reverse=True)
    return ", ".join(f"{stage} {share:.0%}" for share, stage in taken) or "no stage of the ledger took it"


def _completions(groups: Sequence[Group]) -> list[Completion]:
    return [rollout.completion for group in groups for rollout in group.rollouts]
