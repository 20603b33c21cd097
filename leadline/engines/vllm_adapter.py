"""A LoRA adapter into a running vLLM server, alone: the base stays where it is.

A push loads the adapter under a name of its own, which requests ask for from then on, and takes the others away. So no
cached key of another adapter is ever found again (vLLM tells its cache apart by that name), and the proof asks for it by
this name too: a server that answered from the base would be seen.
"""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leadline.engines.vllm_snapshot import Score, Snapshot
from leadline.engines.vllm_weights import ServerPush, transport_for
from leadline.engines.vllm_worker import fingerprint
from leadline.errors import EngineError
from leadline.types import Weights

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank of its adapters."""


class AdapterPush(ServerPush):
    """A `WeightPush` of the adapter of `model` to servers on this host that were started with `--enable-lora`."""

    def __init__(self, score: Score, vocab_size: int, *, model: nn.Module, **options: Any) -> None:
        super().__init__(score, vocab_size, model=model, **options)
        self._config: Any = model.peft_config["default"]  # type: ignore[index]

    async def push(self, url: str, weights: Weights, version: int, name: str) -> str | None:
        """The server has proved that it serves the base with this adapter, under `name`. Raises EngineError."""
        if transport_for(url) != "file":
            raise EngineError(
                f"engine.lora is 'push', but the server {url} is on another host, and vLLM reads adapters from files. It "
                "could not see them. Set engine.lora = 'merge'."
            )
        snapshot = await self.snapshot(weights, version)
        await self._unload_all(url)
        folder = await asyncio.to_thread(self._write, snapshot)
        await self._post(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        receipts = await self._call(url, "leadline_adapter", {})
        check_adapter(url, receipts, snapshot, self._config.lora_alpha / self._config.r)
        await self.check_probes(url, snapshot, str(receipts[0]["dtype"]), model=name)
        await self.name_weights(url, name)
        return name

    async def _unload_all(self, url: str) -> None:
        """Old adapters are gone. Requests do not span a change of adapters, so none is under way that needs them."""
        for model in (await self._get(url, "/v1/models"))["data"]:
            if model.get("parent") is not None:
                await self._post(url, "/v1/unload_lora_adapter", {"lora_name": model["id"]})

    def _write(self, snapshot: Snapshot) -> Path:
        """The directory of this adapter as peft writes it, alone: vLLM may read it again while it serves it."""
        folder = snapshot.path.with_name(f"adapter-{snapshot.version}")
        for old in snapshot.path.parent.glob("adapter-*"):
            if old != folder:
                shutil.rmtree(old)
        self._config.save_pretrained(folder)
        shutil.copyfile(snapshot.path, folder / "adapter_model.safetensors")
        return folder


def check_adapter(url: str, receipts: Any, snapshot: Snapshot, scale: float) -> None:
    """Raise EngineError unless each worker holds every matrix of the adapter bit for bit (vLLM holds B times its scale)."""
    for receipt in receipts:
        dtype = getattr(torch, str(receipt["dtype"]))
        held = set(receipt["held"])
        wrong = sorted(name for name, mark in _expected(snapshot.tensors, dtype, scale).items() if mark not in held)
        if wrong:
            raise EngineError(
                f"The adapter of version {snapshot.version} was loaded into {url}, but {len(wrong)} of its matrices are not "
                f"in the model as they were sent (first: {wrong[:3]}). The server samples from other weights than those "
                "that are trained. Set engine.lora = 'merge', and report the architecture."
            )


def max_rank_for(rank: int) -> int:
    """The smallest of vLLM's limits that an adapter of this rank fits into. Raises EngineError if there is none."""
    fitting = [limit for limit in MAX_RANKS if limit >= rank]
    if not fitting:
        raise EngineError(
            f"model.lora_rank is {rank}, but vLLM takes adapters up to rank {MAX_RANKS[-1]}. None could be loaded. Lower "
            "it, or set engine.lora = 'merge'."
        )
    return fitting[0]


def _expected(tensors: Mapping[str, Tensor], dtype: torch.dtype, scale: float) -> dict[str, int]:
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return {name: fingerprint(t * scale if ".lora_B." in name and scale != 1 else t) for name, t in cast.items()}
