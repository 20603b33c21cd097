"""What only supervised fine-tuning has."""

from pydantic import Field

from leadline.settings.section import Section


class Sft(Section):
    """Supervised fine-tuning on demonstrations (`leadline sft`)."""

    completion_column: str = "completion"
    """Column with the completion: a string, or a list of one assistant message. Rows without it may hold a whole
    conversation in `data.prompt_column`, whose last message, the assistant's, is then the completion."""
    demonstrations_per_step: int = Field(16, ge=1)
    """Demonstrations of one optimizer step. The loss is the mean over all their completion tokens."""
    greedy_prompts: int = Field(0, ge=0)
    """Of the held-out prompts, so many are also completed greedily at each evaluation and scored with `[[rewards]]`;
    without any, by whether the completion is the demonstrated one."""
