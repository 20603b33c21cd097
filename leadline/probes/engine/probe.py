"""`leadline probe engine`: from what was asked to a report."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from leadline.errors import ConfigError, LogError
from leadline.probes.engine.attribute import Attribution, PolicyModel, attribute, without_model
from leadline.probes.engine.collect import draw, read_prompts
from leadline.probes.engine.drawn import Drawn
from leadline.probes.engine.files import read_recorded
from leadline.probes.engine.policies import Chosen, choose
from leadline.recipe import load_config
from leadline.settings.rollout import Sampling
from leadline.settings.section import Dtype

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_TOKENS = 64
MOST_LENGTH, MOST_TOKENS = 2048, 16_384
"""Of a file, with a model: the first tokens of a completion, and the first completions, that are scored."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of the command."""

    model: str | None = None
    engine: str = "hf"
    recipe: Path | None = None
    prompts: Path | None = None
    completions: int = 24
    tokens: int | None = None
    dtype: str = "float32"
    engine_dtype: str | None = None
    adapter: Path | None = None
    older: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What the probe did and found."""

    source: str
    model: str | None
    sampling: Sampling | None
    dtypes: tuple[str, ...]
    attribution: Attribution
    recorded: Attribution | None
    """Of the trainer's column against the policy, where a file holds one and a model is given: which side is off."""
    seconds: float

    @property
    def exit_code(self) -> Literal[0, 1]:
        """0 if nothing is wrong on either side, else 1."""
        found = [self.attribution, *([self.recorded] if self.recorded else [])]
        return 0 if all(one.verdict.cause == "noise" for one in found) else 1


def probe_engine(asked: Asked) -> Report:
    """Draws from the engine, and attributes the gap to the policy. Raises ConfigError, ModelError, EngineError."""
    started = time.perf_counter()
    _check_dtypes(asked)
    sampling, named = _recipe(asked)
    model = asked.model or named
    if model is None:
        raise ConfigError(
            "--model is missing, but without --from something has to be sampled and scored. Nothing can be compared. "
            "Give --model (and --engine), or a recipe with --sampling."
        )
    tokens = asked.tokens or min(sampling.max_tokens, DEFAULT_TOKENS)
    sampling = sampling.model_copy(update={"max_tokens": tokens})
    chosen = choose(model, asked.adapter, asked.older)
    prompts = read_prompts(asked.prompts, chosen.loaded)
    engine_dtype = asked.engine_dtype or asked.dtype
    drawn = draw(
        chosen.loaded, chosen.name, asked.engine, cast(Dtype, engine_dtype), prompts, asked.completions, sampling
    )
    policy = _policy(chosen, sampling, (asked.dtype, engine_dtype))
    found = attribute(drawn, policy)
    return Report(asked.engine, model, sampling, policy.dtypes, found, None, time.perf_counter() - started)


def probe_file(path: Path, asked: Asked) -> Report:
    """Attributes the gap between two recorded columns; with a model, each of them to the policy. Raises LogError."""
    started = time.perf_counter()
    _check_dtypes(asked)
    recorded = read_recorded(path)
    drawn, source = recorded.drawn, f"{recorded.kind} {path}"
    if asked.model is None:
        if drawn.trainer is None:
            raise LogError(
                f"--from is {str(path)!r}, but it holds no logprobs of the trainer. There is nothing to compare the "
                "engine's with. Give --model, the policy that trained on it."
            )
        found = without_model(drawn)
        return Report(source, None, recorded.sampling, (), found, None, time.perf_counter() - started)
    _check_scorable(drawn, path)
    chosen = choose(asked.model, asked.adapter, asked.older)
    sampling = _recipe(asked)[0] if asked.recipe else recorded.sampling or Sampling()
    dtypes = (asked.dtype, asked.engine_dtype or asked.dtype)
    policy = _policy(chosen, sampling, dtypes)
    drawn = drawn.shortened(MOST_LENGTH).first(MOST_TOKENS)
    found = attribute(drawn, policy)
    trainer = attribute(_as_engine(drawn), policy) if drawn.trainer is not None else None
    return Report(source, asked.model, sampling, dtypes, found, trainer, time.perf_counter() - started)


def _as_engine(drawn: Drawn) -> Drawn:
    """The trainer's column in the place of the engine's, on the tokens that it has."""
    assert drawn.trainer is not None
    return Drawn(drawn.prompts, drawn.completions, drawn.trainer)


def _policy(chosen: Chosen, sampling: Sampling, dtypes: tuple[str, ...]) -> PolicyModel:
    loaded = chosen.loaded
    model: Any = loaded.model
    generation = getattr(model, "generation_config", None)
    return PolicyModel(
        model,
        loaded.tokenizer,
        sampling,
        dtypes=dtypes,
        others=chosen.others,
        base=chosen.base,
        generation_config=generation.to_diff_dict() if generation is not None else {},
        unread=chosen.unread,
    )


def _recipe(asked: Asked) -> tuple[Sampling, str | None]:
    if asked.recipe is None:
        return Sampling(), None
    config = load_config(asked.recipe)
    return config.sampling, config.model.name


def _check_dtypes(asked: Asked) -> None:
    for option, value in (("--dtype", asked.dtype), ("--engine-dtype", asked.engine_dtype)):
        if value is not None and value not in DTYPES:
            raise ConfigError(
                f"{option} is {value!r}, but the dtypes are {', '.join(DTYPES)}. Nothing was compared. Use one of them."
            )


def _check_scorable(drawn: Drawn, path: Path) -> None:
    if not all(drawn.prompts):
        raise LogError(
            f"--from is {str(path)!r}, but it does not say which prompts the tokens follow. A model cannot score them. "
            "Leave out --model: the numbers alone are examined then."
        )
