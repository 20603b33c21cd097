"""The zero loss, replayed on the materials run: an engine and a trainer that disagree, under each correction.

    python -m benchmarks.materials_failure [MODEL]        writes docs/materials-failure.md and its plots

MODEL is the model that recipes/materials-sft.toml has fine-tuned (default: its last checkpoint in runs/). Each variant
trains a few steps of recipes/materials.toml with the hf engine. Progress goes to stderr. About ten minutes on two CPU
cores.
"""

import asyncio
import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from leadline.config import Config
from leadline.doctor.diagnosis import diagnose
from leadline.doctor.readers import read_runs
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.errors import LeadlineError, ModelError
from leadline.models import Loaded, load_model
from leadline.policy.batch import Batch
from leadline.policy.policy import Policy
from leadline.recipe import load_config
from leadline.replay.record import Recorded, read_step
from leadline.replay.report import replay, restoring
from leadline.run_dir import read_metrics
from leadline.screen import Screen
from leadline.session import Session, open_session
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt, Weights

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes/materials.toml"
TUNED = ROOT / "runs/materials-sft/checkpoints"
STEPS = 3
SMALL = (
    "model.dtype=float32",
    "rollout.groups_per_step=2",
    "rollout.group_size=8",
    f"run.steps={STEPS}",
    f"run.blackbox_steps={STEPS}",
    "run.checkpoint_every=0",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=5e-6",
    "eval.prompts=0",
    "eval.require_improvement=false",
    'run.skip_checks=["dry_step"]',
)
"""On top of the recipe. In float32, so that rounding makes no gap; without warm-up, so that each step moves the weights by the
whole rate, and at a rate of which three steps leave nothing to say."""

GAP, SPREAD = 0.235, 0.3
"""Nats per token: mean and standard deviation of a normal gap whose mean absolute value is the reported 0.309."""
CAP, WIDE_CAP = 3.0, 10.0
MASK = ("objective.importance_action=sequence_mask", f"objective.importance_high={CAP}")
"""TRL's default: an upper bound on the product over the tokens, no lower one."""
TRUNCATE = ("objective.importance_action=token_truncate", f"objective.importance_high={WIDE_CAP}")
OFF = ("objective.importance_action=off",)
KL_WEIGHT = 0.04
LONG_FACTOR = 3.0
"""Of every frequency: a model that was not trained for long factors hardly sees those that leave the high ones alone."""


@dataclass(frozen=True)
class Variant:
    """An engine and a correction. What it reports makes log pi_old - log mu normal, with mean `gap` and this spread."""

    engine: str
    correction: str
    settings: tuple[str, ...] = ()
    gap: float = 0.0
    spread: float = SPREAD
    long_factors: bool = False


LOW, HIGH, LONG = "reports too much", "reports too little", "takes LongRoPE's long factors"
TENFOLD = f"{LOW}, tenfold"
VARIANTS = (
    Variant("right", "none", OFF),
    Variant("right", "sequence_mask", MASK),
    Variant(LOW, "sequence_mask", MASK, -GAP),
    Variant(TENFOLD, "sequence_mask", MASK, -10 * GAP, 10**0.5 * SPREAD),
    Variant(LOW, "token_truncate, cap 10", TRUNCATE, -GAP),
    Variant(LONG, "sequence_mask", MASK, long_factors=True),
    Variant(LONG, "token_truncate, cap 10", TRUNCATE, long_factors=True),
    Variant(HIGH, "sequence_mask", MASK, GAP),
    Variant(
        TENFOLD, "sequence_mask, and a KL term", (*MASK, f"objective.beta={KL_WEIGHT}"), -10 * GAP, 10**0.5 * SPREAD
    ),
)
"""Tenfold: completions here are a tenth as long as the report's, so that this is the report's gap over a completion."""


@dataclass(frozen=True)
class Told:
    """What a variant's run has left, and what was said of it."""

    variant: Variant
    rows: tuple[dict[str, float], ...]
    log_ratios: tuple[float, ...]
    """Of each trained completion of the run: log of the product of pi_old / mu over its tokens."""
    refused: str
    """What the preflight said against the engine; it was then told to go on."""
    findings: tuple[str, ...]
    """Names, as `leadline doctor` orders them; then those that follow from them."""
    message: str
    """Of the first finding."""
    remedy: str
    """The change that `leadline replay` names; empty = none."""
    restored: float
    """Share of the signal that would reach the gradient under it."""

    def mean(self, metric: str) -> float:
        return float(np.mean([row[metric] for row in self.rows]))


@dataclass(frozen=True)
class Reading:
    """The same sampled tokens, as an engine may report them and as a trainer may score them."""

    engine: str
    trainer: str
    mean: float
    """Of log trainer - log engine, in nats per token."""
    mean_abs: float
    sequence: float
    """Median over completions of the product of the ratios."""


@dataclass(frozen=True)
class Story:
    """Everything that the page tells."""

    told: tuple[Told, ...]
    readings: tuple[Reading, ...]
    reported: tuple[str, str]
    """The doctor's first finding on the reported numbers alone: name and message."""
    clipped: float
    config: Config


