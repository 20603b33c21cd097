"""The vLLM client against servers that misbehave: what is retried, where requests go, when weights change."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from leadline.engines import vllm_link, vllm_pool
from leadline.engines.vllm_http import VLLMEngine
from leadline.errors import EngineError
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.engines.fake_vllm import EOS, VOCAB, Body, FakePush, FakeVLLM, Reply, random_draw

SAMPLING = Sampling(max_tokens=16)
HTML = b"<html><body>502 Bad Gateway</body></html>"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules on a shorter clock."""
    monkeypatch.setattr(vllm_pool, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(vllm_pool, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(vllm_pool, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(vllm_pool, "ABORT_EVERY_S", 0.05)
    monkeypatch.setattr(vllm_link, "HEALTH_TIMEOUT_S", 0.2)


def prompt(index: int = 0, length: int = 3) -> Prompt:
    return Prompt(index=index, text="", token_ids=tuple(range(10, 10 + length)))


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value)}


def engine_for(
    *servers: FakeVLLM, push: FakePush | None = None, said: list[str] | None = None, **changes: Any
) -> VLLMEngine:
    settings = EngineSettings(kind="vllm", **{"patience_s": 5.0, "request_timeout_s": 5.0, **changes})
    return VLLMEngine(
        [server.url for server in servers],
        model_name=settings.model_name,
        eos_ids=frozenset({EOS}),
        vocab_size=VOCAB,
        seed=3,
        settings=settings,
        push=push or FakePush(*servers),
        tokenizer=None,
        say=(said if said is not None else []).append,
    )


def with_servers(count: int, test: Callable[..., Awaitable[Any]], *draws: Any) -> Any:
    """Run `test(*servers)` with as many servers; nothing may take longer than 20 s."""

    async def run() -> Any:
        servers = [FakeVLLM(*draws) for _ in range(count)]
        for server in servers:
            await server.start()
        try:
            async with asyncio.timeout(20):
                return await test(*servers)
        finally:
            for server in servers:
                await server.kill()

    return asyncio.run(run())


def generate(trouble: Callable[[Body, Body], Body | Reply] | None = None, *, times: int = 1, n: int = 4) -> Any:
    """The group of one prompt by a server that is wrong the first `times` times, and how often it was asked."""

    async def test(server: FakeVLLM) -> tuple[list[Completion], int]:
        if trouble is not None:
            server.troubles.extend([trouble] * times)
        engine = engine_for(server)
        try:
            return await engine.generate(prompt(), n, SAMPLING), len(server.requests)
        finally:
            await engine.close()

    return with_servers(1, test)


def status(code: int, body: bytes = b"no", headers: str = "") -> Callable[[Body, Body], Reply]:
    return lambda request, answer: Reply(code, body, headers)


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


# Survival -------------------------------------------------------------------------------------------------------------


def test_the_only_server_killed_and_started_again_serves_pushed_weights_and_every_group_arrives_once() -> None:
    async def test(server: FakeVLLM) -> list[list[Completion]]:
        push = FakePush(server)
        engine = engine_for(server, push=push)
        pushed = weights(7)
        await engine.load_weights(pushed, 4)
        running = [asyncio.create_task(engine.generate(prompt(i), 2, SAMPLING)) for i in range(3)]
        while server.running < 3:
            await asyncio.sleep(0.005)
        await server.kill()
        await asyncio.sleep(0.1)
        await server.start()
        assert server.weights == "the command line's"
        groups = await asyncio.gather(*running)
        assert server.weights["w"].tolist() == [7.0, 7.0]
        assert [version for _, version in push.pushes] == [4, 4]
        await engine.close()
        return groups

    groups = with_servers(1, test, random_draw(token_s=0.02))

    async def undisturbed(server: FakeVLLM) -> list[list[Completion]]:
        engine = engine_for(server)
        await engine.load_weights(weights(7), 4)
        groups = [await engine.generate(prompt(i), 2, SAMPLING) for i in range(3)]
        await engine.close()
        return groups

    assert groups == with_servers(1, undisturbed)


def test_a_restart_that_no_request_noticed_is_noticed_before_its_answer_counts() -> None:
    async def test(server: FakeVLLM) -> None:
        said: list[str] = []
        push = FakePush(server)
        engine = engine_for(server, push=push, said=said)
        await engine.load_weights(weights(7), 1)
        await engine.generate(prompt(0), 2, SAMPLING)
        await server.kill()
        await server.start()
        drawn_with = []
        draw = server.draw

        async def spy(request: Body, aborted: asyncio.Event) -> list[Body]:
            drawn_with.append(server.weights)
            return await draw(request, aborted)

        server.draw = spy
        group = await engine.generate(prompt(1), 2, SAMPLING)
        assert isinstance(drawn_with[-1], dict), "the answer that counts was drawn from pushed weights"
        assert [version for _, version in push.pushes] == [1, 1]
        assert {v for c in group for v in c.policy_versions} == {1}
        assert any("left out" in line for line in said)
        await engine.close()

    with_servers(1, test)


def test_weights_that_another_run_pushed_are_not_sampled_from() -> None:
    async def test(server: FakeVLLM) -> None:
        push = FakePush(server)
        ours, other = engine_for(server, push=push), engine_for(server, push=push)
        await ours.load_weights(weights(1), 1)
        await other.load_weights(weights(2), 1)
        await ours.generate(prompt(0), 2, SAMPLING)
        assert server.weights["w"].tolist() == [1.0, 1.0]
        await ours.close()
        await other.close()

    with_servers(1, test)


def test_a_server_that_never_answers_a_request_is_left_out_and_the_request_goes_elsewhere() -> None:
    async def test(a: FakeVLLM, b: FakeVLLM) -> None:
        a.always = b.always = None
        engine = engine_for(a, b, request_timeout_s=0.3)
        await engine.load_weights(weights(), 0)
        a.troubles.append(lambda request, answer: Reply(never=True))
        started = time.perf_counter()
        groups = await asyncio.gather(*(engine.generate(prompt(i), 2, SAMPLING) for i in range(4)))
        assert len(groups) == 4
        assert time.perf_counter() - started < 3
        await engine.close()

    with_servers(2, test)


def test_a_server_whose_process_hangs_is_noticed_by_its_health_long_before_the_request_times_out() -> None:
    async def test(a: FakeVLLM, b: FakeVLLM) -> None:
        said: list[str] = []
        engine = engine_for(a, b, said=said, request_timeout_s=60)
        await engine.load_weights(weights(), 0)
        await asyncio.sleep(0.1)
        a.always = lambda request, answer: Reply(never=True)
        a.healthy = None
        groups = await asyncio.gather(*(engine.generate(prompt(i), 2, SAMPLING) for i in range(4)))
        assert [c.finish_reason for group in groups for c in group] == [FinishReason.EOS] * 8
        assert any("/health failed 3 times" in line for line in said)
        await engine.close()

    with_servers(2, test)


def test_500_for_a_while_is_sat_out() -> None:
    async def test(server: FakeVLLM) -> None:
        server.always = status(500)
        engine = engine_for(server)
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        await asyncio.sleep(0.8)
        assert not running.done()
        assert 2 < len(server.requests) < 25  # it is asked less and less often
        server.always = None
        assert len(await running) == 2
        await engine.close()

    with_servers(1, test)


@pytest.mark.parametrize("how", ["dead", "500"])
def test_patience_ends_with_an_error_that_names_the_trouble(how: str) -> None:
    async def test(server: FakeVLLM) -> None:
        server.always = status(500, b"EngineCore is gone")
        if how == "dead":
            await server.kill()
        engine = engine_for(server, patience_s=0.5)
        said = "ConnectError" if how == "dead" else "EngineCore is gone"
        with pytest.raises(EngineError, match=rf"engine.patience_s is 0.5, .*{said}"):
            await engine.generate(prompt(), 2, SAMPLING)
        await engine.close()

    with_servers(1, test)


def test_a_busy_server_is_no_dead_one() -> None:
    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server, patience_s=1.0, max_batch=2)
        started = time.perf_counter()
        groups = await asyncio.gather(*(engine.generate(prompt(i), 2, SAMPLING) for i in range(6)))
        assert time.perf_counter() - started > 1.0
        assert len(groups) == 6
        await engine.close()

    with_servers(1, test, random_draw(token_s=0.03))


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["continue", "drain"])
def test_no_request_spans_a_change_of_weights_and_versions_are_exact(mode: Any) -> None:
    async def test(server: FakeVLLM) -> list[list[Completion]]:
        draw = server.draw

        async def spy(request: Body, aborted: asyncio.Event) -> list[Body]:
            before = server.weights
            choices = await draw(request, aborted)
            assert server.weights is before, "tokens of one request were drawn from two weights"
            for choice in choices:
                # The weights sign each token: logprob -v for version v.
                choice["token_logprobs"] = [-float(before["w"][0])] * len(choice["token_ids"])
            return choices

        server.draw = spy
        push = FakePush(server)
        engine = engine_for(server, push=push, on_new_weights=mode)
        await engine.load_weights(weights(1), 1)
        running = [asyncio.create_task(engine.generate(prompt(i), 3, SAMPLING)) for i in range(3)]
        for version in (2, 3):
            await asyncio.sleep(0.12)
            await engine.load_weights(weights(version), version)
        groups = await asyncio.gather(*running)
        assert push.busy_during_push == [0, 0, 0]
        await engine.close()
        return groups

    groups = with_servers(1, test, random_draw(token_s=0.03))
    completions = [c for group in groups for c in group]
    assert all(c.finish_reason is FinishReason.EOS for c in completions)
    assert all(c.logprobs == tuple(-float(v) for v in c.policy_versions) for c in completions)
    spans = {len(set(c.policy_versions)) for c in completions}
    assert spans == {1} if mode == "drain" else max(spans) > 1


