"""How much memory a run will take, forecast before it starts, and the budget of tokens that fits into it.

What autograd keeps of a forward pass is counted on two short rows of the recipe's own proportions and grows linearly with
them: right for any architecture, dtype, adapter, and with recomputation, without a formula for each.
"""

import bisect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from leadline.config import Config
from leadline.errors import TrainingError
from leadline.models import is_lora, plain_model
from leadline.objective.chunked import ACCELERATOR_SWEEP, SWEEP
from leadline.objective.truncated import AT_ONCE
from leadline.policy.batch import Batch, build_batch
from leadline.settings.optimizer import Optimizer as OptimizerSettings
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

T = TypeVar("T")

RESERVE = 0.75
"""Of what is free, how much an automatic budget may take: glibc leaves holes of up to a third of what an update's tensors hold
(measured on a CPU), a forecast of these is right within 15 %, and others need some memory too."""
LEAST_TOKENS = 16


class Scorer(Protocol):
    """What is asked of a policy here."""

    model: nn.Module
    config: Config
    reference: nn.Module | None
    head: Any
    """None = the whole logits of a row are computed."""
    budget: "Budget"

    def logprobs(self, batch: Batch, completions: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """The largest group of a step."""

    prompt: int
    completion: int
    group: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.group * self.completion


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes by what they hold. All of it is on the device of the policy."""

    always: Mapping[str, int]
    """weights, reference, masters, moments, engine copy."""
    updating: Mapping[str, int]
    """gradients, activations, and what the pass at work needs: at the fullest moment of an update."""
    sampling: Mapping[str, int]
    """keys and values: while the hf engine samples."""
    overlapping: bool
    """The engine samples while the policy is updated."""
    free: int
    """Free on the device now, without what `always` names already holds."""
    tokens_per_micro: int

    @property
    def total(self) -> int:
        """The most at any time."""
        phases = (sum(self.updating.values()), sum(self.sampling.values()))
        return sum(self.always.values()) + (sum(phases) if self.overlapping else max(phases))

    def text(self) -> str:
        """One line: the total, and its parts by size."""
        parts = {**self.always, **self.updating, **self.sampling}
        named = ", ".join(f"{name} {size(n)}" for name, n in sorted(parts.items(), key=lambda part: -part[1]) if n)
        return (
            f"memory forecast: at most {size(self.total)} with optimizer.tokens_per_micro = {self.tokens_per_micro} "
            f"({named}); {size(self.free)} free"
        )


def forecast(policy: Scorer, shape: Shape, tokens_per_micro: int) -> Forecast:
    """What a run of this policy takes with micro-batches of `tokens_per_micro` tokens, groups being of this shape.

    Bytes that live tensors hold. What an allocator holds besides is not in them: see `RESERVE`.
    """
    return _forecast(policy, shape, tokens_per_micro, _kept_by_autograd(policy, shape))


def _forecast(policy: Scorer, shape: Shape, tokens_per_micro: int, kept: "Kept") -> Forecast:
    config, model = policy.config, policy.model
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p for p in trained if p.dtype != torch.float32]
    hf = config.engine.kind == "hf"
    return Forecast(
        always={
            "weights": _bytes(model.parameters()),
            "reference": _bytes(policy.reference.parameters()) if policy.reference is not None else 0,
            "masters": 4 * sum(p.numel() for p in masters),
            "moments": 8 * sum(p.numel() for p in trained),
            "engine copy": _engine_copy(model, config) if hf else 0,
        },
        updating=_fullest_moment(policy, shape, tokens_per_micro, kept),
        sampling={"keys and values": _cache_bytes(model, config, shape) if hf else 0},
        overlapping=hf and config.rollout.max_staleness > 0,
        free=free_bytes(next(model.parameters()).device),
        tokens_per_micro=tokens_per_micro,
    )


def fitting_budget(policy: Scorer, shape: Shape) -> int:
    """The most tokens of a micro-batch that fit into what is free, at most those of a step, at least one completion's.

    The weights are loaded already when this is asked; what else stays, and a gradient, must fit beside the activations.
    """
    most = shape.tokens * policy.config.rollout.groups_per_step
    kept = _kept_by_autograd(policy, shape)
    whole = _forecast(policy, shape, most, kept)
    room = RESERVE * whole.free + sum(whole.always[name] for name in ("weights", "reference", "masters"))
    if whole.total <= room:
        return most
    fits = bisect.bisect_right(range(most), room, key=lambda tokens: _forecast(policy, shape, tokens, kept).total) - 1
    return max(fits, shape.prompt + shape.completion)


def plan_memory(policy: Scorer, prompts: Sequence[Prompt]) -> Forecast:
    """The forecast of a run on prompts like these, with the budget that it is to have: an automatic one is set here."""
    config = policy.config
    shape = Shape(max(len(p.token_ids) for p in prompts), config.sampling.max_tokens, config.rollout.group_size)
    if policy.budget.automatic:
        policy.budget.tokens = fitting_budget(policy, shape)
    return forecast(policy, shape, policy.budget.tokens)


class Budget:
    """The tokens of a micro-batch. An automatic one is halved when memory runs out, and the work done again."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self.tokens = settings.first_tokens_per_micro
        self.automatic = settings.tokens_per_micro == "auto"

    def spend(self, work: Callable[[], T], *, undo: Callable[[], None]) -> T:
        """What `work` returns. It must be repeatable after `undo`: an update draws nothing at random.

        Raises TrainingError if memory runs out with a budget that is set, or that cannot be halved any more.
        """
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # its frames would keep the activations
            undo()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            if not self.automatic or self.tokens < 2 * LEAST_TOKENS:
                raise TrainingError(
                    f"optimizer.tokens_per_micro is {self.tokens}, but the memory of the device ran out in an update "
                    f"({str(failure).splitlines()[0][:120]}). The step is lost, the weights are as before it. Lower it, "
                    "or set it to 'auto', or set model.gradient_checkpointing = true."
                )
            self.tokens //= 2


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator said no: torch has a class for devices, and only a message for the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_bytes(device: torch.device) -> int:
    """Bytes that a process can still have on the device: of the machine's memory, its container's, or the device's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [_host_available(), _container_available()]
    return min(n for n in found if n is not None)


def size(count: int) -> str:
    """`1.3 GB`, `250 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


# What autograd keeps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """What a forward pass leaves for its backward pass, without logits: bytes a token, and bytes whatever the length."""

    per_token: float
    fixed: float
    recomputed: float
    """Bytes a token of one block, computed again in the backward pass; 0 if all blocks are kept."""

    def of(self, tokens: int) -> int:
        return math.ceil(self.fixed + self.per_token * tokens)


def _kept_by_autograd(policy: Scorer, shape: Shape) -> Kept:
    recomputing = policy.config.model.gradient_checkpointing
    per_token, fixed = _counted(policy, shape, recomputing=recomputing)
    if not recomputing:
        return Kept(per_token, fixed, 0.0)
    whole, _ = _counted(policy, shape, recomputing=False)
    blocks = plain_model(policy.model).config.get_text_config().num_hidden_layers
    return Kept(per_token, fixed, max(0.0, whole - per_token) / blocks)


def _counted(policy: Scorer, shape: Shape, *, recomputing: bool) -> tuple[float, float]:
    """(bytes a token, bytes whatever the length)."""
    counts = []
    for scale in (1, 2):
        batch = _short_batch(shape, scale, policy.config)
        counts.append((len(batch.token_ids) + len(batch.prompt_ids[0]), _kept(policy, batch, recomputing=recomputing)))
    (few, less), (many, more) = counts
    per_token = (more - less) / (many - few)
    return per_token, max(0.0, less - per_token * few)


def _short_batch(shape: Shape, scale: int, config: Config) -> Batch:
    """A group of the shape's proportions, with about 48 tokens times the scale."""
    shrink = scale * 48 / shape.tokens
    length = max(2 * scale, round(shape.completion * shrink))
    prompt = max(2 * scale, round(shape.prompt * shrink))

    def rollout(reward: float) -> Rollout:
        completion = Completion((3,) * length, (0.0,) * length, (0,) * length, FinishReason.EOS)
        return Rollout(completion, "", reward=reward)

    group = Group(Prompt(0, "", (3,) * prompt), [rollout(float(i)) for i in range(shape.group)])
    return build_batch([group], config, 0)


def _kept(policy: Scorer, batch: Batch, *, recomputing: bool) -> int:
    own = {_storage(p) for p in policy.model.parameters()}
    vocab = plain_model(policy.model).get_output_embeddings().weight.shape[0]
    kept: dict[int, Tensor] = {}  # the tensors too: a freed storage's address may come again

    def note(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own and vocab not in tensor.shape:  # logits do not grow like the rest
            kept[_storage(tensor)] = tensor
        return tensor

    with (
        _training_mode(policy.model, recomputing),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        scores = policy.logprobs(batch, batch.forwarded)
    del scores
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@contextmanager
def _training_mode(model: nn.Module, on: bool) -> Iterator[None]:
    """Transformers recomputes activations in training mode only."""
    model.train(on)
    try:
        yield
    finally:
        model.eval()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# The other parts ------------------------------------------------------------------------------------------------------


def _fullest_moment(policy: Scorer, shape: Shape, tokens_per_micro: int, kept: Kept) -> dict[str, int]:
    """Parts of an update when they are most: in the head's pass, or in a layer's, as the backward pass begins or ends.

    Before the first micro-batch has gone backward there are no gradients but those of the head.
    """
    optimizer = policy.config.optimizer
    step = math.ceil(shape.tokens * policy.config.rollout.groups_per_step / optimizer.minibatches)
    tokens = min(tokens_per_micro, step)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    masters = 4 * sum(p.numel() for p in trained if p.dtype != torch.float32)
    gradients = _bytes(trained) + masters
    head = [p for p in plain_model(policy.model).get_output_embeddings().parameters() if p.requires_grad]
    held = {"gradients": gradients if tokens < step else _bytes(head), "activations": kept.of(tokens)}
    layer = {"a layer's pass": _layer_bytes(policy.model, tokens, kept)}
    logits = _logits_bytes(policy, round(tokens * shape.group * shape.completion / shape.tokens))
    moments = (held | {"logits": logits}, held | layer, {"gradients": gradients} | layer)
    return max(moments, key=lambda parts: sum(parts.values()))


def _logits_bytes(policy: Scorer, predicted: int) -> int:
    """Of the head: matrices of a chunk's logits, or of all tokens'."""
    entries = predicted * int(plain_model(policy.model).get_output_embeddings().weight.shape[0])
    if policy.head is None:
        return 4 * WHOLE_LOGITS * entries
    parameter = next(policy.model.parameters())
    sweep = SWEEP if parameter.device.type == "cpu" else ACCELERATOR_SWEEP
    at_once = entries if entries <= 2 * sweep else sweep
    if policy.config.sampling.truncates:
        most = min(at_once, policy.config.sampling.top_k * predicted or at_once, sweep // AT_ONCE)
        return _truncated_bytes(policy, parameter.element_size(), at_once, most)
    product = 0 if parameter.dtype == torch.float32 else parameter.element_size()  # float32 logits take its place
    return (4 * _matrices(policy) + product) * at_once


WHOLE_LOGITS = 5
"""Matrices of all logits, in float32, where they are not computed by chunks."""


def _matrices(policy: Scorer) -> int:
    """How many of a chunk's logits in float32 there are at once: they and their gradient, or what autograd keeps."""
    if policy.head.softcap is not None:
        return 7
    return 3 if policy.config.objective.entropy_bonus != 0 else 2


def _truncated_bytes(policy: Scorer, product: int, logits: int, places: int) -> int:
    """Where sampling truncates: `product` bytes, a float32 and a flag a logit, and what finds the nucleus or is computed of
    each of the places in the supports."""
    sampling = policy.config.sampling
    nucleus = 8 * logits if sampling.top_p < 1 and sampling.top_k == 0 else 0
    place = 46 if sampling.repetition_penalty == 1 else 65
    return (product + 5) * logits + max(nucleus, place * places)


def _layer_bytes(model: nn.Module, tokens: int, kept: Kept) -> int:
    """Of one layer's backward pass: gradients of the widest activations, two at a time, and what is computed again."""
    config = plain_model(model).config.get_text_config()
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return round(tokens * (kept.recomputed + 2 * int(width) * next(model.parameters()).element_size()))


def _engine_copy(model: nn.Module, config: Config) -> int:
    own = next(model.parameters()).dtype
    wanted = own if config.engine.dtype is None else getattr(torch, config.engine.dtype)
    copies = config.rollout.max_staleness > 0 or wanted != own
    base = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
    return base * wanted.itemsize if copies or is_lora(model) else 0


def _cache_bytes(model: nn.Module, config: Config, shape: Shape) -> int:
    """Keys and values of every row that is decoded at once."""
    text = plain_model(model).config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rows = min(config.engine.max_batch, shape.group * config.rollout.groups_per_step)
    dtype = next(model.parameters()).dtype if config.engine.dtype is None else getattr(torch, config.engine.dtype)
    per_token = 2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize
    return int(rows * (shape.prompt + shape.completion) * per_token)


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _host_available() -> int:
    lines = Path("/proc/meminfo")
    if not lines.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = next(line for line in lines.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(found.split()[1]) * 1024


def _container_available() -> int | None:
    """By the limit of the control group, if there is one."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else int(limit) - int(used)
