from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.view import View


class HangRankDesync(Rule):
    """Processes wait for each other for ever: they reach a collective call out of step.

    ## Symptom
    The last row is healthy and no other follows; GPUs are idle or spin; several GPUs, a LoRA, and an engine in the same
    process.

    ## Cause
    Ranks reach the collective generation desynchronised, or one has data that the others have not.

    ## Fix
    Put a barrier with explicit device ids before generation, or run the engine as a server; print every process's stack to see
    who waits where.

    ## References
    huggingface/trl issue 3671, pulls 6139 and 6187. A log cannot show a hang by itself: LoRA with a colocated engine and a log that ends within
    three rows is a possibility.
    """

    id = "LL602"
    name = "hang-rank-desync"
    severity = "error"
    confirm = "Dump the stacks of all processes (py-spy): are they in different collectives?"
    sick = (
        RunLog(
            [{"step": 1, "loss": 0.0, "optimizer/grad_norm": 0.8}],
            {"model": {"lora_rank": 8}, "raw": {"vllm_mode": "colocate"}},
        ),
        RunLog([{"step": 1, "ranks_waiting": 3}]),
    )
    healthy = (
        RunLog.from_columns({"loss": [0.0] * 10}, {"model": {"lora_rank": 8}, "raw": {"vllm_mode": "colocate"}}),
        RunLog([{"step": 1, "loss": 0.0}], {"model": {"lora_rank": 0}, "raw": {"vllm_mode": "colocate"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = probe.above(
            run,
            r"(rank|process).*(wait|hang|stuck|desync|behind)|(hang|stuck|timeout).*(rank|nccl|collective)",
            0,
            "{name} is {value}.",
        )
        loss, wanted = run["loss"], run.number("run.steps")
        together = run.says(r"colocat")
        if run.live or not together or not uses_lora(run) or not 0 < len(loss) <= 3 or wanted <= len(loss):
            return found
        note = f"The log ends after {len(loss)} row{'s' if len(loss) > 1 else ''}, at step {loss.step}, with LoRA and {together}."
        return [
            *found,
            run.fact(loss, loss.last, 3.0, note, "weak"),
            Evidence("engine", 0, 1.0, 0.0, "This combination hung in several versions.", "weak"),
        ]
