from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class FailedRollouts(Rule):
    """Many rollouts failed and left their groups.

    ## Symptom
    `rollout/failed_fraction` is above 5 %, or the share of aborted completions or failed tool calls is.

    ## Cause
    The reward raised or ran out of time, the engine aborted a request, or a tool server is down. What remains of a
    group is a biased sample: slow and long completions are the ones that go missing.

    ## Fix
    Read the `error` of the failed rollouts and mend the reward, the engine or the tool; raise `rewards.timeout_s` if
    the reward is only slow.

    ## References
    AReaL issue 548 (slow rewards become 0), verl issue 5635 (a verifier's exception swallowed). 5 % is leadline's choice.
    """

    id = "LL102"
    name = "failed-rollouts"
    severity = "warning"
    needs = (("rollout/failed_fraction", "rollout/aborted_fraction", "rollout/tool_failure_fraction"),)
    sick = (RunLog.from_columns({"rollout/failed_fraction": [0.0, 0.2, 0.0]}),)
    healthy = (RunLog.from_columns({"rollout/failed_fraction": [0.0, 0.01, 0.05]}),)
    limit = 0.05

    def examine(self, run: View) -> list[Evidence]:
        found = []
        for name, what in (
            ("rollout/failed_fraction", "rollouts failed"),
            ("rollout/aborted_fraction", "completions were aborted"),
        ):
            note = f"{{percent}} of the {what} {{when}}; more than 5 % biases what is left of the groups."
            found += run.events(name, lambda v: v > self.limit, self.limit, note)
        note = "{percent} of the tool calls failed {when}."
        found += run.lasting("rollout/tool_failure_fraction", lambda v: v > 0.3, 0.3, note, strength="weak")
        return sorted(found, key=lambda item: item.step)
