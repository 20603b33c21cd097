"""Every rule, in the order in which they are asked: the order of the data path, which is that of the ids."""

from leadline.doctor.rule import Rule
from leadline.doctor.rules.all_completions_masked import AllCompletionsMasked
from leadline.doctor.rules.dead_update import DeadUpdate
from leadline.doctor.rules.failed_rollouts import FailedRollouts
from leadline.doctor.rules.first_update_identity_broken import FirstUpdateIdentityBroken
from leadline.doctor.rules.importance_correction_erases_signal import ImportanceCorrectionErasesSignal
from leadline.doctor.rules.learning_rate_too_high import LearningRateTooHigh
from leadline.doctor.rules.nan_poisoned_weights import NanPoisonedWeights
from leadline.doctor.rules.no_update_grad_and_kl_exactly_zero import NoUpdateGradAndKlExactlyZero
from leadline.doctor.rules.rollout_logprob_mismatch import RolloutLogprobMismatch
from leadline.doctor.rules.truncation_rate_high_unresolved import TruncationRateHighUnresolved
from leadline.doctor.rules.unscored_tokens import UnscoredTokens
from leadline.doctor.rules.zero_reward_variance_within_group import ZeroRewardVarianceWithinGroup

RULES: tuple[Rule, ...] = (
    ZeroRewardVarianceWithinGroup(),
    FailedRollouts(),
    TruncationRateHighUnresolved(),
    UnscoredTokens(),
    AllCompletionsMasked(),
    RolloutLogprobMismatch(),
    ImportanceCorrectionErasesSignal(),
    FirstUpdateIdentityBroken(),
    NanPoisonedWeights(),
    DeadUpdate(),
    NoUpdateGradAndKlExactlyZero(),
    LearningRateTooHigh(),
)
