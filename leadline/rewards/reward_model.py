"""A sequence-classification model as a reward."""

import threading
from collections.abc import Sequence

from leadline.errors import RewardError


class RewardModel:
    """The one logit of a sequence-classification model for prompt + completion.

    The text is the prompt as rendered for the policy, followed by what `decoding.py` leaves of the completion.
    Raises RewardError: a directory that holds no such model, more than one label, or a model without a trained head.
    """

    def __init__(self, directory: str, *, batch_size: int = 8, device: str | None = None) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
            self._tokenizer = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError) as error:
            raise RewardError(
                f"The reward is 'model:{directory}', but no sequence-classification model and tokenizer can be loaded "
                f"from there: {error}. Nothing could be scored. Give a directory that holds both."
            ) from error
        _check_head(directory, model.config.num_labels, sorted(info["missing_keys"]))
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model = model.to(self._device).eval()
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._tokenizer.padding_side = "right"
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        with self._lock:  # groups are scored concurrently; one batch at a time bounds the memory
            return [
                score
                for start in range(0, len(texts), self._batch_size)
                for score in self._scores(texts[start : start + self._batch_size])
            ]

    def _scores(self, texts: list[str]) -> list[float]:
        import torch

        bos = self._tokenizer.bos_token
        rendered = bos is not None and texts[0].startswith(bos)  # the chat template wrote BOS already
        inputs = self._tokenizer(texts, add_special_tokens=not rendered, padding=True, return_tensors="pt")
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and inputs["input_ids"].shape[1] > limit:
            raise ValueError(f"{inputs['input_ids'].shape[1]} tokens, but the reward model reads at most {limit}")
        with torch.inference_mode():
            logits = self._model(
                input_ids=inputs["input_ids"].to(self._device),
                attention_mask=inputs["attention_mask"].to(self._device),
            ).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def _check_head(directory: str, num_labels: int, missing: Sequence[str]) -> None:
    if num_labels != 1:
        raise RewardError(
            f"The reward is 'model:{directory}', but that model has {num_labels} labels. Which of them is the reward "
            "is unknown. Give a model with one label."
        )
    if missing:
        raise RewardError(
            f"The reward is 'model:{directory}', but its weights lack {', '.join(missing)}. They would be random, and "
            "the reward noise. Give a trained reward model, not a language model."
        )
