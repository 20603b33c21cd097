import numpy as np

from leadline.doctor.rule import Evidence, Rule, Strength, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    filters_support,
    replays_sampling,
    uses_server_engine,
)
from leadline.doctor.signals import (
    GAP,
    WEIGHT,
)
from leadline.doctor.view import View


class LogprobTemperatureMismatch(Rule):
    """Engine and trainer apply the sampling temperature differently to their logprobs.

    ## Symptom
    The importance ratio is far from 1 from the first step and first token on, more so the further the temperature is from
    1, and it vanishes at temperature 1.

    ## Cause
    The engine reports logprobs of the raw logits (vLLM's default `raw_logprobs`) while the trainer divides by the
    temperature; or one side scales the logprobs instead of the logits.

    ## Fix
    Make the engine report processed logprobs (vLLM 0.10.2 and newer: `logprobs_mode="processed_logprobs"`), divide logits
    (not logprobs) in the trainer by the same temperature, or set `sampling.temperature` to 1.0.

    ## References
    huggingface/trl issue 4159, PrimeIntellect-ai/prime-rl pull 697, allenai/open-instruct issue 1678. Measured fingerprint: sign ratio
    |mean| / mean|.| of 0.46, against 1.0 for top_p and about 0 for noise.
    """

    id = "LL304"
    name = "logprob-temperature-mismatch"
    severity = "error"
    explains = ("rollout-logprob-mismatch",)
    confirm = "Sample one batch at temperature 1: if the gap vanishes, this is it."
    sick = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.5] * 3}, {"sampling": {"temperature": 0.6}, "engine": {"kind": "vllm"}}
        ),
        RunLog([], {"sampling": {"temperature": 0.7}, "raw": {"logprobs_mode": "raw_logprobs"}}, framework="trl"),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.012] * 3},
            {"sampling": {"temperature": 0.6}, "engine": {"kind": "vllm"}},
        ),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.5] * 3}, {"sampling": {"temperature": 1.0}, "engine": {"kind": "vllm"}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        temperature = run.number("sampling.temperature")
        if not self._hot(run):
            return []
        found = []
        gap, signed = run.first_of(*GAP).finite.head(5), run["importance/log_ratio_mean"].finite.head(5)
        if len(gap) and gap.median > 0.1:
            side = abs(signed.median) / gap.median if len(signed) else np.nan
            kind: Strength = "weak" if side > 0.9 or side < 0.1 or filters_support(run) else "strong"
            note = f"From the first row on, logprobs differ by {{value}} nats per token at temperature {number(temperature)}."
            found.append(run.fact(gap, gap.median, 0.1, note, kind, int(gap.steps[0])))
        for name, ratio in run.measured(r"ratio"):
            wrong = ratio.finite.where((ratio.finite.values > 1.3) | (ratio.finite.values < 0.7))
            if len(wrong) and "first" in name:
                found.append(
                    run.fact(wrong, wrong.last, 1.0, f"{name} is {{value}} at temperature {number(temperature)}.")
                )
        return found

    def lint(self, run: View) -> list[Evidence]:
        if not self._hot(run):
            return []
        said = run.says(r"raw_logprobs|raw.?logits|scaled.?logprobs|logprobs?.*(not|before).*temperature")
        if said:
            note = f"The temperature is not 1, and logprobs are raw ({said})."
            return [Evidence("sampling.temperature", 0, run.number("sampling.temperature"), 1.0, note)]
        if run.says(r"processed_logprobs") or not uses_server_engine(run) or run.has(*GAP, *WEIGHT):
            return []
        note = "{option} is {value}, and engines report logprobs of the raw logits unless told otherwise."
        return [run.chosen("sampling.temperature", 1.0, note)]

    def forbids(self, run: View) -> list[Evidence]:
        if run.number("sampling.temperature") == 1:
            return [run.chosen("sampling.temperature", 1.0, "{option} is {value}: there is nothing to scale.")]
        gap = run.first_of(*GAP).finite.head(5)
        if len(gap) and gap.median < 0.03:
            return [run.fact(gap, gap.median, 0.1, "Engine and trainer start {value} nats apart, which is noise.")]
        return []

    @staticmethod
    def _hot(run: View) -> bool:
        temperature = run.number("sampling.temperature")
        return temperature > 0 and abs(temperature - 1) > 0.02 and not replays_sampling(run)
