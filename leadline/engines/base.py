"""What the trainer asks of an engine: two verbs, and `close`."""

from typing import Protocol

from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt, Weights


class Engine(Protocol):
    """Samples completions.

    An implementation keeps these promises, which `tests/engines/test_contract.py` checks on each engine:
    one logprob per token, of the distribution that was sampled (temperature, top_p, top_k, min_p and
    repetition penalty applied), taken when the token was drawn, NaN where unknown; the finish reason of each
    completion; special tokens kept, the final EOS or stop token included; the policy version of each token.
    Token ids in, token ids out: nothing is ever tokenised again.
    """

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        """`n` completions of the prompt. Calls may run concurrently. Raises EngineError."""
        ...

    async def load_weights(self, weights: Weights, version: int) -> None:
        """From now on sample from these weights. Tokens drawn after this returns carry `version`."""
        ...

    async def close(self) -> None:
        """Abort what is running and free the resources."""
        ...


class WeightPush(Protocol):
    """How new weights get into a running vLLM server."""

    async def push(self, url: str, weights: Weights, version: int) -> None:
        """The server at `url` holds exactly these weights, which the push has proved; its caches are empty.

        The server runs nothing of this run when it is called; it is not paused, so that the proof may ask it to score.
        Raises EngineError if that cannot be had or proved: the server's weights are then unknown, and it is not asked
        for completions until a later push succeeds.
        """
        ...
