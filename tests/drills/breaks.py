"""What can be broken between the prompt and the importance weights: engines that lie, and the prompts they are given."""

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.objective.sampling import processed_logits
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt, Weights
from tests.drills.run import Parts

Change = Callable[[Prompt, Completion], Completion]


class Lying:
    """An engine whose answers, or whose weights, are changed on the way."""

    def __init__(
        self,
        inner: Engine,
        *,
        asked: Callable[[Sampling], Sampling] = lambda sampling: sampling,
        seen: Callable[[Prompt], Prompt] = lambda prompt: prompt,
        answers: Change = lambda prompt, completion: completion,
        loaded: Callable[[Weights, int], Weights] = lambda weights, version: weights,
    ) -> None:
        self.inner, self.asked, self.seen, self.answers, self.loaded = inner, asked, seen, answers, loaded

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        drawn = await self.inner.generate(self.seen(prompt), n, self.asked(sampling))
        return [self.answers(prompt, completion) for completion in drawn]

    async def load_weights(self, weights: Weights, version: int) -> None:
        await self.inner.load_weights(self.loaded(weights, version), version)

    async def close(self) -> None:
        await self.inner.close()


def lying(**lies: Any) -> Callable[[Parts], None]:
    def breaks(parts: Parts) -> None:
        parts.set_engine(Lying(parts.engine, **lies))

    return breaks


def own_engine(parts: Parts) -> HFEngine:
    """An engine with weights of its own, as a server has."""
    loaded = parts.policy.loaded
    return HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, own_copy=True)


def reports(new: Callable[[Sequence[float]], Sequence[float]]) -> Callable[[Parts], None]:
    """The engine says other logprobs than those of its draws."""
    return lying(answers=lambda prompt, c: replace(c, logprobs=tuple(new(c.logprobs))))


def off_by_one(logprobs: Sequence[float]) -> Sequence[float]:
    return [*logprobs[1:], *logprobs[:1]]


def unscored(share: float) -> Callable[[Parts], None]:
    draw = random.Random(1)
    return reports(lambda logprobs: [math.nan if draw.random() < share else value for value in logprobs])


@torch.no_grad()
def token_logits(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """One row for each completion token: the logits that it was drawn from."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def scored(model: nn.Module, prompt: Prompt, ids: Sequence[int], **processing: Any) -> tuple[float, ...]:
    """The logprobs of these tokens; raw (temperature 1, nothing cut) unless `processing` says otherwise."""
    if not ids:
        return ()
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    targets = torch.tensor(list(ids))
    logits = processed_logits(token_logits(model, prompt.token_ids, ids), **{**plain, **processing}, keep=targets)
    return tuple(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist())


def raw_logprobs(parts: Parts) -> None:
    """Sampled with temperature and filters, reported without: vLLM's default."""
    model = parts.policy.model

    def answer(prompt: Prompt, c: Completion) -> Completion:
        return replace(c, logprobs=scored(model, prompt, c.token_ids))

    parts.set_engine(Lying(parts.engine, answers=answer))


def not_replayed(**unseen: Any) -> Callable[[Parts], None]:
    """The engine samples as the settings say; the trainer scores as if these were off."""

    def breaks(parts: Parts) -> None:
        config = parts.policy.config
        parts.policy.config = config.model_copy(update={"sampling": config.sampling.model_copy(update=unseen)})

    return breaks


def never_loaded(parts: Parts) -> None:
    """New weights never arrive; the version says that they do."""
    engine = own_engine(parts)
    start = {name: tensor.clone() for name, tensor in parts.policy.weights().items()}
    parts.set_engine(Lying(engine, loaded=lambda weights, version: start))


def corrupted_from(version: int) -> Callable[[Parts], None]:
    """From this version on two layers' matrices land in each other's place."""

    def swapped(weights: Weights, at: int) -> Weights:
        if at < version:
            return weights
        first, second = "model.layers.0.", "model.layers.1."
        other = {first: second, second: first}
        return {n: weights[n.replace(n[:15], other[n[:15]]) if n[:15] in other else n] for n in weights}

    def breaks(parts: Parts) -> None:
        parts.set_engine(Lying(own_engine(parts), loaded=swapped))

    return breaks


def starts_elsewhere(parts: Parts) -> None:
    """Until the first sync the engine samples from weights that are not the trainer's."""

    def noisy(weights: Weights, version: int) -> Weights:
        draw = torch.Generator().manual_seed(5)
        if version > 0:
            return weights
        return {n: t + 0.5 * t.std() * torch.randn(t.shape, generator=draw) for n, t in weights.items()}

    parts.set_engine(Lying(own_engine(parts), loaded=noisy))


def noisy_adapter(parts: Parts) -> None:
    """The engine computes the adapted layers wrongly, from the first row on."""

    def wrong(weights: Weights, version: int) -> Weights:
        draw = torch.Generator().manual_seed(5)
        return {
            n: t + 0.4 * t.std() * torch.randn(t.shape, generator=draw) if "_proj" in n else t
            for n, t in weights.items()
        }

    parts.set_engine(Lying(own_engine(parts), loaded=wrong))


def drifting(parts: Parts) -> None:
    """The engine's numbers go astray by themselves, a little more with each sync."""
    version = 0

    def remembered(weights: Weights, at: int) -> Weights:
        nonlocal version
        version = at
        return weights

    draw = random.Random(3)

    def answer(prompt: Prompt, c: Completion) -> Completion:
        return replace(c, logprobs=tuple(min(0.0, v + draw.gauss(0, 0.01 + 0.01 * version)) for v in c.logprobs))

    parts.set_engine(Lying(parts.engine, answers=answer, loaded=remembered))


def overwritten(parts: Parts) -> None:
    """The trainer puts its own logprobs in the place of the engine's."""
    policy = parts.policy
    update = policy.update

    def blind(batch: Any) -> Any:
        return update(replace(batch, rollout_logprobs=policy._score_all(batch, reference=False).logprobs))

    parts.patch(policy, "update", blind)


def never_stopping(parts: Parts) -> None:
    """The engine does not know the tokens that end a completion."""
    loaded = parts.policy.loaded
    parts.set_engine(HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=frozenset()))


