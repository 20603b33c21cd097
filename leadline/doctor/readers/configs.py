"""Settings in whatever file they stand, and what they mean in canonical names."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from leadline.doctor.readers.bounds import Source, decoded
from leadline.doctor.readers.frameworks import FRAMEWORKS, Framework
from leadline.doctor.readers.json_rows import parse
from leadline.doctor.readers.printed_config import command_options, flattened, literal, printed_settings
from leadline.doctor.readers.recognise import from_words
from leadline.doctor.readers.training_args import read_training_args
from leadline.errors import LogError

MAX_CONFIG = 16 << 20
VAGUE = ("backend", "name", "type", "enabled", "path", "level", "action", "dtype", "kind", "seed", "metrics")
"""Words that end many options, so that alone they stand for none."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
_LEADING_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(?:\(.*)?", re.DOTALL)
_HYDRA = re.compile(r"^[-+]{0,2}\s*[\w.]+=", re.MULTILINE)


def read_config(source: Source) -> dict[str, Any] | None:
    """The settings of a file: JSON, TOML, YAML, a command line or `training_args.bin`; None if it is none of them."""
    data = source.start(MAX_CONFIG)
    if data is None:
        return None
    if data[:4] == b"PK\x03\x04" or data[:1] == b"\x80":
        return read_training_args(data)
    text = decoded(data)
    for reader in (_json, _toml, _hydra_list, _shell, _yaml):
        settings = reader(text)
        if settings:
            return settings
    return None


def _json(text: str) -> dict[str, Any] | None:
    try:
        value = parse(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _toml(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _hydra_list(text: str) -> dict[str, Any] | None:
    """hydra's overrides.yaml: `- actor_rollout_ref.actor.optim.lr=1e-6` on each line."""
    lines = [line.strip().lstrip("- ").strip("'\"") for line in text.splitlines() if line.strip()]
    if not lines or not all(_HYDRA.match(line) for line in lines):
        return None
    return {name.lstrip("+"): literal(value) for name, _, value in (line.partition("=") for line in lines)}


def _shell(text: str) -> dict[str, Any] | None:
    """A launch script or a saved command line."""
    if "--" not in text and not re.search(r"\w\.\w[\w.]*=", text):
        return None
    flags = [line.strip().rstrip("\\") for line in text.splitlines() if line.strip().startswith("--")]
    found = printed_settings(text.splitlines())
    return {**command_options(" ".join(flags).split()), **found} or None


def _yaml(text: str) -> dict[str, Any] | None:
    if not re.search(r"^\s*[\w\"'./-]+\s*:(\s|$)", text, re.MULTILINE):
        return None
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise LogError(
            "The config is YAML, but PyYAML is not installed. Its settings cannot be read. Run: pip install pyyaml"
        ) from error
    if text.count("<<") > 20:
        return None  # merges upon merges unfold without end
    try:
        value = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def framework_of(options: Mapping[str, Any]) -> Framework | None:
    """The framework that settings belong to: the one they name, else the one that has most of the options."""
    named = options.get("framework")
    if isinstance(named, str):
        found = from_words(named)
        if found is not None:
            return found
    names = {_bare(name) for name in flattened(options)}
    scores = [sum(_bare(option) in names for option in set(f.options.values())) for f in FRAMEWORKS]
    best = max(range(len(FRAMEWORKS)), key=lambda place: scores[place])
    return FRAMEWORKS[best] if scores[best] >= 2 else None


def canonical_settings(options: Mapping[str, Any], framework: Framework) -> dict[str, Any]:
    """Settings by canonical name, and all options as `raw.NAME`. Words for a number stay words."""
    flat = flattened(options)
    settings: dict[str, Any] = {f"raw.{name}": value for name, value in flat.items() if name != "framework"}
    if framework.name == "leadline":
        return {**settings, **flat, **dict(options)}
    known = {_bare(alias): name for alias, name in framework.aliases.items()}
    for name, option in framework.options.items():
        known.setdefault(_bare(option), name)
    exact = {known[_bare(option)] for option in flat if _bare(option) in known}
    for option, value in flat.items():
        bare = _bare(option)
        target = known.get(bare) or _by_ending(bare, known)
        if target is not None and (bare in known or target not in exact):
            settings[target] = _valued(value)
    if framework.convert is not None:
        settings.update(framework.convert(flat))
    for name in ("model.dtype", "engine.dtype"):
        if name in settings:
            settings[name] = DTYPES.get(str(settings[name]), str(settings[name]).removeprefix("torch."))
    return settings


def _by_ending(option: str, known: Mapping[str, str]) -> str | None:
    """An option cut short (`actor.lr` of `actor_rollout_ref.actor.lr`), or put under one heading (`grpo.beta`)."""
    cut = {name for full, name in known.items() if full.endswith(f".{option}")}
    if len(cut) == 1 and option not in VAGUE:
        return cut.pop()
    heading, _, rest = option.partition(".")
    return known.get(rest) if heading and "val" not in heading else None


def _bare(option: str) -> str:
    return option.lstrip("-+").replace("-", "_")


def _valued(value: Any) -> Any:
    """`"0 (no kl key)"` is 0 and `"1e-6"` is a number; `">0"` and `"1|2"` stay words."""
    if not isinstance(value, str):
        return value
    match = _LEADING_NUMBER.fullmatch(value)
    if match:
        number = float(match[1])
        return int(number) if number.is_integer() and "." not in match[1] and "e" not in match[1].lower() else number
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value
