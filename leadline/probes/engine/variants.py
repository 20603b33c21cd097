"""Hypotheses about what the engine computes: other prompts, other weights, other settings of the same architecture.

Each is a way to get logits, so each costs a forward pass; they are tried when nothing cheaper explains the gap.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from leadline.probes.engine.scoring import Rows, rows_of

BLOCKS = (16, 128, 1)
"""Tokens in a block of a prefix cache: vLLM's on a GPU, on a CPU, and a radix tree's."""
THETAS = (1e4, 5e5, 1e6)
NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to get the logits that the engine may have had."""

    cause: str
    detail: str
    make: Callable[[], Rows]
    """May fail: not every architecture takes every setting."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Weights that the engine may hold instead of the policy's."""

    name: str
    weights: Mapping[str, Tensor]


# Prompts --------------------------------------------------------------------------------------------------------------


def by_prompt(model: Any, tokenizer: Any, prompts: Sequence[tuple[int, ...]]) -> Iterator[Variant]:
    """BOS twice, BOS not at all, and the prompt after a round through text."""
    plain = rows_of(model)
    bos = tokenizer.bos_token_id
    if bos is not None:
        yield _with_prompt(plain, "bos", "one BOS more", lambda prompt: [bos, *prompt])
        if any(prompt[:1] == (bos,) for prompt in prompts):
            yield _with_prompt(plain, "bos", "without the BOS", lambda p: p[1:] if p[0] == bos else p)

    def again(prompt: Sequence[int]) -> list[int]:
        return list(tokenizer.encode(tokenizer.decode(list(prompt)), add_special_tokens=False))

    def stripped(prompt: Sequence[int]) -> list[int]:
        text = tokenizer.decode(list(prompt), skip_special_tokens=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    for name, change in (("decoded and tokenised again", again), ("without its special tokens", stripped)):
        if any(tuple(change(prompt)) != prompt for prompt in dict.fromkeys(prompts)):
            yield _with_prompt(plain, "prompt_tokens", f"the prompt {name}", change)
    for cut in (1, 2, 3, 4):
        detail = f"without the last {cut} tokens of the prompt"
        yield _with_prompt(plain, "prompt_tokens", detail, lambda prompt, cut=cut: prompt[:-cut])  # type: ignore[misc]


def _with_prompt(plain: Rows, cause: str, detail: str, change: Callable[[Sequence[int]], Sequence[int]]) -> Variant:
    """The same tokens after a changed prompt; nothing to say where the change leaves none of it."""

    def rows(prompt: Sequence[int], completion: Sequence[int]) -> Tensor | None:
        changed = change(prompt)
        return plain(changed, completion) if changed else None

    return Variant(cause, detail, lambda: rows)


# Weights --------------------------------------------------------------------------------------------------------------


def by_weights(model: Any, others: Sequence[Holding]) -> Iterator[Variant]:
    """All, the head, or the experts from other weights; and a prompt cache that they left."""
    head, embedding = head_names(model)
    for other in others:
        weights = other.weights
        yield Variant("stale_weights", f"all weights are {other.name}", partial(rows_of, model, weights))
        if (old := weights.get(head, weights.get(embedding))) is not None:
            detail = f"the output head is {other.name}"
            yield Variant("stale_head", detail, partial(rows_of, model, {head: old}, untied=True))
        if experts := {name: w for name, w in weights.items() if ".experts." in name}:
            yield Variant("stale_experts", f"the experts are {other.name}", partial(rows_of, model, experts))
        for block in BLOCKS:
            detail = f"the prompt's keys and values are {other.name}, in blocks of {block}"
            yield Variant("prefix_cache", detail, partial(_with_old_prompt, model, weights, block))


def by_adapter(model: Any, base: Mapping[str, Tensor] | None) -> Iterator[Variant]:
    """The adapter not applied, halved, doubled; `base` are the weights below the merged ones of `model`."""
    if base is None:
        return
    merged = dict(model.named_parameters())
    yield Variant("adapter_missing", "the weights are those below the adapter", partial(rows_of, model, base))
    for scale in (0.5, 2.0):
        weights = {name: w + (scale - 1) * (w - base[name]) for name, w in merged.items() if name in base}
        yield Variant("adapter_scale", f"the adapter is applied {scale:g} times", partial(rows_of, model, weights))


def by_rounding(model: Any) -> Iterator[Variant]:
    """Weights in half precision under float32 arithmetic, and all of it in half precision."""
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        rounded = {n: p.to(dtype).to(p.dtype) for n, p in model.named_parameters()}
        yield Variant("weights_rounded", f"weights rounded to {name}", partial(rows_of, model, rounded))
        yield Variant("dtype", f"all of it in {name}", lambda dtype=dtype: rows_of(in_dtype(model, dtype)))  # type: ignore[misc]


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model whose parameters are in `dtype`; buffers (rotary frequencies) stay as they are."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(dtype)
    return other


def head_names(model: Any) -> tuple[str, str]:
    """The names of the output head's and the embedding's weights, tied or not."""
    names = {id(module): name for name, module in model.named_modules()}
    return (
        f"{names[id(model.get_output_embeddings())]}.weight",
        f"{names[id(model.get_input_embeddings())]}.weight",
    )


def _with_old_prompt(model: Any, old: Mapping[str, Tensor], block: int) -> Rows:
    """Whole blocks of the prompt are seen through the old weights, the rest through the new ones."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    device = next(model.parameters()).device
    before = {name: tensor.to(device) for name, tensor in old.items()}

    def rows(prompt: Sequence[int], completion: Sequence[int]) -> Tensor | None:
        cached = (len(prompt) - 1) // block * block
        if cached <= 0:
            return None
        ids = torch.tensor([[*prompt, *completion]], device=device)
        seen = {name: DynamicCache(config=model.config), "use_cache": True}
        with torch.no_grad():
            torch.func.functional_call(model, before, kwargs={"input_ids": ids[:, :cached], **seen})
            output = model(input_ids=ids[:, cached:], **seen)
        logits: Tensor = output.logits[0, len(prompt) - 1 - cached : -1].float().cpu()
        return logits

    return rows


# Settings of the architecture -----------------------------------------------------------------------------------------


def by_architecture(model: Any) -> Iterator[Variant]:
    """The same weights under settings that an engine may have lost or read in another way."""
    for cause, detail, values in _changed_settings(model.config):
        yield Variant(cause, detail, lambda values=values: rows_of(_rebuilt(model, values)))  # type: ignore[misc]
    norms = {name: p - 1 for name, p in model.named_parameters() if "norm" in name.lower() and name.endswith("weight")}
    if norms:
        yield Variant("norm_offset", "norm weights less 1", partial(rows_of, model, norms))
        more = {name: w + 2 for name, w in norms.items()}
        yield Variant("norm_offset", "norm weights plus 1", partial(rows_of, model, more))
    for name in {"eager", "sdpa"} - {model.config._attn_implementation}:
        yield Variant("attention", f"{name} attention", lambda name=name: rows_of(_with_attention(model, name)))  # type: ignore[misc]


def _changed_settings(config: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    yield from _rope_settings(config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            yield "soft_cap", f"{name} {getattr(config, name):g} is dropped", {name: None}
    if getattr(config, "sliding_window", None):
        yield "sliding_window", f"the window of {config.sliding_window} is ignored", {"sliding_window": NO_WINDOW}
    for name in ("logits_scaling", "logit_scale"):
        if getattr(config, name, 1.0) not in (None, 1.0):
            yield "logit_scale", f"{name} {getattr(config, name):g} is dropped", {name: 1.0}


def _rope_settings(config: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    theta, rotary = rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)
    plain = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary}
    if rope.get("rope_type") == "longrope":
        for name, other in (("long_factor", "short_factor"), ("short_factor", "long_factor")):
            yield "long_rope", f"{name} at every position", {"rope_parameters": {**rope, other: rope[name]}}
    if rope.get("rope_type", "default") != "default":
        yield "rope", f"the {rope['rope_type']} scaling is lost", {"rope_parameters": plain}
    for value in (value for value in THETAS if value != theta):
        changed = {"rope_parameters": {**rope, "rope_theta": value}}
        yield "rope", f"rope_theta {value:g} instead of {theta:g}", changed
    for value in (value for value in (1.0, 0.5) if value != rotary and rope.get("rope_type") != "longrope"):
        changed = {"rope_parameters": {**rope, "partial_rotary_factor": value}}
        yield "rope", f"partial_rotary_factor {value:g} instead of {rotary:g}", changed
    if theta != THETAS[0] and (rotary != 1.0 or rope.get("rope_type", "default") != "default"):
        lost = {"rope_parameters": {"rope_type": "default", "rope_theta": THETAS[0], "partial_rotary_factor": 1.0}}
        yield "rope", "theta, scaling and partial factor are all lost", lost


def _rebuilt(model: Any, values: Mapping[str, Any]) -> Any:
    """The model under other settings, with the very same parameters."""
    config = copy.deepcopy(model.config)
    for name, value in values.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):  # its fresh weights are thrown away, its draws must not be missed
        other = type(model)._from_config(config, attn_implementation=model.config._attn_implementation)
    other.to(next(model.parameters()).device).load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    return other.eval()


def _with_attention(model: Any, name: str) -> Any:
    """A copy with this implementation. Raises ValueError if the architecture has none of that name."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    return other
