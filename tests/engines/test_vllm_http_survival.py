"""The vLLM client against servers that die, hang, restart and come back."""

import asyncio
import time

import pytest

from leadline.errors import EngineError
from leadline.types import Completion, FinishReason
from tests.engines.fake_vllm import Body, FakePush, FakeVLLM, Reply, random_draw
from tests.engines.vllm_client import SAMPLING, engine_for, prompt, status, weights, with_servers

pytestmark = pytest.mark.usefixtures("quick_client")


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
