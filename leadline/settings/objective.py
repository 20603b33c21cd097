"""The loss."""

from typing import Any, Literal

from pydantic import Field, model_validator

from leadline.aliases import with_importance_alias
from leadline.settings.section import Section

LossName = Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token_mean", "sequence_mean", "constant", "minibatch_token_mean"]
AdvantageScaling = Literal["group_std", "batch_std", "none", "leave_one_out"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceAction = Literal["truncate", "mask", "off"]

DEFAULT_AGGREGATION: dict[LossName, Aggregation] = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "bnpo": "minibatch_token_mean",
    "gspo": "sequence_mean",
    "cispo": "token_mean",
    "reinforce": "token_mean",
}


class Objective(Section):
    """The loss. Equations and sources: `leadline/objective/`."""

    loss: LossName = "dapo"
    """grpo, dapo, dr_grpo and bnpo share the clipped surrogate and differ in `aggregation`; gspo clips a
    sequence ratio; cispo truncates the ratio and keeps all gradients; reinforce has no ratio."""
    aggregation: Aggregation | None = None
    """How token losses become one number; None = the loss's own."""
    advantage_scaling: AdvantageScaling = "group_std"
    """Divide centred rewards by the group's std, the batch's, by nothing (Dr. GRPO), or use the leave-one-out
    baseline (RLOO)."""
    advantage_epsilon: float = Field(1e-6, gt=0)
    """Added to the std. A rounding guard: values from 1e-2 swallow the advantage and are refused."""
    clip_low: float = Field(0.2, gt=0)
    """The policy ratio is clipped below at 1 - clip_low."""
    clip_high: float | None = Field(None, gt=0)
    """... and above at 1 + clip_high; None = clip_low."""
    clip_delta: float | None = Field(None, gt=1)
    """Two-sided clip: upper bound of the ratio for negative advantages. None = off."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the reference. 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence (Schulman 2020)."""
    importance_level: ImportanceLevel = "token"
    """Rollout weight pi_old / mu per token, per sequence (product), or its geometric mean."""
    importance_action: ImportanceAction = "truncate"
    """Outside [low, high]: set to the bound, set to 0, or no weight at all. TRL's `sequence_mask` and the like are
    accepted for `importance_action` and set the level too."""
    importance_low: float = Field(0.0, ge=0)
    """Lower bound of the rollout weight. 0 = none."""
    importance_high: float = Field(2.0, gt=0)
    """Upper bound of the rollout weight."""
    importance_veto: float = Field(0.0, ge=0)
    """A completion with a token whose weight is below this is masked whole. 0 = off."""
    on_unscored: Literal["on_policy", "drop", "refuse"] = "on_policy"
    """A token whose rollout logprob is missing: weight exactly 1, not trained, or an error."""
    max_unscored_fraction: float = Field(0.05, ge=0, le=1)
    """More unscored tokens than this in a step stop the run."""
    entropy_bonus: float = 0.0
    """Weight of the mean token entropy, added to the objective."""
    entropy_quantile: float = Field(0.0, ge=0, lt=1)
    """Train only tokens with entropy above this quantile of the step (0.8 = the top fifth). 0 = all."""
    mask_truncated: bool = False
    """Do not train completions that ran into `sampling.max_tokens`."""
    overlong_buffer: int = Field(0, ge=0)
    """DAPO's soft overlong penalty: in the last so many tokens before `sampling.max_tokens` the reward falls
    linearly to -overlong_penalty. 0 = off."""
    overlong_penalty: float = Field(1.0, gt=0)
    """Largest soft overlong penalty."""

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, values: Any) -> Any:
        return with_importance_alias(values)

    @property
    def resolved_aggregation(self) -> Aggregation:
        return self.aggregation or DEFAULT_AGGREGATION[self.loss]
