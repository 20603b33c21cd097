from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class InFlightUpdateRacesPipeline(Rule):
    """Weights change while a pipeline-parallel engine is in the middle of a forward pass.

    ## Symptom
    NaN or absurd generation logprobs in a few per cent of the steps.

    ## Cause
    In-flight weight updates with pipeline parallelism above 1: stages of one pass see different weights.

    ## Fix
    Pause generation during the update, or set the engine's pipeline parallelism to 1.

    ## References
    NVIDIA-NeMo/RL issues 2180 and 3839. A setting, so no threshold.
    """

    id = "LL326"
    name = "in-flight-update-races-pipeline"
    severity = "warning"
    sick = (RunLog([], {"raw": {"in_flight_weight_updates": True, "generation": {"pipeline_parallel_size": 2}}}),)
    healthy = (RunLog([], {"raw": {"in_flight_weight_updates": True, "generation": {"pipeline_parallel_size": 1}}}),)

    def examine(self, run: View) -> list[Evidence]:
        return []

    def lint(self, run: View) -> list[Evidence]:
        flying = run.says(r"in.?flight\w*\W*= (true|1)")
        stages = [
            (n, v)
            for n, v in run.raw(r"(vllm|generation|rollout|infer|engine).*pipeline")
            if isinstance(v, int) and v > 1
        ]
        if flying and stages:
            return [
                Evidence(
                    stages[0][0],
                    0,
                    float(stages[0][1]),
                    1.0,
                    f"{stages[0][0]} is {stages[0][1]} with updates in flight.",
                )
            ]
        return []
