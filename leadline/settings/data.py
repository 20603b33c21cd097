"""Where prompts come from."""

from typing import Any

from pydantic import Field

from leadline.settings.section import Section


class Data(Section):
    """Where prompts come from."""

    source: str
    """A `.jsonl` file, a Hugging Face `datasets` directory or hub name, `reasoning_gym:TASK`, or `file.py:function` or
    `package.module:function`, which is called with `size` and `seed` and returns rows."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning-gym task (e.g. {max_terms = 3}) or of the function, or keyword arguments of
    `datasets.load_dataset`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages. Without messages and with a chat
    template, a string becomes one user message unless `chat = false`."""
    chat: bool | None = None
    """Render through the chat template. None = yes if the tokenizer has one."""
    system_prompt: str | None = None
    """First message of each conversation, unless the row has a system message of its own."""
    size: int = Field(2000, ge=1)
    """How many training rows to draw from a reasoning-gym task or a function."""
    eval_source: str | None = None
    """Held-out data; None = hold out rows of `source` (a reasoning-gym task draws them with another seed)."""
    eval_split: str | None = None
    """Split of `eval_source`; None = `split`."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """A longer prompt is an error that names the row. None = the model's context less `sampling.max_tokens`."""
