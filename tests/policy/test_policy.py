import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM

from leadline.errors import TrainingError
from leadline.models import Loaded, load_model
from leadline.policy.batch import Batch, build_batch
from leadline.policy.policy import Policy
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests import reference
from tests.builders import (
    MODELS,
    VOCABULARY,
    all_logprobs,
    group,
    groups,
    moved_adapter,
    on_policy,
    plain_logits,
    plain_logprobs,
    policy,
    same,
    settings,
    snapshot,
)

# ---- logprobs


def test_packed_logprobs_are_those_of_each_sequence_alone_in_the_order_asked_for() -> None:
    made = policy(settings())
    batch = build_batch(groups(), made.config, 0)
    order = [4, 0, 11, 7, 1]
    with torch.no_grad():
        scores = made.logprobs(batch, order)
    expected = torch.cat([plain_logprobs(made.model, batch, c) for c in order])
    assert torch.allclose(scores.logprobs, expected, rtol=0, atol=1e-5)
    assert len({round(float(v), 3) for v in expected}) > 20  # nothing is constant here


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
        {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_logprobs_are_of_the_distribution_that_was_sampled(sampling: dict[str, Any]) -> None:
    made = policy(settings(sampling=sampling))
    batch = build_batch(repeating_groups(), made.config, 0)
    with torch.no_grad():
        scores = made.logprobs(batch, range(batch.num_completions))
    expected = [value for c in range(batch.num_completions) for value in replayed(made, batch, c)]
    assert torch.allclose(scores.logprobs, torch.tensor(expected), rtol=0, atol=1e-5)
    assert not torch.allclose(scores.logprobs, all_logprobs(policy(settings()), batch), rtol=0, atol=1e-2)


def repeating_groups() -> list[Group]:
    """Completions that repeat tokens of their prompt and of themselves."""
    rollouts = [
        Rollout(Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), FinishReason.EOS), text="", reward=float(i))
        for i, ids in enumerate([(40, 7, 7, 40, 200), (9, 9, 9), (31,)])
    ]
    return [Group(Prompt(0, "", (7, 12, 40, 55)), rollouts), group((0.0, 1.0), (4, 3), seed=5)]


def replayed(made: Policy, batch: Batch, completion: int) -> list[float]:
    """Token by token in plain Python; the sampled token is always part of the support."""
    sampling = made.config.sampling
    prompt = batch.prompt_ids[int(batch.group_of_completion[completion])].tolist()
    tokens = batch.token_ids[batch.tokens_of([completion])].tolist()
    values = []
    for t, row in enumerate(plain_logits(made.model, prompt, tokens).tolist()):
        seen = [v in (*prompt, *tokens[:t]) for v in range(VOCABULARY)]
        cut = (sampling.top_k, sampling.top_p, sampling.min_p)
        support = reference.processed_logits(row, sampling.temperature, *cut, sampling.repetition_penalty, seen)
        whole = reference.processed_logits(row, sampling.temperature, 0, 1.0, 0.0, sampling.repetition_penalty, seen)
        support[tokens[t]] = whole[tokens[t]]
        values.append(whole[tokens[t]] - math.log(sum(math.exp(x) for x in support)))
    return values


def test_entropies_are_those_of_the_sampled_distribution() -> None:
    made = policy(settings(sampling={"temperature": 0.7}))
    batch = build_batch(groups()[:1], made.config, 0)
    prompt, tokens = batch.prompt_ids[0].tolist(), batch.token_ids[batch.tokens_of([2])].tolist()
    probabilities = (plain_logits(made.model, prompt, tokens) / 0.7).softmax(-1)
    with torch.no_grad():
        entropies = made.logprobs(batch, [2]).entropies
    assert torch.allclose(entropies, -(probabilities * probabilities.log()).sum(-1), rtol=0, atol=1e-5)


def test_bfloat16_logprobs_are_float32_and_packed_as_well_as_rounding_allows() -> None:
    made = policy(settings(model={"dtype": "bfloat16"}))
    assert made.packs
    batch = build_batch(groups(), made.config, 0)
    logprobs = all_logprobs(made, batch)
    in_float32 = copy.deepcopy(made.model).float()
    plain, truth = (
        torch.cat([plain_logprobs(model, batch, c) for c in range(batch.num_completions)])
        for model in (made.model, in_float32)
    )
    assert logprobs.dtype == torch.float32
    assert float((logprobs - plain).abs().max()) < 0.1
    assert float((logprobs - truth).abs().mean()) < 1.2 * float((plain - truth).abs().mean())


