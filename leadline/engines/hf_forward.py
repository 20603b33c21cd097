"""A forward of the model as the hf engine needs it."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leadline.engines.hf_prompts import PromptCache, layer_windows
from leadline.models import plain_model


class Forward:
    """The logits that follow the last token of each row, whatever the model calls its arguments."""

    def __init__(self, model: Any) -> None:
        # peft: the layers inside it carry the adapter, the wrapper adds nothing.
        self._model = plain_model(model)
        known = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._takes_positions = "position_ids" in known
        self._windows = layer_windows(self._model.config)
        self.context_length = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)

    def can_share(self, prefilled: PromptCache) -> bool:
        """Whether completions may attend to this cache without a copy: its own columns no longer tell a token's position."""
        return self._takes_positions and prefilled.can_be_shared(self._windows)

    def __call__(
        self, ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], mask: Tensor | None, cache: Any
    ) -> Tensor:
        device = self._model.device
        options: dict[str, Any] = {self._cache_name: cache, **self._options}
        if self._takes_positions:
            options["position_ids"] = torch.tensor(positions, device=device)
        output = self._model(input_ids=torch.tensor(ids, device=device), attention_mask=mask, use_cache=True, **options)
        logits: Tensor = output.logits[:, -1]
        return logits
