"""What runs inside a vLLM worker: new weights, whole or not at all, and a receipt for them.

vLLM mixes `WorkerExtension` into its worker class (`--worker-extension-cls`), and `/collective_rpc` calls its methods
between two steps of the engine: no token is ever sampled from half-loaded weights. Everything is read and checked
before the first layer changes, for a load that fails half-way leaves vLLM layers that kill the engine. A refusal is an
answer, not an exception: vLLM ends a worker that raises.

On a CPU vLLM keeps the matrices of linear layers only in a packed form, and its own reload forgets two of them: an
output head that is tied to the embedding, and the experts of a mixture of experts.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

PREFIX = "leadline_"
"""Of method names: they share the worker's namespace."""


class WorkerExtension:
    """Methods for `/collective_rpc`; arguments and results are JSON.

    Each returns the receipt, or {"refused": reason} with the old weights still served.
    """

    vllm_config: Any
    model_runner: Any
    device: Any

    def leadline_load(self, path: str) -> dict[str, Any]:
        """Serve the weights in the safetensors file at `path`."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            weights = load_file(path)
        except (OSError, SafetensorError) as error:
            return {"refused": f"{path} cannot be read: {error}"}
        return serve_weights(self, weights)

    def leadline_device(self) -> dict[str, Any]:
        """The kind of device on which the worker computes."""
        return {"device": str(self.device.type)}

    def leadline_receive(
        self, host: str, port: int, world: int, tensors: list[list[Any]], backend: str
    ) -> dict[str, Any]:
        """Serve the weights that the trainer broadcasts; `tensors` lists name, dtype and shape in their order."""
        rank = 1 + int(self.vllm_config.parallel_config.rank)
        device = self.device if backend == "nccl" else torch.device("cpu")
        try:
            weights = dict(_received(broadcast_group(host, port, rank, world, backend), tensors, device))
        except RuntimeError as error:
            return {"refused": f"the trainer at {host}:{port} was lost while it sent the weights: {error}"}
        return serve_weights(self, weights)

    def leadline_adapter(self) -> dict[str, Any]:
        """The receipt for the adapter that was loaded last: fingerprints of its tensors where they lie in the worker."""
        if getattr(self.vllm_config, "lora_config", None) is None:
            return {"refused": "it was started without --enable-lora"}
        adapters = self.model_runner.lora_manager._adapter_manager.list_adapters()
        if not adapters:
            return {"refused": "it holds no adapter"}
        newest = adapters[max(adapters)]  # vLLM counts its adapters
        return {
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
            "held": [fingerprint(tensor) for module in newest.loras.values() for tensor in _matrices(module)],
        }


def serve_weights(worker: Any, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """From the next step on the worker samples from `weights`, if nothing speaks against them."""
    from vllm.config import set_current_vllm_config

    model, config = worker.model_runner.get_model(), worker.vllm_config
    if getattr(config, "lora_config", None) is not None:
        return {"refused": "it was started for adapters (--enable-lora), and its layers take no other weights"}
    tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
    if reason := _objection(weights, _checkpoint_shapes(worker), tied=tied):
        return {"refused": reason}
    with torch.no_grad(), set_current_vllm_config(config):
        _load(model, config, weights)
    for reset in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        getattr(worker.model_runner, reset, lambda: None)()
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensors": fingerprints(weights),
        "live": live_fingerprints(model, weights),
    }


def fingerprints(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """CRC-32 of the bytes of each tensor: equal on both sides of a push, whatever carried it."""
    return {name: fingerprint(tensor) for name, tensor in weights.items()}


def fingerprint(tensor: Tensor) -> int:
    """CRC-32 of the bytes."""
    return zlib.crc32(_bytes(tensor))


def live_fingerprints(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Of the parameters that the model still holds as they were sent: neither fused, sharded nor packed."""
    live = {
        name: parameter.data
        for name, parameter in model.named_parameters()
        if name in weights and parameter.shape == weights[name].shape and parameter.dtype == weights[name].dtype
    }
    return fingerprints(live)


