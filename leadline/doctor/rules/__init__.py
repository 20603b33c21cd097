"""Every rule, in the order in which they are asked: the order of the data path, which is that of the ids."""

from leadline.doctor.rule import Rule
from leadline.doctor.rules.absolute_difference_is_negative import AbsoluteDifferenceIsNegative
from leadline.doctor.rules.absorbing_state_at_length_cap import AbsorbingStateAtLengthCap
from leadline.doctor.rules.advantage_blowup_tiny_std import AdvantageBlowupTinyStd
from leadline.doctor.rules.advantage_epsilon_dominates import AdvantageEpsilonDominates
from leadline.doctor.rules.advantage_sign_reversed import AdvantageSignReversed
from leadline.doctor.rules.all_completions_masked import AllCompletionsMasked
from leadline.doctor.rules.behaviour_weight_missing import BehaviourWeightMissing
from leadline.doctor.rules.beta_mis_scaled import BetaMisScaled
from leadline.doctor.rules.clip_range_too_narrow import ClipRangeTooNarrow
from leadline.doctor.rules.clipped_ratio_metric_wrong import ClippedRatioMetricWrong
from leadline.doctor.rules.compiled_graph_stale_adapter import CompiledGraphStaleAdapter
from leadline.doctor.rules.correction_masks_less_as_gap_grows import CorrectionMasksLessAsGapGrows
from leadline.doctor.rules.correction_uses_current_policy import CorrectionUsesCurrentPolicy
from leadline.doctor.rules.dead_update import DeadUpdate
from leadline.doctor.rules.dropout_in_rl_forward import DropoutInRlForward
from leadline.doctor.rules.duplicated_bos import DuplicatedBos
from leadline.doctor.rules.dynamic_sampling_filters_on_shaped_score import DynamicSamplingFiltersOnShapedScore
from leadline.doctor.rules.empty_completions import EmptyCompletions
from leadline.doctor.rules.engine_starts_with_other_weights import EngineStartsWithOtherWeights
from leadline.doctor.rules.entropy_collapse import EntropyCollapse
from leadline.doctor.rules.entropy_explosion import EntropyExplosion
from leadline.doctor.rules.eos_fill_mask_error import EosFillMaskError
from leadline.doctor.rules.eos_id_mismatch import EosIdMismatch
from leadline.doctor.rules.eos_suppressed_by_min_length import EosSuppressedByMinLength
from leadline.doctor.rules.failed_rollouts import FailedRollouts
from leadline.doctor.rules.first_update_identity_broken import FirstUpdateIdentityBroken
from leadline.doctor.rules.format_reward_dominates import FormatRewardDominates
from leadline.doctor.rules.fp16_overflow import Fp16Overflow
from leadline.doctor.rules.grad_clip_swallows_update import GradClipSwallowsUpdate
from leadline.doctor.rules.gradient_accumulation_is_zero import GradientAccumulationIsZero
from leadline.doctor.rules.gradient_scaling_depends_on_backend import GradientScalingDependsOnBackend
from leadline.doctor.rules.gradient_vanishes import GradientVanishes
from leadline.doctor.rules.group_size_too_small import GroupSizeTooSmall
from leadline.doctor.rules.hang_rank_desync import HangRankDesync
from leadline.doctor.rules.hang_weight_transfer import HangWeightTransfer
from leadline.doctor.rules.importance_correction_erases_signal import ImportanceCorrectionErasesSignal
from leadline.doctor.rules.in_flight_update_races_pipeline import InFlightUpdateRacesPipeline
from leadline.doctor.rules.k3_kl_outlier_explosion import K3KlOutlierExplosion
from leadline.doctor.rules.kl_bonus_without_reference import KlBonusWithoutReference
from leadline.doctor.rules.kl_drift_reward_collapse import KlDriftRewardCollapse
from leadline.doctor.rules.kl_metric_uses_other_estimator import KlMetricUsesOtherEstimator
from leadline.doctor.rules.kl_penalty_not_applied import KlPenaltyNotApplied
from leadline.doctor.rules.learning_rate_too_high import LearningRateTooHigh
from leadline.doctor.rules.learning_rate_too_low_for_lora import LearningRateTooLowForLora
from leadline.doctor.rules.length_normalization_bias import LengthNormalizationBias
from leadline.doctor.rules.log_probability_positive import LogProbabilityPositive
from leadline.doctor.rules.logprob_drift_independent_of_weights import LogprobDriftIndependentOfWeights
from leadline.doctor.rules.logprob_temperature_mismatch import LogprobTemperatureMismatch
from leadline.doctor.rules.logprob_truncation_support_mismatch import LogprobTruncationSupportMismatch
from leadline.doctor.rules.lora_double_applied import LoraDoubleApplied
from leadline.doctor.rules.lora_grad_not_flowing import LoraGradNotFlowing
from leadline.doctor.rules.lora_merge_unmerge_drift_bf16 import LoraMergeUnmergeDriftBf16
from leadline.doctor.rules.mask_denominator_mismatch import MaskDenominatorMismatch
from leadline.doctor.rules.metric_entropy_misordered import MetricEntropyMisordered
from leadline.doctor.rules.metric_vanished import MetricVanished
from leadline.doctor.rules.moe_routing_mismatch import MoeRoutingMismatch
from leadline.doctor.rules.nan_metric_aggregation import NanMetricAggregation
from leadline.doctor.rules.nan_poisoned_weights import NanPoisonedWeights
from leadline.doctor.rules.nan_reward_poisons_advantage import NanRewardPoisonsAdvantage
from leadline.doctor.rules.near_greedy_sampling import NearGreedySampling
from leadline.doctor.rules.negative_kl_sampling_mismatch import NegativeKlSamplingMismatch
from leadline.doctor.rules.no_update_grad_and_kl_exactly_zero import NoUpdateGradAndKlExactlyZero
from leadline.doctor.rules.offpolicy_uncorrected import OffpolicyUncorrected
from leadline.doctor.rules.oom_logits import OomLogits
from leadline.doctor.rules.optimizer_empty_frozen_adapter import OptimizerEmptyFrozenAdapter
from leadline.doctor.rules.overfit_no_kl_anchor import OverfitNoKlAnchor
from leadline.doctor.rules.pad_token_is_eos import PadTokenIsEos
from leadline.doctor.rules.padding_in_scored_text import PaddingInScoredText
from leadline.doctor.rules.padding_side_wrong import PaddingSideWrong
from leadline.doctor.rules.ratio_constant_no_policy_gradient import RatioConstantNoPolicyGradient
from leadline.doctor.rules.ratio_threshold_skips_batches import RatioThresholdSkipsBatches
from leadline.doctor.rules.reference_model_mismatch import ReferenceModelMismatch
from leadline.doctor.rules.reference_not_frozen import ReferenceNotFrozen
from leadline.doctor.rules.retokenization_drift import RetokenizationDrift
from leadline.doctor.rules.reward_hacking_environment_loophole import RewardHackingEnvironmentLoophole
from leadline.doctor.rules.reward_hacking_nontermination import RewardHackingNontermination
from leadline.doctor.rules.reward_parse_mismatch import RewardParseMismatch
from leadline.doctor.rules.reward_service_times_out import RewardServiceTimesOut
from leadline.doctor.rules.reward_sign_wrong import RewardSignWrong
from leadline.doctor.rules.rewards_all_missing import RewardsAllMissing
from leadline.doctor.rules.rollout_logprob_mismatch import RolloutLogprobMismatch
from leadline.doctor.rules.rollout_lora_not_applied import RolloutLoraNotApplied
from leadline.doctor.rules.rollout_lora_wrong_output import RolloutLoraWrongOutput
from leadline.doctor.rules.rollout_reuse_frequency_mismatch import RolloutReuseFrequencyMismatch
from leadline.doctor.rules.rollout_weights_corrupted_on_sync import RolloutWeightsCorruptedOnSync
from leadline.doctor.rules.sampling_logprobs_overwritten import SamplingLogprobsOverwritten
from leadline.doctor.rules.sequence_is_sum_deflates_gradient import SequenceIsSumDeflatesGradient
from leadline.doctor.rules.special_tokens_stripped import SpecialTokensStripped
from leadline.doctor.rules.stale_derived_weight_cache import StaleDerivedWeightCache
from leadline.doctor.rules.stale_prefix_cache import StalePrefixCache
from leadline.doctor.rules.staleness_at_its_bound import StalenessAtItsBound
from leadline.doctor.rules.stop_string_read_as_truncation import StopStringReadAsTruncation
from leadline.doctor.rules.think_tag_prefilled import ThinkTagPrefilled
from leadline.doctor.rules.throughput_collapse import ThroughputCollapse
from leadline.doctor.rules.train_infer_mismatch_collapse import TrainInferMismatchCollapse
from leadline.doctor.rules.truncated_reward_zeroing import TruncatedRewardZeroing
from leadline.doctor.rules.truncation_cap_too_small import TruncationCapTooSmall
from leadline.doctor.rules.truncation_rate_high_unresolved import TruncationRateHighUnresolved
from leadline.doctor.rules.unscored_tokens import UnscoredTokens
from leadline.doctor.rules.updates_skipped import UpdatesSkipped
from leadline.doctor.rules.wrong_grouping import WrongGrouping
from leadline.doctor.rules.zero_reward_variance_within_group import ZeroRewardVarianceWithinGroup

