"""Groups, batches and policies of the tiny model, for the tests of the trainer's core."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leadline.config import Config, parse_config
from leadline.models import load_model
from leadline.policy.batch import Batch, build_batch
from leadline.policy.policy import Policy
from leadline.policy.update_metrics import Update
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

VOCABULARY = 260
NAN = math.nan
MODELS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}, "lora": {"lora_rank": 4}}
"""Sections `model` for what can be trained."""


def settings(**sections: dict[str, Any]) -> Config:
    """The tiny model on the CPU in float32, with a learning rate at which one step can be seen."""
    values: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"source": "prompts.jsonl"},
        "rewards": [{"name": "exact_match"}],
        "sampling": {"max_tokens": 16},
        "optimizer": {"learning_rate": 1e-3},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return parse_config(values)


def token_ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def completion(length: int, seed: int = 0, finish: FinishReason = FinishReason.EOS, logprob: float = NAN) -> Completion:
    return Completion(token_ids(length, seed), (logprob,) * length, (0,) * length, finish)


def rollout(reward: float, length: int, seed: int, finish: FinishReason = FinishReason.EOS) -> Rollout:
    return Rollout(completion(length, seed, finish), text="", reward=reward)


def group(
    rewards: Sequence[float], lengths: Sequence[int], seed: int = 0, finish: FinishReason = FinishReason.EOS
) -> Group:
    """Random tokens; no rollout logprobs yet (see `on_policy`)."""
    rollouts = [
        rollout(reward, length, 100 * seed + i, finish)
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Group(Prompt(seed, "", token_ids(4 + seed % 5, 7000 + seed)), rollouts)


def groups() -> list[Group]:
    """Four groups with signal, of unequal lengths."""
    return [
        group((0.0, 1.0, 0.3), (5, 1, 9), seed=1),
        group((1.0, 0.0, 0.0), (7, 3, 4), seed=2),
        group((2.0, 0.0, 1.5), (2, 8, 6), seed=3),
        group((0.0, 0.2, 1.0), (4, 4, 10), seed=4),
    ]


def policy(config: Config, seed: int = 0) -> Policy:
    return Policy(load_model(config.model, seed), config)


def all_logprobs(policy: Policy, batch: Batch) -> Tensor:
    with torch.no_grad():
        return policy.logprobs(batch, range(batch.num_completions)).logprobs


def scored(groups: Sequence[Group], logprobs: Tensor) -> list[Group]:
    """The groups with these rollout logprobs, one per completion token of all of them."""
    left = iter(logprobs.tolist())

    def rescored(rollout: Rollout) -> Rollout:
        values = tuple(next(left) for _ in rollout.completion.token_ids)
        return replace(rollout, completion=replace(rollout.completion, logprobs=values))

    return [replace(group, rollouts=[rescored(r) for r in group.rollouts]) for group in groups]


def plain_logits(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Row t predicts completion token t: one sequence, no padding, no packing."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def plain_logprobs(model: nn.Module, batch: Batch, completion: int) -> Tensor:
    prompt = batch.prompt_ids[int(batch.group_of_completion[completion])].tolist()
    tokens = batch.token_ids[batch.tokens_of([completion])]
    logits = plain_logits(model, prompt, tokens.tolist())
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def on_policy(policy: Policy, groups: Sequence[Group], offset: float | Tensor = 0.0) -> Batch:
    """The batch of the groups, as if an engine had sampled them with log mu = log pi - offset."""
    logprobs = all_logprobs(policy, build_batch(groups, policy.config, policy.version)) - offset
    return build_batch(scored(groups, logprobs), policy.config, policy.version)


def moved_adapter() -> tuple[Policy, Batch]:
    """A LoRA policy after three updates, and the batch that it was trained on."""
    made = policy(settings(model={"lora_rank": 4}, objective={"beta": 0.1}, optimizer={"learning_rate": 1e-2}))
    batch = on_policy(made, groups())
    for _ in range(3):
        made.update(batch)
    return made, batch


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def all_finite(made: Policy) -> bool:
    return all(bool(t.isfinite().all()) for t in made.model.state_dict().values())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def optimizer_inputs(policy: Policy) -> list[dict[str, Tensor]]:
    """From now on: the gradients by name that each optimizer step is given (before clipping)."""
    seen: list[dict[str, Tensor]] = []
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    step: Callable[..., Any] = policy.optimizer.step

    def spy(loss: float, rate: float) -> Any:
        policy.optimizer.collect()
        masters = policy.optimizer._masters
        seen.append({n: m.grad.clone() for n, m in zip(names, masters, strict=True) if m.grad is not None})
        return step(loss, rate)

    policy.optimizer.step = spy  # type: ignore[method-assign]
    return seen


def logprob_gradients(policy: Policy) -> list[Tensor]:
    """From now on: for each micro-batch, the gradient of the loss by its tokens' logprobs, filled in by backward."""
    seen: list[Tensor] = []
    forward = policy.logprobs

    def spy(*args: Any, **kwargs: Any) -> Any:
        scores = forward(*args, **kwargs)
        if scores.logprobs.requires_grad:
            scores.logprobs.register_hook(lambda grad: seen.append(grad.clone()))
        return scores

    policy.logprobs = spy  # type: ignore[method-assign]
    return seen


def stages(update: Update, what: str = "share") -> dict[str, float]:
    """The ledger columns that are not 0."""
    columns = {
        key.removeprefix("ledger/").removesuffix(f"_{what}"): value
        for key, value in update.metrics.items()
        if key.startswith("ledger/") and key.endswith(f"_{what}") and "sampled" not in key
    }
    return {stage: value for stage, value in columns.items() if value != 0}


def poison_logits(made: Policy, value: float) -> None:
    """From now on one logit, of the entry 17 at the fifth position, is `value`."""

    def hook(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        place = torch.zeros_like(logits, dtype=torch.bool)
        place[0, 4, 17] = True
        return torch.where(place, value, logits)

    head = made.model.get_output_embeddings()
    head.register_forward_hook(hook)