def tuned_model(argument: str | None) -> Path:
    """The fine-tuned model's directory. Raises ModelError: there is none."""
    if argument is not None and Path(argument, "config.json").is_file():
        return Path(argument)
    there = sorted(TUNED.glob("step_*/model")) if argument is None else []
    if not there:
        raise ModelError(
            f"MODEL is {argument or str(TUNED)!r}, but no model is there. The failure is replayed on the fine-tuned one. "
            "Make it with: leadline sft recipes/materials-sft.toml"
        )
    return there[-1]


def tell(recipe: Path, model: Path, directory: Path, settings: Sequence[str], variants: Sequence[Variant]) -> Story:
    """Train every variant on the model, written as a LongRoPE one, and ask doctor, replay and policy about the runs."""
    dressed = as_long_rope(model, directory / "model")
    common = [*settings, f'model.name="{dressed}"']
    told = []
    for number, variant in enumerate(variants):
        say(f"{number + 1} of {len(variants)}: the engine {variant.engine}, correction {variant.correction}")
        told.append(run_variant(variant, recipe, common, directory / f"run{number}"))
        gc.collect()  # a session and its parts know each other, and hold a model each
    config = load_config(recipe, common)
    say("the sampling block, reported and scored in different ways")
    readings = read_sampling(read_step(directory / "run0", 1), config)
    return Story(tuple(told), readings, doctor_of_report(directory), told[0].mean("rollout/truncated_fraction"), config)


# ---- engines that are wrong


class Skewed:
    """An engine that samples rightly, and reports logprobs that are off by a normal number for each token."""

    def __init__(self, inner: Engine, gap: float, spread: float) -> None:
        self.inner, self.gap, self.spread = inner, gap, spread

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        completions = await self.inner.generate(prompt, n, sampling)
        draw = np.random.default_rng(2 * abs(prompt.index) + (prompt.index < 0))
        return [self._reported(completion, draw) for completion in completions]

    def _reported(self, completion: Completion, draw: np.random.Generator) -> Completion:
        off = draw.normal(self.gap, self.spread, len(completion.logprobs))
        return replace(completion, logprobs=tuple((np.array(completion.logprobs) - off).tolist()))

    async def load_weights(self, weights: Weights, version: int) -> None:
        await self.inner.load_weights(weights, version)

    async def close(self) -> None:
        await self.inner.close()


def engine_of(variant: Variant, session: Session) -> Engine:
    """The session's engine, made wrong as the variant says."""
    if not variant.long_factors:
        return Skewed(session.engine, variant.gap, variant.spread) if variant.gap else session.engine
    loaded = session.policy.loaded
    return HFEngine(with_long_factors(loaded), tokenizer=loaded.tokenizer, eos_ids=loaded.eos_ids, own_copy=True)


def as_long_rope(model: Path, target: Path) -> Path:
    """The same model, written as a LongRoPE one: its short factors are 1, which change nothing below half its context."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("config.json"), copy_function=_link)
    config = json.loads((model / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["rope_parameters"] |= {
        "rope_type": "longrope",
        "attention_factor": 1.0,
        "factor": 2.0,
        "original_max_position_embeddings": config["max_position_embeddings"] // 2,
        "short_factor": [1.0] * (size // 2),
        "long_factor": [LONG_FACTOR] * (size // 2),
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(Path(source).resolve())


def with_long_factors(loaded: Loaded) -> Any:
    """A copy of the model whose short factors are the long ones, as in an engine that chose by the longest sequence it
    may be asked for."""
    model: Any = loaded.model
    config = type(model.config).from_dict(model.config.to_dict())
    config.rope_parameters = {**config.rope_parameters, "short_factor": config.rope_parameters["long_factor"]}
    other = type(model)._from_config(config, attn_implementation="sdpa", dtype=model.dtype)
    other.load_state_dict(model.state_dict())
    return other.eval()


# ---- one run, and what is said of it


def run_variant(variant: Variant, recipe: Path, common: Sequence[str], path: Path) -> Told:
    config = load_config(recipe, [*common, *variant.settings])
    quiet = Console(stderr=True, quiet=True)
    with Screen(config, console=quiet) as screen:
        session = open_session(config, path, resume=False, stopping=lambda: False, screen=screen)
        session.engine = engine_of(variant, session)
        session.roller = replace(session.roller, engine=session.engine)
        refused = asyncio.run(_look_then_train(session))
    shutil.rmtree(path / "checkpoints")
    rows = tuple(read_metrics(path / "metrics.jsonl"))
    findings, message = doctor_of(path)
    best = restoring(replay(path, 1, None, with_weights=False))
    return Told(
        variant,
        rows,
        tuple(log_ratios([read_step(path, step + 1) for step in range(len(rows))])),
        refused,
        findings,
        message,
        str(best.change) if best else "",
        best.reached if best else float("nan"),
    )


async def _look_then_train(session: Session) -> str:
    """Train, whatever the preflight finds; what it finds wrong with the engine."""
    assert session.preflight is not None
    checks = await session.preflight.with_engine(session.engine)
    session.preflight = None
    await session.run()
    return " ".join(f"{check.part}: {check.note}" for check in checks if check.verdict == "wrong")


def doctor_of(path: Path) -> tuple[tuple[str, ...], str]:
    """Names of the findings on a log and of what follows from them, and the first one's message."""
    (run,) = read_runs([path])
    findings = diagnose(run).findings
    follow = [name for finding in findings for name in finding.consequences]
    return (*(finding.name for finding in findings), *follow), findings[0].message if findings else ""


