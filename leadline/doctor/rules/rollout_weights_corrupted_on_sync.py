import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class RolloutWeightsCorruptedOnSync(Rule):
    """A weight sync leaves the engine with wrong weights.

    ## Symptom
    From one step to the next the gap between engine and trainer jumps from noise to more than 0.5 nats, rollouts are
    garbled or run to the limit, and the reward falls to its minimum. It happens with a learning rate of 0 as well.

    ## Cause
    Sharded parameters were sent as if whole, a sleeping engine lost buffers, or tensors landed in the wrong layers.

    ## Fix
    Compare a checksum of each tensor on both sides after a sync; run one sync with a learning rate of 0, which must change
    nothing. Until then use the plain path: unsharded, no sleep, full reload.

    ## References
    verl issue 7904, Open-Athena/MarinFold issue 236 (0.02 to 66 nats), NovaSky-AI/SkyRL issue 1680, PrimeIntellect-ai/prime-rl issue 3175. A
    jump by 20 times to above 0.5 nats between two rows: leadline's choice.
    """

    id = "LL312"
    name = "rollout-weights-corrupted-on-sync"
    severity = "error"
    explains = (
        "importance-correction-erases-signal",
        "rollout-logprob-mismatch",
        "truncation-rate-high-unresolved",
        "train-infer-mismatch-collapse",
        "lora-merge-unmerge-drift-bf16",
    )
    confirm = "Sync once with a learning rate of 0: greedy outputs must not change."
    sick = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.017, 0.018, 2.4, 2.6]}),
        RunLog([{"step": 1, "n": 60, "corrupted": 0}, {"step": 2, "n": 52, "corrupted": 32}]),
        RunLog([{"step": 1, "logprob_gap_nats_step0": 0.0175, "logprob_gap_later": 66.5}]),
    )
    healthy = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.017, 0.018, 0.02, 0.019]}),
        RunLog([{"step": 1, "n": 60, "corrupted": 0}, {"step": 2, "n": 52, "corrupted": 0}]),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [1e-6, 0.8, 0.7, 0.8], "staleness/max": [0.0, 1.0, 1.0, 1.0]}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        gap = run.first_of(*GAP, "importance/kl_k3", "importance/kl_k1").finite
        before, after = gap.values[:-1], gap.values[1:]
        jumps = np.flatnonzero((after > 20 * np.abs(before)) & (after > 0.5) & ~_grew_older(run, gap.steps))
        if len(jumps):
            at = int(jumps[0]) + 1
            stays = np.median(gap.values[at:]) > 0.3
            note = f"{gap.name} jumped from {number(float(gap.values[at - 1]))} to {number(float(gap.values[at]))} at step {int(gap.steps[at])}."
            found.append(
                Evidence(gap.name, int(gap.steps[at]), float(gap.values[at]), 0.5, note, "strong" if stays else "weak")
            )
        found += probe.grows(run, r"corrupt|garbl|gibberish|cjk|mojibake|soup", 3)
        for name, step, start, end in probe.changes(run, r"gap|diff|mismatch"):
            if end > 0.5 and end > 10 * start:
                found.append(Evidence(name, step, end, start, f"{name} went from {number(start)} to {number(end)}."))
        return found

    def lint(self, run: View) -> list[Evidence]:
        video = run.says(r"\bvl\b|-vl-|vision|vlm|multimodal")
        if run.says(r"sleep_level\W*= 2|sleep.*level.*2") and video:
            return [
                Evidence(
                    "sleep level",
                    0,
                    2.0,
                    1.0,
                    f"Sleep level 2 discards buffers that a vision model needs ({video}).",
                    "weak",
                )
            ]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP).finite
        if len(gap) > 3 and gap.high < 0.1:
            return [run.fact(gap, gap.high, 0.5, "Engine and trainer never differ by more than {value} nats.")]
        return []


def _grew_older(run: View, steps: np.ndarray) -> np.ndarray:
    """By step but the first: whether its tokens are staler than those of the step before, which alone widens the gap."""
    ages = dict(zip(run["staleness/max"].finite.steps, run["staleness/max"].finite.values, strict=True))
    ages_of_steps = np.array([ages.get(step, 0.0) for step in steps])
    return ages_of_steps[1:] > ages_of_steps[:-1]
