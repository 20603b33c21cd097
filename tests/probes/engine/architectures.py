"""Small random models of several architectures, that behave: every weight matters, and vLLM's CPU kernels accept them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from leadline.model_sources import read_tokenizer
from leadline.models import Loaded
from leadline.settings.model import Model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 12,
    "long_factor": [1.1, 1.3, 1.6, 2.0, 2.6, 3.5, 5.0, 8.0, 12.0, 18.0, 25.0, 32.0],
    "original_max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": {**ROPE, "rope_theta": 500000.0}}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "phi3-partial": ("Phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.75}}),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONG_ROPE, "max_position_embeddings": 2048, "original_max_position_embeddings": 512},
    ),
    "nemotron": ("Nemotron", {"hidden_act": "relu2", "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "gemma2": (
        "Gemma2",
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "tie_word_embeddings": True,  # vLLM knows no other
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
}
EAGER = {"gemma2"}
"""Whose own attention in transformers is eager."""


def architecture(name: str, seed: int = 0) -> Loaded:
    """A random model of the family on the byte tokenizer; a fresh one at each call."""
    kind, options = FAMILIES[name]
    tokenizer = read_tokenizer(Model(name="tiny"))
    shape = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **{**SIZES, **options},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = getattr(transformers, f"{kind}ForCausalLM")._from_config(
            shape, attn_implementation="eager" if name in EAGER else "sdpa"
        )
        _behave(made.float())
    return Loaded(made.eval(), tokenizer, frozenset({tokenizer.eos_token_id}), shape.max_position_embeddings)


def _behave(model: Any) -> None:
    """Weights of a size at which attention is not uniform, and logits of a standard deviation of about 2."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    offset = 1.0 if model.config.model_type in ("nemotron", "gemma2") else 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if "norm" in name:
                parameter.copy_(1 - offset + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * 1.3 / parameter.shape[-1] ** 0.5)
        if head is embedding:
            embedding.copy_(torch.randn(embedding.shape) * 2 / embedding.shape[1] ** 0.5)
        else:
            embedding.copy_(torch.randn(embedding.shape))
            head.copy_(torch.randn(head.shape) * 2 / head.shape[1] ** 0.5)


def moved(loaded: Loaded, seed: int, share: float = 0.15) -> dict[str, Tensor]:
    """The weights, each tensor a share of its size away: what some updates do."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + share * p.detach().std().nan_to_num(0).clamp(min=0.05) * torch.randn(p.shape, generator=draw)
        for name, p in loaded.model.named_parameters()
    }


def holding(loaded: Loaded, weights: dict[str, Tensor], seed: int = 0) -> nn.Module:
    """A model of the same architecture with these weights."""
    other: Any = type(loaded.model)._from_config(
        loaded.model.config, attn_implementation=loaded.model.config._attn_implementation
    )
    own = dict(loaded.model.named_parameters())  # a tied head once: its alias would put the old one back
    other.load_state_dict({**own, **weights}, strict=False)
    other.tie_weights()
    return other.eval()


def saved(loaded: Loaded, directory: Path) -> Path:
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    return directory


def prompts(count: int, length: int = 40, vocab: int = 260) -> Iterator[tuple[int, ...]]:
    """Random prompts that begin with BOS (id 1) and hold no other special token."""
    draw = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield (1, *torch.randint(4, vocab, (length - 1,), generator=draw).tolist())
