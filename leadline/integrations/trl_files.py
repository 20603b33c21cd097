"""What the callback leaves in `output_dir/leadline/`: readable by `leadline doctor`, and bounded.

config.json      the trainer's arguments
metrics.jsonl    one line per optimizer step, in leadline's names
findings.jsonl   what the doctor said, when it began
blackbox/        step_000012.safetensors: the last steps at token level, and the first that were not finite
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from leadline.doctor.json_lines import to_line
from leadline.doctor.rule import Finding
from leadline.run_dir import MAX_KEPT


class Files:
    """The directory of one run. Raises OSError if the disk refuses."""

    def __init__(self, path: Path, blackbox_steps: int) -> None:
        self.path = path
        self._blackbox = path / "blackbox"
        self._recent: list[Path] = []
        self._steps = blackbox_steps
        self._kept = 0

    def begin(self, settings: Mapping[str, Any], *, anew: bool) -> None:
        """The directory is there; with `anew`, nothing of an earlier run is."""
        self._blackbox.mkdir(parents=True, exist_ok=True)
        if anew:
            for old in (*self.path.glob("*.jsonl"), *self._blackbox.glob("step_*.safetensors")):
                old.unlink()
        text = json.dumps({"framework": "trl", **settings}, indent=2, default=str)
        (self.path / "config.json").write_text(text)

    def write_row(self, row: Mapping[str, float]) -> None:
        """Appends to metrics.jsonl."""
        self._append("metrics.jsonl", row)

    def write_finding(self, finding: Finding) -> None:
        """Appends to findings.jsonl."""
        self._append("findings.jsonl", finding.to_dict())

    def write_blackbox(self, step: int, tensors: Mapping[str, Tensor], *, keep: bool) -> None:
        """The step at token level; of those without `keep`, only the last stay."""
        target = self._blackbox / f"step_{step:06d}.safetensors"
        partial = target.with_name(f".{target.name}.partial")
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, partial)
        partial.replace(target)  # not synced to the disk: a killed process loses nothing, and a step must not wait
        if keep and self._kept < MAX_KEPT:
            self._kept += 1
            return
        self._recent.append(target)
        while len(self._recent) > self._steps:
            self._recent.pop(0).unlink(missing_ok=True)

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        with (self.path / name).open("ab", buffering=0) as file:
            file.write(to_line(values))
