"""Causes of a gap between engine and trainer, really induced: an engine that samples wrongly, or reports wrongly."""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from leadline.engines.hf import HFEngine
from leadline.models import Loaded
from leadline.probes.engine.attribute import PolicyModel
from leadline.probes.engine.drawn import Drawn, drawn_from
from leadline.probes.engine.variants import Holding
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.probes.engine.architectures import holding, moved, prompts

TOKENS = 24
COMPLETIONS = 9
ASKED = Sampling(max_tokens=TOKENS)
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Seam:
    """An engine and what the trainer believes of it. By default both are right."""

    loaded: Loaded
    asked: Sampling = ASKED
    drawn_with: Sampling | None = None
    """None = as asked."""
    model: Any = None
    """What the engine samples from; None = the policy."""
    dtype: Any = None
    prompt: Callable[[Ids], Ids] = tuple
    """What the engine makes of a prompt."""
    report: Callable[[Drawn], Drawn] = lambda drawn: drawn
    """What it makes of its logprobs."""
    draw: Callable[[Ids], Completion] | None = None
    """Instead of the hf engine."""
    known: dict[str, Any] = field(default_factory=dict)
    """What the probe is told besides."""


def drawn_across(seam: Seam) -> Drawn:
    """Completions of the seam's engine, under the prompts as the trainer knows them."""
    own = list(prompts(COMPLETIONS))
    asked = [Prompt(i, "", seam.prompt(ids)) for i, ids in enumerate(own)]
    if seam.draw is not None:
        completions = [seam.draw(prompt.token_ids) for prompt in asked]
    else:
        completions = asyncio.run(_hf(seam, asked))
    trainer = [Prompt(i, "", ids) for i, ids in enumerate(own)]
    return seam.report(drawn_from(list(zip(trainer, completions, strict=True))))


def probed(seam: Seam) -> PolicyModel:
    """The policy as the probe is given it."""
    return PolicyModel(seam.loaded.model, seam.loaded.tokenizer, seam.asked, **seam.known)


async def _hf(seam: Seam, asked: Sequence[Prompt]) -> list[Completion]:
    engine = HFEngine(
        seam.model or seam.loaded.model,
        tokenizer=seam.loaded.tokenizer,
        eos_ids=frozenset(),
        dtype=seam.dtype,
    )
    found = await asyncio.gather(*(engine.generate(p, 1, seam.drawn_with or seam.asked) for p in asked))
    await engine.close()
    return [completion for [completion] in found]


# What an engine reports -----------------------------------------------------------------------------------------------


def shifted(drawn: Drawn) -> Drawn:
    """Each completion's logprobs one place late, as if the prompt's last were the first of them."""
    late = [torch.cat([part[-1:], part[:-1]]) for part in drawn.engine.split(drawn.lengths.tolist())]
    return replace(drawn, engine=torch.cat(late))


def raw(loaded: Loaded) -> Callable[[Drawn], Drawn]:
    def report(drawn: Drawn) -> Drawn:
        values = [_plain(loaded.model, p, c) for p, c in zip(drawn.prompts, drawn.completions, strict=True)]
        return replace(drawn, engine=torch.cat(values))

    return report


def _plain(model: Any, prompt: Ids, completion: Ids) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)[torch.arange(len(completion)), list(completion)]


# What an engine computes ----------------------------------------------------------------------------------------------


def reconfigured(loaded: Loaded, **values: Any) -> Any:
    config = copy.deepcopy(loaded.model.config)
    for name, value in values.items():
        setattr(config, name, value)
    other = type(loaded.model)._from_config(config, attn_implementation=loaded.model.config._attn_implementation)
    other.load_state_dict(loaded.model.state_dict())
    return other.eval()


def rope(loaded: Loaded, **values: Any) -> Any:
    return reconfigured(loaded, rope_parameters={**loaded.model.config.rope_parameters, **values})


