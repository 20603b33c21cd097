"""Real vLLM servers and the vLLM of this process, started when the first test needs them and ended with the last test; and a
shorter clock for those that are made up."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from leadline.engines import vllm_link, vllm_pool
from tests.engines.real_vllm import SMALL, Servers, untied
from tests.engines.vllm_models import saved


@pytest.fixture
def quick_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules on a shorter clock."""
    monkeypatch.setattr(vllm_pool, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(vllm_pool, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(vllm_pool, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(vllm_pool, "ABORT_EVERY_S", 0.05)
    monkeypatch.setattr(vllm_link, "HEALTH_TIMEOUT_S", 0.2)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    made.stop()


@pytest.fixture(scope="session")
def vllm_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM starts once in a process."""
    import warnings

    from leadline.engines.vllm_inprocess import VLLMInProcess
    from leadline.engines.vllm_server import ServerOptions

    model = str(saved(untied(), tmp_path_factory.mktemp("inprocess")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's own code
        made = VLLMInProcess(ServerOptions(model=model, **SMALL), eos_ids=frozenset(), vocab_size=260, seed=0)
    yield made
    made._closed, made._loading = False, asyncio.Lock()
    asyncio.run(made.close())
