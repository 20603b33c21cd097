from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class HangWeightTransfer(Rule):
    """The run stands still in the transfer of weights to the engine.

    ## Symptom
    No row follows an optimizer step; GPUs are at full load; no timeout.

    ## Cause
    One side of the transfer died or never entered it; NCCL waits without limit.

    ## Fix
    Set a timeout for the transfer, read the engine's own log, and restart both sides; sync through HTTP or disk to prove it.

    ## References
    huggingface/trl issue 6913, OpenRLHF issue 1193. A log cannot show it by itself; the time spent in the sync can.
    """

    id = "LL603"
    name = "hang-weight-transfer"
    severity = "error"
    confirm = "py-spy on trainer and engine, and the engine's log: who waits?"
    sick = (
        RunLog([{"step": 1, "weight_sync_seconds": 1900.0}]),
        RunLog.from_columns({"time/sync_s": [2.0] * 8 + [900.0], "time/step_s": [60.0] * 8 + [960.0]}),
    )
    healthy = (RunLog.from_columns({"time/sync_s": [2.0] * 9, "time/step_s": [60.0] * 9}),)

    def examine(self, run: View) -> list[Evidence]:
        found = probe.above(
            run,
            r"(weight|sync|transfer|broadcast|refit|nccl).*(hang|stuck|stall|wait|second|min|time|\bs\b)",
            300,
            "{name} is {value}.",
        )
        found += (
            probe.above(run, r"(hang|stuck|stall|froze).*(step|hour|min|sec)", 0, "{name} is {value}.", "weak")
            if run.says(r"sync|transfer|nccl|weight")
            else []
        )
        for name, times in run.family(r"time/[^/]*(sync|weight|broadcast|refit|transfer|load)[^/]*").items():
            slow = times.finite.where(times.finite.values > 300)
            if len(slow) and slow.high > 20 * max(times.median, 0.1):
                found.append(
                    run.fact(
                        slow,
                        slow.high,
                        20 * times.median,
                        f"{name} was {{value}} s at step {slow.step}; usually {number(times.median)}.",
                    )
                )
        return found

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"(hang|stuck|stall|deadlock|never return)\w*.*(sync|transfer|broadcast|weight|nccl|refit)")
        said = said or run.says(
            r"(sync|transfer|broadcast|weight|nccl|refit).*(hang|stuck|stall|deadlock|never return)"
        )
        return (
            [Evidence("weight transfer", 0, 1.0, 0.0, f"The transfer is said to hang ({said}).", "weak")]
            if said
            else []
        )