def stale_head(loaded: Loaded, old: dict[str, Tensor]) -> Any:
    """The head of the old weights on the new ones, tied or not."""
    other = copy.deepcopy(loaded.model)
    embedding = "model.embed_tokens.weight"
    head = old.get("lm_head.weight", old[embedding])
    other.config.tie_word_embeddings = False
    other.lm_head.weight = torch.nn.Parameter(head.clone())
    return other


def through_an_old_prefix(loaded: Loaded, old: Any, block: int) -> Callable[[Ids], Completion]:
    """Samples token by token, the whole blocks of the prompt seen by the old model."""
    draw = torch.Generator().manual_seed(3)

    def sample(prompt: Ids) -> Completion:
        cached = (len(prompt) - 1) // block * block
        cache = DynamicCache(config=loaded.model.config)
        ids, tokens, logprobs = torch.tensor([prompt]), [], []
        with torch.no_grad():
            old(input_ids=ids[:, :cached], cache=cache, use_cache=True)
            rest = ids[:, cached:]
            for _ in range(TOKENS):
                logits = loaded.model(input_ids=rest, cache=cache, use_cache=True).logits[0, -1]
                values = logits.double().log_softmax(-1)
                token = int(torch.multinomial(values.exp(), 1, generator=draw))
                tokens.append(token)
                logprobs.append(float(values[token]))
                rest = torch.tensor([[token]])
        return Completion(tuple(tokens), tuple(logprobs), (0,) * TOKENS, FinishReason.LENGTH)

    return sample


# The catalogue --------------------------------------------------------------------------------------------------------

HOT = Sampling(max_tokens=TOKENS, temperature=0.7)
Make = Callable[[Loaded], Seam]


def _knobs(**values: Any) -> Make:
    return lambda loaded: Seam(loaded, drawn_with=Sampling(max_tokens=TOKENS, **values))


def _stale(loaded: Loaded, model: Callable[[dict[str, Tensor]], Any], **values: Any) -> Seam:
    old = moved(loaded, 1)
    return Seam(loaded, model=model(old), known={"others": (Holding("of an older step", old),)}, **values)


def _adapter(loaded: Loaded, scale: float) -> Seam:
    base = moved(loaded, 2)
    merged = dict(loaded.model.named_parameters())
    weights = {name: base[name] + scale * (merged[name].detach() - base[name]) for name in base}
    return Seam(loaded, model=holding(loaded, weights), known={"base": base})


def _stale_experts(loaded: Loaded) -> Seam:
    def model(old: dict[str, Tensor]) -> Any:
        return holding(loaded, {name: w for name, w in old.items() if ".experts." in name})

    return _stale(loaded, model)


def _old_prefix(loaded: Loaded) -> Seam:
    old = moved(loaded, 1)
    draw = through_an_old_prefix(loaded, holding(loaded, old), 16)
    return Seam(loaded, draw=draw, known={"others": (Holding("of an older step", old),)})


def _norms(loaded: Loaded) -> Seam:
    names = {
        name: p.detach() - 1
        for name, p in loaded.model.named_parameters()
        if "norm" in name and name.endswith("weight")
    }
    return Seam(loaded, model=holding(loaded, names))


def _rounded(loaded: Loaded) -> Seam:
    return Seam(
        loaded, model=holding(loaded, {n: p.detach().bfloat16().float() for n, p in loaded.model.named_parameters()})
    )


