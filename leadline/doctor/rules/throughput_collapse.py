from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class ThroughputCollapse(Rule):
    """The run slows down by an order of magnitude, or stands still for a while.

    ## Symptom
    Throughput falls to a fifth, or the time per step rises by six times, and stays there.

    ## Cause
    An event loop or environment server starves, a worker died, completions got much longer, or the queue is empty.

    ## Fix
    Compare the stage times: generation, reward, sync, update. If generation grew with the completions, limit them
    (`sampling.max_tokens`); if nothing grew but the whole, look for a worker that died.

    ## References
    PrimeIntellect-ai/prime-rl issues 1372 and 1713 (15 000 to 500 tokens/s). A fifth and six times over the last fifth of 20 rows: leadline's choice.
    """

    id = "LL605"
    name = "throughput-collapse"
    severity = "warning"
    needs = (("throughput/sampled_tokens_per_s", "throughput/trained_tokens_per_s", "time/step_s"),)
    sick = (RunLog.from_columns({"throughput/sampled_tokens_per_s": [15000.0] * 20 + [500.0] * 8}),)
    healthy = (RunLog.from_columns({"throughput/sampled_tokens_per_s": [15000.0] * 20 + [9000.0] * 8}),)

    def examine(self, run: View) -> list[Evidence]:
        found = []
        # trained tokens also get fewer where groups stop to disagree, which is no matter of speed
        speed = run.first_of("throughput/sampled_tokens_per_s", "throughput/trained_tokens_per_s").finite
        if len(speed) >= TREND and 0 < speed.late < 0.2 * speed.head(len(speed) // 2).median:
            note = f"{speed.name} fell from {number(speed.early)} to {{value}}."
            found.append(run.fact(speed, speed.late, 0.2 * speed.early, note))
        time = run["time/step_s"].finite
        if len(time) >= TREND and time.late > 6 * time.head(len(time) // 2).median:
            found.append(
                run.fact(time, time.late, 6 * time.early, f"A step takes {{value}} s; it took {number(time.early)}.")
            )
        return found
