from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class DynamicSamplingFiltersOnShapedScore(Rule):
    """Dynamic sampling decides by a shaped score, so groups that all failed are kept.

    ## Symptom
    Dynamic sampling is on, and the policy is destroyed within tens of steps; groups without a right answer are trained on.

    ## Cause
    The filter keeps groups whose *score* varies. With length or format shaping in it, a group of only wrong answers varies
    too, and the shaping becomes the whole signal.

    ## Fix
    Filter on accuracy: verl `algorithm.filter_groups.metric: acc`, elsewhere a filter on the unshaped reward.

    ## References
    verl-project/verl-recipe issue 125. A setting, so no threshold.
    """

    id = "LL119"
    name = "dynamic-sampling-filters-on-shaped-score"
    severity = "warning"
    sick = (RunLog([], {"raw": {"algorithm": {"filter_groups": {"enable": True, "metric": "score"}}}}),)
    healthy = (
        RunLog([], {"raw": {"algorithm": {"filter_groups": {"enable": True, "metric": "acc"}}}}),
        RunLog([], {"raw": {"algorithm": {"filter_groups": {"enable": False, "metric": "score"}}}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        return []

    def lint(self, run: View) -> list[Evidence]:
        on = run.says(r"filter_groups[._]enable = true") or run.says(r"filter_groups = true")
        shaped = run.says(r"filter_groups[._]metric = (score|seq_reward|seq_final_reward|reward)")
        if not on or not shaped:
            return []
        return [Evidence("filter_groups.metric", 0, 1.0, 0.0, f"Groups are filtered by a shaped score ({shaped}).")]