class Going:
    """Draws a token each 30 ms from the weights of that moment, which sign it: logprob -v for version v."""

    def __init__(self, server: FakeVLLM) -> None:
        self.server = server
        self.drawn = 0

    async def __call__(self, request: Body, aborted: asyncio.Event) -> list[Body]:
        signed: list[tuple[str, float]] = []
        for _ in range(request["max_tokens"]):
            await asyncio.sleep(0.03)
            weights = self.server.weights
            signed.append((self.server.weight_version, -float(weights["w"][0]) if isinstance(weights, dict) else 0.0))
            self.drawn += 1
            if aborted.is_set():
                break
        names = list(dict.fromkeys(name for name, _ in signed))
        first = {name: [n for n, _ in signed].index(name) for name in names}
        ends = [*list(first.values())[1:], len(signed)]
        spans = [{"version": n, "start": first[n], "end": end} for n, end in zip(names, ends, strict=True)]
        choice = {
            "token_ids": [7] * len(signed),
            "token_logprobs": [value for _, value in signed],
            "finish_reason": "abort" if aborted.is_set() else "length",
            "weight_versions": spans,
        }
        return [choice] * request["n"]


def test_where_the_server_tells_versions_a_request_spans_the_change_and_each_token_has_its_own() -> None:
    async def test(server: FakeVLLM) -> list[Completion]:
        server.draw, server.tells_versions = Going(server), True
        push = FakePush(server)
        engine = engine_for(server, push=push)
        await engine.load_weights(weights(1), 1)
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        for version in (2, 3):
            await asyncio.sleep(0.12)
            await engine.load_weights(weights(version), version)
        completions = await running
        assert len(server.requests) == 1, "nothing was aborted and asked again"
        assert push.busy_during_push == [0, 1, 1]
        await engine.close()
        return completions

    for completion in with_servers(1, test):
        assert completion.finish_reason is FinishReason.LENGTH
        assert set(completion.policy_versions) == {1, 2, 3}
        assert completion.logprobs == tuple(-float(v) for v in completion.policy_versions)


