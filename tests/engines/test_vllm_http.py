"""The vLLM client against servers that misbehave: what is retried, what is refused, and where requests go."""

import asyncio
import math
from typing import Any

import pytest

from leadline.errors import EngineError
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason
from tests.engines.fake_vllm import EOS, Body, FakePush, FakeVLLM, Reply, random_draw
from tests.engines.vllm_client import HTML, SAMPLING, engine_for, generate, prompt, status, weights, with_servers

pytestmark = pytest.mark.usefixtures("quick_client")

# One server -----------------------------------------------------------------------------------------------------------


def test_a_group_is_one_request_and_is_drawn_again_alike() -> None:
    group, asked = generate()
    assert (len(group), asked) == (4, 1)
    assert all(c.finish_reason is FinishReason.EOS and c.token_ids[-1] == EOS for c in group)
    assert generate()[0] == group
    assert len({c.token_ids for c in group}) == 4


def test_a_greedy_group_is_one_draw() -> None:
    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server)
        group = await engine.generate(prompt(), 3, Sampling(max_tokens=16, temperature=0))
        assert server.requests[0]["n"] == 1
        assert len(group) == 3
        assert len(set(group)) == 1
        await engine.close()

    with_servers(1, test)


@pytest.mark.parametrize(
    "trouble",
    [
        status(500, b"EngineCore encountered an issue"),
        status(503),
        status(429, headers="Retry-After: 0.1\r\n"),
        status(200, HTML),
        status(200, b'{"choices": [{"index": 0, "tok'),
        lambda request, answer: {"choices": answer["choices"][:1]},
        lambda request, answer: Reply(200, b'{"choices": []}' * 50, cut=True),
    ],
    ids=["500", "503", "429", "html", "cut_json", "wrong_n", "cut_connection"],
)
def test_what_can_heal_is_asked_again_and_gives_the_same_group(trouble: Any) -> None:
    group, asked = generate(trouble, times=2)
    assert asked == 3
    assert group == generate()[0]


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_4xx_is_shown_at_once_and_never_asked_again(code: int) -> None:
    async def test(server: FakeVLLM) -> None:
        server.always = status(code, b"the knob is wrong")
        engine = engine_for(server)
        with pytest.raises(EngineError, match=rf"HTTP {code}: the knob is wrong"):
            await engine.generate(prompt(), 2, SAMPLING)
        assert len(server.requests) == 1
        await engine.close()

    with_servers(1, test)


@pytest.mark.parametrize(
    ("trouble", "said"), [(status(200, HTML), "<html>"), (status(200, b'{"choices": []}'), "n = 4")]
)
def test_an_answer_that_stays_unreadable_is_an_error(trouble: Any, said: str) -> None:
    with pytest.raises(EngineError, match=f"HTTP 200 3 times.*{said}"):
        generate(trouble, times=3)


def test_a_context_that_would_shorten_completions_is_refused_before_it_is_asked() -> None:
    async def test(server: FakeVLLM) -> None:
        server.context_length = 64
        engine = engine_for(server)
        await engine.generate(prompt(length=48), 1, SAMPLING)
        with pytest.raises(EngineError, match=r"holds 64\. .* --max-model-len 65"):
            await engine.generate(prompt(length=49), 1, SAMPLING)
        assert len(server.requests) == 1
        await engine.close()

    with_servers(1, test)


def test_a_server_of_another_model_is_an_error_that_lists_what_it_serves() -> None:
    async def test(server: FakeVLLM) -> None:
        server.model = "llama"
        engine = engine_for(server, model_name="policy")
        with pytest.raises(EngineError, match=r"engine.model_name is 'policy', but .* serves \['llama'\]"):
            await engine.generate(prompt(), 1, SAMPLING)
        await engine.close()

    with_servers(1, test)


def test_nulls_arrive_as_nan_and_everything_else_stays() -> None:
    def nulls(request: Body, answer: Body) -> Body:
        answer["choices"][1]["logprobs"]["token_logprobs"][1] = None
        answer["choices"][2]["logprobs"] = None
        return answer

    group, asked = generate(nulls)
    right = generate()[0]
    assert asked == 1
    assert [c.token_ids for c in group] == [c.token_ids for c in right]
    assert [sum(map(math.isnan, c.logprobs)) for c in group] == [0, 1, len(right[2].token_ids), 0]


