"""Runs that are broken in one place, each with the finding that must come first."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.drills import breaks, update_breaks
from tests.drills.healthy import reward
from tests.drills.run import Drill, Parts, Sections, intact

VLLM = {"engine": {"kind": "vllm"}}
"""The engine is another program, whose logprobs have to be believed. Its part is played by the hf engine."""
SHORT = {"run": {"steps": 8}}


def fault(
    name: str,
    cause: str,
    breaks: Callable[[Parts], None] = intact,
    unchecked: Sections | None = None,
    **sections: Any,
) -> Drill:
    return Drill(name, cause, sections, unchecked or {}, breaks)


def short(
    name: str,
    cause: str,
    breaks: Callable[[Parts], None] = intact,
    unchecked: Sections | None = None,
    **sections: Mapping[str, Any],
) -> Drill:
    """Eight steps are enough."""
    return fault(name, cause, breaks, unchecked, **{**SHORT, **sections})


REWARDS = (
    short("rewards-equal", "zero-reward-variance-within-group", rewards=[reward("constant")]),
    short("rewards-none", "rewards-all-missing", rewards=[reward("silent")]),
    short("reward-raises", "failed-rollouts", rewards=[reward("raising")]),
    short("reward-nan", "failed-rollouts", rewards=[reward("sometimes_nan")]),
    short("engine-aborts", "failed-rollouts", breaks.aborting),
    short(
        "nan-reward-in-naive-advantages",
        "nan-reward-poisons-advantage",
        update_breaks.advantages(update_breaks.poisoned_by_nan),
        rewards=[reward("sometimes_nan")],
    ),
    fault("distance-as-reward", "reward-sign-wrong", rewards=[reward("distance")]),
    short("answer-marker-unknown", "reward-parse-mismatch", rewards=[reward("answered")]),
    short(
        "special-tokens-stripped",
        "reward-parse-mismatch",  # what the log can show: the tag is never found
        breaks.all_of(
            breaks.writes(["<|im_start|>7", "<|im_start|>8", "9"]),
            update_breaks.without_special_tokens,
        ),
        rewards=[reward("tagged")],
    ),
    short(
        "think-tag-prefilled",
        "think-tag-prefilled",
        breaks.all_of(breaks.prompts_end("<think>\n"), breaks.writes(["so </think> 7", "hm, 3 </think> 8"])),
        rewards=[reward("think_format"), reward("even_share", weight=0.1)],
        decoding={"strip_reasoning": False},
    ),
    fault(
        "format-outweighs-accuracy",
        "format-reward-dominates",
        rewards=[reward("format_odd", weight=3.0), reward("accuracy_even")],
        optimizer={"learning_rate": 1e-3},
    ),
    short(
        "two-per-group-sparse",
        "group-size-too-small",
        rewards=[reward("rarely")],
        rollout={"group_size": 2, "groups_per_step": 12},
    ),
    fault("reward-service-away", "reward-service-times-out", update_breaks.silent_steps(9, 17)),
    short("prompts-mixed-in-groups", "wrong-grouping", update_breaks.advantages(update_breaks.mixed_prompts)),
    short("advantages-negated", "advantage-sign-reversed", update_breaks.advantages(update_breaks.reversed_sign)),
    short(
        "epsilon-swallows-advantages",
        "advantage-epsilon-dominates",
        unchecked={"objective": {"advantage_epsilon": 5.0}},
    ),
    short("padding-scored", "padding-in-scored-text", update_breaks.padded_text),
    short("two-bos", "duplicated-bos", breaks.two_bos),
)

GENERATION = (
    short("cap-too-small", "truncation-cap-too-small", breaks.never_stopping, rewards=[reward("finished")]),
    short(
        "stop-token-unknown-to-engine",
        "truncation-rate-high-unresolved",
        breaks.never_stopping,
        sampling={"max_tokens": 12},
    ),
    short(
        "all-truncated-all-masked",
        "all-completions-masked",
        breaks.never_stopping,
        sampling={"max_tokens": 8},
        objective={"mask_truncated": True},
    ),
    short("many-truncated", "truncation-rate-high-unresolved", sampling={"max_tokens": 4}),
    short("end-token-unknown-to-trainer", "eos-id-mismatch", breaks.lying(answers=breaks.ends_unknown)),
    short(
        "ends-inferred-from-ids",
        "clipped-ratio-metric-wrong",
        breaks.lying(answers=breaks.ends_inferred),
        sampling={"max_tokens": 80},
    ),
    short("nearly-greedy", "near-greedy-sampling", sampling={"temperature": 0.01}),
    short("empty-completions", "empty-completions", breaks.lying(answers=breaks.sometimes_empty)),
    fault(
        "reward-grows-with-length",
        "reward-hacking-nontermination",
        rewards=[reward("more_words")],
        optimizer={"learning_rate": 3e-3},
        run={"steps": 30},
    ),
    fault(
        "reward-is-length",
        "absorbing-state-at-length-cap",
        rewards=[reward("long_enough")],
        optimizer={"learning_rate": 5e-3},
        run={"steps": 30},
    ),
    fault("engine-slows-down", "throughput-collapse", breaks.slow_from(17, 2.0)),
)

IMPORTANCE = (
    short("logprobs-shifted", "rollout-logprob-mismatch", breaks.reports(lambda v: [x - 0.3 for x in v]), **VLLM),
    short(
        "logprobs-shifted-and-uncorrected",
        "rollout-logprob-mismatch",
        breaks.reports(lambda v: [x - 0.3 for x in v]),
        objective={"importance_action": "off"},
        **VLLM,
    ),
    short("logprobs-off-by-one", "rollout-logprob-mismatch", breaks.reports(breaks.off_by_one), **VLLM),
    short("logprobs-in-bits", "rollout-logprob-mismatch", breaks.reports(lambda v: [x / 0.6931 for x in v]), **VLLM),
    short("completions-retokenised", "rollout-logprob-mismatch", breaks.retokenised, **VLLM),
    short(
        "raw-logprobs-at-0.6",
        "logprob-temperature-mismatch",
        breaks.raw_logprobs,
        sampling={"temperature": 0.6},
        **VLLM,
    ),
    short(
        "temperature-not-replayed",
        "logprob-temperature-mismatch",
        breaks.not_replayed(temperature=1.0),
        sampling={"temperature": 0.7},
        **VLLM,
    ),
    short(
        "raw-logprobs-with-top-k",
        "logprob-truncation-support-mismatch",
        breaks.raw_logprobs,
        sampling={"top_k": 20},
        **VLLM,
    ),
    short(
        "top-p-not-replayed",
        "logprob-truncation-support-mismatch",
        breaks.not_replayed(top_p=1.0),
        sampling={"top_p": 0.8},
        **VLLM,
    ),
    short("logprobs-missing", "unscored-tokens", breaks.unscored(0.02), **VLLM),
    short(
        "logprobs-missing-half",
        "unscored-tokens",
        breaks.unscored(0.5),
        objective={"max_unscored_fraction": 1.0, "on_unscored": "drop"},
        **VLLM,
    ),
    short(
        "sequence-mask-under-an-offset",
        "sequence-is-sum-deflates-gradient",
        breaks.all_of(breaks.never_stopping, breaks.reports(lambda v: [x + 0.03 for x in v])),
        sampling={"max_tokens": 80},
        objective={"importance_level": "sequence", "importance_action": "mask", "importance_low": 0.5},
        **VLLM,
    ),
    short(
        "sequence-weight-under-an-offset",
        "sequence-is-sum-deflates-gradient",
        breaks.all_of(breaks.never_stopping, breaks.reports(lambda v: [x + 0.05 for x in v])),
        sampling={"max_tokens": 80},
        objective={"importance_level": "sequence"},
        **VLLM,
    ),
    short("bound-of-weights-tiny", "importance-correction-erases-signal", objective={"importance_high": 0.05}),
    short(
        "band-of-weights-tighter-than-noise",
        "importance-correction-erases-signal",
        objective={"importance_low": 0.999, "importance_high": 1.001, "importance_action": "mask"},
        engine={"dtype": "bfloat16"},
    ),
    short(
        "veto-tighter-than-noise",
        "importance-correction-erases-signal",
        objective={"importance_veto": 0.9999},
        engine={"dtype": "bfloat16"},
    ),
    fault("weights-never-arrive", "rollout-logprob-mismatch", breaks.never_loaded, **VLLM),
    fault(
        "adapter-never-arrives",
        "rollout-lora-not-applied",
        breaks.never_loaded,
        model={"lora_rank": 4},
        optimizer={"learning_rate": 3e-3},
        **VLLM,
    ),
    short(
        "adapter-computed-wrongly", "rollout-lora-wrong-output", breaks.noisy_adapter, model={"lora_rank": 4}, **VLLM
    ),
    short("sync-swaps-layers", "rollout-weights-corrupted-on-sync", breaks.corrupted_from(4), **VLLM),
    short("engine-starts-elsewhere", "engine-starts-with-other-weights", breaks.starts_elsewhere, **VLLM),
    short(
        "logprobs-overwritten",
        "sampling-logprobs-overwritten",
        breaks.overwritten,
        rollout={"max_staleness": 1},
        **VLLM,
    ),
    fault(
        "stale-and-uncorrected",
        "offpolicy-uncorrected",
        rollout={"max_staleness": 6},
        objective={"importance_action": "off"},
        optimizer={"learning_rate": 8e-4},
        run={"steps": 30},
    ),
    fault(
        "engine-drifts-by-itself",
        "logprob-drift-independent-of-weights",
        breaks.drifting,
        unchecked={"optimizer": {"learning_rate": 0.0}},
        **VLLM,
    ),
)

UPDATE = (
    fault("learning-rate-1000x", "learning-rate-too-high", optimizer={"learning_rate": 0.3}),
    fault(
        "learning-rate-1000x-with-kl",
        "learning-rate-too-high",
        optimizer={"learning_rate": 0.3},
        objective={"beta": 0.02},
    ),
    fault(
        "adapter-at-a-full-models-rate",
        "learning-rate-too-low-for-lora",
        model={"lora_rank": 4},
        optimizer={"learning_rate": 1e-6},
        objective={"beta": 0.02},
    ),
    short("clip-norm-zero", "grad-clip-swallows-update", unchecked={"optimizer": {"max_grad_norm": 0.0}}),
    short("clip-norm-1e-9", "grad-clip-swallows-update", optimizer={"max_grad_norm": 1e-9}),
    short("clip-norm-negative", "grad-clip-swallows-update", unchecked={"optimizer": {"max_grad_norm": -1.0}}),
    short("logits-nan", "nan-poisoned-weights", update_breaks.nan_logits_from(3)),
    short("gradient-infinite", "nan-poisoned-weights", update_breaks.infinite_gradient_from(3)),
    short("optimizer-holds-a-copy", "optimizer-empty-frozen-adapter", update_breaks.moves_a_copy),
    short("loss-detached", "no-update-grad-and-kl-exactly-zero", update_breaks.detached),
    short(
        "policy-term-detached",
        "no-update-grad-and-kl-exactly-zero",
        update_breaks.policy_term_cut_off,
        objective={"beta": 0.04},
    ),
    short(
        "recomputation-cuts-off-the-adapter",
        "lora-grad-not-flowing",
        update_breaks.adapter_cut_off,
        model={"lora_rank": 4, "gradient_checkpointing": True},
        optimizer={"learning_rate": 1e-3},
    ),
    fault(
        "reference-is-the-policy",
        "reference-not-frozen",
        update_breaks.reference_is_policy,
        objective={"beta": 0.04},
        optimizer={"learning_rate": 1e-3},
    ),
    fault("beta-1000x", "beta-mis-scaled", objective={"beta": 40.0}),
    short(
        "reference-of-another-model",
        "reference-model-mismatch",
        update_breaks.other_reference,
        objective={"beta": 0.04},
    ),
    fault(
        "kl-left-out-of-the-loss",
        "kl-penalty-not-applied",
        update_breaks.kl_left_out,
        objective={"beta": 0.2},
    ),
    short(
        "clip-range-tiny",
        "clip-range-too-narrow",
        objective={"clip_low": 1e-5},
        optimizer={"epochs_per_batch": 4},
    ),
    short(
        "old-logprobs-of-another-forward",
        "first-update-identity-broken",
        update_breaks.noisy_old_logprobs(0.05),
        optimizer={"epochs_per_batch": 2},
    ),
    short(
        "dropout-in-the-update",
        "first-update-identity-broken",  # the log cannot say which layer differs
        update_breaks.training_dropout,
        optimizer={"epochs_per_batch": 2},
    ),
    fault(
        "entropy-bonus-negative",
        "entropy-collapse",
        update_breaks.peaked,
        rewards=[reward("shortness")],
        objective={"entropy_bonus": -0.3},
        rollout={"max_steps_without_signal": 40},
        run={"steps": 40},
    ),
    fault(
        "entropy-bonus-huge",
        "entropy-explosion",
        update_breaks.peaked,
        rewards=[reward("one_token")],
        objective={"entropy_bonus": 1.0},
        optimizer={"learning_rate": 1e-3},
        run={"steps": 40},
    ),
    short("one-token-in-500-trained", "dead-update", objective={"entropy_quantile": 0.999}),
    fault("gradient-norm-left-out", "metric-vanished", update_breaks.forgotten_from(12, "optimizer/grad_norm")),
    fault(
        "held-out-prompts-want-the-opposite",
        "overfit-no-kl-anchor",
        update_breaks.held_out_differs,
        rewards=[reward("by_answer")],
        eval={"prompts": 12, "samples": 4, "every": 4},
        optimizer={"learning_rate": 1e-3},
    ),
)

FAULTS: tuple[Drill, ...] = (*REWARDS, *GENERATION, *IMPORTANCE, *UPDATE)
