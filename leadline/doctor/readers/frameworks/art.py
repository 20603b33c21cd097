"""ART (OpenPipe) and torchforge: rows of a history or of a console, with few keys."""

from collections.abc import Mapping

from leadline.doctor.readers.frameworks.framework import Framework, Key

UNTRAINABLE = "groups without spread are dropped before training"

ART = Framework(
    name="art",
    words=("openpipe", "art (openpipe)"),
    keys={
        "loss/train": "loss",
        "loss/policy_loss": "loss/policy",
        "loss/grad_norm": "optimizer/grad_norm",
        "loss/learning_rate": "optimizer/learning_rate",
        "train/reward": "reward/mean",
        "train/reward_std_dev": "reward/group_std",
        "loss/kl_div": "kl/k3",
        "loss/entropy": "policy/entropy",
        "loss/probs_corr": "importance/prob_correlation",
        "probs_corr": "importance/prob_correlation",
        "val/reward": "eval/reward_mean",
        "val/reward_std_dev": "eval/reward_std",
        "train/completion_tokens": "rollout/length_mean",
        "train/exception_rate": "rollout/failed_fraction",
        "data/step_num_groups_trainable": Key("rollout/trainable_groups", UNTRAINABLE),
        "time/step_wall_s": "time/step_s",
        "time/step_trainer_s": "time/update_s",
    },
    patterns=((r"val/(.+)", "eval/score/{0}"),),
    steps=("step", "training_step", "_step", "Step"),
    marks=(r'"loss/train":', r"'loss/train':", r'"train/reward_std_dev"'),
    could_log={
        "importance/prob_correlation": "logprobs=True in the completion requests of the rollout",
        "kl/k3": "beta (> 0)",
        "eval/reward_mean": "model.log(trajectories, split='val')",
    },
    options={
        "objective.beta": "beta",
        "optimizer.learning_rate": "learning_rate",
        "objective.clip_low": "epsilon",
        "objective.clip_high": "epsilon_high",
        "objective.importance_level": "importance_sampling_level",
        "objective.importance_high": "truncated_importance_sampling",
        "objective.advantage_scaling": "scale_rewards",
    },
    ignored=(r"step|_step|_runtime|_timestamp|time|training_step|recorded_at|split|costs/.*|train/num_.*",),
)

_TORCHFORGE: Mapping[str, str | Key] = {
    "grpo_loss/total_loss": "loss",
    "rl_trainer/avg_loss": "loss",
    "grpo_loss/policy_gradient_loss": "loss/policy",
    "grpo_loss/kl_divergence_mean": "kl/k3",
    "grpo_loss/kl_divergence_max": "kl/max",
    "grpo_loss/entropy": "policy/entropy",
    "rl_trainer/learning_rate": "optimizer/learning_rate",
    "buffer/sample/avg_sampled_policy_age": "staleness/mean",
    "buffer/sample/max_sampled_policy_age": "staleness/max",
    "buffer/sample/min_sampled_policy_age": "staleness/min",
}

TORCHFORGE = Framework(
    name="torchforge",
    words=("torchforge", "forge"),
    keys=_TORCHFORGE,
    patterns=(
        (r"reward/evaluate_response/(?:avg|mean)_(?:total_)?reward", "reward/mean"),
        (r"reward/evaluate_response/(?:avg|mean)_(.+)", "reward/{0}/mean"),
    ),
    steps=("global_step", "step", "_step", "Step"),
    marks=(r"grpo_loss/total_loss", r"rl_trainer/avg_loss"),
    options={"objective.beta": "beta", "optimizer.learning_rate": "optimizer.lr", "rollout.group_size": "group_size"},
    ignored=(r"step|global_step|_step|_runtime|_timestamp|.*_duration_.*|perf/.*",),
)