SHORT_ROPE = [1.0] * 12
EVERYWHERE: dict[str, tuple[str, Make]] = {
    "nothing": ("noise", Seam),
    "nothing at temperature 0.7": ("noise", lambda m: Seam(m, asked=HOT)),
    "logprobs one place late": ("off_by_one", lambda m: Seam(m, report=shifted)),
    "logprobs to base 2": (
        "scaled_logprobs",
        lambda m: Seam(m, report=lambda d: replace(d, engine=d.engine / torch.log(torch.tensor(2.0)))),
    ),
    "raw logprobs at temperature 0.7": ("raw_logprobs", lambda m: Seam(m, asked=HOT, report=raw(m))),
    "raw logprobs at 0.7, top_p 0.9": (
        "raw_logprobs",
        lambda m: Seam(m, asked=Sampling(max_tokens=TOKENS, temperature=0.7, top_p=0.9), report=raw(m)),
    ),
    "temperature 0.7 for 1": ("temperature", _knobs(temperature=0.7)),
    "temperature 1 for 0.7": ("temperature", lambda m: Seam(m, asked=HOT, drawn_with=ASKED)),
    "top_p 0.9": ("top_p", _knobs(top_p=0.9)),
    "top_k 20": ("top_k", _knobs(top_k=20)),
    "min_p 0.1": ("min_p", _knobs(min_p=0.1)),
    "repetition_penalty 1.15": ("repetition_penalty", _knobs(repetition_penalty=1.15)),
    "defaults of generation_config.json": (
        "generation_config",
        lambda m: replace(
            _knobs(temperature=0.6, top_p=0.95, top_k=20)(m),
            known={"generation_config": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}},
        ),
    ),
    "BOS twice": ("bos", lambda m: Seam(m, prompt=lambda ids: (1, *ids))),
    "BOS missing": ("bos", lambda m: Seam(m, prompt=lambda ids: ids[1:])),
    "end of the prompt missing": ("prompt_tokens", lambda m: Seam(m, prompt=lambda ids: ids[:-2])),
    "adapter missing": ("adapter_missing", lambda m: _adapter(m, 0.0)),
    "adapter twice": ("adapter_scale", lambda m: _adapter(m, 2.0)),
    "old weights": ("stale_weights", lambda m: _stale(m, lambda old: holding(m, old))),
    "old head": ("stale_head", lambda m: _stale(m, lambda old: stale_head(m, old))),
    "old prefix cache": ("prefix_cache", _old_prefix),
    "norms less one": ("norm_offset", _norms),
    "weights rounded to bfloat16": ("weights_rounded", _rounded),
    "bfloat16": ("dtype", lambda m: Seam(m, dtype="bfloat16")),
    "bfloat16, as accepted": (
        "noise",
        lambda m: Seam(m, dtype="bfloat16", known={"dtypes": ("float32", "bfloat16")}),
    ),
}
SPECIAL: dict[str, tuple[str, str, Make]] = {
    "rope_theta lost": ("llama", "rope", lambda m: Seam(m, model=rope(m, rope_theta=10000.0))),
    "partial rotary lost, Phi-3": ("phi3-partial", "rope", lambda m: Seam(m, model=rope(m, partial_rotary_factor=1.0))),
    "partial rotary lost, Nemotron": ("nemotron", "rope", lambda m: Seam(m, model=rope(m, partial_rotary_factor=1.0))),
    "LongRoPE's long factors": (
        "phi3-longrope",
        "long_rope",
        lambda m: Seam(m, model=rope(m, short_factor=m.model.config.rope_parameters["long_factor"])),
    ),
    "attention soft cap dropped": (
        "gemma2",
        "soft_cap",
        lambda m: Seam(m, model=reconfigured(m, attn_logit_softcapping=None)),
    ),
    "final soft cap dropped": (
        "gemma2",
        "soft_cap",
        lambda m: Seam(m, model=reconfigured(m, final_logit_softcapping=None)),
    ),
    "sliding window ignored": (
        "mistral-window",
        "sliding_window",
        lambda m: Seam(m, model=reconfigured(m, sliding_window=500)),
    ),
    "old experts": ("qwen3-moe", "stale_experts", _stale_experts),
    "experts in bfloat16": ("qwen3-moe", "moe_routing", lambda m: Seam(m, dtype="bfloat16")),
}
"""Of one architecture each."""
COMMON = ("llama", "llama-tied", "qwen3", "phi3-partial", "nemotron", "gemma2")
"""Architectures on which every cause of EVERYWHERE is induced."""
