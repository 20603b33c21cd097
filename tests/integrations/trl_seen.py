"""What a run under the callback has left, and trainers that go wrong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
pytest.importorskip("torch")

import torch

from leadline.integrations.trl import DoctorCallback


def names(callback: DoctorCallback) -> list[str]:
    return [finding.name for finding in callback.findings]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "leadline" / "metrics.jsonl").read_text().splitlines()]


def own_output(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("leadline:")]


def finite(trainer: Any) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def nan_loss(at_step: int, last: int | None = None) -> Any:
    """A trainer whose loss is NaN at some steps, as an overflow would make it."""
    from trl import GRPOTrainer

    class Overflowing(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            bad = at_step <= self.state.global_step + 1 <= (last or at_step)
            return loss * math.nan if bad else loss

    return Overflowing