def seldom_ending(parts: Parts) -> None:
    """Three tokens end a completion, not thirty: eighty tokens on average."""
    loaded = replace(parts.policy.loaded, eos_ids=frozenset({3, 230, 231, 232}))
    parts.policy.loaded = loaded
    parts.set_engine(HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids))


def ends_unknown(prompt: Prompt, c: Completion) -> Completion:
    """The end came, and the trainer's side does not know its token: it counts as cut off."""
    return replace(c, finish_reason=FinishReason.LENGTH)


def ends_inferred(prompt: Prompt, c: Completion) -> Completion:
    """The end is inferred from the last id, and three of the ids that end a completion were forgotten."""
    forgotten = c.token_ids[-1] in (230, 231, 232)
    return replace(c, finish_reason=FinishReason.LENGTH) if forgotten else c


def sometimes_empty(prompt: Prompt, c: Completion) -> Completion:
    return Completion((), (), (), FinishReason.STOP) if len(c.token_ids) < 3 else c


def aborting(parts: Parts) -> None:
    draw = random.Random(2)

    def answer(prompt: Prompt, c: Completion) -> Completion:
        return replace(c, finish_reason=FinishReason.ABORT) if draw.random() < 0.3 else c

    parts.set_engine(Lying(parts.engine, answers=answer))


def retokenised(parts: Parts) -> None:
    """The completion comes back as text, and is tokenised again: bytes that are no character become others."""
    tokenizer = parts.policy.loaded.tokenizer

    def answer(prompt: Prompt, c: Completion) -> Completion:
        ids = tokenizer.encode(tokenizer.decode(c.token_ids))[: len(c.token_ids)]
        keep = len(ids)
        return Completion(tuple(ids), c.logprobs[:keep], c.policy_versions[:keep], c.finish_reason)

    parts.set_engine(Lying(parts.engine, answers=answer))


def writes(texts: Sequence[str]) -> Callable[[Parts], None]:
    """The completions are texts of this list, as if a model that had been taught them wrote them."""

    def breaks(parts: Parts) -> None:
        loaded, draw = parts.policy.loaded, random.Random(4)

        def answer(prompt: Prompt, c: Completion) -> Completion:
            ids = (*loaded.tokenizer.encode(draw.choice(texts)), 3)
            versions = c.policy_versions[:1] * len(ids)
            return Completion(ids, scored(loaded.model, prompt, ids), versions, FinishReason.EOS)

        parts.set_engine(Lying(parts.engine, answers=answer))

    return breaks


def prompts_end(ending: str) -> Callable[[Parts], None]:
    """Every prompt ends with this text, as some chat templates do."""

    def breaks(parts: Parts) -> None:
        encode = parts.policy.loaded.tokenizer.encode
        parts.prompts[:] = [
            replace(p, text=p.text + ending, token_ids=tuple(encode(p.text + ending))) for p in parts.prompts
        ]

    return breaks


def few_prompts(parts: Parts) -> None:
    """The same four prompts in every step."""
    del parts.prompts[4:]


def two_bos(parts: Parts) -> None:
    """The template writes BOS, and the tokenizer adds another."""
    parts.prompts[:] = [replace(p, text="<|bos|>" + p.text, token_ids=(1, 1, *p.token_ids)) for p in parts.prompts]


def all_of(*breaks: Callable[[Parts], None]) -> Callable[[Parts], None]:
    def together(parts: Parts) -> None:
        for each in breaks:
            each(parts)

    return together


def slow_from(version: int, seconds: float) -> Callable[[Parts], None]:
    """From this version on the engine takes its time."""

    class Slow(Lying):
        now = 0

        async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
            if self.now >= version:
                await asyncio.sleep(seconds)
            return await super().generate(prompt, n, sampling)

        async def load_weights(self, weights: Weights, at: int) -> None:
            self.now = at
            await super().load_weights(weights, at)

    return lambda parts: parts.set_engine(Slow(parts.engine))
