"""Logprobs from the wire to the weights: missing ones through the real trainer, raw ones found out and converted."""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.config import Config
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_snapshot import policy_score
from leadline.errors import EngineError, TrainingError
from leadline.objective.sampling import processed_logits
from leadline.policy.policy import Policy
from leadline.rollouts import Roller
from leadline.settings.rollout import Sampling
from leadline.train import Step, train
from leadline.types import Completion, Prompt, Rollout
from tests.builders import all_finite, policy, settings, snapshot
from tests.engines.fake_vllm import Body
from tests.engines.served_model import ServedModel

# Missing logprobs, trained on ------------------------------------------------------------------------------------------


class Prompts:
    """Prompts of random tokens."""

    position = 0

    def __next__(self) -> Prompt:
        index, self.position = self.position, self.position + 1
        ids = torch.randint(3, 260, (12,), generator=torch.Generator().manual_seed(index))
        return Prompt(index, "", tuple(ids.tolist()))


class ShareOfEven:
    """A reward that no two completions share."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion], texts: Sequence[str]) -> list[Rollout]:
        def even(completion: Completion) -> float:
            return sum(token % 2 == 0 for token in completion.token_ids) / len(completion.token_ids)

        return [Rollout(c, text, reward=even(c)) for c, text in zip(completions, texts, strict=True)]


def trained(trouble: Callable[[Body, Body], Body], **objective: Any) -> tuple[Policy, list[Step], dict[str, Tensor]]:
    """Three steps of the real loop on a server that answers with `trouble`; and the weights before them."""
    config: Config = settings(
        sampling={"max_tokens": 48},
        rollout={"group_size": 4, "groups_per_step": 2},
        objective=objective,
        run={"steps": 3},
    )
    made = policy(config)
    before, steps = snapshot(made.model), []

    async def record(step: Step) -> None:
        steps.append(step)

    async def run() -> None:
        engine = ServedModel(made.loaded)
        engine.server.always = trouble
        roller = Roller(
            engine,
            ShareOfEven(),
            made.loaded.tokenizer,
            made.loaded.eos_ids,
            config,
        )
        await engine.load_weights(made.weights(), 0)
        try:
            await train(config, policy=made, engine=engine, roller=roller, prompts=Prompts(), record=record)
        finally:
            await engine.close()

    asyncio.run(run())
    return made, steps, before


def one_null(request: Body, answer: Body) -> Body:
    """In the second group of each step, in the middle of its longest completion."""
    if request["prompt"] == list(next_prompt(1)) or request["prompt"] == list(next_prompt(3)):
        longest = max(answer["choices"], key=lambda choice: len(choice["token_ids"]))
        logprobs = longest["logprobs"]["token_logprobs"]
        logprobs[len(logprobs) // 2] = None
    return answer


def next_prompt(index: int) -> tuple[int, ...]:
    prompts = Prompts()
    prompts.position = index
    return next(prompts).token_ids


def all_null(request: Body, answer: Body) -> Body:
    for choice in answer["choices"]:
        choice["logprobs"]["token_logprobs"] = [None] * len(choice["token_ids"])
    return answer


@pytest.mark.parametrize("action", ["token_truncate", "token_mask", "sequence_mask", "geometric_mask"])
def test_one_null_among_hundreds_of_tokens_trains_on_with_ratio_one_there(action: str) -> None:
    made, steps, before = trained(one_null, importance_action=action)
    assert len(steps) == 3
    assert all_finite(made)
    assert any(not torch.equal(before[name], tensor) for name, tensor in made.model.state_dict().items())
    for step, nulls in zip(steps, (1, 1, 0), strict=True):
        missing = step.batch.rollout_logprobs.isnan()
        assert len(missing) > 100
        assert missing.sum() == nulls
        assert step.metrics["rollout/unscored_fraction"] == pytest.approx(nulls / len(missing))
        assert not step.update.discarded
        seen = missing[step.update.blackbox["seen_tokens"]]
        weights = step.update.blackbox["seen_weights"]
        assert seen.sum() == nulls
        assert (weights[seen] == 1.0).all()
        assert (weights - 1).abs().max() < 1e-3


def test_every_token_null_stops_the_run_untrained() -> None:
    with pytest.raises(TrainingError, match="came without a logprob"):
        trained(all_null)


def test_every_token_null_trains_with_every_weight_one_where_that_is_allowed() -> None:
    made, steps, before = trained(all_null, max_unscored_fraction=1.0)
    assert all_finite(made)
    assert any(not torch.equal(before[name], tensor) for name, tensor in made.model.state_dict().items())
    for step in steps:
        assert step.metrics["rollout/unscored_fraction"] == 1.0
        assert (step.update.blackbox["seen_weights"] == 1.0).all()


# Raw logprobs ---------------------------------------------------------------------------------------------------------


class RawServer(ServedModel):
    """Samples as asked, and reports logprobs at `temperature` with the most probable tokens', as vLLM does."""

    temperature = 1.0

    async def _draw(self, request: Body, aborted: asyncio.Event) -> list[Body]:
        choices = await super()._draw(request, aborted)
        for choice in choices:
            ids = [*request["prompt"], *choice["token_ids"]]
            with torch.no_grad():
                logits = self.loaded.model(input_ids=torch.tensor([ids])).logits[0, len(request["prompt"]) - 1 : -1]
            logprobs = (logits.float() / self.temperature).log_softmax(-1)
            tops = logprobs.topk(max(1, request["logprobs"])).indices.tolist()
            choice["token_logprobs"] = [float(logprobs[t, i]) for t, i in enumerate(choice["token_ids"])]
            choice["top_logprobs"] = [
                {f"token_id:{i}": float(logprobs[t, i]) for i in [token, *tops[t]]}
                for t, token in enumerate(choice["token_ids"])
            ]
        return choices


