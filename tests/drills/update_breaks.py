"""What can be broken between the rewards and the weights: grouping, advantages, logprobs, reference, optimizer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import leadline.policy.batch
import leadline.policy.policy
import leadline.policy.step_loss
import leadline.rollouts
from leadline.models import load_model
from leadline.objective.advantages import group_advantages
from leadline.policy.step_loss import Scores
from leadline.types import Completion, Prompt, Rollout
from tests.drills.breaks import own_engine
from tests.drills.run import Parts

Advantages = Callable[..., Tensor]


def advantages(made: Advantages) -> Callable[[Parts], None]:
    return lambda parts: parts.patch(leadline.policy.batch, "group_advantages", made)


def reversed_sign(rewards: Tensor, groups: Tensor, **how: Any) -> Tensor:
    return -group_advantages(rewards, groups, **how)


def mixed_prompts(rewards: Tensor, groups: Tensor, **how: Any) -> Tensor:
    """Reshaped along the wrong axis: each group holds one completion of each prompt."""
    count = int(groups.max()) + 1
    return group_advantages(rewards, torch.arange(len(rewards)) % count, **how)


def poisoned_by_nan(rewards: Tensor, groups: Tensor, **how: Any) -> Tensor:
    """A mean that does not leave out the reward that is none."""
    means = torch.stack([rewards[groups == group].mean() for group in groups])
    stds = torch.stack([rewards[groups == group].std() for group in groups])
    return (rewards - means) / (stds + how["epsilon"])


def silent_steps(*steps: int) -> Callable[[Parts], None]:
    """The reward service is away in these steps, and its client says 0."""

    def breaks(parts: Parts) -> None:
        score = parts.roller.scorer.score
        per_step = parts.config.rollout.groups_per_step

        async def away(prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Rollout]:
            rollouts = await score(prompt, completions, texts)
            zero = prompt.index // per_step + 1 in steps
            return [replace(r, reward=0.0, rewards=dict.fromkeys(r.rewards, 0.0)) if zero else r for r in rollouts]

        parts.patch(parts.roller.scorer, "score", away)

    return breaks


def padded_text(parts: Parts) -> None:
    """Completions are padded to one width before they are decoded, and decoded whole."""

    def decoded(tokenizer: Any, completion: Completion, **how: Any) -> str:
        ids = [*completion.token_ids, *[0] * (40 - len(completion.token_ids))]
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    parts.patch(leadline.rollouts, "decode", decoded)


def without_special_tokens(parts: Parts) -> None:
    def decoded(tokenizer: Any, completion: Completion, **how: Any) -> str:
        return str(tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    parts.patch(leadline.rollouts, "decode", decoded)


# ---- the model


def peaked(parts: Parts) -> None:
    """A policy that is surer than a random one: an entropy of about one nat."""
    parts.policy.model.lm_head.weight.data *= 4


def nan_logits_from(version: int) -> Callable[[Parts], None]:
    """The trainer's forward gives NaN at one position; the engine's copy does not."""

    def breaks(parts: Parts) -> None:
        parts.set_engine(own_engine(parts))
        policy = parts.policy

        def hook(module: Any, inputs: Any, logits: Tensor) -> Tensor:
            return logits * math.nan if policy.version >= version else logits

        policy.model.get_output_embeddings().register_forward_hook(hook)

    return breaks


def infinite_gradient_from(version: int) -> Callable[[Parts], None]:
    def breaks(parts: Parts) -> None:
        policy = parts.policy
        first = next(policy.model.parameters())
        first.register_hook(lambda grad: grad * math.inf if policy.version >= version else grad)

    return breaks


def detached(parts: Parts) -> None:
    """The loss is computed from numbers that the graph does not know."""
    policy = parts.policy
    forward = policy.logprobs

    def cut(*args: Any, **more: Any) -> Scores:
        scores = forward(*args, **more)
        return Scores(scores.logprobs.detach().requires_grad_(), scores.entropies.detach())

    parts.patch(policy, "logprobs", cut)


def adapter_cut_off(parts: Parts) -> None:
    """Recomputation leaves the adapter's output without a graph."""
    for name, module in parts.policy.model.named_modules():
        if ".lora_B." in name:
            module.register_forward_hook(lambda module, inputs, output: output.detach())
    head = parts.policy.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, logits: logits.requires_grad_())


def policy_term_cut_off(parts: Parts) -> None:
    """The ratio is exp(x - x) of numbers without a graph."""
    loss = leadline.policy.step_loss.policy_loss

    def cut(name: str, logprobs: Tensor, *rest: Any, **how: Any) -> Any:
        return loss(name, logprobs.detach(), *rest, **how)

    parts.patch(leadline.policy.step_loss, "policy_loss", cut)


def noisy_old_logprobs(size: float) -> Callable[[Parts], None]:
    """Old logprobs come from another forward than the update's."""

    def breaks(parts: Parts) -> None:
        policy = parts.policy
        score = policy._score_all

        def other(batch: Any, *, reference: bool) -> Scores:
            scores = score(batch, reference=reference)
            return Scores(scores.logprobs + size * torch.randn_like(scores.logprobs), scores.entropies)

        parts.patch(policy, "_score_all", other)

    return breaks


def training_dropout(parts: Parts) -> None:
    """The update's forward drops activations; engine and old logprobs do not see it."""
    policy = parts.policy
    inside = False

    def hook(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return torch.nn.functional.dropout(output, 0.2) if inside else output

    for layer in policy.model.model.layers:
        layer.mlp.register_forward_hook(hook)
    step = policy._optimizer_step

    def stepped(*args: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return step(*args)
        finally:
            inside = False

    parts.set_engine(own_engine(parts))
    parts.patch(policy, "_optimizer_step", stepped)


# ---- reference and loss


def reference_is_policy(parts: Parts) -> None:
    parts.policy.reference = parts.policy.model


def other_reference(parts: Parts) -> None:
    """The reference was loaded from another checkpoint."""
    other = load_model(parts.config.model, seed=1).model
    parts.policy.reference.load_state_dict(other.state_dict())


def kl_left_out(parts: Parts) -> None:
    """The KL is measured, and its coefficient never arrives in the loss."""
    loss = leadline.policy.policy.step_loss

    def without(objective: Any, *args: Any) -> Any:
        return loss(objective.model_copy(update={"beta": 0.0}), *args)

    parts.patch(leadline.policy.policy, "step_loss", without)


# ---- optimizer


def moves_a_copy(parts: Parts) -> None:
    """The optimizer was built before the weights were, and holds others."""
    optimizer = parts.policy.optimizer
    others = [torch.nn.Parameter(p.detach().clone()) for p in optimizer.parameters]
    optimizer._adamw = torch.optim.AdamW(others, lr=1e-3)


def forgotten_from(version: int, name: str) -> Callable[[Parts], None]:
    """From this version on a metric is left out of the row, as some writers do with a NaN."""

    def breaks(parts: Parts) -> None:
        update = parts.policy.update

        def silent(batch: Any) -> Any:
            done = update(batch)
            if parts.policy.version > version:
                done.metrics.pop(name)
            return done

        parts.patch(parts.policy, "update", silent)

    return breaks


def held_out_differs(parts: Parts) -> None:
    """What is rewarded in training is wrong for the held-out prompts."""
    held_out = parts.config.eval.prompts
    parts.prompts[:] = [
        replace(p, columns={"answer": "odd" if i < held_out else "even"}) for i, p in enumerate(parts.prompts)
    ]
