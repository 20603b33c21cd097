"""Asynchronous runs that survive their engine and their trainer: no group is lost or trained twice, the bound holds.

First against a server that misbehaves on purpose, in the loop around a policy that counts; the weights sign each token,
so that a token drawn from other weights than it says is seen. Then the decisive ones with a real vLLM.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from leadline.config import Config
from leadline.engines.vllm_http import VLLMEngine
from leadline.errors import EngineError
from leadline.loop.place import Place
from leadline.settings.rollout import EngineSettings
from leadline.train import Step, train
from leadline.types import Weights
from tests.builders import settings
from tests.engines.fake_vllm import EOS, VOCAB, Body, FakePush, FakeVLLM, Reply, random_draw
from tests.loops import CountingPolicy, count, roller, stream

STEPS = 6


class Versioned(CountingPolicy):
    """Its weights are its version."""

    def weights(self) -> Weights:
        return {"w": torch.full((2,), float(self.version))}


class Trainer:
    """One life of a trainer: a policy, an engine, and the steps that were recorded. It may go on from another's."""

    def __init__(self, server: FakeVLLM, push: FakePush, config: Config, place: Place | None = None, version: int = 0):
        self.config, self.server, self.place = config, server, place or Place()
        self.policy = Versioned(seconds=0.01)
        self.policy.version = version
        self.steps: list[Step] = []
        self.said: list[str] = []
        self.engine = VLLMEngine(
            [server.url],
            model_name=None,
            eos_ids=frozenset({EOS}),
            vocab_size=VOCAB,
            seed=3,
            settings=EngineSettings(kind="vllm", patience_s=5.0, request_timeout_s=2.0),
            push=push,
            tokenizer=None,
            say=self.said.append,
        )

    async def run(self, reward: Callable[..., Any] = count) -> None:
        async def record(step: Step) -> None:
            self.steps.append(step)

        prompts = stream()
        prompts.seek(self.place.position)
        try:
            await self.engine.load_weights(self.policy.weights(), self.policy.version)
            await train(
                self.config,
                policy=self.policy,
                engine=self.engine,
                roller=roller(self.config, self.engine, reward),
                prompts=prompts,
                record=record,
                place=self.place,
            )
        finally:
            await self.engine.close()

    async def at_work(self, version: int) -> None:
        """Until the policy has this version and the server is drawing."""
        while not (self.policy.version >= version and self.server.running):
            await asyncio.sleep(0.001)

    def resumed(self, push: FakePush, step: int) -> "Trainer":
        """A new trainer that goes on after this step."""
        place = self.steps[step - 1].place
        return Trainer(self.server, push, self.config, place, version=step)


def signed(server: FakeVLLM) -> FakeVLLM:
    """Its tokens' logprobs are minus the version of the weights that drew them."""
    draw = server.draw

    async def signing(request: Body, aborted: asyncio.Event) -> list[Body]:
        before = server.weights
        choices = await draw(request, aborted)
        for choice in choices:
            version = float(before["w"][0]) if isinstance(before, dict) else 99.0
            choice["token_logprobs"] = [-version] * len(choice["token_ids"])
        return choices

    server.draw = signing
    return server


def survived(steps: Sequence[Step], max_staleness: int) -> None:
    """Every step was made, each prompt trained once, no token older than the bound or drawn from other weights."""
    assert [step.number for step in steps] == list(range(1, STEPS + 1))
    assert [group.prompt.index for step in steps for group in step.groups] == list(range(3 * STEPS))
    for step in steps:
        completions = [r.completion for group in step.groups for r in group.rollouts]
        assert all(c.token_ids for c in completions)
        assert all(c.logprobs == tuple(-float(v) for v in c.policy_versions) for c in completions)
        assert int(step.batch.staleness.min()) >= 0 and int(step.batch.staleness.max()) <= max_staleness


Story = Callable[[FakeVLLM, FakePush, Config], Awaitable[Sequence[Step]]]


def tell(story: Story, max_staleness: int = 1, **rollout: Any) -> None:
    """The story of a run, around a server whose requests take a while; in the end it has survived."""
    made = settings(
        rollout={"group_size": 4, "groups_per_step": 3, "max_staleness": max_staleness, **rollout},
        run={"steps": STEPS},
        eval={"prompts": 0},
    )

    async def main() -> Sequence[Step]:
        async with asyncio.timeout(30), FakeVLLM(random_draw(token_s=0.004)) as server:
            return await story(signed(server), FakePush(server), made)

    survived(asyncio.run(main()), max_staleness)


BOUNDS = pytest.mark.parametrize("max_staleness", [0, 1, 2])


async def with_trouble(trainer: Trainer, trouble: Awaitable[None], **parts: Any) -> Sequence[Step]:
    """The steps of a run that has this trouble meanwhile."""
    task = asyncio.ensure_future(trouble)
    await trainer.run(**parts)
    assert task.done(), "the run was over before the trouble began"
    await task
    return trainer.steps


@BOUNDS
def test_a_server_that_is_killed_while_it_draws_and_started_again(quick_client: None, max_staleness: int) -> None:
    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        trainer = Trainer(server, push, made)

        async def trouble() -> None:
            for version in (1, 3):
                await trainer.at_work(version)
                await server.kill()
                await asyncio.sleep(0.1)
                await server.start()
                await asyncio.sleep(0.02)

        steps = await with_trouble(trainer, trouble())
        assert any("is left out" in line for line in trainer.said)  # the second time it may not have been back yet
        return steps

    tell(story, max_staleness)


