import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    at_cap,
    cap,
    has_signal,
    no_signal,
)
from leadline.doctor.view import View


class AbsorbingStateAtLengthCap(Rule):
    """The policy ran to the length limit and cannot come back: all rewards are equal there.

    ## Symptom
    A healthy phase, then the reward falls, and from one step on every completion is exactly as long as the limit, with no
    spread of rewards, for ever.

    ## Cause
    Every completion at the limit gets the same reward, so no advantage points away from it. A reward that depends on
    length alone leads there with the first overshoot.

    ## Fix
    Go back to a checkpoint before the plateau. Give truncated completions a graded penalty (`objective.overlong_buffer`), a
    reward that differs among them, or a KL term (`objective.beta`) that pulls back.

    ## References
    "A brief example of reward hacking in GRPO" (blog): reward minus distance to 20 characters, all at 256 tokens. A rise from below
    70 % of the limit to the limit is leadline's choice.
    """

    id = "LL210"
    name = "absorbing-state-at-length-cap"
    severity = "error"
    needs = ("rollout/length_mean",)
    explains = ("truncation-rate-high-unresolved", "zero-reward-variance-within-group", "truncation-cap-too-small")
    sick = (
        RunLog.from_columns(
            {
                "rollout/length_mean": [60.0, 70.0, 120.0, 256.0, 256.0, 256.0],
                "reward/std": [0.4, 0.4, 0.3, 0.0, 0.0, 0.0],
            },
            {"sampling": {"max_tokens": 256}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"rollout/length_mean": [60.0, 70.0, 120.0, 256.0, 256.0, 256.0], "reward/std": [0.4] * 6},
            {"sampling": {"max_tokens": 256}},
        ),
        RunLog.from_columns(
            {"rollout/length_mean": [256.0] * 6, "reward/std": [0.0] * 6}, {"sampling": {"max_tokens": 256}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        length, pinned, dead = run["rollout/length_mean"].finite, at_cap(run), no_signal(run)
        stuck = pinned.where(np.isin(pinned.steps, dead.steps))
        if not len(stuck) or stuck.step != length.step:
            return []
        start, onset = length.head(3).low, int(stuck.steps[0])
        healthy_before = length.steps[0] < onset and start < 0.7 * stuck.last
        if healthy_before and len(stuck) >= min(PERSISTENT, len(length)):
            note = (
                f"Completions grew from {number(start)} to {{value}} tokens, the limit, and rewards no longer differ."
            )
            return [run.fact(stuck, stuck.last, cap(run), note, "proof", onset)]
        about_length = run.says(r"length|distance|characters|longer|shorter")
        if about_length and "reward" in about_length.lower():
            note = f"Every completion is {{value}} tokens, the limit; the reward is about length ({about_length})."
            return [run.fact(stuck, stuck.last, cap(run), note, "strong", onset)]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        signal = has_signal(run).tail(1)
        last = run["rollout/length_mean"].finite
        if len(signal) and len(last) and signal.step >= last.step:
            return [
                run.fact(signal, signal.last, 0.0, f"Rewards still differ at the last row ({signal.name} {{value}}).")
            ]
        return []
