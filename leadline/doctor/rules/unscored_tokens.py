from leadline.doctor.rule import Evidence, Rule, when
from leadline.doctor.run_log import RunLog, above


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
    A missing logprob that is read as 0.0 claims probability one and corrupts each ratio it enters; leadline keeps it
    NaN and counts it. Every engine can score every token it samples, so any share above 0 is a defect.
    """

    id = "LL202"
    name = "unscored-tokens"
    severity = "warning"
    needs = ("rollout/unscored_fraction",)
    sick = (RunLog.from_columns({"rollout/unscored_fraction": [0.0, 0.001, 0.0]}),)
    healthy = (RunLog.from_columns({"rollout/unscored_fraction": [0.0, 0.0]}),)

    def examine(self, run: RunLog) -> list[Evidence]:
        name = "rollout/unscored_fraction"
        return [
            Evidence(
                name,
                streak.last,
                streak.value,
                0.0,
                f"{100 * streak.value:.2g} % of the sampled tokens have no rollout logprob {when(streak)}.",
            )
            for streak in run.streaks(name, above(0), 1)
        ]