def broadcast_backend(trainer: str, workers: Collection[str]) -> str:
    """`nccl` where both sides compute on CUDA devices; else `gloo`, which every machine has."""
    return "nccl" if {trainer, *workers} == {"cuda"} else "gloo"


def broadcast_group(host: str, port: int, rank: int, world: int, backend: str = "gloo", timeout: float = 60.0) -> Any:
    """A process group of its own over TCP; rank 0 is the trainer. Touches no global group."""
    import torch.distributed

    distributed: Any = torch.distributed

    limit = timedelta(seconds=timeout)
    store = distributed.TCPStore(host, port, world, rank == 0, limit)
    group = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    return group(distributed.PrefixStore("leadline", store), rank, world, limit)


def _received(group: Any, tensors: list[list[Any]], device: torch.device) -> Iterable[tuple[str, Tensor]]:
    for name, dtype, shape in tensors:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        group.broadcast(tensor, 0).wait()
        yield name, tensor.cpu()  # a whole second model has no room on the device


def _matrices(module: Any) -> list[Tensor]:
    """A and B of an adapted layer; of each of the layers that vLLM has put together as one (query, key and value)."""
    sides = [side if isinstance(side, list) else [side] for side in (module.lora_a, module.lora_b)]
    return [tensor for side in sides for tensor in side if tensor is not None]


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


# ---- checks, before anything changes


def _objection(weights: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> str | None:
    """Why these are not all the tensors the server was started from, of their shapes, and finite; None if they are."""
    unknown = sorted(name for name in weights.keys() - expected.keys() if not (tied and _is_head(name)))
    missing = sorted(name for name in expected.keys() - weights.keys() if not (tied and _is_head(name)))
    if unknown or missing:
        return (
            f"{len(missing)} tensors of the served model are not among the new weights (first: {missing[:3]}), and "
            f"{len(unknown)} new ones are not in the model (first: {unknown[:3]})"
        )
    for name, tensor in weights.items():
        if name in expected and tuple(tensor.shape) != expected[name]:
            return f"{name} has the shape {tuple(tensor.shape)}, but the served model has {expected[name]}"
        # One pass that makes no copy: a NaN or an infinity anywhere survives the sum.
        if tensor.is_floating_point() and not bool(tensor.sum(dtype=torch.float32).isfinite()):
            return f"{name} is not finite"
    return None


def _checkpoint_shapes(worker: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of the checkpoint that the server was started from; read once."""
    shapes: dict[str, tuple[int, ...]] | None = getattr(worker, f"{PREFIX}shapes", None)
    if shapes is None:
        from vllm.model_executor.model_loader import get_model_loader

        config = worker.vllm_config
        loader: Any = get_model_loader(config.load_config)
        found = loader.get_all_weights(config.model_config, worker.model_runner.get_model())
        shapes = {name: tuple(tensor.shape) for name, tensor in found if not name.endswith("rotary_emb.inv_freq")}
        setattr(worker, f"{PREFIX}shapes", shapes)
    return shapes


def _is_head(name: str) -> bool:
    return name.split(".")[-2:-1] in (["lm_head"], ["embed_out"], ["output"])


# ---- the load


def _load(model: nn.Module, config: Any, weights: Mapping[str, Tensor]) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _forget_expert_kernels(model)
    initialize_layerwise_reload(model)
    model.load_weights(iter(weights.items()))  # type: ignore[operator]
    finalize_layerwise_reload(model, config.model_config)
    if current_platform.is_cpu():
        _pack_vocabulary_layers(model)


def _forget_expert_kernels(model: nn.Module) -> None:
    """vLLM packs experts for the CPU when it makes their kernel, and never again: without a kernel it makes a new one."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _pack_vocabulary_layers(model: nn.Module) -> None:
    """A tied head has no tensor of its own in a checkpoint, so nothing made vLLM pack it again: pack it from the weight."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear") and layer.weight.numel():
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
