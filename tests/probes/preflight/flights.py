"""A small run up to where its preflight begins."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leadline.config import Config, parse_config
from leadline.data import PromptData, PromptStream
from leadline.engines.base import Engine
from leadline.probes.preflight.parts import Parts
from leadline.session import build_engine, load_parts
from leadline.types import Prompt


def recipe(folder: Path, **sections: Any) -> Config:
    """The tiny model on nine rows with an answer."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + 3?", "answer": str(i + 3)}) + "\n" for i in range(9)))
    values: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"source": str(rows)},
        "rewards": [{"name": "exact_match"}],
        "sampling": {"max_tokens": 8},
        "rollout": {"group_size": 2, "groups_per_step": 2},
        "optimizer": {"learning_rate": 1e-3},
        "eval": {"prompts": 2},
        "run": {"steps": 2, "checkpoint_every": 0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_config(values)


def parts(folder: Path, **sections: Any) -> Parts:
    return load_parts(recipe(folder, **sections), lambda stage: None, lambda line: None)


def engine(made: Parts) -> Engine:
    return build_engine(made.config, made.loaded, Path("unused"), lambda line: None)


def with_prompts(made: Parts, texts: Sequence[str], ids: Sequence[Sequence[int]] = ()) -> Parts:
    """The same run on these prompts, with their own tokens or with `ids`."""
    own = [made.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompts = [Prompt(0, text, tuple(tokens)) for text, tokens in zip(texts, ids or own, strict=True)]
    return replace(made, data=PromptData(PromptStream(prompts, 0), [], frozenset(), removed=0))
