"""Tiny random models of the families that transformers has, and which fast paths each takes.

python -m tests.families > docs/families.md
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from leadline.models import Loaded, load_model, remove_dropout
from leadline.policy.policy import Policy
from tests.builders import VOCABULARY, settings

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW: dict[str, Any] = {"sliding_window": 5}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model, small."""

    kind: str
    """As in LlamaForCausalLM."""
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    note: str = ""
    """What is special about it."""
    shares: bool = True
    """A group shares its prompt within a row."""
    chunks: bool = True
    """Logits are computed a chunk at a time."""


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama"),
    "llama-tied": Family("Llama", {"tie_word_embeddings": True}, note="head tied to the embedding"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "qwen3-moe": Family("Qwen3Moe", EXPERTS, note="experts"),
    "mistral": Family("Mistral", WINDOW, note="sliding window"),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, note="experts"),
    "phi": Family("Phi", {"partial_rotary_factor": 0.5}, note="bias on the head"),
    "phi3": Family("Phi3", WINDOW, note="sliding window"),
    "gemma": Family("Gemma"),
    "gemma2": Family(
        "Gemma2",
        {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "eager",
        "sliding window, soft caps on attention and logits",
    ),
    "gemma3": Family("Gemma3Text", WINDOW, note="sliding window"),
    "gemma4": Family(
        "Gemma4Text", {**WINDOW, "final_logit_softcapping": 3.0}, note="sliding window, soft cap on logits"
    ),
    "nemotron": Family("Nemotron"),
    "olmo": Family("Olmo"),
    "olmo2": Family("Olmo2"),
    "olmo3": Family("Olmo3", WINDOW, note="sliding window"),
    "granite": Family("Granite", {"logits_scaling": 2.0, "attention_multiplier": 0.2}, note="logits divided"),
    "cohere": Family("Cohere", {"logit_scale": 0.25}, note="logits multiplied"),
    "cohere2": Family("Cohere2", {**WINDOW, "logit_scale": 0.25}, note="sliding window, logits multiplied"),
    "gpt-neox": Family("GPTNeoX"),
    "gpt2": Family("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, note="learned positions"),
    "opt": Family("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}, note="learned positions"),
    "gpt-j": Family("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, note="bias on the head"),
    "smollm3": Family("SmolLM3"),
    "stablelm": Family("StableLm"),
    "starcoder2": Family("Starcoder2", WINDOW, note="sliding window"),
    "glm4": Family("Glm4"),
    "exaone4": Family("Exaone4", {**WINDOW, "sliding_window_pattern": 2}, note="sliding window"),
    "apertus": Family("Apertus"),
    "arcee": Family("Arcee"),
    "seed-oss": Family("SeedOss"),
    "hunyuan": Family("HunYuanDenseV1"),
    "ernie4.5": Family("Ernie4_5"),
    "deepseek-v3": Family("DeepseekV3", LATENT, note="latent attention, experts"),
    "gpt-oss": Family(
        "GptOss",
        {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
        "eager",
        "sliding window, attention sinks, experts",
    ),
    "llama4": Family(
        "Llama4Text", {"num_local_experts": 2, "attention_chunk_size": 8}, note="chunked attention", shares=False
    ),
    "falcon": Family("Falcon", {"alibi": False}, note="attention of its own", shares=False),
    "bloom": Family("Bloom", {"n_layer": 2, "n_head": 4}, "eager", "ALiBi", shares=False),
    "mamba": Family("Mamba", {"state_size": 4}, "eager", "recurrent", shares=False),
    "recurrent-gemma": Family(
        "RecurrentGemma",
        {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        note="recurrent, soft cap on logits",
        shares=False,
    ),
    "falcon-h1": Family(
        "FalconH1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "lm_head_multiplier": 0.5,
        },
        note="recurrent, logits multiplied",
        shares=False,
    ),
    "qwen3-next": Family(
        "Qwen3Next",
        {
            **EXPERTS,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
        note="recurrent, experts",
        shares=False,
    ),
    "lfm2": Family("Lfm2", {"layer_types": ["conv", "full_attention"]}, note="convolutions", shares=False),
}


def model_of(name: str) -> nn.Module:
    """A random model of the family, in float32, without dropout."""
    family = FAMILIES[name]
    config_class = getattr(transformers, f"{family.kind}Config")
    settable = {k: v for k, v in SMALL.items() if not isinstance(getattr(config_class, k, None), property)}
    shape = config_class(**(settable | family.options))
    torch.manual_seed(0)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    made: nn.Module = model_class._from_config(shape, attn_implementation=family.attention).float().eval()
    remove_dropout(made)
    return made


def policy_of(made: nn.Module, **sections: dict[str, Any]) -> Policy:
    """A policy of the model, which now has its fast paths."""
    config = settings(**sections)
    tiny = load_model(config.model)
    return Policy(Loaded(made, tiny.tokenizer, tiny.eos_ids, None), config)


def table() -> str:
    """docs/families.md."""
    rows = [
        f"| {name} | {family.note} | {_tick(family.shares)} | {_tick(family.chunks)} |"
        for name, family in FAMILIES.items()
    ]
    return "\n".join([HEADER, *rows]) + "\n"


def _tick(taken: bool) -> str:
    return "yes" if taken else "no"


HEADER = """# Which models take the fast path

A policy tries at its start, on a few random tokens, whether a fast path gives the model's own logprobs and gradients, and
takes it only then; what it does not take it says in one line. This table is what it finds for a tiny random model of each
family: `tests/policy/test_attention.py` makes each, and compares logprobs and the gradient of every parameter with those of each
sequence alone (2e-5 nats, 1e-5 relative). Generated by `python -m tests.families`.

*Shared prompt*: the completions of a group stand behind one copy of their prompt. Where it says no, sequences are forwarded
one by one. *Chunked logits*: no logits of more than a chunk exist, forward or backward. See [fast-path.md](fast-path.md).

| family | what is special | shared prompt | chunked logits |
| --- | --- | --- | --- |"""


if __name__ == "__main__":
    print(table(), end="")
