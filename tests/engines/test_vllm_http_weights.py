"""The vLLM client while weights change: which tokens are of which weights, and pushes that fail."""

import asyncio
from typing import Any

import pytest

from leadline.errors import EngineError
from leadline.types import Completion, FinishReason
from tests.engines.fake_vllm import Body, FakePush, FakeVLLM, random_draw
from tests.engines.vllm_client import SAMPLING, engine_for, prompt, status, weights, with_servers

pytestmark = pytest.mark.usefixtures("quick_client")


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
