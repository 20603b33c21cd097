import asyncio
import math

import numpy as np
import pytest

from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason, Prompt

SAMPLING = Sampling()


def prompt(index: int) -> Prompt:
    return Prompt(index=index, text="", token_ids=(1,))


def completion(token: int) -> Completion:
    return Completion((token,), (-0.5,), (0,), FinishReason.EOS)


def test_a_mapping_is_read_at_the_prompt_index() -> None:
    engine = ScriptedEngine({4: [completion(40), completion(41)]})
    assert asyncio.run(engine.generate(prompt(4), 2, SAMPLING)) == [completion(40), completion(41)]


def test_a_sequence_is_read_round_and_round() -> None:
    engine = ScriptedEngine([[completion(0)], [completion(1)]])
    groups = [asyncio.run(engine.generate(prompt(i), 1, SAMPLING)) for i in (0, 3, 5, 2)]
    assert [group[0].token_ids for group in groups] == [(0,), (1,), (1,), (0,)]


@pytest.mark.parametrize("script", [{}, [[completion(0)]], lambda prompt, n: [completion(0)]])
def test_a_script_without_enough_completions_is_refused(script: object) -> None:
    with pytest.raises(EngineError, match="prompt 9, but 2 were asked for"):
        asyncio.run(ScriptedEngine(script).generate(prompt(9), 2, SAMPLING))


def test_tokens_carry_the_version_at_the_time_of_the_call() -> None:
    async def run() -> list[int]:
        engine = ScriptedEngine([[completion(0)]], delay=lambda p: 0.02)
        early = asyncio.create_task(engine.generate(prompt(0), 1, SAMPLING))
        await asyncio.sleep(0)
        await engine.load_weights({}, 3)
        late = await engine.generate(prompt(0), 1, SAMPLING)
        assert engine.loaded == [3]
        return [c.policy_versions[0] for c in [*await early, *late]]

    assert asyncio.run(run()) == [0, 3]


def test_each_call_takes_its_delay() -> None:
    async def run() -> list[int]:
        engine = ScriptedEngine([[completion(0)]], delay=lambda p: 0.01 * (3 - p.index))
        order: list[int] = []

        async def one(index: int) -> None:
            await engine.generate(prompt(index), 1, SAMPLING)
            order.append(index)

        await asyncio.gather(*(one(index) for index in range(3)))
        return order

    assert asyncio.run(run()) == [2, 1, 0]


def test_a_closed_engine_is_refused() -> None:
    async def run() -> None:
        engine = ScriptedEngine([[completion(0)]])
        await engine.close()
        await engine.generate(prompt(0), 1, SAMPLING)

    with pytest.raises(EngineError, match="closed"):
        asyncio.run(run())


def test_echo_is_the_same_for_the_same_prompt_and_differs_within_a_group() -> None:
    script = echo_script(vocab_size=50, eos_ids={3}, max_tokens=12)
    assert script(prompt(5), 4) == script(prompt(5), 4)
    assert len({c.token_ids for i in (5, 6, -5) for c in script(prompt(i), 4)}) == 12


def test_echo_ends_with_eos_or_at_the_limit() -> None:
    completions = echo_script(vocab_size=50, eos_ids={3, 7}, max_tokens=6)(prompt(0), 200)
    assert {c.finish_reason for c in completions} == {FinishReason.EOS, FinishReason.LENGTH}
    for c in completions:
        ended = c.finish_reason is FinishReason.EOS
        assert {3, 7}.isdisjoint(c.token_ids[:-1] if ended else c.token_ids)
        assert c.token_ids[-1] == 3 if ended else len(c.token_ids) == 6


def test_echo_without_eos_ids_runs_to_the_limit() -> None:
    [c] = echo_script(vocab_size=50, eos_ids=(), max_tokens=6)(prompt(0), 1)
    assert (len(c.token_ids), c.finish_reason) == (6, FinishReason.LENGTH)
    assert c.logprobs == pytest.approx([-math.log(50)] * 6)


def test_echo_reports_the_probabilities_it_draws_with() -> None:
    """The mean negative logprob is the entropy per draw, if the draws follow the reported distribution."""
    completions = echo_script(vocab_size=11, eos_ids={3}, max_tokens=8)(prompt(0), 4000)
    logprobs = np.concatenate([c.logprobs for c in completions])
    q = 1 / (1 + 8 / 2)
    expected = -q * math.log(q) - (1 - q) * math.log((1 - q) / 10)
    assert -logprobs.mean() == pytest.approx(expected, abs=0.02)
