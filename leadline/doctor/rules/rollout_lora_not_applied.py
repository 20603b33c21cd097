from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    is_async_engine,
    uses_lora,
    uses_server_engine,
)
from leadline.doctor.signals import (
    GAP_GROWTH,
)
from leadline.doctor.view import View


class RolloutLoraNotApplied(Rule):
    """The engine samples from the base model: the adapter never reaches it.

    ## Symptom
    The gap between engine and trainer grows steadily with the distance of the policy from its start, whatever the sync
    interval or staleness; the reward of rollouts is flat while the trainer's loss works.

    ## Cause
    The sync ships the frozen base only, or the adapter is loaded under an id that requests never name.

    ## Fix
    List the engine's adapters after a sync (it must not be empty) and count `lora_` tensors in the payload; send the adapter
    or merged weights, and name the adapter in each request.

    ## References
    verl issues 7495 (36 times the KL over the run, two months to find) and 3821. Growth by 3 with a LoRA and constant staleness:
    leadline's choice; an empty list of adapters is proof.
    """

    id = "LL308"
    name = "rollout-lora-not-applied"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "train-infer-mismatch-collapse")
    confirm = "Ask the engine for its adapters after a sync, and compare the fingerprint of what was pushed with the last one."
    sick = (
        RunLog.from_columns({"importance/kl_k3": [0.001 * 1.15**i for i in range(40)]}, {"model": {"lora_rank": 16}}),
        RunLog([{"step": 1, "tensors": 399, "lora_tensors": 0, "list_loras": 0}], {"raw": {"enable_lora": True}}),
    )
    healthy = (
        RunLog.from_columns({"importance/kl_k3": [0.001] * 40}, {"model": {"lora_rank": 16}}),
        RunLog.from_columns({"importance/kl_k3": [0.001 * 1.15**i for i in range(40)]}, {"model": {"lora_rank": 0}}),
        RunLog([{"step": 1, "tensors": 399, "lora_tensors": 392}]),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = probe.zero(
            run,
            r"(lora|adapter).*(tensor|module|count|loaded|num)|list loras|n(um)? loras",
            "{name} is 0: no adapter arrived.",
            "proof",
        )
        for name, pushed in run.measured(r"(push|sent|engine|deliver).*(norm|hash|sum|fingerprint)"):
            for other, initial in run.measured(r"(initial|base|disk).*(norm|hash|sum|fingerprint)"):
                if len(pushed.finite) and pushed.last == initial.last:
                    found.append(
                        run.fact(
                            pushed, pushed.last, initial.last, f"{name} equals {other} ({{value}}): the start was sent."
                        )
                    )
        gap = run.first_of(*GAP_GROWTH).finite
        stale = run.first_of("staleness/mean").finite
        steady = not len(stale) or not stale.rises(0.5)
        if (
            uses_lora(run)
            and steady
            and gap.is_trend
            and gap.early > 0
            and gap.late > 3 * gap.early
            and gap.rises(1e-4)
        ):
            note = f"{gap.name} rose steadily from {number(gap.early)} to {{value}} in a LoRA run, without growing staleness."
            found.append(
                run.fact(
                    gap,
                    gap.late,
                    3 * gap.early,
                    note,
                    "strong" if uses_server_engine(run) else "weak",
                    int(gap.steps[0]),
                )
            )
        return found

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"lora[._]merge\W*= false|merge_lora\W*= false")
        if (
            any(value is False for _, value in run.raw(r"lora\.merge|merge_lora"))
            and uses_lora(run)
            and is_async_engine(run)
        ):
            return [
                Evidence(
                    "lora.merge",
                    0,
                    0.0,
                    1.0,
                    f"The adapter is not merged ({said or 'merge = False'}): the sync must ship it.",
                    "weak",
                )
            ]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        if run.number("model.lora_rank") == 0:
            return [run.chosen("model.lora_rank", 1, "{option} is {value}: there is no adapter.")]
        return []
