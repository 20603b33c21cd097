"""Real vLLM servers that are wrong in one way each: how they are started, and what is done to them."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import save_file
from torch import Tensor

from leadline.engines.serve_command import CPU_ARGUMENTS
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_server import ServerOptions, VLLMServer, free_port
from leadline.engines.vllm_snapshot import plain_tensors
from leadline.models import Loaded
from leadline.probes.engine.attribute import PolicyModel
from leadline.probes.engine.drawn import Drawn, drawn_from
from leadline.probes.engine.variants import Holding
from leadline.settings.rollout import EngineSettings, Sampling
from leadline.types import Completion, FinishReason, Prompt
from tests.probes.engine.architectures import architecture, moved, prompts, saved
from tests.probes.engine.induced import ASKED, HOT, TOKENS, Ids

COMPLETIONS = 12
PROMPT_TOKENS = 160
"""More than a block of the prefix cache on a CPU (128)."""
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


@dataclass(frozen=True)
class Start:
    """How one server is started."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    edit: dict[str, Any] = field(default_factory=dict)
    """Of the config.json that the server reads."""


@dataclass(frozen=True)
class Running:
    url: str
    loaded: Loaded
    directory: Path

    def post(self, route: str, body: dict[str, Any] | None = None) -> Any:
        answer = httpx.post(self.url + route, json=body or {}, timeout=120, trust_env=False)
        answer.raise_for_status()
        return answer

    def load(self, weights: dict[str, Tensor], *, reset: bool = True) -> None:
        """The server holds these weights, by leadline's worker; with `reset` its prefix cache is empty."""
        path = self.directory / "weights.safetensors"
        save_file(plain_tensors(weights, self.loaded.model), path)
        answer = self.post("/collective_rpc", {"method": "leadline_load", "kwargs": {"path": str(path)}}).text
        assert "refused" not in answer, answer
        if reset:
            self.post("/reset_prefix_cache")

    def own(self) -> dict[str, Tensor]:
        return dict(self.loaded.model.named_parameters())

    def asked(self) -> list[Ids]:
        return list(prompts(COMPLETIONS, PROMPT_TOKENS))

    def draw(self, sampling: Sampling = ASKED, prompt: Callable[[Ids], Ids] = tuple) -> Drawn:
        return asyncio.run(self._draw(sampling, prompt))

    async def _draw(self, sampling: Sampling, prompt: Callable[[Ids], Ids]) -> Drawn:
        engine = VLLMEngine(
            [self.url],
            model_name=None,
            eos_ids=frozenset(),
            vocab_size=self.loaded.model.config.vocab_size,
            seed=0,
            settings=EngineSettings(kind="vllm"),
            push=None,
            tokenizer=self.loaded.tokenizer,
        )
        own = [Prompt(i, "", ids) for i, ids in enumerate(self.asked())]
        sent = [Prompt(p.index, "", prompt(p.token_ids)) for p in own]
        try:
            found = await asyncio.gather(*(engine.generate(p, 1, sampling) for p in sent))
        finally:
            await engine.close()
        return drawn_from(list(zip(own, (c for [c] in found), strict=True)))

    def draw_without_knobs(self) -> Drawn:
        """As a client does that leaves out what it does not want to change."""
        pairs = []
        for i, ids in enumerate(self.asked()):
            body = {"model": "policy", "prompt": list(ids), "max_tokens": TOKENS, "logprobs": 0, "seed": i}
            [choice] = self.post("/v1/completions", {**body, "return_token_ids": True}).json()["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            completion = Completion(tuple(tokens), tuple(logprobs), (0,) * len(tokens), FinishReason.LENGTH)
            pairs.append((Prompt(i, "", ids), completion))
        return drawn_from(pairs)

    def policy(self, sampling: Sampling = ASKED, **known: Any) -> PolicyModel:
        return PolicyModel(self.loaded.model, self.loaded.tokenizer, sampling, **known)


@contextmanager
def served(start: Start, directory: Path) -> Iterator[Running]:
    """A real server of a fresh random model, started wrongly or rightly."""
    loaded = architecture(start.family)
    path = saved(loaded, directory / "model")
    _edit(path / "config.json", start.edit)
    _edit(path / "generation_config.json", DEFAULTS)
    options = ServerOptions(
        model=str(path),
        port=free_port(),
        dtype=start.options.get("dtype", "float32"),
        max_model_len=start.options.get("max_model_len", 512),
        max_num_seqs=16,
        kv_cache_bytes=64 << 20,
        eager=True,
        logprobs_mode=start.options.get("logprobs_mode", "processed_logprobs"),
        arguments=(*CPU_ARGUMENTS, *start.arguments),
    )
    with VLLMServer(options, directory / "server.log", {**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        asyncio.run(server.ready(300))
        yield Running(server.url, loaded, directory)


def _edit(path: Path, values: dict[str, Any]) -> None:
    """Keys replaced; None removes one."""
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


# What is done to a server that was started rightly ---------------------------------------------------------------------

Probe = tuple[Drawn, PolicyModel]


def _older(running: Running) -> tuple[Holding, ...]:
    return (Holding("of an older step", moved(running.loaded, 1)),)


def _told_older(running: Running, drawn: Drawn) -> Probe:
    return drawn, running.policy(others=_older(running))


def _stale(running: Running) -> Probe:
    running.load(dict(_older(running)[0].weights))
    try:
        return _told_older(running, running.draw())
    finally:
        running.load(running.own())


def _reloaded_by_vllm(running: Running) -> Probe:
    """vLLM's own reload, on a CPU, forgets a tied head and spoils experts."""
    running.load(dict(_older(running)[0].weights))
    own = str(running.directory / "model")
    running.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": own}})
    running.post("/reset_prefix_cache")
    try:
        return _told_older(running, running.draw())
    finally:
        running.load(running.own())


def _experts_left_out(running: Running) -> Probe:
    """A push that changes everything but the experts."""
    old = dict(_older(running)[0].weights)
    running.load({**running.own(), **{name: w for name, w in old.items() if ".experts." in name}})
    try:
        return _told_older(running, running.draw())
    finally:
        running.load(running.own())


def _cache_kept(running: Running) -> Probe:
    running.load(dict(_older(running)[0].weights))
    running.draw()
    running.load(running.own(), reset=False)
    try:
        return _told_older(running, running.draw())
    finally:
        running.post("/reset_prefix_cache")


def _knobs(**values: Any) -> Callable[[Running], Probe]:
    return lambda running: (running.draw(Sampling(max_tokens=TOKENS, **values)), running.policy())


def _asked_hot(running: Running) -> Probe:
    return running.draw(HOT), running.policy(HOT)


def _right(running: Running) -> Probe:
    return running.draw(), running.policy()


STARTS: dict[str, Start] = {
    "llama, tied": Start("llama-tied", arguments=("--generation-config", "auto")),
    "llama, raw logprobs": Start("llama", {"logprobs_mode": "raw_logprobs"}),
    "qwen3, bfloat16": Start("qwen3", {"dtype": "bfloat16"}),
    "phi3, LongRoPE beyond its length": Start("phi3-longrope", {"max_model_len": 1024}),
    "phi3, partial rotary": Start("phi3-partial"),
    "nemotron": Start("nemotron"),
    "gemma2": Start("gemma2"),
    "qwen3": Start("qwen3"),
    "llama, config without rope": Start("llama", edit={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "qwen3-moe": Start("qwen3-moe"),
    "qwen3-moe, bfloat16": Start("qwen3-moe", {"dtype": "bfloat16"}),
}
DONE: Sequence[tuple[str, str, str, Callable[[Running], Probe]]] = (
    ("llama, tied", "nothing", "noise", _right),
    ("llama, tied", "nothing at temperature 0.7", "noise", _asked_hot),
    ("llama, tied", "temperature 0.7 for 1", "temperature", _knobs(temperature=0.7)),
    ("llama, tied", "temperature 1 for 0.7", "temperature", lambda r: (r.draw(), r.policy(HOT))),
    ("llama, tied", "top_p 0.9", "top_p", _knobs(top_p=0.9)),
    ("llama, tied", "top_k 20", "top_k", _knobs(top_k=20)),
    ("llama, tied", "min_p 0.1", "min_p", _knobs(min_p=0.1)),
    ("llama, tied", "repetition_penalty 1.15", "repetition_penalty", _knobs(repetition_penalty=1.15)),
    (
        "llama, tied",
        "defaults of generation_config.json",
        "generation_config",
        lambda r: (r.draw_without_knobs(), r.policy(generation_config=DEFAULTS)),
    ),
    ("llama, tied", "BOS twice", "bos", lambda r: (r.draw(prompt=lambda ids: (1, *ids)), r.policy())),
    ("llama, tied", "BOS missing", "bos", lambda r: (r.draw(prompt=lambda ids: ids[1:]), r.policy())),
    (
        "llama, tied",
        "end of the prompt missing",
        "prompt_tokens",
        lambda r: (r.draw(prompt=lambda i: i[:-2]), r.policy()),
    ),
    ("llama, tied", "old weights", "stale_weights", _stale),
    ("llama, tied", "reloaded by vLLM", "stale_head", _reloaded_by_vllm),
    ("llama, tied", "prefix cache kept", "prefix_cache", _cache_kept),
    ("llama, raw logprobs", "temperature 0.7", "raw_logprobs", _asked_hot),
    ("llama, raw logprobs", "temperature 1", "noise", _right),
    ("qwen3, bfloat16", "nothing more", "dtype", _right),
    ("qwen3, bfloat16", "temperature 0.7 for 1", "temperature", _knobs(temperature=0.7)),
    (
        "qwen3, bfloat16",
        "as accepted",
        "noise",
        lambda r: (r.draw(), r.policy(dtypes=("float32", "bfloat16"))),
    ),
    ("phi3, LongRoPE beyond its length", "nothing more", "long_rope", _right),
    ("phi3, partial rotary", "nothing", "noise", _right),
    ("nemotron", "nothing", "noise", _right),
    ("gemma2", "nothing", "noise", _right),
    ("qwen3", "nothing", "noise", _right),
    ("llama, config without rope", "nothing more", "rope", _right),
    ("qwen3-moe", "nothing", "noise", _right),
    ("qwen3-moe", "experts left out of a push", "stale_experts", _experts_left_out),
    # which leaves experts that are neither the old ones nor the new ones: nothing that is known explains them
    ("qwen3-moe", "reloaded by vLLM", "unexplained", _reloaded_by_vllm),
    ("qwen3-moe, bfloat16", "nothing more", "moe_routing", _right),
)
"""Server, what is done to it, the cause that must be named, and how."""