def test_a_choice_that_stays_without_tokens_is_a_failed_rollout_beside_whole_ones() -> None:
    def empty(request: Body, answer: Body) -> Body:
        if request["n"] == 1 or answer["choices"][0]["index"] == 0:
            answer["choices"][0].update(token_ids=[], finish_reason="abort")
        return answer

    async def test(server: FakeVLLM) -> None:
        server.always = empty
        engine = engine_for(server)
        group = await engine.generate(prompt(), 3, SAMPLING)
        assert group[0] == Completion((), (), (), FinishReason.ABORT)
        assert [c.finish_reason for c in group[1:]] == [FinishReason.EOS] * 2
        await engine.close()

    with_servers(1, test)


def test_close_returns_what_runs_as_aborted_and_later_calls_raise() -> None:
    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server)
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        while not server.running:
            await asyncio.sleep(0.01)
        await engine.close()
        assert await running == [Completion((), (), (), FinishReason.ABORT)] * 2
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(prompt(), 1, SAMPLING)

    with_servers(1, test, random_draw(token_s=5))


def test_an_api_key_is_sent_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    seen = []

    async def test(server: FakeVLLM) -> None:
        reply = server._reply

        async def spy(method: str, path: str, request: Body, head: str) -> Reply:
            seen.append("authorization: bearer sesame" in head.lower())
            return await reply(method, path, request, head)

        server._reply = spy  # type: ignore[method-assign]
        engine = engine_for(server)
        await engine.generate(prompt(), 1, SAMPLING)
        await engine.close()

    with_servers(1, test)
    assert seen
    assert all(seen)


# Several servers ------------------------------------------------------------------------------------------------------


def test_requests_go_to_the_server_with_the_fewest_tokens_to_draw() -> None:
    async def test(a: FakeVLLM, b: FakeVLLM) -> None:
        engine = engine_for(a, b)
        await engine.load_weights(weights(), 0)
        while "/v1/models" not in b.paths:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        long = asyncio.create_task(engine.generate(prompt(0), 1, Sampling(max_tokens=400)))
        await asyncio.sleep(0.02)
        await asyncio.gather(*(engine.generate(prompt(i), 1, Sampling(max_tokens=16)) for i in range(1, 7)), long)
        assert sorted((len(a.requests), len(b.requests))) == [1, 6]
        await engine.close()

    with_servers(2, test, random_draw(token_s=0.02))


def test_no_more_completions_than_max_batch_are_under_way_on_a_server() -> None:
    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server, max_batch=5)
        groups = await asyncio.gather(*(engine.generate(prompt(i), 2, SAMPLING) for i in range(6)))
        assert server.most_running == 2
        assert len(await engine.generate(prompt(9), 8, SAMPLING)) == 8  # larger than the limit: goes alone
        assert len(groups) == 6
        await engine.close()

    with_servers(1, test, random_draw(token_s=0.01))


def test_a_dead_server_is_left_out_and_returns_with_the_newest_weights() -> None:
    async def test(a: FakeVLLM, b: FakeVLLM) -> None:
        said: list[str] = []
        push = FakePush(a, b)
        engine = engine_for(a, b, push=push, said=said)
        await engine.load_weights(weights(0), 0)
        running = [asyncio.create_task(engine.generate(prompt(i), 2, SAMPLING)) for i in range(6)]
        while not (a.running and b.running):
            await asyncio.sleep(0.005)
        await a.kill()
        groups = await asyncio.gather(*running)
        assert all(c.finish_reason is FinishReason.EOS for group in groups for c in group)
        await engine.load_weights(weights(1), 1)
        assert (a.url, 1) not in push.pushes
        await a.start()
        while not any("is back, with the weights of version 1" in line for line in said):
            await asyncio.sleep(0.01)
        assert (a.url, 1) in push.pushes
        asked = len(a.requests)
        groups = await asyncio.gather(*(engine.generate(prompt(i), 2, SAMPLING) for i in range(6)))
        assert len(a.requests) > asked
        assert {v for group in groups for c in group for v in c.policy_versions} == {1}
        await engine.close()

    with_servers(2, test, random_draw(token_s=0.02))
