"""Small random models that vLLM's CPU kernels accept (heads of 32), on the byte tokenizer, saved as directories."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from leadline.model_sources import read_tokenizer
from leadline.models import Loaded, save_model
from leadline.settings.model import Model

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.08,
}


def llama(seed: int = 0, *, tied: bool, **sizes: Any) -> Loaded:
    return _loaded(LlamaForCausalLM, LlamaConfig, seed, tied, **{"intermediate_size": 128, **sizes})


def mixture(seed: int = 0) -> Loaded:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return _loaded(Qwen3MoeForCausalLM, Qwen3MoeConfig, seed, False, intermediate_size=128, **experts)


def saved(loaded: Loaded, directory: Path) -> Path:
    save_model(loaded.model, loaded.tokenizer, directory)
    return directory


def changed(loaded: Loaded, seed: int) -> Loaded:
    """Every tensor a tenth away: enough to be seen in each layer."""
    other: Any = type(loaded.model)(loaded.model.config).eval()
    other.load_state_dict(loaded.model.state_dict())
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=draw) * parameter.std().nan_to_num(0).clamp(min=0.1)
            parameter.add_(noise, alpha=0.3)
    return replace(loaded, model=other)


def _loaded(model: type[nn.Module], config: type[Any], seed: int, tied: bool, **sizes: Any) -> Loaded:
    tokenizer = read_tokenizer(Model(name="tiny"))
    settings = config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **{**SIZES, **sizes},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = model(settings)
        nn.init.normal_(made.lm_head.weight, std=1 / settings.hidden_size**0.5)
    return Loaded(made.eval(), tokenizer, frozenset({tokenizer.eos_token_id}), settings.max_position_embeddings)
