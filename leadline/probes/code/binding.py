"""From a function's signature to a call on a `ProbeBatch`: what each parameter stands for, and in which shape."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leadline.errors import ConfigError
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.layouts import Layout, argument, first_tensor, layouts, returned
from leadline.probes.code.words import ALWAYS_PASSED, CHOICES, PASSED, QUANTITIES, SETTINGS, quantity_of

STYLES = {
    "TRL": ("per_token_logps", "num_generations", "completion_mask"),
    "verl": ("response_mask", "old_log_prob", "log_prob", "loss_agg_mode", "token_level_rewards", "solution_str"),
    "OpenRLHF": (
        "action_mask",
        "log_probs_base",
        "n_samples_per_prompt",
        "old_log_probs",
        "action_log_probs",
        "queries",
    ),
    "leadline": ("completion_of_token", "group_of_completion", "rollout_logprobs"),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter that is passed: a quantity of the batch, or a value."""

    name: str
    quantity: str | None
    value: Any = None
    positional: bool = False


@dataclass(frozen=True)
class Binding:
    """A function whose parameters are understood.

    Example:
        bind(policy_loss, "loss", {}).call(batch, layout)
    """

    role: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the function was told: by setting, for the reference to use the same."""

    @property
    def quantities(self) -> frozenset[str]:
        return frozenset(parameter.quantity for parameter in self.parameters if parameter.quantity)

    @property
    def style(self) -> str:
        """Whose signature it resembles most."""
        names = {parameter.name for parameter in self.parameters}
        known = {style: sum(any(word in name for name in names) for word in words) for style, words in STYLES.items()}
        best = max(known, key=lambda style: known[style])
        return best if known[best] else "plain"

    @property
    def layouts(self) -> Sequence[Layout]:
        """The shapes to try, likeliest first."""
        return layouts(self.role, self.quantities, [p.name for p in self.parameters], self.style)

    def on(self, layout: Layout) -> Callable[[ProbeBatch], Tensor]:
        """The function of a batch: what it returns for the trained tokens, for the completions, or one number."""
        return lambda batch: self.call(batch.copy(), layout)

    def call(self, batch: ProbeBatch, layout: Layout) -> Tensor:
        """On the batch's own tensors, which the function may write into.

        Raises what the function raises, and ValueError where it returned another shape than one known."""
        outputs = [self._once(part, layout) for part in layout.parts(batch)]
        output = torch.cat([first_tensor(o).flatten() for o in outputs]) if len(outputs) > 1 else outputs[0]
        return returned(output, batch, layout, self.role)

    def _once(self, batch: ProbeBatch, layout: Layout) -> Any:
        values = [(p, argument(p.quantity, batch, layout) if p.quantity else p.value) for p in self.parameters]
        positional = [value for p, value in values if p.positional]
        named = {p.name: value for p, value in values if not p.positional}
        return self.function(*positional, **named)


def bind(function: Callable[..., Any], role: str, given: Sequence[str]) -> Binding:
    """`given` are the user's own words, "parameter=quantity" or "parameter=value", which win over the names' meaning.

    A class is built first, from its defaults and the settings it takes.
    Raises ConfigError: a parameter without a default that nothing is known to fit.
    """
    own = given_arguments(given)
    settings: dict[str, Any] = {}
    built: Sequence[Parameter] = ()
    if inspect.isclass(function):
        built = _parameters(function, role, own, settings)
        instance: Any = function(**{p.name: p.value for p in built if p.quantity is None})
        function = getattr(instance, "forward", instance)
    parameters = tuple(_parameters(function, role, own, settings))
    unknown = sorted(own.keys() - {p.name for p in (*parameters, *built)})
    if unknown:
        raise ConfigError(
            f"--arg names {', '.join(unknown)}, but the function has no such parameter. It could not be passed. "
            f"It has: {', '.join(inspect.signature(function).parameters) or '(none)'}."
        )
    binding = Binding(role, function, parameters, settings)
    if "ref_logprobs" in binding.quantities:
        settings["ref_logprobs"] = True
    if "config" in binding.quantities:
        settings["clip_unsure"] = True
    return binding


def _parameters(
    function: Callable[..., Any], role: str, own: Mapping[str, Any], settings: dict[str, Any]
) -> list[Parameter]:
    passed, missing = [], []
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        quantity, fixed = own.get(p.name, (quantity_of(p.name, role), None))
        if quantity is None and fixed is None:
            if p.default is p.empty:
                missing.append(p.name)
            continue
        positional = p.kind is p.POSITIONAL_ONLY
        if quantity in SETTINGS or quantity in CHOICES:
            fixed, quantity = _setting(quantity, p.default, p.empty, settings), None
        passed.append(Parameter(p.name, quantity, fixed, positional))
    if missing:
        raise ConfigError(
            f"The function takes {', '.join(missing)}, but no such quantity is known for --as {role}. It could not be "
            f"called. Say what it stands for: --arg {missing[0]}=QUANTITY (or a value), where QUANTITY is one of "
            f"{', '.join(QUANTITIES)}."
        )
    return passed


def _setting(name: str, default: Any, empty: Any, settings: dict[str, Any]) -> Any:
    own = default is not empty and default is not None and name not in ALWAYS_PASSED
    value = default if own or (default is None and name in ("delta", "veto")) else PASSED[name]
    if default is False:  # a switch, not a number
        return default
    settings[name] = value
    return value


def given_arguments(given: Sequence[str]) -> dict[str, tuple[str | None, Any]]:
    """`--arg` words by parameter: (quantity, None) or (None, value). Raises ConfigError."""
    return dict(_given(words) for words in given)


def _given(words: str) -> tuple[str, tuple[str | None, Any]]:
    name, equals, value = words.partition("=")
    if not equals or not name:
        raise ConfigError(
            f"--arg is {words!r}, but it has no name and value. It could not be passed. Write --arg PARAMETER=QUANTITY."
        )
    if value in QUANTITIES:
        return name, (value, None)
    try:
        return name, (None, ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return name, (None, value)
