import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import GAP_GROWTH
from leadline.doctor.view import View

YOUNGER = 0.9
"""Tokens of at most this share of the age are younger: that explains a smaller mismatch."""


class StalePrefixCache(Rule):
    """The engine reuses cached keys and values of old weights.

    ## Symptom
    The mismatch rises with the steps and drops when the engine restarts or the cache is reset; it is larger for prompts that
    share a prefix.

    ## Cause
    The prefix cache is not reset when weights change, or its salt does not change with the adapter.

    ## Fix
    Reset the prefix cache at every weight update (or salt it with the weight version); to prove it, switch prefix caching
    off.

    ## References
    PrimeIntellect-ai/prime-rl issue 1650, NovaSky-AI/SkyRL issue 2064. Repeated rises that end in a drop by more than half, while
    the tokens do not become younger: leadline's choice.
    """

    id = "LL313"
    name = "stale-prefix-cache"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "rollout-lora-not-applied")
    confirm = "Reset the engine's prefix cache once: does the mismatch drop at that step?"
    sick = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.01 + 0.01 * (i % 10) for i in range(40)]}),
        RunLog([{"step": 1, "mismatch_before_cache_reset": 0.3, "mismatch_after_cache_reset": 0.01}]),
        RunLog(
            [], {"raw": {"enable_prefix_caching": True, "in_flight_weight_updates": True, "reset_prefix_cache": False}}
        ),
    )
    healthy = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.012 + 0.001 * (i % 3) for i in range(40)]}),
        RunLog.from_columns(
            {
                "importance/log_ratio_abs_mean": [0.01 + 0.01 * (i % 10) for i in range(40)],
                "staleness/mean": [
                    0.2 + 0.2 * (i % 10) for i in range(40)
                ],  # groups are replayed until they are too old
            }
        ),
        RunLog(
            [], {"raw": {"enable_prefix_caching": True, "in_flight_weight_updates": True, "reset_prefix_cache": True}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        gap = run.first_of(*GAP_GROWTH).finite
        if len(gap) >= TREND:
            values = gap.values
            falls = np.flatnonzero(
                (values[1:] < 0.5 * values[:-1]) & (values[:-1] > 3 * np.min(values)) & (values[:-1] > 0.02)
            )
            staleness = run["staleness/mean"]
            ages = dict(zip(staleness.steps.tolist(), staleness.values.tolist(), strict=True))
            age = np.array([ages.get(step, np.nan) for step in gap.steps.tolist()])
            drops = falls[~(age[falls + 1] < YOUNGER * age[falls])]
            climbs = [np.all(np.diff(values[max(0, d - 4) : d + 1]) >= -0.1 * values[d]) for d in drops[:100] if d >= 4]
            if len(climbs) >= 2 and all(climbs):
                note = f"{gap.name} climbs and falls by more than half {len(drops)} times, last from {{value}}."
                found.append(run.fact(gap, float(values[drops[-1]]), 0.02, note, since=int(gap.steps[0])))
        for name, step, start, end in probe.changes(run, r"cache|restart|reset"):
            if end < 0.5 * start:
                found.append(
                    Evidence(name, step, end, start, f"{name}: {number(start)} fell to {number(end)} with the reset.")
                )
        return found

    def measure(self, run: View) -> list[Evidence]:
        if run.says(r"(prefix|kv).?cach\w*\W*= (true|1|on)|enable_prefix_caching") is None:
            return []
        return probe.grows(run, r"mismatch|\bkl\b|log ?prob|logp", 3, "weak")

    def lint(self, run: View) -> list[Evidence]:
        cached = run.says(r"(prefix|kv).?cach\w*\W*= (true|1)|enable_prefix_caching")
        flying = run.says(r"in.?flight\w*\W*= (true|1)|partial_rollout\w*\W*= (true|1)")
        off = [
            n
            for n, v in run.raw(r"(reset|clear|recompute)\w*(prefix|kv)\w*cache|(prefix|kv)_cache\w*(reset|clear)")
            if v is False
        ]
        if cached and (off or (flying and not run.says(r"(reset|clear|recompute).*cache.*= (true|1)|salt"))):
            reset = f"{off[0]} is off" if off else "nothing resets it when weights change"
            return [Evidence("prefix cache", 0, 1.0, 0.0, f"The prefix cache is on ({cached}) and {reset}.", "weak")]
        return []
