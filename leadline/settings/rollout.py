"""What samples, how, and how far ahead."""

from typing import Literal

from pydantic import Field

from leadline.settings.section import Dtype, Section, Strings


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

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class EngineSettings(Section):
    """What samples."""

    kind: Literal["hf", "scripted", "vllm", "vllm_inprocess"] = "hf"
    """`hf`: transformers in this process. `vllm`: vLLM servers. `vllm_inprocess`: vLLM in this process, on the trainer's
    own device. `scripted`: replays a script, for tests and --dry-run."""
    dtype: Dtype | None = None
    """hf: sample from a copy of the weights in this dtype. None = the policy's own weights (a copy when
    `rollout.max_staleness` > 0, for then it samples while they change)."""
    max_batch: int = Field(128, ge=1)
    """hf, vllm_inprocess: most completions decoded at once. vllm: most under way on one server (a larger group goes
    alone)."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """vllm without urls, vllm_inprocess: memory for keys and values. None = on a CPU 0.5; on an accelerator what is left
    of it for a server (which then cannot share it with the trainer), and 4 in process."""
    urls: Strings = ()
    """vllm: addresses of the servers; empty = start one. An API key is taken from the environment: VLLM_API_KEY."""
    model_name: str | None = None
    """vllm: the name under which the servers serve the policy. None = the only one they serve."""
    request_timeout_s: float = Field(600.0, gt=0)
    """vllm: a group that takes longer is asked for again, elsewhere if there is another server."""
    patience_s: float = Field(300.0, ge=0)
    """vllm: how long a run waits for a server to answer again before it stops."""
    on_new_weights: Literal["continue", "drain"] = "continue"
    """vllm, vllm_inprocess: completions under way keep their tokens and go on with the new weights, or are finished
    first."""
    lora: Literal["merge", "push"] = "merge"
    """vllm with model.lora_rank: what a server is given. `merge`: the base with the adapter merged into it. `push`: the
    adapter alone, a small part of the bytes; the server must have been started with `leadline serve --lora-rank`."""
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
    replay_max_staleness: int = Field(0, ge=0)
    """Groups with signal are kept until their tokens are so many steps old, and each may stand in once for a group without
    signal (that no refill has replaced). Above max_staleness. 0 = no replay."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """A step in which more rollouts than this failed (reward raised or timed out, engine aborted) stops the run."""
    max_steps_without_signal: int = Field(20, ge=1)
    """So many steps in a row without any signal stop the run."""
