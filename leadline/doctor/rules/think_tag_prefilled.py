import re

from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class ThinkTagPrefilled(Rule):
    """The chat template already opens the reasoning block, and the reward demands the opening tag.

    ## Symptom
    The format reward is exactly its minimum from the first step, with a reasoning model; completions hold a closing
    tag only.

    ## Cause
    The prompt ends in the opening tag, so the model does not write it, and only generated tokens are decoded. A pattern
    that wants both tags can never match.

    ## Fix
    Let the reward accept a completion without the opening tag when the template ends with it, or put the tag in front
    of the text before scoring. In leadline, `decoding.reasoning_open` and `decoding.reasoning_close` handle both cases.

    ## References
    huggingface/trl issue 6966 (reproduced with DeepSeek-R1-Distill). The names of reasoning models are a hint, not proof.
    """

    id = "LL105"
    name = "think-tag-prefilled"
    severity = "error"
    explains = ("reward-parse-mismatch", "zero-reward-variance-within-group")
    confirm = "Print the end of one rendered prompt: does it end with the opening tag?"
    sick = (
        RunLog.from_columns(
            {"reward/think_format_reward/mean": [0.0] * 3}, {"model": {"name": "DeepSeek-R1-Distill-Qwen-1.5B"}}
        ),
        RunLog([], {"raw": {"template_ends_with": "opening think tag"}}),
    )
    healthy = (
        RunLog.from_columns(
            {"reward/think_format_reward/mean": [0.0, 0.4, 0.7]}, {"model": {"name": "DeepSeek-R1-Distill-Qwen-1.5B"}}
        ),
        RunLog.from_columns({"reward/format/mean": [0.0] * 3}, {"model": {"name": "Llama-3.2-1B"}}),
        RunLog.from_columns(
            {"reward/tagged/mean": [0.0] * 3},
            {"model": {"name": "Llama-3.2-1B"}, "decoding": {"reasoning_open": "<think>"}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        reasoning = self._reasons(run)
        found = []
        for name, part in run.family(r"reward/[^/]*(format|think|tag)[^/]*/mean").items():
            values = part.finite
            if len(values) and values.low == values.high and values.low <= 0 and ("think" in name or reasoning):
                note = f"{name} was {{value}} in every row of a reasoning model."
                found.append(run.fact(values, values.low, 0.0, note, "strong" if reasoning else "weak"))
        return found

    @staticmethod
    def _reasons(run: View) -> bool:
        """The model or its template; the markers that leadline knows in every run say nothing about this one."""
        named = (f"{name} = {value}" for name, value in run.raw(r"^(?!(raw\.)?decoding\.)") if value)
        return any(re.search(r"think|reason|r1-|-r1|qwen3|qwq|distill", text.lower()) for text in named)

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"(template|prompt).*(ends?|prefill|open).*think|think.*(prefill|opened)|add_think|force_think")
        return (
            [Evidence("chat template", 0, 1.0, 0.0, f"The template opens the reasoning block ({said}).")]
            if said
            else []
        )

    def measure(self, run: View) -> list[Evidence]:
        note = "{percent} of {count} dumped completions close a reasoning block that they do not open."
        return rollouts.share(run, lambda text: "</think>" in text and "<think>" not in text, 0.3, note, "weak")

    def forbids(self, run: View) -> list[Evidence]:
        parts = run.family(r"reward/[^/]*(format|think|tag)[^/]*/mean")
        return [
            run.fact(part, part.high, 0.0, f"{name} reached {{value}}: the tags are found.")
            for name, part in parts.items()
            if len(part.finite) > 1 and part.high > max(0.1, part.low)
        ][:1]
