from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class UnscoredTokens(Rule):
    """The engine sampled tokens without saying how probable they were.

    ## Symptom
    `rollout/unscored_fraction` is above 0: some rollout logprobs are missing (NaN).

    ## Cause
    The engine was not asked for logprobs, dropped them for some tokens (special tokens, the last token, a restarted
    request), or the completion was put together from text that the policy did not sample.

    ## Fix
    Ask the engine for the logprob of each sampled token. Until then `objective.on_unscored` decides: "on_policy" gives
    such tokens the weight 1, "drop" leaves them out, "refuse" stops the run.

    ## References
    A missing logprob that is read as 0.0 claims probability one and corrupts each ratio it enters (verifiers pull 2078,
    ART issue 467); leadline keeps it NaN and counts it. Every engine can score what it samples: any share above 0 is a defect.
    """

    id = "LL202"
    name = "unscored-tokens"
    severity = "warning"
    needs = (("rollout/unscored_fraction", "importance/scored_fraction"),)
    sick = (
        RunLog.from_columns({"rollout/unscored_fraction": [0.0, 0.001, 0.0]}),
        RunLog.from_columns({"importance/scored_fraction": [0.9, 0.9]}),
    )
    healthy = (RunLog.from_columns({"rollout/unscored_fraction": [0.0, 0.0]}),)

    def examine(self, run: View) -> list[Evidence]:
        note = "{percent} of the sampled tokens have no rollout logprob {when}."
        found = run.events("rollout/unscored_fraction", lambda v: v > 0, 0.0, note)
        note = "Only {percent} of the sampled tokens have a rollout logprob {when}."
        return found + run.events("importance/scored_fraction", lambda v: v < 0.999, 1.0, note)
