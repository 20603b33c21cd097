"""What kind of run it is, from its settings: adapter, engine, experts, asynchrony, precision."""

import re

from leadline.doctor.view import View


def uses_lora(run: View) -> bool:
    """An adapter is trained instead of all weights."""
    rank = run.number("model.lora_rank")
    if rank == rank:
        return rank > 0
    return run.says(r"(?<![a-z])(lora|qlora|peft|dora|adapter)") is not None


def uses_server_engine(run: View) -> bool:
    """Another implementation than the trainer's samples: vLLM, SGLang, TensorRT-LLM."""
    if run.setting("engine.kind") in ("vllm", "sglang", "trtllm"):
        return True
    return run.framework in ("verl", "openrlhf", "slime", "miles", "prime_rl", "areal", "skyrl", "nemo_rl") or (
        run.says(r"vllm|sglang") is not None
    )


def is_moe(run: View) -> bool:
    """The model's name says so, or an option about experts is set."""
    model = str(run.setting("model.name", ""))
    named = re.search(r"\d+b-a\d|moe|mixtral|deepseek-v[23]|expert", model.lower())
    return named is not None or run.says(r"\bmoe\b|experts?\b|router|\d+b-a\d") is not None


def is_async(run: View) -> bool:
    """The engine may run ahead of the trainer."""
    if run.number("rollout.max_staleness") > 0:
        return True
    stale = run.first_of("staleness/mean", "staleness/max").finite
    return bool(len(stale) and stale.high > 0)


def is_half(run: View) -> bool:
    """The weights are float16, whose range is small."""
    return run.setting("model.dtype") == "float16" or run.says(r"\b(fp16|float16|half)\b( = (true|1))?") is not None


def is_multi_turn(run: View) -> bool:
    """A rollout has several turns: tools, or an environment."""
    turns = run.first_of("rollout/turns_mean", "rollout/tool_calls_mean").finite
    if len(turns) and turns.high > 1:
        return True
    return run.says(r"\btools?\b|multi_?turn|\bagent|environment") is not None


def inner_updates(run: View) -> float:
    """Optimizer steps per batch of rollouts; NaN if it is not known."""
    epochs, parts = run.number("optimizer.epochs_per_batch"), run.number("optimizer.minibatches")
    if epochs != epochs and parts != parts:
        return float("nan")
    return (1 if epochs != epochs else epochs) * (1 if parts != parts else parts)


SUPPORT = ("sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.repetition_penalty")
"""Settings that cut or bend the sampled distribution, in a way that a trainer may not replay."""


def cuts(run: View, setting: str) -> bool:
    """The setting has a value that changes the sampled distribution."""
    value = run.number(setting)
    if setting == "sampling.top_p":
        return 0 < value < 1
    return value > 1 if setting == "sampling.repetition_penalty" else value > 0


def filters_support(run: View) -> bool:
    """Some setting cuts or bends the sampled distribution."""
    return any(cuts(run, setting) for setting in SUPPORT)


def is_async_engine(run: View) -> bool:
    """The engine runs on its own, so weights travel to it."""
    return uses_server_engine(run)


TOKEN_TRUNCATION = {
    "leadline": '`objective.importance_level = "token"` and `objective.importance_action = "truncate"`',
    "trl": '`vllm_importance_sampling_mode="token_truncate"`',
    "verl": "`algorithm.rollout_correction.rollout_is=token`, `rollout_is_threshold=2.0`",
    "openrlhf": "`--algo.advantage.is_correction_enable` (`is_correction_type` tis)",
    "slime": "`--use-tis --tis-clip 2.0`",
    "miles": "`--use-tis --tis-clip 2.0`",
    "nemo_rl": "`loss_fn.use_importance_sampling_correction=true`, `truncated_importance_sampling_ratio=2.0`",
    "skyrl": "`trainer.algorithm.off_policy_correction.tis_ratio_type=token`",
    "open_instruct": "`--use_rho_correction --rho_clamp_upper 2.0`",
    "prime_rl": "`loss.type` with token masking (`dppo`)",
    "areal": "`rejection_sampling` with level token and action clamp",
    "roll": "`infer_correction` with token weights",
}


def token_truncation(run: View) -> str:
    """How the run's framework is told to truncate importance weights per token."""
    return TOKEN_TRUNCATION.get(run.framework, TOKEN_TRUNCATION["leadline"])


def is_tiny(run: View) -> bool:
    """A model of a few million weights bears, and needs, rates far above the usual ones."""
    return (
        re.search(r"\btiny\b|\d+m\b|smollm|small.?test|internal-testing", str(run.setting("model.name", "")).lower())
        is not None
    )


def replays_sampling(run: View) -> bool:
    """The trainer applies the same temperature and filters as the engine, in the same program: leadline's own engines."""
    return run.framework == "leadline" and run.setting("engine.kind") in (None, "hf", "scripted")


def learning_rate(run: View) -> float:
    """The highest rate that was set or logged; NaN if neither is known."""
    logged, configured = run["optimizer/learning_rate"].finite.high, run.number("optimizer.learning_rate")
    return max((rate for rate in (logged, configured) if rate == rate), default=float("nan"))


def rate_bound(run: View) -> float:
    """The rate from which supervised fine-tuning begins: 1e-5 for all weights, 1e-4 for LoRA (which may be used)."""
    return 1.01e-4 if uses_lora(run) else 1e-5
