"""Settings out of what a run prints at its start: a dict, a `Namespace(...)`, a command line, a dotted list."""

import ast
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from leadline.doctor.readers.frameworks import FRAMEWORKS
from leadline.doctor.readers.frameworks.parsing import blocks

MAX_TEXT = 1 << 20
MAX_SETTINGS = 20_000
_NAMESPACE = re.compile(r"(?:Namespace|TrainingArguments|(?<!\w)\w{0,60}Config|Args|Arguments)\(")
_FIELD = re.compile(r"""(?<!\w)(\w{1,100})\s*=\s*('[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\}|<[^>]*>|[^,()\s]+)""")
_DOTTED = re.compile(r"^\s*(\w[\w-]*) \.{2,} (.+?)\s*$")

_OPTIONS = frozenset(
    name.lstrip("-").replace("-", "_")
    for framework in FRAMEWORKS
    for option in (*framework.options.values(), *framework.aliases)
    for name in (option, option.rsplit(".", 1)[-1])
)
_BOTH = frozenset({"learning_rate", "lr", "kl_coef", "loss", "n", "r", "model", "clip_ratio", "temperature_mean"})
"""Names that are options and metrics alike, or too short to tell."""


def is_option(key: str) -> bool:
    """Some framework has an option of this name, which is no metric."""
    return key.lstrip("-").replace("-", "_") in _OPTIONS and key not in _BOTH


def flattened(value: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings under dotted names, at most `MAX_SETTINGS` of them and ten levels deep."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, inside: Any, depth: int) -> None:
        if len(flat) >= MAX_SETTINGS:
            return
        if isinstance(inside, Mapping) and inside and depth < 10:
            for key, item in inside.items():
                walk(f"{prefix}.{key}" if prefix else str(key), item, depth + 1)
        elif prefix:
            flat[prefix] = inside

    walk("", value, 0)
    return flat


def printed_settings(lines: Iterable[str]) -> dict[str, Any]:
    """All settings that the lines print, the first of each name. Nothing is evaluated but literals."""
    kept = list(lines)
    found: dict[str, Any] = {}
    for settings in (*_dicts(kept), _namespaces(kept), _dotted(kept), _commands(kept)):
        for name, value in settings.items():
            found.setdefault(name, value)
    return found


def literal(text: str) -> Any:
    """A number, truth value, list or quoted text as itself; anything else as text."""
    text = text.strip().rstrip(",")
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null", "~"):
        return None
    try:
        return float(text) if re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) else ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def command_options(words: Iterable[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--flag` and hydra's `name=value` of a command line."""
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            options[name] = literal(value) if equals else True
            name = "" if equals else name
        elif name:
            options[name] = literal(word) if options[name] is True else [options[name], literal(word)]
        elif re.match(r"\+{0,2}[A-Za-z_][\w.]*\.[\w.]+=", word):
            key, _, value = word.lstrip("+").partition("=")
            options[key] = literal(value)
    return options


def _dicts(lines: list[str]) -> list[dict[str, Any]]:
    """Printed dicts that are literals and hold options."""
    found = []
    for block in blocks(iter(lines), r"""(?:[A-Za-z_][\w.]*\s*=\s*)?\{\s*(?=$|['"])"""):
        value = _literal_dict(block)
        if isinstance(value, dict):
            flat = flattened(value)
            if sum(is_option(name) or is_option(name.rsplit(".", 1)[-1]) for name in flat) >= 2:
                found.append(flat)
    return found


def _literal_dict(block: str) -> Any:
    if len(block) > MAX_TEXT:
        return None
    opening, closing = block.find("{"), block.rfind("}")
    try:
        return ast.literal_eval(block[opening : closing + 1])
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def _namespaces(lines: list[str]) -> dict[str, Any]:
    """`GRPOConfig(` and its `name=value` up to the bracket that closes it."""
    options: dict[str, Any] = {}
    inside = False
    for line in lines:
        match = _NAMESPACE.search(line)
        if match:
            inside, line = True, line[match.end() :]
        if inside:
            options.update({name: literal(value) for name, value in _FIELD.findall(line)})
            inside = not line.rstrip().endswith(")") and len(options) < MAX_SETTINGS
    return options if sum(map(is_option, options)) >= 2 else {}


def _dotted(lines: list[str]) -> dict[str, Any]:
    """Megatron's `  lr ........ 1e-06`."""
    options = {match[1]: literal(match[2]) for line in lines if (match := _DOTTED.match(line))}
    return options if sum(map(is_option, options)) >= 2 else {}


def _commands(lines: list[str]) -> dict[str, Any]:
    """A line, or lines joined by backslashes, with at least two options of a framework."""
    found: dict[str, Any] = {}
    command = ""
    for line in lines:
        joined = command + line.strip()
        if joined.endswith("\\") and len(joined) < MAX_TEXT:
            command = joined[:-1] + " "
            continue
        command = ""
        if " --" in f" {joined}" or ("=" in joined and re.search(r"\b\w+\.\w[\w.]*=", joined)):
            options = command_options(_words(joined))
            known = sum(is_option(name) or is_option(name.rsplit(".", 1)[-1]) for name in options)
            if known >= 2:
                found.update(options)
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=False)
    except ValueError:
        return line.split()
