"""The weights of one version as they are sent to a server, and what the server must say about them afterwards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadline.engines.vllm_worker import fingerprints
from leadline.models import is_adapter, is_lora
from leadline.types import Weights

PROBE_PROMPT = 160
"""Tokens before the first probe: more than a cache block (16 on a GPU, 128 on a CPU)."""
PROBES = 8
PROBE_TOP = 5
"""Logprobs compared per probe: those of the most probable tokens, and of the one that was drawn."""

Score = Callable[[Weights, Sequence[int]], Tensor]
"""Weights, token ids -> logprobs [token, vocab] of what follows each of them; temperature 1, nothing else applied."""


def policy_score(model: nn.Module) -> Score:
    """The policy's own scoring, in its dtype.

    A model on the CPU scores the weights it is given, and one with an adapter the adapter it is given, so that it may be
    trained meanwhile. One with weights into which its adapter was merged, or all of whose weights lie on an accelerator
    (where there is no room for a second copy), scores as it is.
    """
    device = next(model.parameters()).device

    def score(weights: Weights, token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(token_ids)], device=device)
        as_it_is = not is_adapter(weights) and (is_lora(model) or device.type != "cpu")
        names = {} if as_it_is else {name: name.replace(".default.", ".") for name, _ in model.named_parameters()}
        own = {name: weights[sent].to(device) for name, sent in names.items() if sent in weights}
        with torch.no_grad():
            output = torch.func.functional_call(model, own, kwargs={"input_ids": ids, "use_cache": False})
        logprobs: Tensor = output.logits[0].float().log_softmax(-1).cpu()
        return logprobs

    return score


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one version as they are sent, and what the server must say about them."""

    weights: Weights
    """What it was taken of: the same object again needs no second snapshot."""
    version: int
    path: Path
    """A safetensors file, in memory where the system has such a place."""
    tensors: Mapping[str, Tensor]
    fingerprints: Mapping[str, int]
    dtype: str
    expected: Tensor
    """[probe, vocab] logprobs by the policy."""


def take_snapshot(
    weights: Weights, version: int, *, path: Path, score: Score, probe_ids: Sequence[int], model: nn.Module | None
) -> Snapshot:
    """Write the weights to `path` and score the probes with them. `model` knows the names of its checkpoints."""
    from safetensors.torch import load_file, save_file

    tensors = plain_tensors(weights, None if is_adapter(weights) else model)
    path.unlink(missing_ok=True)  # not written over: workers may still have the last one mapped
    save_file(tensors, path)
    coarsest = max((tensor.dtype for tensor in tensors.values()), key=_epsilon)
    rows = score(weights, probe_ids)[PROBE_PROMPT - 1 : PROBE_PROMPT - 1 + PROBES]
    dtype = str(coarsest).removeprefix("torch.")
    return Snapshot(weights, version, path, load_file(path), fingerprints(tensors), dtype, rows)


def probe_ids(vocab_size: int) -> list[int]:
    """The same tokens in every push: what an old version left in a cache would be found again."""
    draw = torch.Generator().manual_seed(20)
    return torch.randint(vocab_size, (PROBE_PROMPT + PROBES,), generator=draw).tolist()


def plain_tensors(weights: Weights, model: nn.Module | None) -> dict[str, Tensor]:
    """Each tensor once, on the CPU, under the name it has in a checkpoint; an alias (a tied head) is left out."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    unique: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if place not in seen or not tensor.numel():
            unique[name] = tensor.detach()
        seen.add(place)
    if model is not None:
        unique = _checkpoint_names(model, unique)
    return {name: tensor.cpu().contiguous() for name, tensor in unique.items()}


def _checkpoint_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers fuses some tensors when it loads (experts of one layer into one); checkpoints and vLLM do not."""
    from transformers.core_model_loading import revert_weight_conversion

    plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    converted: dict[str, Tensor] = revert_weight_conversion(plain, tensors)
    return converted


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
