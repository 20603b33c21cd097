from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, Strength, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    SUPPORT,
    cuts,
    filters_support,
    replays_sampling,
    uses_server_engine,
)
from leadline.doctor.signals import (
    GAP,
    WEIGHT,
)
from leadline.doctor.view import View


class LogprobTruncationSupportMismatch(Rule):
    """The engine renormalises its logprobs over the tokens that top_p or top_k kept; the trainer does not.

    ## Symptom
    The importance ratio is below 1 by about the kept mass (0.95 at top_p 0.95) from the first step on, one-sided and
    constant; the gradient is tiny at the sequence level; it vanishes with top_p 1 and top_k off.

    ## Cause
    Processed logprobs are of the cut distribution, the trainer's of the full one. Every token is less probable to the
    trainer: top_p 0.9 over 256 tokens is a weight of 4e-11.

    ## Fix
    Set `sampling.top_p` to 1, `sampling.top_k` to 0 and `sampling.min_p` to 0 (and the repetition penalty to 1), or replay the
    same filter in the trainer, as leadline does.

    ## References
    huggingface/trl issue 6789, verl issue 6240, vllm issue 42259. Measured fingerprint: sign ratio 1.0 and every difference below 0.
    """

    id = "LL305"
    name = "logprob-truncation-support-mismatch"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "sequence-is-sum-deflates-gradient", "importance-correction-erases-signal")
    confirm = "Sample one batch with top_p 1 and top_k off: if the ratio returns to 1, this is it."
    sick = (
        RunLog.from_columns(
            {"importance/ratio_mean": [0.95] * 3}, {"sampling": {"top_p": 0.95}, "engine": {"kind": "vllm"}}
        ),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.094] * 3, "importance/log_ratio_mean": [-0.094] * 3},
            {"sampling": {"top_p": 0.9}, "engine": {"kind": "vllm"}},
        ),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.6] * 3, "importance/log_ratio_mean": [0.6] * 3},
            {"sampling": {"top_k": 20}, "engine": {"kind": "vllm"}},
        ),
        RunLog([{"step": 1}], {"sampling": {"top_k": 50}, "engine": {"kind": "vllm"}}),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/ratio_mean": [0.999] * 3}, {"sampling": {"top_p": 0.95}, "engine": {"kind": "vllm"}}
        ),
        RunLog.from_columns(
            {"importance/ratio_mean": [0.95] * 3}, {"sampling": {"top_p": 1.0}, "engine": {"kind": "vllm"}}
        ),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.24] * 3, "importance/log_ratio_mean": [-0.24] * 3},
            {"sampling": {"top_p": 0.9}, "engine": {"kind": "hf"}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        if not filters_support(run) or replays_sampling(run):
            return []
        found = []
        gap, signed = run.first_of(*GAP).finite.head(5), run["importance/log_ratio_mean"].finite.head(5)
        if len(gap) and len(signed) and gap.median > 0.02 and signed.median < -0.9 * gap.median:
            note = f"Every difference has one sign: the mean is {{value}} nats, the mean size {number(gap.median)}."
            found.append(run.fact(signed, signed.median, 0.0, note, "proof", int(signed.steps[0])))
        elif len(gap) and len(signed) and gap.median > 0.02 and signed.median > 0.9 * gap.median:
            note = f"Every difference has one sign: the engine's logprobs are lower by {{value}} of {number(gap.median)} nats, as those of the uncut distribution are."
            found.append(run.fact(signed, signed.median, 0.0, note, "proof", int(signed.steps[0])))
        ratio = run.first_of(
            "importance/ratio_mean", "importance/weight_mean", "importance/geometric_ratio_mean"
        ).finite
        if len(ratio) and ratio.head(5).median < 0.98 and not ratio.falls(0.1):
            kept = run.number("sampling.top_p")
            kind: Strength = "strong" if not kept < 1 or ratio.median < kept + 0.03 else "weak"
            note = "The mean ratio is {value} from the first row on and constant, below 1 as the kept mass."
            found.append(run.fact(ratio, ratio.median, 1.0, note, kind, int(ratio.steps[0])))
        if len(gap) and gap.median > 0.05 and not len(signed):
            found.append(
                run.fact(
                    gap, gap.median, 0.05, "Logprobs differ by {value} nats per token from the first row on.", "weak"
                )
            )
        for name, measured in run.measured(r"ratio(?!.*(threshold|clip|count))"):
            low = measured.finite.where((measured.finite.values > 0) & (measured.finite.values < 0.98))
            if len(low) and measured.high < 1.02:
                found.append(run.fact(low, low.median, 1.0, f"{name} is {{value}}, below 1 as the kept mass."))
        return found + probe.above(
            run, r"(outside|below).*(support|kept|top)|kept mass|mass.*kept", 0, "{name} is {value}."
        )

    def lint(self, run: View) -> list[Evidence]:
        if replays_sampling(run):
            return []
        if (
            not filters_support(run)
            or not (uses_server_engine(run) or run.says("ratio|importance"))
            or run.has(*GAP, *WEIGHT)
        ):
            return []
        name = next(n for n in SUPPORT if cuts(run, n))
        return [run.chosen(name, 1.0, "{option} is {value}: the engine samples from a cut distribution.")]

    def forbids(self, run: View) -> list[Evidence]:
        known = [name for name in SUPPORT if run.setting(name) is not None]
        if known and not filters_support(run) and {"sampling.top_p", "sampling.top_k"} <= set(known):
            return [
                run.chosen("sampling.top_p", 1.0, "top_p, top_k and min_p are off: the whole distribution is sampled.")
            ]
        signed, gap = run["importance/log_ratio_mean"].finite, run.first_of(*GAP).finite
        if len(signed) and len(gap) and abs(signed.median) < 0.5 * gap.median:
            return [
                run.fact(
                    signed, signed.median, 0.0, "The signed mean is {value} nats: the differences have both signs."
                )
            ]
        return []
