from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class SpecialTokensStripped(Rule):
    """Tags that the reward needs are registered as special tokens and decoded away.

    ## Symptom
    The format reward is at its minimum from the first step; the decoded text lacks the tags that the model was taught
    to write.

    ## Cause
    Decoding with `skip_special_tokens=True` removes every token that the tokenizer lists as special, load-bearing answer
    tags included, before the reward sees the text.

    ## Fix
    Decode with special tokens kept and strip only padding and the terminator (leadline does); or add the tags as
    ordinary tokens. TRL decodes with `skip_special_tokens=True` always: score from `completion_ids` there.

    ## References
    huggingface/trl issues 2897 and 3026. A setting, so no threshold.
    """

    id = "LL106"
    name = "special-tokens-stripped"
    severity = "error"
    explains = ("reward-parse-mismatch", "zero-reward-variance-within-group")
    confirm = "Decode one completion with and without special tokens: do the tags differ?"
    sick = (RunLog.from_columns({"reward/format/mean": [0.0] * 3}, {"raw": {"skip_special_tokens": True}}),)
    healthy = (
        RunLog.from_columns({"reward/format/mean": [0.0, 0.3, 0.6]}, {"raw": {"skip_special_tokens": True}}),
        RunLog.from_columns({"reward/format/mean": [0.0] * 3}, {"raw": {"skip_special_tokens": False}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        if run.says(r"skip_special_tokens\W+= (true|1)") is None:
            return []
        return [
            run.fact(part, part.low, 0.0, f"{name} was {{value}} in every row, and special tokens are stripped.")
            for name, part in run.family(r"reward/[^/]*(format|tag|think|answer|parse)[^/]*/mean").items()
            if len(part.finite) and part.low == part.high and part.low <= 0
        ]

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"skip_special_tokens\W+= (true|1)")
        custom = run.says(r"(added|additional|custom|special).*(tag|token).*<|tags? .*special")
        if said is None or run.rows or run.has("reward/mean"):
            return []
        note = f"Special tokens are stripped before scoring ({said})."
        return [Evidence("decoding", 0, 1.0, 0.0, note, "strong" if custom else "weak")]

    def forbids(self, run: View) -> list[Evidence]:
        said = run.says(r"skip_special_tokens\W+= (false|0)") if run.framework != "trl" else None
        return [Evidence("decoding", 0, 0.0, 0.0, f"Special tokens are kept ({said}).")] if said else []
