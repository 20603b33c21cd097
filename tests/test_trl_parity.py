"""The same loss and the same gradient as TRL's GRPOTrainer, on its own left-padded batch."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

import torch
from torch import Tensor

from leadline.policy.batch import Batch, Minibatch, build_batch
from leadline.policy.step_loss import Before, loss_shares, step_loss
from tests.builders import group, policy, settings
from tests.integrations.trl_runs import build

pytestmark = pytest.mark.filterwarnings("default")  # TRL and transformers warn about each other, and that is theirs

GROUPS = [group((0.0, 1.0, 0.3, 0.0), (5, 1, 9, 16), seed=1), group((1.0, 0.0, 0.2, 0.7), (7, 3, 4, 12), seed=4)]
BETA = 0.04


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("off_policy", [False, True])
def test_loss_and_gradient_equal_those_of_trl(loss: str, off_policy: bool, tmp_path: Path) -> None:
    beta = BETA if off_policy else 0.0
    made = policy(settings(objective={"loss": loss, "beta": beta, "importance_action": "off"}))
    batch = build_batch(GROUPS, made.config, 0)
    theirs_model = policy(settings(model={"attention": "eager"})).model  # the same random weights
    # By default TRL multiplies its KL term by the policy ratio, which ours and the paper's is not.
    trainer = build(
        tmp_path,
        None,
        model=theirs_model,
        loss_type=loss,
        use_bias_correction_kl=False,
        per_device_train_batch_size=batch.num_completions,
        num_generations=4,
        max_completion_length=16,
    )
    trainer.beta = beta  # not as a setting: TRL would load a reference by the model's name, which it has none of
    trainer.current_gradient_accumulation_steps = 1
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        now = made.logprobs(batch, batch.forwarded).logprobs
    before = Before()
    if off_policy:
        before = Before(*(now + spread * torch.randn(now.shape, generator=draw) for spread in (0.3, 0.2)))

    ours = our_loss(made, batch, before)
    theirs = trainer.compute_loss(trainer.model, padded(batch, before))
    theirs.backward()

    assert float(ours) == pytest.approx(float(theirs.detach()), abs=1e-6)
    gradient, expected = flat_gradient(made.model), flat_gradient(trainer.model)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def our_loss(made: Any, batch: Batch, before: Before) -> Tensor:
    minibatch = Minibatch(batch.forwarded, int(batch.loss_mask.sum()))
    shares = loss_shares(batch, minibatch, made.config)
    scores = made.logprobs(batch, batch.forwarded)
    loss, _, _ = step_loss(made.config.objective, batch, batch.forwarded, scores, before, shares)
    loss.backward()
    return loss.detach()


def padded(batch: Batch, before: Before) -> dict[str, Tensor]:
    """Prompts padded on the left, completions on the right, as TRL lays them out."""
    prompts = [batch.prompt_ids[g] for g in batch.group_of_completion.tolist()]
    completions = [batch.token_ids[batch.tokens_of([c])] for c in range(batch.num_completions)]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(c) for c in completions], batch_first=True)
    inputs = {
        "prompt_ids": pad(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": mask,
        "advantages": batch.advantages,
        "num_items_in_batch": mask.sum(),
    }
    for name, values in (("old_per_token_logps", before.old_logprobs), ("ref_per_token_logps", before.ref_logprobs)):
        if values is not None:
            inputs[name] = torch.zeros(mask.shape).masked_scatter(mask.bool(), values)
    return inputs


def flat_gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
