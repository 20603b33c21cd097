from leadline.doctor.rule import Evidence, Rule, Strength, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class EosSuppressedByMinLength(Rule):
    """A minimum length forbids the end token, so completions run on.

    ## Symptom
    All lengths equal the limit even for trivial prompts; the end token is probable and never sampled; the KL (k1) is
    negative.

    ## Cause
    `min_length` or `min_new_tokens` masks the end token while sampling, and the trainer scores the unmasked distribution.

    ## Fix
    Set the minimum to 0 (TRL: `generation_kwargs`), or let the trainer replay it.

    ## References
    huggingface/trl issues 235 and 256. A setting; its effect shows in lengths that never fall below it.
    """

    id = "LL207"
    name = "eos-suppressed-by-min-length"
    severity = "error"
    explains = ("negative-kl-sampling-mismatch", "truncation-rate-high-unresolved", "truncation-cap-too-small")
    sick = (
        RunLog.from_columns(
            {"rollout/length_min": [128.0] * 3, "rollout/length_mean": [128.0] * 3},
            {"raw": {"min_new_tokens": 128}, "sampling": {"max_tokens": 128}},
        ),
        RunLog([], {"raw": {"min_length": 64}}),
    )
    healthy = (
        RunLog([], {"raw": {"min_length": -1}}),
        RunLog.from_columns({"rollout/length_min": [12.0] * 3}, {"sampling": {"max_tokens": 128}}),
    )

    def _minimum(self, run: View) -> tuple[str, float]:
        for name, value in run.raw(r"min_(new_)?(tokens|length|response_length)$|^min_len|minimum_length"):
            if isinstance(value, int | float) and value > 1:
                return name, float(value)
        return "", 0.0

    def examine(self, run: View) -> list[Evidence]:
        name, least = self._minimum(run)
        shortest = run.first_of("rollout/length_min", "rollout/length_mean").finite
        if not least or not len(shortest) or shortest.low < least:
            return []
        note = f"No completion is shorter than {{value}} tokens, and {name} is {number(least)}."
        return [run.fact(shortest, shortest.low, least, note)]

    def lint(self, run: View) -> list[Evidence]:
        name, least = self._minimum(run)
        if not least:
            return []
        kl = run.first_of("kl/k1", "kl/reference").finite
        kind: Strength = "strong" if len(kl) and kl.median < 0 else "weak"
        return [Evidence(name, 0, least, 0.0, f"{name} is {number(least)}: the end token is masked until then.", kind)]
