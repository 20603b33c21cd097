"""Preflight of what is trained: reference, optimizer, memory."""

import torch

from leadline.errors import ConfigError, TrainingError
from leadline.models import is_lora
from leadline.policy.batch import build_batch
from leadline.policy.memory import size
from leadline.probes.preflight.parts import Parts
from leadline.types import Completion, FinishReason, Group, Rollout

SAME = 1e-4
"""Nats by which a reference may differ from the policy that it is a copy of."""
SLACK = 1.2
"""A forecast of memory is right within a fifth."""
REFERENCE_TOKENS = 16


def reference(parts: Parts) -> str:
    """The reference is frozen, shares nothing that is trained, and is the policy as it begins. Raises TrainingError."""
    policy = parts.policy
    policy.check_frozen()
    if parts.config.objective.beta == 0:
        return "none: objective.beta is 0"
    gap = _distance(parts)
    if not gap <= SAME:
        raise TrainingError(
            f"objective.beta is {parts.config.objective.beta}, but before the first step the reference is {gap:.2g} nats a "
            "token away from the policy that it is a copy of. The KL term would pull towards another model. Report this "
            "as a bug."
        )
    what = "the base under the adapter" if is_lora(policy.model) else "a frozen copy that shares no weight"
    return f"{what}; on {REFERENCE_TOKENS} tokens it differs from the policy by {gap:.1g} nats"


@torch.no_grad()
def _distance(parts: Parts) -> float:
    """Largest |log pi - log pi_ref| of the first prompt's own tokens, taken as a completion of it."""
    prompt = parts.first_prompts[0]
    ids = (prompt.token_ids * REFERENCE_TOKENS)[:REFERENCE_TOKENS]
    completion = Completion(ids, (0.0,) * len(ids), (0,) * len(ids), FinishReason.EOS)
    batch = build_batch([Group(prompt, [Rollout(completion, "", reward=0.0)])], parts.config, 0)
    own, other = (parts.policy.logprobs(batch, [0], reference=which).logprobs.float() for which in (False, True))
    return float((own - other).abs().max())


def optimizer(parts: Parts) -> str:
    """The optimizer moves each trainable weight, once, and nothing else. Raises TrainingError."""
    policy = parts.policy
    policy.optimizer.check_complete(policy.model)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    frozen = sum(p.numel() for p in policy.model.parameters() if not p.requires_grad)
    tail = f"; {frozen:,} are frozen" if frozen else "; none is frozen"
    return f"it moves the {len(trained)} tensors ({sum(p.numel() for p in trained):,} weights) that are trainable{tail}"


def memory(parts: Parts) -> str:
    """What the longest batch takes fits into what is free. Raises ConfigError."""
    forecast = parts.forecast
    loaded = sum(forecast.always[name] for name in ("weights", "reference", "masters"))
    needed = forecast.total - loaded
    if needed > SLACK * forecast.free:
        raise ConfigError(
            f"optimizer.tokens_per_micro is {forecast.tokens_per_micro}, but an update would take {size(needed)} more than "
            f"what is loaded, and {size(forecast.free)} are free. It would run out of memory. Lower it, set it to 'auto', "
            "set model.gradient_checkpointing = true or optimizer.moments = '8bit', or lower sampling.max_tokens."
        )
    return forecast.text().removeprefix("memory forecast: ")