def test_with_drain_no_request_spans_a_change_although_the_server_could() -> None:
    async def test(server: FakeVLLM) -> None:
        server.draw, server.tells_versions = Going(server), True
        push = FakePush(server)
        engine = engine_for(server, push=push, on_new_weights="drain")
        await engine.load_weights(weights(1), 1)
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        await asyncio.sleep(0.12)
        await engine.load_weights(weights(2), 2)
        assert push.busy_during_push == [0, 0]
        assert {v for c in await running for v in c.policy_versions} == {1}
        await engine.close()

    with_servers(1, test)


def test_what_was_drawn_around_a_push_that_failed_does_not_count() -> None:
    """Between a failed push and the next one a server that goes on may draw from anything."""

    async def test(server: FakeVLLM) -> None:
        server.draw, server.tells_versions = Going(server), True
        push = FakePush(server)
        engine = engine_for(server, push=push)
        await engine.load_weights(weights(1), 1)

        async def half(server: FakeVLLM) -> None:
            await asyncio.sleep(0.6)  # the request ends meanwhile, with tokens of half-loaded weights
            raise EngineError("the receipt does not match")

        push.failures.append(half)
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        await asyncio.sleep(0.1)
        await engine.load_weights(weights(2), 2)
        for completion in await running:
            assert set(completion.policy_versions) == {2}
            assert set(completion.logprobs) == {-2.0}
        assert len(server.requests) == 2
        await engine.close()

    with_servers(1, test)


def test_tokens_of_weights_that_were_not_pushed_do_not_count_and_the_server_is_pushed_to_again() -> None:
    async def test(server: FakeVLLM) -> None:
        server.draw, server.tells_versions = Going(server), True
        push = FakePush(server)
        engine = engine_for(server, push=push)
        await engine.load_weights(weights(1), 1)
        server.weight_version = "another run's"
        server.weights = weights(9)
        for completion in await engine.generate(prompt(), 1, SAMPLING):
            assert set(completion.logprobs) == {-1.0}
        assert [version for _, version in push.pushes] == [1, 1]
        await engine.close()

    with_servers(1, test)


