"""A real tokenizer without a download: one token per byte, and the special tokens the tests need."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None, bos: bool = False) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=["<answer>", "</answer>"],
    )
    fast.chat_template = chat_template
    if bos:
        _add_bos(fast)
    return fast


def _add_bos(fast: PreTrainedTokenizerFast) -> None:
    from tokenizers.processors import TemplateProcessing

    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", fast.bos_token_id)]
    )
