"""What can be wrong with a config, in words: settings that contradict each other, and values pydantic refuses."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from leadline.config import Config

Sections = Mapping[str, "type[BaseModel]"]

OVERLONG = "overlong"
"""Label of the soft overlong penalty among a rollout's rewards."""


def contradictions(config: "Config") -> list[str]:
    """One line for each pair of settings that cannot both be meant."""
    return [problem for check in CHECKS if (problem := check(config))]


def explained(error: "ValidationError", sections: Sections) -> str:
    """The problems of a ValidationError in the house form, one line each; what only follows from another is left out."""
    problems = _by_setting(error.errors(), sections)
    places = [problem["loc"] for problem in problems]
    return "\n".join(
        _explained(problem, sections)
        for problem in problems
        if not any(len(place) > len(loc := problem["loc"]) and place[: len(loc)] == loc for place in places)
    )


def _half_precision(config: "Config") -> str | None:
    if config.model.dtype != "float16":
        return None
    return (
        "model.dtype is 'float16', but gradients of that dtype underflow without loss scaling. Part of the signal would "
        "vanish. Use bfloat16 or float32 (engine.dtype may be float16)."
    )


def _greedy_training(config: "Config") -> str | None:
    if config.sampling.temperature > 0:
        return None
    return (
        "sampling.temperature is 0, but a greedy group holds the same completion "
        f"{config.rollout.group_size} times. No group would carry a signal. Use 1.0; for greedy evaluation set "
        "eval.temperature = 0."
    )


def _minibatches_split_groups(config: "Config") -> str | None:
    groups, parts = config.rollout.groups_per_step, config.optimizer.minibatches
    if groups % parts == 0:
        return None
    return (
        f"optimizer.minibatches is {parts}, but rollout.groups_per_step is {groups}, which {parts} does not divide. "
        "Minibatches would weigh groups differently. Choose a divisor."
    )


def _overlong_fits(config: "Config") -> str | None:
    buffer, limit = config.objective.overlong_buffer, config.sampling.max_tokens
    if buffer < limit:
        return None
    return (
        f"objective.overlong_buffer is {buffer}, but sampling.max_tokens is {limit}. Every completion would be "
        "penalised. Use a tenth to a quarter of max_tokens."
    )


def _labels_unique(config: "Config") -> str | None:
    labels = [r.resolved_label for r in config.rewards]
    if config.objective.overlong_buffer:
        labels.append(OVERLONG)  # the penalty is logged as a component of this name
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if not twice:
        return None
    return f"rewards has {twice[0]!r} twice, but logs name rewards by label. Means would mix. Give each a `label`."


def _weights_not_all_zero(config: "Config") -> str | None:
    if any(r.weight for r in config.rewards):
        return None
    return (
        "rewards has weight 0 everywhere, but the reward is their weighted sum. Nothing would be learned. Set a weight."
    )


def _epsilon_is_small(config: "Config") -> str | None:
    epsilon = config.objective.advantage_epsilon
    if epsilon < 1e-2:
        return None
    return (
        f"objective.advantage_epsilon is {epsilon}, but a group's reward std is often of that size. Advantages would "
        "vanish. Use 1e-6."
    )


def _lower_clip_acts(config: "Config") -> str | None:
    clip = config.objective.clip_low
    if clip < 1:
        return None
    return (
        f"objective.clip_low is {clip}, but the ratio is clipped at 1 - clip_low and never negative. The lower clip "
        "would never act. Use 0.2."
    )


def _importance_bounds_are_ordered(config: "Config") -> str | None:
    low, high = config.objective.importance_low, config.objective.importance_high
    if low < high:
        return None
    return (
        f"objective.importance_low is {low}, but importance_high is {high}. No rollout weight could lie between them. "
        "Set low < high."
    )


def _urls_need_vllm(config: "Config") -> str | None:
    if not config.engine.urls or config.engine.kind == "vllm":
        return None
    return (
        f"engine.urls is {list(config.engine.urls)}, but engine.kind is {config.engine.kind!r}, which uses no server. "
        "The servers would stay idle. Set engine.kind = 'vllm', or remove urls."
    )


def _model_name_needs_vllm(config: "Config") -> str | None:
    engine = config.engine
    if engine.model_name is None or (engine.kind == "vllm" and engine.urls):
        return None
    return (
        f"engine.model_name is {engine.model_name!r}, but without engine.urls no server is asked for a model by name. It "
        "would be ignored. Remove it, or give engine.urls with engine.kind = 'vllm'."
    )


def _pushed_adapters_exist(config: "Config") -> str | None:
    if config.engine.lora == "merge":
        return None
    if config.engine.kind != "vllm":
        return (
            f"engine.lora is 'push', but engine.kind is {config.engine.kind!r}, which takes no adapters. None would be "
            "pushed. Set engine.kind = 'vllm', or engine.lora = 'merge'."
        )
    if not config.model.lora_rank:
        return (
            "engine.lora is 'push', but model.lora_rank is 0. There is no adapter to push. Set model.lora_rank, or "
            "engine.lora = 'merge'."
        )
    return None


def _kv_cache_is_ours(config: "Config") -> str | None:
    engine = config.engine
    if engine.kv_cache_gib is None or engine.kind == "vllm_inprocess" or (engine.kind == "vllm" and not engine.urls):
        return None
    whose = "the servers of engine.urls were started with theirs" if engine.urls else "only vLLM has such a cache"
    return (
        f"engine.kv_cache_gib is {engine.kv_cache_gib:g}, but {whose}. It would be ignored. Remove it"
        f"{', and start the servers with `leadline serve --kv-cache`' if engine.urls else ''}."
    )