RULES: tuple[Rule, ...] = (
    ZeroRewardVarianceWithinGroup(),
    FailedRollouts(),
    GroupSizeTooSmall(),
    RewardParseMismatch(),
    ThinkTagPrefilled(),
    SpecialTokensStripped(),
    FormatRewardDominates(),
    RewardSignWrong(),
    RewardHackingNontermination(),
    RewardHackingEnvironmentLoophole(),
    TruncatedRewardZeroing(),
    WrongGrouping(),
    NanRewardPoisonsAdvantage(),
    NanMetricAggregation(),
    AdvantageBlowupTinyStd(),
    AdvantageEpsilonDominates(),
    RewardsAllMissing(),
    RewardServiceTimesOut(),
    DynamicSamplingFiltersOnShapedScore(),
    AdvantageSignReversed(),
    TruncationRateHighUnresolved(),
    UnscoredTokens(),
    AllCompletionsMasked(),
    TruncationCapTooSmall(),
    EosIdMismatch(),
    EosFillMaskError(),
    EosSuppressedByMinLength(),
    ClippedRatioMetricWrong(),
    NearGreedySampling(),
    AbsorbingStateAtLengthCap(),
    LengthNormalizationBias(),
    DuplicatedBos(),
    RetokenizationDrift(),
    StopStringReadAsTruncation(),
    PadTokenIsEos(),
    EmptyCompletions(),
    PaddingInScoredText(),
    RolloutLogprobMismatch(),
    ImportanceCorrectionErasesSignal(),
    SequenceIsSumDeflatesGradient(),
    LogprobTemperatureMismatch(),
    LogprobTruncationSupportMismatch(),
    SamplingLogprobsOverwritten(),
    OffpolicyUncorrected(),
    RolloutLoraNotApplied(),
    RolloutLoraWrongOutput(),
    LoraDoubleApplied(),
    LoraMergeUnmergeDriftBf16(),
    RolloutWeightsCorruptedOnSync(),
    StalePrefixCache(),
    StaleDerivedWeightCache(),
    LogprobDriftIndependentOfWeights(),
    MoeRoutingMismatch(),
    TrainInferMismatchCollapse(),
    RolloutReuseFrequencyMismatch(),
    StalenessAtItsBound(),
    EngineStartsWithOtherWeights(),
    CorrectionMasksLessAsGapGrows(),
    CorrectionUsesCurrentPolicy(),
    AbsoluteDifferenceIsNegative(),
    DropoutInRlForward(),
    BehaviourWeightMissing(),
    InFlightUpdateRacesPipeline(),
    FirstUpdateIdentityBroken(),
    NanPoisonedWeights(),
    DeadUpdate(),
    NoUpdateGradAndKlExactlyZero(),
    LearningRateTooHigh(),
    LearningRateTooLowForLora(),
    LoraGradNotFlowing(),
    OptimizerEmptyFrozenAdapter(),
    RatioConstantNoPolicyGradient(),
    CompiledGraphStaleAdapter(),
    Fp16Overflow(),
    K3KlOutlierExplosion(),
    NegativeKlSamplingMismatch(),
    PaddingSideWrong(),
    KlMetricUsesOtherEstimator(),
    RatioThresholdSkipsBatches(),
    ReferenceModelMismatch(),
    KlPenaltyNotApplied(),
    BetaMisScaled(),
    KlDriftRewardCollapse(),
    EntropyCollapse(),
    EntropyExplosion(),
    MetricEntropyMisordered(),
    GradientScalingDependsOnBackend(),
    GradClipSwallowsUpdate(),
    MaskDenominatorMismatch(),
    ClipRangeTooNarrow(),
    ReferenceNotFrozen(),
    UpdatesSkipped(),
    GradientAccumulationIsZero(),
    KlBonusWithoutReference(),
    GradientVanishes(),
    LogProbabilityPositive(),
    OverfitNoKlAnchor(),
    OomLogits(),
    HangRankDesync(),
    HangWeightTransfer(),
    MetricVanished(),
    ThroughputCollapse(),
)
