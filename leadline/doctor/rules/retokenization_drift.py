import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    is_multi_turn,
)
from leadline.doctor.signals import (
    GAP,
    GAP_GROWTH,
)
from leadline.doctor.view import View


class RetokenizationDrift(Rule):
    """A conversation is decoded and tokenized again, so the trainer scores tokens that nobody sampled.

    ## Symptom
    In multi-turn or tool runs only: sporadic giant logprob differences at turn boundaries, spikes of the mismatch KL,
    lengths that differ between engine and trainer.

    ## Cause
    Text to tokens is not the inverse of tokens to text. Each turn that is rebuilt from text may get other ids; templates
    that strip earlier reasoning change the prefix too.

    ## Fix
    Keep token ids through the whole conversation and append to them; check that each turn's ids begin with the previous
    turn's (verl: `tokenization_sanity_check_mode: strict`).

    ## References
    huggingface/trl issue 5224, rllm-org/rllm pull 272, verl issue 6719. Largest difference above 5 nats with a mean below 0.1 in
    a multi-turn run: leadline's choice.
    """

    id = "LL213"
    name = "retokenization-drift"
    severity = "error"
    explains = ("rollout-logprob-mismatch",)
    confirm = "Encode the decoded text of a conversation: are the ids the sampled ones?"
    sick = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_max": [9.0, 0.4, 11.0, 8.0], "importance/log_ratio_abs_mean": [0.02] * 4},
            {"raw": {"tools": True}},
        ),
        RunLog([{"step": 1, "roundtrip_mismatch_rate": 0.2}]),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_max": [0.5] * 4, "importance/log_ratio_abs_mean": [0.02] * 4},
            {"raw": {"tools": True}},
        ),
        RunLog.from_columns({"importance/log_ratio_abs_max": [9.0] * 4, "importance/log_ratio_abs_mean": [0.02] * 4}),
    )

    def examine(self, run: View) -> list[Evidence]:
        pattern = r"(retoken|re token|roundtrip|round trip|prefix|tito|ids?).*(mismatch|differ|fail|drift)"
        found = probe.above(run, pattern, 0, "{name} is {value}: ids do not survive a turn.")
        if not is_multi_turn(run):
            return found
        typical = run.first_of(*GAP).finite.median
        largest = run["importance/log_ratio_abs_max"].finite
        if len(largest) and np.mean(largest.values > 5) > 0.3 and (np.isnan(typical) or typical < 0.1):
            note = "The largest logprob difference reaches {value} nats in a multi-turn run whose mean difference is small."
            found.append(run.fact(largest, largest.high, 5.0, note))
        gap = run.first_of(*GAP_GROWTH).finite
        if len(gap) >= TREND and gap.high > 20 * max(gap.median, 1e-6) and gap.high > 0.05:
            found.append(
                run.fact(gap, gap.high, gap.median, f"{gap.name} spikes to {{value}} in a multi-turn run.", "weak")
            )
        return found

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"text.?level|re-?token|decode.*encode|tokenization_sanity_check_mode\W*= (disable|ignore|off)")
        if said is None:
            return []
        return [Evidence("tokenization", 0, 1.0, 0.0, f"Turns are rebuilt from text ({said}).", "weak")]

    def forbids(self, run: View) -> list[Evidence]:
        turns = run["rollout/turns_mean"].finite
        return (
            [run.fact(turns, turns.high, 1.0, "Conversations have {value} turn.")]
            if len(turns) and turns.high <= 1
            else []
        )
