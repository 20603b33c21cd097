"""Causes really induced in a real vLLM. One server at a time."""

from collections.abc import Callable, Iterator

import pytest

from leadline.probes.engine.attribute import attribute
from tests.probes.engine.served import DONE, STARTS, Probe, Running, served

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(STARTS[request.param], tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.mark.parametrize(
    ("running", "cause", "induce"),
    [(server, cause, induce) for server, _, cause, induce in DONE],
    ids=[f"{server}: {what}" for server, what, _, _ in DONE],
    indirect=["running"],
)
def test_what_was_done_to_the_server_is_named_first(
    running: Running, cause: str, induce: Callable[[Running], Probe]
) -> None:
    drawn, policy = induce(running)
    assert attribute(drawn, policy).verdict.cause == cause