def log_ratios(steps: Sequence[Recorded]) -> list[float]:
    """log pi_old - log mu, summed over the tokens of each completion that was trained."""
    found = []
    for record in steps:
        owner = record.batch(record.config).completion_of_token
        reported = [p for g in record.groups for r in g.rollouts for p in r.completion.logprobs]
        for seen in record.seen.values():
            gap = seen.scores.logprobs.double() - torch.tensor(reported).double()
            found += [float(gap[owner == c].sum()) for c in owner[seen.forwarded].unique()]
    return found


# ---- what the sampling block alone would do

PLAIN: Mapping[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
WHOLE, WARM, RAW = "the whole block", "temperature only", "raw"
PENALTY, SUPPORT = "temperature and penalty", "temperature, top_p, top_k"
SCORED: Mapping[str, Mapping[str, Any]] = {
    WHOLE: {},
    WARM: PLAIN,
    RAW: {**PLAIN, "temperature": 1.0},
    PENALTY: {"top_p": 1.0, "top_k": 0},
    SUPPORT: {"repetition_penalty": 1.0},
}
COMPARED = ((WHOLE, WARM), (WHOLE, PENALTY), (WHOLE, SUPPORT), (WHOLE, RAW), (RAW, WARM), (RAW, WHOLE))
"""What an engine reports, and what a trainer takes it to be."""


def read_sampling(record: Recorded, config: Config) -> tuple[Reading, ...]:
    """The tokens of a right engine's step, scored in each way by the model that drew them."""
    policy = Policy(load_model(config.model, config.run.seed), config)
    batch = record.batch(config)
    scored = {}
    for name, change in SCORED.items():
        policy.config = config.model_copy(update={"sampling": config.sampling.model_copy(update=dict(change))})
        with torch.no_grad():
            scored[name] = policy.logprobs(batch, range(batch.num_completions)).logprobs.double().cpu()
    return tuple(reading(engine, trainer, scored[trainer] - scored[engine], batch) for engine, trainer in COMPARED)


def reading(engine: str, trainer: str, gap: torch.Tensor, batch: Batch) -> Reading:
    sums = torch.zeros(batch.num_completions, dtype=torch.float64)
    sums.index_add_(0, batch.completion_of_token, gap)
    return Reading(engine, trainer, float(gap.mean()), float(gap.abs().mean()), float(sums.median().exp()))


# ---- the reported numbers

REPORTED = (
    (10, 0.0, 0.00530, 0.819, 0.683, 3.97e-10),
    (20, 0.0, 0.00483, 1.007, 0.513, 4.87e-09),
    (30, 0.0, 0.00628, 0.605, 0.602, 2.01e-10),
    (40, 0.0, 0.00624, 1.171, 0.239, 1.10e-07),
    (50, 0.0, 0.00840, 1.080, 0.529, 1.53e-07),
    (60, 0.0, 0.00736, 0.925, 0.494, 1.28e-08),
    (70, 0.0, 0.00895, 1.078, 0.204, 1.64e-10),
)
"""Step, loss, gradient norm, reward, its std, mean importance ratio: the table that this replays."""
REPORTED_GAP = 0.309
TRL_KEYS = ("step", "loss", "grad_norm", "reward", "reward_std", "sampling/importance_sampling_ratio/mean")


def doctor_of_report(directory: Path) -> tuple[str, str]:
    """The doctor's first finding on a TRL log of nothing but the reported numbers."""
    rest = {
        "sampling/sampling_logp_difference/mean": REPORTED_GAP,
        "frac_reward_zero_std": 0.0,
        "completions/clipped_ratio": 1.0,
    }
    log = directory / "reported.jsonl"
    log.write_text("\n".join(json.dumps({**dict(zip(TRL_KEYS, row, strict=True)), **rest}) for row in REPORTED))
    names, message = doctor_of(log)
    return (names[0], message) if names else ("nothing", "")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    from benchmarks.materials_failure_page import write

    torch.set_num_threads(1)
    try:
        model = tuned_model(sys.argv[1] if len(sys.argv) > 1 else None)
    except LeadlineError as error:
        say(str(error))
        return 2
    with tempfile.TemporaryDirectory() as directory:
        write(tell(RECIPE, model, Path(directory), SMALL, VARIANTS), ROOT / "docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
