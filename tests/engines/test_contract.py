"""What every engine promises (`leadline/engines/base.py`), checked on each.

A new engine joins by an entry in ENGINES: how to make it, and how far its logprobs may lie from a plain forward.
`vllm_http` speaks with a server that stands in for vLLM; `vllm_server` and `vllm_inprocess` are the real one, with tied
and with untied embeddings.
"""

import asyncio
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.models import Loaded, load_model, merged_weights
from leadline.objective.logprobs import token_logprobs
from leadline.objective.sampling import processed_logits
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.engines.real_vllm import KEY, TOLERANCE, InProcess, OnServer, tied, untied, words
from tests.engines.served_model import ServedModel

NO_EOS: frozenset[int] = frozenset()
"""Nothing ends a completion but what a test adds."""


@dataclass(frozen=True)
class Kind:
    make: Callable[[Loaded], Engine]
    tolerance: float
    """Largest distance of a logprob from a plain forward of the same model in `dtype`, in nats."""
    dtype: torch.dtype = torch.float32
    model: Callable[[int], Loaded] | None = None
    """By its seed; None = `tiny`, with whichever tokenizer a test likes."""

    def loaded(self, seed: int = 0, eos_ids: frozenset[int] = NO_EOS, tokenizer: Any = None) -> Loaded:
        """A model that this engine can sample from."""
        loaded = replace(tiny(seed) if self.model is None else self.model(seed), eos_ids=eos_ids)
        return loaded if tokenizer is None or self.model is not None else replace(loaded, tokenizer=tokenizer)


def hf(**options: object) -> Callable[[Loaded], Engine]:
    return lambda loaded: HFEngine(loaded.model, tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, **options)