def _urls_are_addresses(config: "Config") -> str | None:
    wrong = [url for url in config.engine.urls if not url.startswith(("http://", "https://"))]
    if not wrong:
        return None
    return (
        f"engine.urls has {wrong[0]!r}, but an address begins with http:// or https://. No server could be reached. "
        f"Write http://{wrong[0]}."
    )


def _improvement_needs_prompts(config: "Config") -> str | None:
    if config.eval.prompts or not config.eval.require_improvement:
        return None
    return (
        "eval.require_improvement is true, but eval.prompts is 0. Nothing would be measured, and the run would count "
        "as a success. Hold out prompts, or set it to false."
    )


def _replay_is_older_than_the_queue(config: "Config") -> str | None:
    bound, replay = config.rollout.max_staleness, config.rollout.replay_max_staleness
    if not 0 < replay <= bound:
        return None
    return (
        f"rollout.replay_max_staleness is {replay}, but rollout.max_staleness is {bound}. A group that is trained at its "
        "bound could never be replayed. Set replay_max_staleness above max_staleness, or to 0."
    )


def _replay_is_weighted(config: "Config") -> str | None:
    replay = config.rollout.replay_max_staleness
    if not replay or config.objective.importance_action != "off":
        return None
    return (
        f"rollout.replay_max_staleness is {replay}, but objective.importance_action is 'off'. Replayed groups would train "
        "as if the policy of today had drawn them. Set importance_action = 'truncate', or replay_max_staleness = 0."
    )


def _stalls_are_told_before_they_end_the_run(config: "Config") -> str | None:
    warning, limit = config.run.stall_warning_s, config.run.stall_limit_s
    if warning <= limit:
        return None
    return (
        f"run.stall_warning_s is {warning:g}, but run.stall_limit_s is {limit:g}. The run would stop before it was said "
        "what it waits for. Set stall_warning_s below stall_limit_s."
    )


def _servers_have_their_time(config: "Config") -> str | None:
    engine, limit = config.engine, config.run.stall_limit_s
    longest = max(engine.request_timeout_s, engine.patience_s)
    if engine.kind != "vllm" or limit > longest:
        return None
    return (
        f"run.stall_limit_s is {limit:g}, but engine.request_timeout_s and engine.patience_s let a run wait {longest:g} s for "
        "a server. It would stop while a server may still answer. Set stall_limit_s above both, or lower them."
    )


CHECKS = (
    _half_precision,
    _greedy_training,
    _minibatches_split_groups,
    _overlong_fits,
    _epsilon_is_small,
    _lower_clip_acts,
    _importance_bounds_are_ordered,
    _replay_is_older_than_the_queue,
    _replay_is_weighted,
    _stalls_are_told_before_they_end_the_run,
    _servers_have_their_time,
    _labels_unique,
    _weights_not_all_zero,
    _urls_need_vllm,
    _model_name_needs_vllm,
    _pushed_adapters_exist,
    _kv_cache_is_ours,
    _urls_are_addresses,
    _improvement_needs_prompts,
)


def _by_setting(problems: Sequence[Any], sections: Sections) -> list[Any]:
    """A setting that takes several kinds of values has one problem, not one for each kind that a value is not."""
    settings: dict[tuple[Any, ...], list[Any]] = {}
    for problem in problems:
        settings.setdefault(_setting_of(problem["loc"], sections), []).append(problem)
    return [{**first, "loc": loc, "msg": _either([first, *others])} for loc, (first, *others) in settings.items()]


def _setting_of(loc: tuple[Any, ...], sections: Sections) -> tuple[Any, ...]:
    """(section, setting, kind of value) -> (section, setting)."""
    if len(loc) != 3 or loc[0] not in sections or not isinstance(loc[2], str):
        return loc
    field = sections[loc[0]].model_fields.get(loc[1])
    return loc[:2] if field is not None and get_origin(field.annotation) in (Union, UnionType) else loc


def _either(problems: Sequence[Any]) -> str:
    return " or ".join([problems[0]["msg"], *(p["msg"].removeprefix("Input should be ") for p in problems[1:])])


def _explained(problem: Any, sections: Sections) -> str:
    """One pydantic problem. Our own validators already speak the house form."""
    kind, loc = problem["type"], problem["loc"]
    name = ".".join(str(part) for part in loc)
    match kind:
        case "value_error":
            return str(problem["ctx"]["error"])
        case "extra_forbidden":
            known = list(sections[loc[0]].model_fields) if len(loc) > 1 else list(sections)
            return (
                f"{name} is set, but there is no such setting. It would be ignored. {_meant(loc, known, sections)}"
                f"Use one of: {', '.join(known)}."
            )
        case "missing":
            return f"{name} is missing, but a run needs it. Nothing can start. Add it to the recipe."
        case "too_short":
            return f"{name} is empty, but a run needs at least one. Nothing can start. Add a table [[{name}]]."
        case "tuple_type" if name == "rewards":
            return f"{name} is no list, but a run may have several. None could be told apart. Write [[{name}]]."
        case "model_type":
            return (
                f"{name} is {_shown(problem['input'])}, but it is a section of settings. None of them would be set. "
                f"Write [{loc[0]}] and its settings below."
            )
    fact = problem["msg"].replace("Input should be", "it should be").replace("a valid tuple", "a list")
    return f"{name} is {_shown(problem['input'])}, but {fact}. The run cannot start. Change the value."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _meant(loc: Sequence[Any], known: Sequence[str], sections: Sections) -> str:
    """The setting of this name in another section, or one spelled like it."""
    last = str(loc[-1])
    names = [*_elsewhere(last, sections), *get_close_matches(last, known, n=1)]
    return f"Did you mean {names[0]}? " if names else ""


def _elsewhere(field: str, sections: Sections) -> Iterator[str]:
    return (f"{name}.{field}" for name, section in sections.items() if field in section.model_fields)
