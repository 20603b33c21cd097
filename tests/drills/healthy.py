"""Runs in which nothing is wrong, however odd they look. The doctor may warn; it must not cry fault."""

from collections.abc import Callable
from typing import Any

from tests.drills.breaks import few_prompts, seldom_ending
from tests.drills.run import Drill, Parts, intact


def healthy(name: str, breaks: Callable[[Parts], None] = intact, **sections: Any) -> Drill:
    return Drill(name, sections=sections, breaks=breaks)


REWARDS = "tests.drills.rewards"


def reward(name: str, **more: Any) -> dict[str, Any]:
    return {"name": f"{REWARDS}:{name}", **more}


HEALTHY: tuple[Drill, ...] = (
    healthy("plain"),
    *(
        healthy(f"loss-{loss}", objective={"loss": loss})
        for loss in ("grpo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce")
    ),
    *(
        healthy(f"advantages-{scaling}", objective={"advantage_scaling": scaling})
        for scaling in ("batch_std", "none", "leave_one_out")
    ),
    healthy("kl-k3", objective={"beta": 0.04}),
    healthy("kl-k1", objective={"beta": 0.02, "kl_estimator": "k1"}),
    healthy("kl-k2-strong", objective={"beta": 0.1, "kl_estimator": "k2"}),
    healthy("async-1", rollout={"max_staleness": 1}),
    healthy("async-2", rollout={"max_staleness": 2}),
    healthy(
        "async-2-geometric-mask",
        rollout={"max_staleness": 2},
        objective={"importance_level": "geometric", "importance_action": "mask", "importance_low": 0.5},
    ),
    healthy("sparse-reward", rewards=[reward("rarely")]),
    healthy("binary-reward", rewards=[reward("mostly_even")]),
    healthy("groups-of-two", rollout={"group_size": 2, "groups_per_step": 12}),
    healthy("groups-of-three-binary", rewards=[reward("mostly_even")], rollout={"group_size": 3, "groups_per_step": 8}),
    healthy("one-group-per-step", rollout={"group_size": 16, "groups_per_step": 1}),
    healthy("long-completions", sampling={"max_tokens": 160}, breaks=seldom_ending, run={"steps": 10}),
    Drill("resumed", sections={"run": {"checkpoint_every": 4}}, resumed=True),
    Drill("resumed-async", sections={"run": {"checkpoint_every": 5}, "rollout": {"max_staleness": 1}}, resumed=True),
    healthy("bfloat16", model={"dtype": "bfloat16"}),
    healthy("bfloat16-engine", engine={"dtype": "bfloat16"}),
    healthy("lora", model={"lora_rank": 4}, optimizer={"learning_rate": 1e-3}),
    healthy("lora-kl", model={"lora_rank": 4}, optimizer={"learning_rate": 1e-3}, objective={"beta": 0.05}),
    healthy("refill", rewards=[reward("rarely")], rollout={"refill": 6}),
    healthy("replay", rewards=[reward("rarely")], rollout={"replay_max_staleness": 4}),
    healthy("replay-async", rewards=[reward("rarely")], rollout={"replay_max_staleness": 4, "max_staleness": 1}),
    healthy("two-epochs", optimizer={"epochs_per_batch": 2}),
    healthy("four-minibatches", optimizer={"minibatches": 4}),
    healthy("epochs-and-minibatches", optimizer={"minibatches": 2, "epochs_per_batch": 2}),
    healthy("top-k", sampling={"top_k": 40}),
    healthy("top-p", sampling={"top_p": 0.9}),
    healthy("min-p", sampling={"min_p": 0.02}),
    healthy("repetition-penalty", sampling={"repetition_penalty": 1.1}),
    healthy("temperature-low", sampling={"temperature": 0.6}),
    healthy("temperature-high", sampling={"temperature": 1.3}),
    healthy("stop-strings", sampling={"stop": ["a", "e", "t"]}),
    healthy("mask-truncated", objective={"mask_truncated": True}),
    healthy("overlong-penalty", objective={"overlong_buffer": 10, "overlong_penalty": 0.3}),
    healthy("learning-to-be-short", rewards=[reward("shortness")]),
    healthy("two-rewards", rewards=[reward("even_share"), reward("shortness", weight=0.3)]),
    healthy("rewards-below-zero", rewards=[reward("penalty")]),
    healthy("rewards-of-a-hundred", rewards=[reward("hundredfold")]),
    healthy("rewards-sometimes-none", rewards=[reward("now_and_then")]),
    healthy("four-prompts", few_prompts),
    healthy("lora-async", model={"lora_rank": 4}, optimizer={"learning_rate": 1e-3}, rollout={"max_staleness": 1}),
    healthy("sequence-weights", objective={"importance_level": "sequence", "importance_high": 4.0}),
    healthy("no-correction-on-policy", objective={"importance_action": "off"}),
    healthy("warmup-cosine", optimizer={"warmup_steps": 5, "schedule": "cosine"}),
    healthy("weight-decay", optimizer={"weight_decay": 0.01}),
    healthy("tight-clip-of-gradients", optimizer={"max_grad_norm": 0.05}),
    healthy("small-learning-rate", optimizer={"learning_rate": 1e-5}),
    healthy("entropy-bonus", objective={"entropy_bonus": 0.002}),
    healthy("high-entropy-tokens-only", objective={"entropy_quantile": 0.5}),
    healthy("evaluated", eval={"prompts": 6, "every": 6}),
    healthy("checkpointing-memory", model={"gradient_checkpointing": True}),
    healthy("one-step", run={"steps": 1}),
    healthy("three-steps", run={"steps": 3}),
)