IN_MEMORY = {
    "hf": Kind(hf(), 1e-4),
    "hf_copy": Kind(hf(own_copy=True), 1e-4),
    "hf_bfloat16": Kind(hf(dtype="bfloat16"), 0.06, torch.bfloat16),
    "vllm_http": Kind(ServedModel, 1e-4),
    "scripted": Kind(
        lambda loaded: ScriptedEngine(echo_script(260, loaded.eos_ids, 64), delay=lambda prompt: 0.05), 0.0
    ),
}
ENGINES = ["hf", "hf_copy", "hf_bfloat16", "vllm_http"]
REAL = [pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm_server", "vllm_inprocess")]

engines = pytest.mark.parametrize("kind", [*ENGINES, *REAL], indirect=True)
byte_engines = pytest.mark.parametrize("kind", ENGINES, indirect=True)
float32_engines = pytest.mark.parametrize("kind", ["hf", "hf_copy"], indirect=True)
all_engines = pytest.mark.parametrize("kind", [*ENGINES, *REAL, "scripted"], indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    if request.param == "vllm_server":
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        running = request.getfixturevalue("servers").get("tied")
        return Kind(lambda loaded: OnServer(running, loaded), TOLERANCE, model=tied)
    if request.param == "vllm_inprocess":
        engine = request.getfixturevalue("vllm_here")
        return Kind(lambda loaded: InProcess(engine, loaded), TOLERANCE, model=untied)
    return IN_MEMORY[request.param]


PROMPTS = [
    Prompt(index=i, text="", token_ids=tuple(range(5 + i, 5 + i + length)))
    for i, length in enumerate((3, 40, 1, 17, 17, 64))
]

DISTRIBUTIONS = {
    "plain": Sampling(max_tokens=8),
    "cold": Sampling(max_tokens=8, temperature=0.6),
    "hot": Sampling(max_tokens=8, temperature=1.5),
    "top_k": Sampling(max_tokens=8, top_k=20),
    "top_p": Sampling(max_tokens=8, top_p=0.8),
    "min_p": Sampling(max_tokens=8, min_p=0.1),
    "penalty": Sampling(max_tokens=8, repetition_penalty=1.3),
    "everything": Sampling(max_tokens=8, temperature=0.7, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    "greedy": Sampling(max_tokens=8, temperature=0),
    "greedy_penalty": Sampling(max_tokens=8, temperature=0, repetition_penalty=1.3),
}


def tiny(seed: int = 0, eos_ids: frozenset[int] = NO_EOS) -> Loaded:
    return replace(load_model(Model(name="tiny", device="cpu"), seed), eos_ids=eos_ids)


def generate(
    kind: Kind, loaded: Loaded, sampling: Sampling, prompts: Sequence[Prompt] = PROMPTS[:2], n: int = 2
) -> list[list[Completion]]:
    """The groups of the prompts, all asked for at once, by a fresh engine."""

    async def run() -> list[list[Completion]]:
        engine = kind.make(loaded)
        groups = await asyncio.gather(*(engine.generate(prompt, n, sampling) for prompt in prompts))
        await engine.close()
        return groups

    return asyncio.run(run())


def first(kind: Kind, loaded: Loaded, sampling: Sampling) -> Completion:
    return generate(kind, loaded, sampling, PROMPTS[:1], 1)[0][0]


def plain_logprobs(model: nn.Module, prompt: Prompt, completion: Completion, sampling: Sampling) -> Tensor:
    """Logprobs by one forward of this sequence alone: no cache, no padding, no batch."""
    ids = torch.tensor([*prompt.token_ids, *completion.token_ids])
    begin = len(prompt.token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, begin - 1 : -1]
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for t in range(len(logits)):
        seen[t, ids[: begin + t]] = True
    knobs = sampling.model_dump(include={"top_k", "top_p", "min_p", "repetition_penalty"})
    return token_logprobs(
        processed_logits(logits, temperature=sampling.temperature or 1.0, seen=seen, **knobs), ids[begin:]
    )


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with its weights in `dtype`; rotary frequencies stay float32, as transformers loads a model."""
    cast = copy.deepcopy(model)
    for parameter in cast.parameters():
        parameter.data = parameter.data.to(dtype)
    return cast


def first_seen_at(token_ids: Sequence[int], position: int) -> int:
    """The id at `position` or the next one that did not occur before: what would end a completion just there."""
    return next(t for t in range(position, len(token_ids)) if token_ids[t] not in token_ids[:t])


def same(groups: Sequence[Sequence[Completion]], others: Sequence[Sequence[Completion]]) -> bool:
    """The same tokens, and logprobs that are equal but for rounding, which depends on what else is in a batch."""
    pairs = [pair for group, other in zip(groups, others, strict=True) for pair in zip(group, other, strict=True)]
    return all(
        a.token_ids == b.token_ids
        and a.finish_reason is b.finish_reason
        and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        for a, b in pairs
    )


# Tokens and logprobs --------------------------------------------------------------------------------------------------


@all_engines
def test_a_group_has_n_completions_with_one_finite_logprob_and_one_version_per_token(kind: Kind) -> None:
    for group in generate(kind, kind.loaded(), Sampling(max_tokens=20), n=3):
        assert len(group) == 3
        for completion in group:
            assert 0 < len(completion.token_ids) == len(completion.logprobs) == len(completion.policy_versions)
            assert all(math.isfinite(x) and x <= 0 for x in completion.logprobs)


@engines
@pytest.mark.parametrize("sampling", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_logprobs_are_those_of_a_plain_forward_under_the_distribution_that_was_sampled(
    kind: Kind, sampling: Sampling
) -> None:
    loaded = kind.loaded()
    model = in_dtype(loaded.model, kind.dtype)
    groups = generate(kind, loaded, sampling, PROMPTS)
    pairs = [(prompt, completion) for prompt, group in zip(PROMPTS, groups, strict=True) for completion in group]

    def plain(model: nn.Module) -> Tensor:
        return torch.cat([plain_logprobs(model, prompt, completion, sampling) for prompt, completion in pairs])

    found = torch.cat([torch.tensor(completion.logprobs) for _, completion in pairs])
    if kind.dtype == torch.float32:
        assert (found - plain(model)).abs().max() < kind.tolerance
        return
    # Two bfloat16 forwards differ by what both are off: each is held to the same weights in float32. A token at the edge
    # of a truncated support may fall to the other side, where its logprob is minus infinity: the bulk is compared.
    truth = plain(in_dtype(model, torch.float32))
    off, rounding = (found - truth).abs(), (plain(model) - truth).abs()
    assert off.isfinite().float().mean() > 0.9
    for share in (0.5, 0.75):
        assert off[off.isfinite()].quantile(share) < 1.5 * rounding[rounding.isfinite()].quantile(share)


@byte_engines
def test_logprobs_of_a_model_with_tied_embeddings_are_those_of_a_plain_forward(kind: Kind) -> None:
    loaded = kind.loaded()
    shape = copy.deepcopy(loaded.model.config)
    shape.tie_word_embeddings, shape.initializer_range = True, 0.15
    torch.manual_seed(0)
    tied = replace(loaded, model=type(loaded.model)(shape).eval())
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    [[completion]] = generate(kind, tied, Sampling(max_tokens=12), PROMPTS[:1], 1)
    expected = plain_logprobs(in_dtype(tied.model, kind.dtype), PROMPTS[0], completion, Sampling())
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < kind.tolerance


@engines
def test_greedy_takes_the_most_probable_token_and_does_so_again(kind: Kind) -> None:
    loaded, sampling = kind.loaded(), Sampling(max_tokens=16, temperature=0)
    completion = first(kind, loaded, sampling)
    assert same([[completion]], [[first(kind, loaded, sampling)]])
    ids = list(PROMPTS[0].token_ids)
    for token in completion.token_ids:
        logits = in_dtype(loaded.model, kind.dtype)(input_ids=torch.tensor([ids])).logits[0, -1].float()
        assert logits.max() - logits[token] < (1e-4 if kind.dtype == torch.float32 else 0.05)  # ties within rounding
        ids.append(token)


@engines
def test_completions_of_a_group_differ_and_are_drawn_again_alike(kind: Kind) -> None:
    loaded, sampling = kind.loaded(), Sampling(max_tokens=12)
    groups = generate(kind, loaded, sampling, n=4)
    assert same(groups, generate(kind, loaded, sampling, n=4))
    assert len({completion.token_ids for group in groups for completion in group}) == 8


@float32_engines
def test_a_ragged_batch_holds_what_each_prompt_gives_alone(kind: Kind) -> None:
    loaded, sampling = kind.loaded(), Sampling(max_tokens=24)
    together = generate(kind, loaded, sampling, PROMPTS, n=3)
    alone = [generate(kind, loaded, sampling, [prompt], n=3)[0] for prompt in PROMPTS]
    for group, expected in zip(together, alone, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in expected]
        for completion, other in zip(group, expected, strict=True):
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)


# How completions end --------------------------------------------------------------------------------------------------


@engines
def test_the_limit_ends_a_completion_as_length(kind: Kind) -> None:
    completion = first(kind, kind.loaded(), Sampling(max_tokens=5))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.truncated
    assert len(completion.token_ids) == 5


@engines
@pytest.mark.parametrize("others", [(), (258, 257)], ids=["only", "one_of_three"])
def test_each_eos_id_ends_a_completion_as_eos_and_is_kept(kind: Kind, others: tuple[int, ...]) -> None:
    free = first(kind, kind.loaded(), Sampling(max_tokens=20)).token_ids
    end = first_seen_at(free, 6)
    completion = first(kind, kind.loaded(eos_ids=frozenset({free[end], *others})), Sampling(max_tokens=20))
    assert completion.finish_reason is FinishReason.EOS
    assert completion.token_ids == free[: end + 1]


@engines
def test_eos_at_the_limit_is_eos_and_not_length(kind: Kind) -> None:
    free = first(kind, kind.loaded(), Sampling(max_tokens=20)).token_ids
    end = first_seen_at(free, 6)
    completion = first(kind, kind.loaded(eos_ids=frozenset({free[end]})), Sampling(max_tokens=end + 1))
    assert completion.finish_reason is FinishReason.EOS
    assert not completion.truncated


@engines
def test_eos_as_first_token_is_kept(kind: Kind) -> None:
    free = first(kind, kind.loaded(), Sampling(max_tokens=1)).token_ids
    completion = first(kind, kind.loaded(eos_ids=frozenset(free)), Sampling(max_tokens=20))
    assert (completion.token_ids, completion.finish_reason) == (free, FinishReason.EOS)


@engines
def test_a_stop_token_ends_a_completion_as_stop_and_is_kept(kind: Kind) -> None:
    free = first(kind, kind.loaded(), Sampling(max_tokens=20)).token_ids
    end = first_seen_at(free, 6)
    completion = first(kind, kind.loaded(), Sampling(max_tokens=20, stop_token_ids=(258, free[end])))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == free[: end + 1]


@engines
@pytest.mark.parametrize(
    ("stop", "include_stop"),
    [("[{b}]", True), ("{a}][{b}]", False), ("{a}][{b}", True), ("[{a}][{b}][{c}]", False)],
    ids=["one_token", "two_tokens_cut_from_text", "inside_a_token", "three_tokens_cut_from_text"],
)
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(
    kind: Kind, stop: str, include_stop: bool
) -> None:
    loaded = kind.loaded(tokenizer=words())
    free = first(kind, loaded, Sampling(max_tokens=20)).token_ids
    end = first_seen_at(free, 8)
    a, b, c = free[end - 1 : end + 2]
    last = end + 1 if "{c}" in stop else end
    sampling = Sampling(max_tokens=20, stop=("never", stop.format(a=a, b=b, c=c)), include_stop=include_stop)
    completion = first(kind, loaded, sampling)
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == free[: last + 1]


@engines
def test_a_stop_string_at_the_limit_is_stop_and_not_length(kind: Kind) -> None:
    loaded = kind.loaded(tokenizer=words())
    free = first(kind, loaded, Sampling(max_tokens=20)).token_ids
    end = first_seen_at(free, 8)
    completion = first(kind, loaded, Sampling(max_tokens=end + 1, stop=(f"[{free[end]}]",)))
    assert completion.finish_reason is FinishReason.STOP


@byte_engines
def test_a_stop_string_of_several_bytes_is_found_across_tokens_of_one_byte(kind: Kind) -> None:
    loaded = kind.loaded()
    hot = Sampling(max_tokens=400, temperature=2.0)
    free = first(kind, loaded, hot).token_ids
    pieces = [loaded.tokenizer.decode(token) for token in free]
    windows = ["".join(pieces[t - 2 : t + 1]) for t in range(2, len(free))]
    # Three ASCII characters, one token each, that do not stand together before.
    end = next(t for t in range(2, len(free)) if len(windows[t - 2]) == 3 and windows[t - 2].isascii())
    completion = first(kind, loaded, hot.model_copy(update={"stop": (windows[end - 2],)}))
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == free[: end + 1]


@engines
def test_special_tokens_are_kept(kind: Kind) -> None:
    loaded = kind.loaded()
    special = set(loaded.tokenizer.all_special_ids)
    groups = generate(kind, loaded, Sampling(max_tokens=200, temperature=2.0), n=4)
    assert special & {token for group in groups for c in group for token in c.token_ids}


@all_engines
def test_close_returns_what_runs_as_aborted(kind: Kind) -> None:
    async def run() -> list[Completion]:
        engine = kind.make(kind.loaded())
        await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=1))
        running = asyncio.create_task(engine.generate(PROMPTS[0], 2, Sampling(max_tokens=900)))
        await asyncio.sleep(0.02)
        await engine.close()
        return await running

    completions = asyncio.run(run())
    assert [c.finish_reason for c in completions] == [FinishReason.ABORT] * 2
    assert all(len(c.token_ids) < 900 for c in completions)


# Weights --------------------------------------------------------------------------------------------------------------


@all_engines
def test_tokens_carry_the_version_that_was_loaded_last(kind: Kind) -> None:
    loaded = kind.loaded()

    async def run() -> list[Completion]:
        engine = kind.make(loaded)
        completions = await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=4))
        for version in (1, 7):
            await engine.load_weights(merged_weights(loaded.model), version)
            completions += await engine.generate(PROMPTS[0], 1, Sampling(max_tokens=4))
        await engine.close()
        return completions

    assert [set(c.policy_versions) for c in asyncio.run(run())] == [{0}, {1}, {7}]


@engines
def test_after_load_weights_logprobs_are_those_of_the_new_weights(kind: Kind) -> None:
    policy, other, sampling = kind.loaded(seed=0), kind.loaded(seed=1), Sampling(max_tokens=12)

    async def run() -> Completion:
        engine = kind.make(policy)
        await engine.generate(PROMPTS[1], 2, sampling)
        policy.model.load_state_dict(other.model.state_dict())  # what an update does to the policy
        await engine.load_weights(merged_weights(policy.model), 1)
        completions = await engine.generate(PROMPTS[1], 2, sampling)
        await engine.close()
        return completions[0]

    completion = asyncio.run(run())
    expected = plain_logprobs(in_dtype(other.model, kind.dtype), PROMPTS[1], completion, sampling)
    assert (torch.tensor(completion.logprobs) - expected).abs().max() < kind.tolerance
    old = plain_logprobs(in_dtype(kind.loaded(seed=0).model, kind.dtype), PROMPTS[1], completion, sampling)
    assert (torch.tensor(completion.logprobs) - old).abs().max() > 0.5


def test_a_bfloat16_copy_reports_its_own_logprobs_which_lie_close_to_those_of_the_policy() -> None:
    loaded, sampling = tiny(), Sampling(max_tokens=32)
    [group] = generate(IN_MEMORY["hf_bfloat16"], loaded, sampling, PROMPTS[:1], 4)
    gap = torch.cat(
        [torch.tensor(c.logprobs) - plain_logprobs(loaded.model, PROMPTS[0], c, sampling) for c in group]
    ).abs()
    assert 1e-4 < gap.mean() < 0.02
    assert gap.max() < 0.1