def test_a_server_that_cannot_abort_has_its_connections_cut_and_the_group_is_drawn_anew() -> None:
    async def test(server: FakeVLLM) -> None:
        server.unknown_routes = {"/abort_requests"}
        engine = engine_for(server)
        await engine.load_weights(weights(1), 1)
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        await asyncio.sleep(0.08)
        await engine.load_weights(weights(2), 2)
        assert {v for c in await running for v in c.policy_versions} == {2}
        await engine.close()

    with_servers(1, test, random_draw(token_s=0.03))


def test_pushed_weights_are_a_copy_that_a_later_update_of_the_policy_does_not_change() -> None:
    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server)
        live = weights(1)
        live["tied"] = live["w"]
        await engine.load_weights(live, 1)
        live["w"].fill_(9)
        assert server.weights["w"].tolist() == [1.0, 1.0]
        assert server.weights["tied"] is server.weights["w"]
        await engine.close()

    with_servers(1, test)


def test_a_push_that_fails_once_is_tried_again() -> None:
    async def test(server: FakeVLLM) -> None:
        push = FakePush(server)

        async def fail(server: FakeVLLM) -> None:
            raise EngineError("the receipt does not match")

        push.failures.append(fail)
        engine = engine_for(server, push=push)
        await engine.load_weights(weights(1), 1)
        assert server.weights["w"].tolist() == [1.0, 1.0]
        await engine.close()

    with_servers(1, test)


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_push_that_fails_twice_on_a_server_that_is_well_is_an_error_and_nothing_is_sampled_from_it(when: str) -> None:
    async def test(server: FakeVLLM) -> None:
        push = FakePush(server)

        async def fail(server: FakeVLLM) -> None:
            raise EngineError("the receipt does not match")

        engine = engine_for(server, push=push)
        if when == "later":
            await engine.load_weights(weights(1), 1)
        push.failures.extend([fail] * 100)
        with pytest.raises(EngineError, match=r"version 2 failed twice \(the receipt does not match\)"):
            await engine.load_weights(weights(2), 2)
        with pytest.raises(EngineError, match="failed twice"):
            await engine.generate(prompt(), 1, SAMPLING)
        assert server.requests == []
        await engine.close()

    with_servers(1, test)


def test_a_push_that_breaks_in_an_unforeseen_way_ends_the_run_instead_of_waiting_for_ever() -> None:
    class Broken(FakePush):
        async def push(self, url: str, weights: Any, version: int, name: str) -> None:
            raise KeyError("a bug")

    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server, push=Broken(server))
        with pytest.raises(KeyError, match="a bug"):
            await engine.load_weights(weights(1), 1)
        with pytest.raises(KeyError, match="a bug"):
            await engine.generate(prompt(), 1, SAMPLING)
        await engine.close()

    with_servers(1, test)


def test_a_server_that_dies_half_way_through_a_push_gets_the_weights_when_it_is_back() -> None:
    async def test(server: FakeVLLM) -> None:
        push = FakePush(server)
        engine = engine_for(server, push=push)
        await engine.load_weights(weights(1), 1)

        async def die(server: FakeVLLM) -> None:
            await server.kill()
            raise EngineError("connection lost")

        push.failures.append(die)
        await engine.load_weights(weights(2), 2)  # the run goes on: nothing is sampled until it is back
        running = asyncio.create_task(engine.generate(prompt(), 2, SAMPLING))
        await asyncio.sleep(0.1)
        assert not running.done()
        await server.start()
        assert {v for c in await running for v in c.policy_versions} == {2}
        assert server.weights["w"].tolist() == [2.0, 2.0]
        await engine.close()

    with_servers(1, test)


def test_a_server_without_names_for_weights_is_pushed_to_after_every_loss() -> None:
    async def test(server: FakeVLLM) -> None:
        server.unknown_routes = {"/weight_info", "/update_weight_version"}
        push = FakePush(server)
        engine = engine_for(server, push=push)
        await engine.load_weights(weights(1), 1)
        server.troubles.append(status(500))
        await engine.generate(prompt(), 2, SAMPLING)
        assert [version for _, version in push.pushes] == [1, 1]
        await engine.close()

    with_servers(1, test)


def test_without_a_push_weights_cannot_be_loaded() -> None:
    async def test(server: FakeVLLM) -> None:
        engine = engine_for(server)
        engine._pool._push_weights = None
        with pytest.raises(EngineError, match="no way to push weights"):
            await engine.load_weights(weights(), 1)
        await engine.close()

    with_servers(1, test)
