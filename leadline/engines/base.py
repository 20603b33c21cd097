"""What the trainer asks of an engine: two verbs, and `close`."""

from typing import Any, Protocol

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

    async def prepare(self, weights: Weights, version: int) -> Any:
        """Whatever later pushes of these weights need of the policy is read, for it stands still only until this returns.

        Returns the policy's logprobs behind the probe prompts, [probe, vocab], by which a server's logprobs are judged;
        None if it has none.
        """
        ...

    async def push(self, url: str, weights: Weights, version: int, name: str) -> str | None:
        """The server at `url` holds exactly these weights, which the push has proved; its caches are empty.

        From the first token that it draws of them the server calls these weights `name`, if it can. Requests under way
        are not ended. Returns the model that requests must ask for; None = the one they asked for before the push.
        Raises EngineError if that cannot be had or proved: the server's weights are then unknown, and it is not asked
        for completions until a later push succeeds.
        """
        ...
