"""A step as its run has recorded it: the black box, the settings of that time and the row of metrics."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leadline.config import Config, parse_config
from leadline.errors import ConfigError, RunDirError
from leadline.metrics import LEDGER_STAGES
from leadline.policy.batch import Batch, build_batch
from leadline.policy.optimizer import Outcome
from leadline.policy.step_loss import Scores
from leadline.run_dir import read_metrics
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

BLACKBOX = "blackbox"
NEEDED = ("token_ids", "lost_at", "prompt_ids", "rollout_logprobs")


@dataclass(frozen=True, slots=True)
class Seen:
    """What the model said in one optimizer step. Entry t belongs to token t of the batch; NaN where it saw nothing."""

    forwarded: Bool[Tensor, " token"]
    scores: Scores
    old_logprobs: Float[Tensor, " token"]
    ref_logprobs: Float[Tensor, " token"]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Recorded:
    """One step of a run."""

    run: Path
    step: int
    config: Config
    """As it was when the step was made."""
    groups: tuple[Group, ...]
    replaced: frozenset[int]
    """The groups that a refill stood in for."""
    seen: Mapping[int, Seen]
    """By optimizer step, those without any gradient left out."""
    row: Mapping[str, float]
    """The metrics that the run has written."""

    def batch(self, config: Config) -> Batch:
        """The step's batch, as these settings would have made it."""
        return build_batch(self.groups, config, self.step - 1, replaced=self.replaced)


def recorded_steps(run: Path) -> list[int]:
    """The steps whose black boxes are there, oldest first. Raises RunDirError: the directory holds no run."""
    if not (run / "config.json").is_file():
        raise RunDirError(
            f"RUN is {str(run)!r}, but there is no config.json of a run. There is nothing to replay. Give the directory of "
            "a run (run.dir of its recipe)."
        )
    if "sft" in json.loads((run / "config.json").read_text()):
        raise RunDirError(
            f"RUN is {str(run)!r}, but it is a fine-tuning run. Its loss has no rewards, weights or ledger that could be "
            "otherwise. Give the directory of a reinforcement learning run."
        )
    digits = (path.stem.removeprefix("step_") for path in (run / BLACKBOX).glob("step_*.safetensors"))
    return sorted(int(word) for word in digits if word.isdigit())


def read_step(run: Path, step: int | None) -> Recorded:
    """The step, or the last one that has a black box. Raises RunDirError: it is not there or cannot be read."""
    steps = recorded_steps(run)
    if not steps:
        raise RunDirError(
            f"RUN is {str(run)!r}, but it keeps no black box. Its steps cannot be replayed. Set run.blackbox_steps (3 by "
            "default) in the next run; steps that are discarded are always kept."
        )
    if step is None:
        step = steps[-1]
    if step not in steps:
        raise RunDirError(
            f"--step is {step}, but {str(run)!r} keeps black boxes of the steps {', '.join(map(str, steps))} only. The "
            "tokens of the others are gone. Choose one of these, or set run.blackbox_steps higher in the next run."
        )
    return _read(run, step)


def _read(run: Path, step: int) -> Recorded:
    path = run / BLACKBOX / f"step_{step:06d}.safetensors"
    try:
        tensors = load_file(path)
        sidecar = json.loads(path.with_suffix(".json").read_text())
        missing = [name for name in NEEDED if name not in tensors]
        if missing or "config" not in sidecar:
            raise ValueError(f"it lacks {', '.join([*missing, 'config'][:1])}: another version of leadline wrote it")
        config = parse_config(sidecar["config"])
        rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] == step]
        groups = tuple(_groups(tensors, sidecar["info"], step))
    except (OSError, ValueError, KeyError, SafetensorError, ConfigError) as error:
        raise RunDirError(
            f"--step is {step}, but its black box {str(path)!r} cannot be read ({error}). The step cannot be replayed. "
            "Choose another step."
        ) from error
    return Recorded(run, step, config, groups, _replaced(tensors), _seen(tensors), rows[-1] if rows else {})


def _groups(tensors: Mapping[str, Tensor], info: Mapping[str, Any], step: int) -> Iterator[Group]:
    """The groups of the batch, each token with the version that drew it."""
    owner, group_of = tensors["completion_of_token"], tensors["group_of_completion"].tolist()
    lengths = torch.bincount(owner, minlength=len(group_of)).tolist()
    versions = (step - 1 - tensors["staleness"]).tolist()
    ids, logprobs = tensors["token_ids"].tolist(), tensors["rollout_logprobs"].tolist()
    rollouts: dict[int, list[Rollout]] = {}
    start = 0
    for place, (group, length) in enumerate(zip(group_of, lengths, strict=True)):
        part = slice(start, start + length)
        reason = FinishReason(info["finish_reasons"][place])
        completion = Completion(tuple(ids[part]), tuple(logprobs[part]), tuple(versions[part]), reason)
        rollouts.setdefault(group, []).append(Rollout(completion, "", reward=float(tensors["rewards"][place])))
        start += length
    for group, members in rollouts.items():
        prompt = tensors["prompt_ids"][tensors["group_of_prompt_token"] == group].tolist()
        yield Group(Prompt(group, info["prompts"][group], tuple(prompt)), members, replayed=group in info["replayed"])


def _replaced(tensors: Mapping[str, Tensor]) -> frozenset[int]:
    """Groups none of whose scored tokens is in the loss, though nothing else kept a completion of theirs out."""
    kept_out = torch.tensor([LEDGER_STAGES.index("failed"), LEDGER_STAGES.index("truncated")])
    eligible = ~torch.isin(tensors["lost_at"], kept_out)[tensors["completion_of_token"]]
    eligible &= ~tensors["rollout_logprobs"].isnan()
    group_of_token = tensors["group_of_completion"][tensors["completion_of_token"]]
    could = set(group_of_token[eligible].tolist())
    does = set(group_of_token[eligible & tensors["loss_mask"]].tolist())
    return frozenset(could - does)


def _seen(tensors: Mapping[str, Tensor]) -> dict[int, Seen]:
    if "seen_tokens" not in tensors:
        return {}
    count = len(tensors["token_ids"])
    seen = {}
    for row, place in enumerate(tensors["step_optimizer_step"].tolist()):
        here = tensors["seen_optimizer_step"] == place
        tokens = tensors["seen_tokens"][here]
        spread = {
            name: torch.full((count,), torch.nan).index_copy(0, tokens, tensors[f"seen_{name}"][here].float())
            for name in ("logprobs", "entropies", "old_logprobs", "ref_logprobs")
        }
        numbers = {
            name: float(tensors[f"step_{name}"][row]) for name in ("grad_norm", "grad_norm_clipped", "update_norm")
        }
        outcome = Outcome(discarded=bool(tensors["step_discarded"][row]), **numbers)
        scores = Scores(spread["logprobs"], spread["entropies"])
        forwarded = torch.zeros(count, dtype=torch.bool).index_fill(0, tokens.long(), True)
        seen[place] = Seen(forwarded, scores, spread["old_logprobs"], spread["ref_logprobs"], outcome)
    return seen