class Mixing(nn.Module):
    """A model whose positions all see the mean of the whole row: it must not be packed."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain
        self.config = plain.config

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        output = self.plain(input_ids=input_ids, **inputs)
        output.logits = output.logits + output.logits.mean(1, keepdim=True)
        return output


def mamba(loaded: Loaded) -> nn.Module:
    torch.manual_seed(0)
    shape = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4, initializer_range=0.5)
    return MambaForCausalLM(shape).eval()


@pytest.mark.parametrize("make", [lambda loaded: Mixing(loaded.model), mamba], ids=["mixing", "mamba"])
def test_a_model_that_mixes_neighbours_is_not_packed_and_has_the_right_logprobs(make: Any) -> None:
    config = settings()
    loaded = load_model(config.model)
    made = Policy(Loaded(make(loaded), loaded.tokenizer, loaded.eos_ids, None), config)
    assert not made.packs
    assert any("each sequence is forwarded on its own" in line for line in made.slow_paths)
    batch = build_batch(groups(), config, 0)
    if not isinstance(made.model, Mixing):  # whose logits depend on tokens to come, so "alone" is with these
        expected = torch.cat([plain_logprobs(made.model, batch, c) for c in range(batch.num_completions)])
        assert torch.allclose(all_logprobs(made, batch), expected, rtol=0, atol=1e-5)
    one_by_one = torch.cat([made.logprobs(batch, [c]).logprobs.detach() for c in range(batch.num_completions)])
    assert torch.allclose(all_logprobs(made, batch), one_by_one, rtol=0, atol=1e-5)
    assert made.update(build_batch(groups(), config, 0)).metrics["optimizer/steps"] == 1


def test_the_tiny_model_takes_every_fast_path() -> None:
    made = policy(settings())
    assert made.packs
    assert made.head is not None
    assert made.slow_paths == ()


def test_finding_out_whether_prompts_can_be_shared_leaves_the_weights_and_gradients_alone() -> None:
    config = settings(objective={"mask_truncated": True, "on_unscored": "drop"})
    loaded = load_model(config.model)
    before = snapshot(loaded.model)
    made = Policy(loaded, config)
    assert same(snapshot(made.model), before)
    assert all(p.grad is None for p in made.model.parameters())


# ---- weights and checkpoints


def test_weights_that_are_not_finite_are_neither_saved_nor_sent(tmp_path: Path) -> None:
    made = policy(settings())
    made.model.lm_head.weight.data[3, 4] = math.inf
    with pytest.raises(TrainingError, match=r"lm_head\.weight is not finite"):
        made.weights()
    with pytest.raises(TrainingError, match=r"lm_head\.weight is not finite"):
        made.save(tmp_path)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_restored_policy_goes_on_bit_for_bit(model: dict[str, Any], tmp_path: Path) -> None:
    config = settings(
        model=model, objective={"beta": 0.1}, optimizer={"minibatches": 2, "weight_decay": 0.1, "schedule": "cosine"}
    )
    made = policy(config)
    batch = on_policy(made, groups())
    for _ in range(2):
        made.update(batch)
    made.discarded_in_a_row = 1
    made.save(tmp_path)
    other = policy(config)
    other.restore(tmp_path)
    assert (other.version, other.discarded_in_a_row) == (2, 1)
    assert same(snapshot(other.model), snapshot(made.model))
    before = snapshot(made.model)
    rows = [[one.update(batch).metrics for _ in range(2)] for one in (made, other)]
    assert same(snapshot(other.model), snapshot(made.model))
    assert not same(snapshot(made.model), before)
    for row, restored in zip(*rows, strict=True):
        changing = ("time/", "throughput/", "memory/")
        assert {k: v for k, v in row.items() if not k.startswith(changing)} == pytest.approx(
            {k: v for k, v in restored.items() if not k.startswith(changing)}, rel=0, abs=0, nan_ok=True
        )


def test_what_is_saved_is_a_plain_model_with_the_trained_logits(tmp_path: Path) -> None:
    made, batch = moved_adapter()
    made.save(tmp_path)
    plain = load_model(settings(model={"name": str(tmp_path / "model")}).model).model
    expected = torch.cat([plain_logprobs(plain, batch, c) for c in range(batch.num_completions)])
    assert torch.allclose(all_logprobs(made, batch), expected, rtol=0, atol=1e-5)
