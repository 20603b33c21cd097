"""From a recipe to an engine on vLLM: in this process, or a server of its own. Nothing is started here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.engines import serve_command, vllm_build
from leadline.engines.vllm_adapter import AdapterPush
from leadline.engines.vllm_build import build_inprocess_engine, build_vllm_engine
from leadline.engines.vllm_server import command, environment
from leadline.engines.vllm_weights import ServerPush
from leadline.engines.vllm_worker import broadcast_backend
from leadline.errors import EngineError
from tests.builders import policy, settings

# In this process ------------------------------------------------------------------------------------------------------


class Captured:
    """What the engine would have been made with."""

    def __init__(self, options: Any, **arguments: Any) -> None:
        self.options = options
        self.arguments = arguments


@pytest.mark.parametrize("cuda", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.usefixtures("any_head")
def test_it_yields_its_memory_where_it_can_and_no_step_is_sampled_ahead_and_says_where_it_does_not(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, staleness: int
) -> None:
    monkeypatch.setattr(vllm_build, "VLLMInProcess", Captured)
    monkeypatch.setattr(vllm_build, "can_sleep", lambda: cuda)
    config = settings(
        engine={"kind": "vllm_inprocess", "on_new_weights": "drain"}, rollout={"max_staleness": staleness}
    )
    said: list[str] = []
    made: Any = build_inprocess_engine(config, policy(config).loaded, said.append)
    assert made.arguments["yields_memory"] == (staleness == 0)
    assert made.arguments["drain"]
    expected = (
        [] if cuda and not staleness else ["rollout.max_staleness is 1" if cuda else "vLLM cannot sleep on a CPU"]
    )
    assert [line[: len(start)] for line, start in zip(said, expected, strict=True)] == expected


@pytest.mark.usefixtures("any_head")
def test_its_cache_is_as_large_as_set_and_never_vllms_own_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_build, "VLLMInProcess", Captured)

    def cache(**engine: Any) -> int:
        config = settings(engine={"kind": "vllm_inprocess", **engine})
        made: Any = build_inprocess_engine(config, policy(config).loaded, lambda text: None)
        return int(made.options.kv_cache_bytes)

    assert cache(kv_cache_gib=1.5) == 3 << 29
    assert cache() == 1 << 29
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert cache() == 4 << 30


@pytest.mark.parametrize("kind", ["vllm", "vllm_inprocess"])
def test_a_model_without_a_kernel_on_the_cpu_is_refused_before_vllm_dies_of_it(kind: str) -> None:
    config = settings(engine={"kind": kind})
    loaded = policy(config).loaded
    with pytest.raises(EngineError, match=r"model.name is 'tiny', but its attention heads have 16 dimensions.*'hf'"):
        if kind == "vllm":
            build_vllm_engine(config, loaded, Path("/no/log"), lambda text: None)
        else:
            build_inprocess_engine(config, loaded, lambda text: None)


# Servers --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def any_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model serves as one that vLLM takes."""
    monkeypatch.setattr(serve_command, "CPU_HEAD_SIZES", (16,))


def built(**sections: Any) -> Any:
    config = settings(**sections)
    return build_vllm_engine(config, policy(config).loaded, Path("/no/log"), lambda text: None)


@pytest.mark.usefixtures("any_head")
def test_adapters_are_pushed_alone_where_that_is_set_to_a_server_that_takes_their_rank() -> None:
    pool = built(engine={"kind": "vllm", "lora": "push"}, model={"name": "tiny", "lora_rank": 12})._pool
    assert type(pool._push_weights) is AdapterPush
    words = command(pool._server.options)
    assert words[words.index("--max-lora-rank") + 1] == "16"
    assert "--enable-lora" in words
    assert environment(pool._server.options, {})["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.usefixtures("any_head")
def test_elsewhere_they_are_merged_and_the_server_takes_no_adapters() -> None:
    pool = built(engine={"kind": "vllm"}, model={"name": "tiny", "lora_rank": 12})._pool
    assert type(pool._push_weights) is ServerPush
    assert "--enable-lora" not in command(pool._server.options)


@pytest.mark.usefixtures("any_head")
def test_a_rank_above_vllms_largest_is_refused_before_anything_starts() -> None:
    with pytest.raises(EngineError, match=r"model.lora_rank is 513, but vLLM takes adapters up to rank 512"):
        built(engine={"kind": "vllm", "lora": "push"}, model={"name": "tiny", "lora_rank": 513})


@pytest.mark.usefixtures("any_head")
def test_a_server_of_our_own_has_room_for_the_probes_beside_a_full_batch_and_the_cache_that_is_set() -> None:
    options = built(engine={"kind": "vllm", "max_batch": 32, "kv_cache_gib": 1.0})._pool._server.options
    assert (options.max_num_seqs, options.kv_cache_bytes) == (40, 1 << 30)


@pytest.mark.parametrize(
    ("trainer", "workers", "backend"),
    [
        ("cuda", ["cuda", "cuda"], "nccl"),
        ("cuda", ["cuda", "cpu"], "gloo"),
        ("cpu", ["cuda"], "gloo"),
        ("cpu", ["cpu"], "gloo"),
        ("xpu", ["xpu"], "gloo"),
    ],
)
def test_weights_are_broadcast_by_nccl_where_both_sides_have_cuda_devices_and_else_by_gloo(
    trainer: str, workers: list[str], backend: str
) -> None:
    assert broadcast_backend(trainer, workers) == backend