@BOUNDS
def test_a_server_that_hangs_for_a_while(quick_client: None, max_staleness: int) -> None:
    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        trainer = Trainer(server, push, made)

        async def trouble() -> None:
            await trainer.at_work(2)
            server.always, server.healthy = (lambda request, answer: Reply(never=True)), None
            while not any("left out" in line for line in trainer.said):
                await asyncio.sleep(0.01)
            server.always, server.healthy = None, True

        return await with_trouble(trainer, trouble())

    tell(story, max_staleness)


@BOUNDS
def test_a_server_that_answers_500_for_a_while(quick_client: None, max_staleness: int) -> None:
    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        trainer = Trainer(server, push, made)

        async def trouble() -> None:
            await trainer.at_work(2)
            server.always = lambda request, answer: Reply(500, b"EngineCore encountered an issue")
            await asyncio.sleep(0.5)
            server.always = None

        return await with_trouble(trainer, trouble())

    tell(story, max_staleness)


@BOUNDS
def test_a_server_that_dies_half_way_through_a_push(quick_client: None, max_staleness: int) -> None:
    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        trainer = Trainer(server, push, made)

        async def die(server: FakeVLLM) -> None:
            await server.kill()
            raise EngineError("connection lost")

        async def trouble() -> None:
            await trainer.at_work(2)
            push.failures.append(die)
            while server.serving:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            await server.start()

        return await with_trouble(trainer, trouble())

    tell(story, max_staleness)


@BOUNDS
def test_a_push_that_fails_for_good_stops_the_run_and_the_resumed_one_goes_on(
    quick_client: None, max_staleness: int
) -> None:
    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        async def refuse(server: FakeVLLM) -> None:
            raise EngineError("the receipt does not match")

        first = Trainer(server, push, made)

        async def trouble() -> None:
            await first.at_work(3)
            push.failures.extend([refuse] * 50)

        with pytest.raises(EngineError, match="the receipt does not match"):
            await with_trouble(first, trouble())
        assert first.steps[-1].number == first.policy.version, "the step that no engine got is recorded"
        push.failures.clear()
        second = first.resumed(push, first.policy.version)
        await second.run()
        return [*first.steps, *second.steps]

    tell(story, max_staleness)


@BOUNDS
def test_a_slow_reward(quick_client: None, max_staleness: int) -> None:
    async def slow(completion_ids: Sequence[int]) -> float:
        await asyncio.sleep(0.03 if len(completion_ids) % 3 else 0.0)
        return count(completion_ids)

    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        trainer = Trainer(server, push, made)
        await trainer.run(reward=slow)
        return trainer.steps

    tell(story, max_staleness)


@BOUNDS
@pytest.mark.parametrize("lost", [0, 2])
def test_a_trainer_that_dies_is_resumed_while_the_server_lives(
    quick_client: None, max_staleness: int, lost: int
) -> None:
    """The server holds weights of the dead trainer that are newer than the checkpoint; none of them is sampled from."""

    async def story(server: FakeVLLM, push: FakePush, made: Config) -> Sequence[Step]:
        first = Trainer(server, push, made)
        life = asyncio.create_task(first.run())
        await first.at_work(4)
        while len(first.steps) < 4:
            await asyncio.sleep(0.001)
        life.cancel()
        await asyncio.wait([life])
        kept = first.steps[: 4 - lost]
        second = first.resumed(push, len(kept))
        await second.run()
        return [*kept, *second.steps]

    tell(story, max_staleness)


class Mute(FakeVLLM):
    """Does what it is told, but its answer to the second name of its weights gets lost."""

    names = 0

    async def _reply(self, method: str, path: str, request: Body, head: str) -> Reply:
        reply = await super()._reply(method, path, request, head)
        self.names += path == "/update_weight_version"
        return Reply(never=True) if self.names == 2 and path == "/update_weight_version" else reply


def test_tokens_have_the_version_of_their_weights_though_the_answer_to_the_push_got_lost(quick_client: None) -> None:
    made = settings(rollout={"group_size": 4, "groups_per_step": 3}, run={"steps": STEPS}, eval={"prompts": 0})

    async def main() -> Sequence[Step]:
        async with asyncio.timeout(30), Mute(random_draw(token_s=0.004)) as server:
            trainer = Trainer(signed(server), FakePush(server), made)
            await trainer.run()
            assert sum("is left out" in line for line in trainer.said) == 1
            return trainer.steps

    survived(asyncio.run(main()), 0)


def test_prompts_that_refills_took_out_of_their_turn_are_not_trained_again_after_a_kill(quick_client: None) -> None:
    made = settings(
        rollout={"group_size": 4, "groups_per_step": 3, "max_staleness": 1, "refill": 2},
        run={"steps": STEPS},
        eval={"prompts": 0},
    )

    def often_alike(prompt: str, completion_ids: Sequence[int]) -> float:
        return count(completion_ids) if int(prompt.split()[1]) % 3 else 1.0

    async def main() -> tuple[list[int], tuple[int, ...]]:
        async with asyncio.timeout(30), FakeVLLM(random_draw(token_s=0.004)) as server:
            push = FakePush(server)
            first = Trainer(signed(server), push, made)
            await first.run(often_alike)
            kept = next(step.number for step in first.steps if step.place.ahead)
            second = first.resumed(push, kept)
            await second.run(often_alike)
            steps = [*first.steps[:kept], *second.steps]
            return [group.prompt.index for step in steps for group in step.groups], second.place.ahead

    indices, ahead = asyncio.run(main())
    assert len(indices) == len(set(indices)) > 3 * STEPS
    assert set(ahead) < set(indices)
    assert max(indices) > max(ahead), "the resumed run came by what was ahead"
