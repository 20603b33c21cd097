import asyncio
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from leadline.errors import RewardError
from leadline.rewards.reward_model import RewardModel
from leadline.rewards.scorer import build_scorer
from leadline.settings.reward import Reward
from leadline.types import Completion, FinishReason, Prompt
from tests.byte_tokenizer import byte_tokenizer

TEXTS = ["5", "the answer is six", "", "7 and more"]


def llama(labels: int = 1) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=labels,
        pad_token_id=None,
    )


def save(path: Path, model: torch.nn.Module) -> str:
    model.save_pretrained(path)  # type: ignore[operator]
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    torch.manual_seed(0)
    return save(tmp_path / "judge", LlamaForSequenceClassification(llama()))


def test_a_reward_model_gives_its_logit_whatever_shares_the_batch(directory: str) -> None:
    model = LlamaForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = byte_tokenizer()
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([tokenizer("2 + 3?" + t)["input_ids"]])).logits.item() for t in TEXTS]
    assert len({round(e, 4) for e in expected}) == 4
    for batch_size in (1, 3, 8):
        scores = RewardModel(directory, batch_size=batch_size, device="cpu")(["2 + 3?"] * 4, TEXTS)
        assert scores == pytest.approx(expected, abs=1e-5)


def test_a_recipe_names_a_reward_model_by_its_directory(directory: str) -> None:
    scorer = build_scorer([Reward(name=f"model:{directory}", weight=2.0, params={"batch_size": 2})])
    completions = [Completion((1,), (-0.5,), (0,), FinishReason.EOS)] * 4
    rollouts = asyncio.run(scorer.score(Prompt(0, "2 + 3?", (1,)), completions, TEXTS))
    expected = RewardModel(directory)(["2 + 3?"] * 4, TEXTS)
    assert [r.rewards["judge"] for r in rollouts] == pytest.approx(expected)
    assert [r.reward for r in rollouts] == pytest.approx([2 * e for e in expected])


def test_a_text_beyond_the_models_context_fails_its_rollouts(directory: str) -> None:
    scorer = build_scorer([Reward(name=f"model:{directory}")])
    completions = [Completion((1,), (-0.5,), (0,), FinishReason.EOS)]
    (rollout,) = asyncio.run(scorer.score(Prompt(0, "2 + 3?", (1,)), completions, ["x" * 40]))
    assert rollout.error == "judge: ValueError: 46 tokens, but the reward model reads at most 32"


def test_bos_is_added_unless_the_chat_template_wrote_it(directory: str) -> None:
    byte_tokenizer(bos=True).save_pretrained(directory)
    judge = RewardModel(directory)
    assert judge(["<bos>2 + 3?"], ["5"]) == judge(["2 + 3?"], ["5"])


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="no sequence-classification model and tokenizer can be loaded"):
        RewardModel(str(tmp_path))


def test_more_than_one_label_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="that model has 2 labels"):
        RewardModel(save(tmp_path, LlamaForSequenceClassification(llama(2))))


def test_a_language_model_without_a_trained_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"its weights lack score\.weight"):
        RewardModel(save(tmp_path, LlamaForCausalLM(llama())))
