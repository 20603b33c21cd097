from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.view import View


class CompiledGraphStaleAdapter(Rule):
    """A compiled step took the adapter's weights as constants.

    ## Symptom
    Training metrics move, and the evaluated adapter gets worse than the start; compilation is on.

    ## Cause
    The compiler captured the adapter by value, so forward and backward use the weights of the first trace.

    ## Fix
    Compile without the adapter's parameters as constants (pass them as inputs), or switch compilation off and compare.

    ## References
    Goekdeniz-Guelmez/mlx-lm-lora issue 50. Both settings on and a falling score; the settings alone are only a possibility.
    """

    id = "LL410"
    name = "compiled-graph-stale-adapter"
    severity = "error"
    confirm = "Run ten steps with and without compilation from the same seed."
    sick = (
        RunLog(
            [{"step": 1, "score_pct": 90.2}, {"step": 20, "score_pct": 85.4}],
            {"raw": {"mx.compile": True, "lora": True}},
        ),
    )
    healthy = (
        RunLog(
            [{"step": 1, "score_pct": 85.4}, {"step": 20, "score_pct": 90.2}],
            {"raw": {"mx.compile": False, "lora": True}},
        ),
        RunLog([{"step": 1, "score_pct": 90.2}, {"step": 20, "score_pct": 85.4}], {"raw": {"lora": True}}),
    )

    def _compiled(self, run: View) -> str | None:
        return run.says(r"(?<!_)compile\w*\W*= (true|1)") if uses_lora(run) else None

    def examine(self, run: View) -> list[Evidence]:
        if not self._compiled(run):
            return []
        held = run.first_of("eval/reward_mean").finite
        found = probe.falls(run, r"score|acc|eval|pass", 0.02)
        if len(held) > 1 and held.last < 0.95 * held.first:
            found.append(
                run.fact(
                    held, held.last, held.first, f"The held-out reward fell from {number(held.first)} to {{value}}."
                )
            )
        return found

    def lint(self, run: View) -> list[Evidence]:
        said = self._compiled(run)
        return (
            [Evidence("compile", 0, 1.0, 0.0, f"A LoRA is trained in a compiled step ({said}).", "weak")]
            if said
            else []
        )
