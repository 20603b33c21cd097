from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class PadTokenIsEos(Rule):
    """The pad token is the end token, so masks built from ids hide the end.

    ## Symptom
    Completions get longer and longer until all reach the limit: the policy never learns to stop.

    ## Cause
    With pad equal to EOS, a mask that drops pad ids drops the EOS too, so the end is never trained; or an EOS that was
    forced at the limit is trained as if it had been sampled.

    ## Fix
    Give the tokenizer a pad token of its own, or mask by length, not by id.

    ## References
    huggingface/trl issues 1623, 3091 and 6357, OpenRLHF issue 238. A setting; many trainers mask by length and are safe with it.
    """

    id = "LL215"
    name = "pad-token-is-eos"
    severity = "warning"
    explains = ("truncation-rate-high-unresolved",)
    sick = (
        RunLog([], {"raw": {"tokenizer.pad_token_id": 2, "tokenizer.eos_token_id": 2}}),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.02 * i for i in range(40)]},
            {"raw": {"pad_token": "eos", "eos_token": "eos"}},
        ),
    )
    healthy = (RunLog([], {"raw": {"tokenizer.pad_token_id": 0, "tokenizer.eos_token_id": 2}}),)

    def examine(self, run: View) -> list[Evidence]:
        cut = run["rollout/truncated_fraction"].finite
        if not self.lint(run) or len(cut) < TREND or not cut.rises(0.3):
            return []
        return [run.fact(cut, cut.late, cut.early, f"The truncated share rose from {number(cut.early)} to {{value}}.")]

    def lint(self, run: View) -> list[Evidence]:
        ids = {key: [v for _, v in run.raw(rf"(^|[._]){key}_token(_id)?$") if v is not None] for key in ("pad", "eos")}
        if ids["pad"] and ids["eos"] and str(ids["pad"][0]) == str(ids["eos"][0]):
            return [Evidence("pad_token", 0, 1.0, 0.0, f"pad and eos are both {ids['pad'][0]}.", "weak")]
        return []
