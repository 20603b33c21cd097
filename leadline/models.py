"""Models and tokenizers: where they come from, what the trainer changes about them, and how they are saved."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadline.errors import ModelError
from leadline.model_sources import add_special_tokens, own_tokenizer, read_model, seeded
from leadline.policy.attention import recomputing_contexts
from leadline.settings.model import Model as ModelSettings


@dataclass(frozen=True)
class Loaded:
    """A causal language model on its device, without dropout, and what belongs to it.

    Example:
        Loaded(model, tokenizer, eos_ids=frozenset({2}), context_length=8192)
    """

    model: nn.Module
    tokenizer: Any
    eos_ids: frozenset[int]
    """Every id that ends a completion: of the generation config, the config and the tokenizer."""
    context_length: int | None
    """Most tokens of prompt and completion together; None = the model states no limit."""
    new_tokens: tuple[str, ...] = ()
    """Of `model.add_special_tokens`, those that the model's source does not have."""


def load_model(settings: ModelSettings, seed: int = 0) -> Loaded:
    """The model of `settings`, ready to train: right dtype and device, dropout 0, LoRA adapter if asked for.

    `seed` decides the weights of `tiny` and of a fresh adapter. Raises ModelError.
    """
    model, tokenizer = read_model(settings, seed), own_tokenizer(settings)
    if len(tokenizer) > (rows := model.get_input_embeddings().num_embeddings):
        raise ModelError(
            f"model.tokenizer is {settings.tokenizer or settings.name!r}, but it has {len(tokenizer)} tokens and the "
            f"model embeds {rows}. Some prompts would be out of range. Use the model's own tokenizer."
        )
    before = {token: tokenizer(token, add_special_tokens=False)["input_ids"] for token in settings.add_special_tokens}
    new_ids = add_special_tokens(tokenizer, settings.add_special_tokens)
    if new_ids:
        spelled = {id: before[tokenizer.convert_ids_to_tokens(id)] for id in new_ids}
        _embed_new_tokens(model, spelled, len(tokenizer), settings)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # some tools insist on one; here nothing is inferred from it
    eos_ids = _eos_ids(model, tokenizer)
    context_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    remove_dropout(model)
    model.to(_device(settings.device))
    trained = _with_adapter(model, settings, seed) if settings.lora_rank else model
    if settings.gradient_checkpointing:
        # The newer name first. The non-reentrant kind reaches an adapter although the inputs need no gradient.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": recomputing_contexts})
    return Loaded(trained, tokenizer, eos_ids, context_length, tuple(tokenizer.convert_ids_to_tokens(list(new_ids))))


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights under their plain Hugging Face names, W + (alpha / r) B A where a LoRA adapter is (Hu et al. 2021).

    Without an adapter the tensors are the model's own; with one, adapted matrices are new and the model is unchanged.
    """
    if not is_lora(model):
        return dict(model.state_dict())
    base: Any = model.base_model
    plain = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.model.state_dict().items()
        if ".lora_" not in name
    }
    for name, module in base.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            plain[f"{name}.weight"] = _merged(module)
    return plain


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the LoRA adapter alone, under the names that peft gives them in a file."""
    from peft import get_peft_model_state_dict

    return {name: t.detach() for name, t in get_peft_model_state_dict(model, save_embedding_layers=False).items()}


def is_adapter(weights: Mapping[str, Any]) -> bool:
    """Whether these are the tensors of a LoRA adapter alone."""
    return bool(weights) and all(".lora_" in name for name in weights)


def save_model(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    """`directory` holds a plain Hugging Face model with its tokenizer; a LoRA adapter is merged, and also in `adapter/`."""
    if is_lora(model):
        model.save_pretrained(directory / "adapter", save_embedding_layers=False)  # type: ignore[operator]
    plain_model(model).save_pretrained(directory, state_dict=merged_weights(model))
    tokenizer.save_pretrained(directory)


def plain_model(model: nn.Module) -> Any:
    """The transformers model inside, whether or not peft wraps it."""
    return model.base_model.model if is_lora(model) else model  # type: ignore[union-attr]


def is_lora(model: nn.Module) -> bool:
    """Whether the model is wrapped by peft."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def remove_dropout(model: nn.Module) -> None:
    """Every dropout probability is 0: the policy that is trained is the policy that sampled."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    for part in {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values():
        for name, value in vars(part).items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)


def _embed_new_tokens(model: Any, spelled: Mapping[int, Sequence[int]], tokens: int, settings: ModelSettings) -> None:
    """Rows of the embedding and of the head for the ids in `spelled`: the mean of the rows of the tokens that spelled each.

    Rows that began alike (as the mean of all, say) would be learned only as fast as they drift apart.

    Raises ModelError: the rows would never be trained.
    """
    if settings.lora_rank:
        raise ModelError(
            f"model.add_special_tokens is {list(settings.add_special_tokens)}, which the model lacks, but "
            f"model.lora_rank is {settings.lora_rank}, and an adapter leaves embeddings as they are. The new tokens could "
            "not be told apart. Train them in without an adapter first (leadline sft), and go on from that model."
        )
    rows = [
        {id: tensor[list(pieces)].detach().float().mean(0) for id, pieces in spelled.items()}
        for tensor in _by_token(model)
    ]
    if tokens > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(tokens, mean_resizing=False)
    with torch.no_grad():
        for tensor, new in zip(_by_token(model), rows, strict=True):
            for id, row in new.items():
                tensor[id] = row.to(tensor.dtype)


def _by_token(model: Any) -> list[Tensor]:
    """What has a row for each token of the vocabulary: the embedding, the head, and the head's bias if there is one."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return [model.get_input_embeddings().weight, head.weight, *([] if bias is None else [bias])]


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    sources = (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    )
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list | tuple) else () if source is None else (source,))
    return frozenset(int(i) for i in ids)


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def _with_adapter(model: Any, settings: ModelSettings, seed: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules=list(settings.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with seeded(seed), warnings.catch_warnings():
            # peft asks transformers for a property that newer versions have renamed
            warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
            wrapped: nn.Module = get_peft_model(model, adapter)
    except ValueError as error:
        raise ModelError(
            f"model.lora_targets is {list(settings.lora_targets)}, but peft finds no such modules in the model: {error} "
            "No adapter could be trained. Name linear layers of the model, or leave it empty for all of them."
        ) from error
    return wrapped


def _merged(module: Any) -> Tensor:
    """W + the deltas of the active adapters, added in float32."""
    with torch.no_grad():
        weight: Tensor = module.get_base_layer().weight
        deltas = [module.get_delta_weight(adapter).float() for adapter in module.active_adapters]
        return sum(deltas, weight.float()).to(weight.dtype)