def group_of(engine: ServedModel, sampling: Sampling) -> tuple[list[Completion], VLLMEngine, list[str]]:
    """A group after the weights were loaded, which is when the client looks at the server's logprobs."""
    engine.score = policy_score(engine.loaded.model)

    async def run() -> tuple[list[Completion], VLLMEngine]:
        client = await engine._client()
        try:
            await engine.load_weights(engine.loaded.model.state_dict(), 1)
            return await engine.generate(Prompt(0, "", (5, 6, 7)), 2, sampling), client
        finally:
            await engine.close()

    group, client = asyncio.run(run())
    return group, client, engine.said


def distance(engine: ServedModel, group: list[Completion], sampling: Sampling) -> float:
    """Largest distance of the group's logprobs from the distribution that was sampled."""
    largest = 0.0
    for completion in group:
        ids = [5, 6, 7, *completion.token_ids]
        with torch.no_grad():
            logits = engine.loaded.model(input_ids=torch.tensor([ids])).logits[0, 2:-1]
        knobs = sampling.model_dump(include={"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})
        expected = processed_logits(logits, **knobs).log_softmax(-1)[
            torch.arange(len(completion.token_ids)), list(completion.token_ids)
        ]
        largest = max(largest, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return largest


COLD = Sampling(max_tokens=24, temperature=0.6)


def test_processed_logprobs_are_recognised_without_a_word() -> None:
    engine = ServedModel(policy(settings()).loaded)
    group, client, said = group_of(engine, COLD)
    assert not client._pool.links[0].raw
    assert said == []
    assert distance(engine, group, COLD) < 1e-4


def test_raw_logprobs_are_found_out_and_said_and_serve_where_they_are_the_same() -> None:
    plain = Sampling(max_tokens=24)
    engine = RawServer(policy(settings()).loaded)
    group, client, said = group_of(engine, plain)
    assert client._pool.links[0].raw
    assert "reports raw logprobs" in said[0]
    assert distance(engine, group, plain) < 1e-4


def test_raw_logprobs_are_refused_where_they_matter() -> None:
    with pytest.raises(EngineError, match=r"engine.raw_logprobs is 'refuse', but .*--logprobs-mode processed_logprobs"):
        group_of(RawServer(policy(settings()).loaded), COLD)


def test_a_server_that_comes_back_in_another_mode_is_found_out_before_it_serves() -> None:
    class Changing(RawServer):
        """Raw only after its restart."""

        async def _draw(self, request: Body, aborted: asyncio.Event) -> list[Body]:
            if "reports raw" in self.server.model:
                return await super()._draw(request, aborted)
            return await ServedModel._draw(self, request, aborted)

    engine = Changing(policy(settings()).loaded)
    engine.score = policy_score(engine.loaded.model)

    async def run() -> None:
        prompt = Prompt(0, "", (5, 6, 7))
        try:
            await engine.load_weights(engine.loaded.model.state_dict(), 1)
            await engine.generate(prompt, 2, COLD)
            engine.score = None  # the policy may be in the middle of an update: it is not asked again
            await engine.server.kill()
            engine.server.model = "policy that reports raw"
            await engine.server.start()
            asked = len(engine.server.requests)
            with pytest.raises(EngineError, match=r"engine.raw_logprobs is 'refuse', but"):
                await engine.generate(prompt, 2, COLD)
            assert {request["n"] for request in engine.server.requests[asked + 1 :]} == {1}, "only probes were answered"
        finally:
            await engine.close()

    asyncio.run(run())
    assert any("reports raw logprobs" in line for line in engine.said)


@pytest.mark.parametrize(
    ("knobs", "tops"),
    [
        ({"temperature": 0.6}, 260),
        ({"temperature": 1.5, "top_k": 20}, 20),
        ({"top_p": 0.8}, 260),
        ({"min_p": 0.1}, 260),
        ({"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02}, 50),
    ],
)
def test_raw_logprobs_are_converted_exactly(knobs: dict[str, Any], tops: int) -> None:
    sampling = Sampling(max_tokens=24, **knobs)
    engine = RawServer(policy(settings()).loaded, raw_logprobs="convert")
    group, _, _ = group_of(engine, sampling)
    assert engine.server.requests[-1]["logprobs"] == tops
    assert distance(engine, group, sampling) < 1e-4


def test_a_raw_logprob_without_its_likely_tokens_is_nan() -> None:
    engine = RawServer(policy(settings()).loaded, raw_logprobs="convert")

    def few(request: Body, answer: Body) -> Body:
        if request["logprobs"]:
            for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:3]:
                top.pop(next(reversed(top)))
        return answer

    engine.server.always = few
    group, _, _ = group_of(engine, COLD)
    assert [math.isnan(x) for x in group[0].logprobs[:4]] == [False, True, True, False]
    assert not any(map(math.isnan, group[1].logprobs))


def test_a_repetition_penalty_makes_conversion_impossible_and_that_is_said() -> None:
    with pytest.raises(EngineError, match=r"sampling.repetition_penalty is 1.3, but .* No conversion is exact"):
        group_of(
            RawServer(policy(settings()).loaded, raw_logprobs="convert"),
            Sampling(max_tokens=24, repetition_penalty=1.3),
        )


def test_logprobs_of_another_temperature_are_an_error_that_names_it() -> None:
    engine = RawServer(policy(settings()).loaded)
    engine.temperature = 4.0
    with pytest.raises(EngineError, match=r"asked for temperature 2.0, but reports logprobs as of temperature 4.0"):
        group_of(engine, COLD)


@pytest.mark.parametrize("value", [None, 0.0], ids=["null", "placeholder_zero"])
def test_a_server_that_does_not_report_logprobs_is_an_error_at_the_start(value: float | None) -> None:
    engine = ServedModel(policy(settings()).loaded)

    def fill(request: Body, answer: Body) -> Body:
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"] = [value] * len(choice["token_ids"])
        return answer

    engine.server.always = fill
    with pytest.raises(EngineError, match="differ from the policy's"):
        group_of(engine, COLD)


def test_a_server_with_other_weights_is_an_error_at_the_start() -> None:
    class Forgetful(ServedModel):
        async def push(self, url: str, weights: Any, version: int, name: str) -> None:
            pass

    engine = Forgetful(policy(settings()).loaded)
    engine.loaded = policy(settings(), seed=1).loaded
    with pytest.raises(EngineError, match="serves another model"):
        group_of(engine, COLD)
