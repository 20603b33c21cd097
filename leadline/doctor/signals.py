"""Which canonical quantities can stand for one another, best first, and questions that many rules ask."""

import numpy as np

from leadline.doctor.series import Series, paired
from leadline.doctor.view import View

GRAD = ("optimizer/grad_norm",)
MASKED = ("optimizer/update_successful",)
ZERO_SIGNAL = ("rollout/zero_signal_fraction", "reward/zero_std_fraction")
SPREAD = ("reward/group_std", "reward/std")
KL = ("kl/k3", "kl/reference", "kl/k2", "kl/k1")
GAP = ("importance/log_ratio_abs_mean", "importance/sequence_log_ratio_abs_mean")
GAP_GROWTH = (
    *GAP,
    "importance/kl_k3",
    "importance/kl_k1",
    "importance/mult_prob_error",
    "importance/prob_diff_abs_mean",
)
WEIGHT = ("importance/weight_mean", "importance/sequence_ratio_mean", "importance/ratio_mean")
ENTROPY = ("policy/entropy", "rollout/entropy")
CLIP = ("policy/clip_fraction",)
FIRST_ROWS = 3


def has_signal(run: View) -> Series:
    """The rows that prove nonzero advantages within groups; empty if none does."""
    return run.remembered("has signal", _has_signal)


def _has_signal(run: View) -> Series:
    zero = run.first_of(*ZERO_SIGNAL).finite
    if len(zero):
        return zero.where(zero.values < 0.95)
    for name, least in (("reward/group_std", 1e-6), ("advantage/abs_mean", 1e-3), ("advantage/max", 1e-3)):
        series = run[name].finite
        if len(series):
            return series.where(series.values > least)
    wide = run["reward/std"].finite
    return wide.where(wide.values > 1e-6)


def no_signal(run: View) -> Series:
    """The rows that prove that no group had an advantage; empty if none does."""
    zero = run.first_of(*ZERO_SIGNAL).finite
    if len(zero):
        return zero.where(zero.values >= 0.95)
    spread = run.first_of("reward/group_std", "advantage/abs_mean", "reward/std").finite
    return spread.where(spread.values <= 1e-9)


def dead_gradient(run: View) -> Series:
    """Rows with a gradient norm of exactly 0 (below 1e-9)."""
    grad = run.first_of(*GRAD).finite
    return grad.where(grad.values < 1e-9)


def share_with(part: Series, whole: Series) -> float:
    """Share of the rows of `whole` that are in `part`; 0 if there are none."""
    return float(np.mean(np.isin(whole.steps, part.steps))) if len(whole) else 0.0


def cap(run: View) -> float:
    """The completion limit: the setting; NaN if it is not known."""
    return run.number("sampling.max_tokens")


def at_cap(run: View) -> Series:
    """Rows in which the mean completion reaches the limit (99 %), or, where the limit is not known, min = mean = max."""
    length = run["rollout/length_mean"].finite
    limit = cap(run)
    if np.isfinite(limit):
        return length.where(length.values >= 0.99 * limit)
    steps, mean, longest = paired(length, run["rollout/length_max"])
    equal = steps[(mean > 1) & (mean >= 0.999 * longest)]
    return length.where(np.isin(length.steps, equal))


def reward_falls(run: View) -> bool:
    """The reward ends clearly lower than its best: by a quarter of the range it had, beyond the noise."""
    return run.remembered("reward falls", _reward_falls)


def _reward_falls(run: View) -> bool:
    reward = run["reward/mean"].finite
    if len(reward) < 6:
        return len(reward) > 1 and reward.last < reward.first - 0.25 * max(abs(reward.first), 1e-9)
    window = max(3, len(reward) // 10)
    sums = np.concatenate(([0.0], np.cumsum(reward.values)))
    smooth = (sums[window:] - sums[:-window]) / window
    peak = int(np.argmax(smooth))
    drop = float(smooth[peak] - smooth[-1])
    return bool(
        drop > max(0.25 * max(abs(float(smooth[peak])), float(np.ptp(smooth))), 3 * reward.noise / np.sqrt(window))
    )


def reward_rises(run: View) -> bool:
    """The reward ends higher than it began, beyond the noise."""
    return run.remembered("reward rises", _reward_rises)


def _reward_rises(run: View) -> bool:
    reward = run["reward/mean"].finite
    return len(reward) >= 6 and reward.rises(0.02 * max(1e-9, abs(reward.early)))


STAGE_ADVICE = {
    "failed": "Read the `error` of the failed rollouts and mend the reward or the engine.",
    "no_signal": "Groups have equal rewards: change the data's difficulty or the reward.",
    "stale": "Lower `rollout.max_staleness`.",
    "truncated": "Raise `sampling.max_tokens`, or set `objective.mask_truncated` to false.",
    "unscored": 'Make the engine report a logprob for each token, or set `objective.on_unscored` to "on_policy".',
    "low_entropy": "Lower `objective.entropy_quantile`.",
    "importance_masked": 'Set `objective.importance_level = "token"` and `objective.importance_action = "truncate"`; then find '
    "why engine and trainer disagree: engine dtype, processed logprobs.",
    "importance_shrunk": 'Set `objective.importance_level = "token"` and `objective.importance_action = "truncate"`; then find '
    "why engine and trainer disagree: engine dtype, processed logprobs.",
    "clipped": "Lower `optimizer.learning_rate` or `optimizer.epochs_per_batch`, or widen `objective.clip_low` and "
    "`objective.clip_high`.",
    "ratio_drift": "Lower `optimizer.learning_rate` or `optimizer.epochs_per_batch`.",
    "discarded": "Look at the rollouts in `blackbox/`: loss or gradient was not finite.",
}
"""What to change for each stage of the ledger at which the signal can end."""


def largest_stage(run: View, step: int) -> str | None:
    """The stage of the ledger, the last one apart, that took most of the signal at a step."""
    shares = {stage: run[f"ledger/{stage}_share"].at(step) for stage in STAGE_ADVICE}
    known = {stage: share for stage, share in shares.items() if share > 0}
    return max(known, key=lambda stage: known[stage], default=None)
