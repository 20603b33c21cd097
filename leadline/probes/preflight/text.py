"""Preflight of tokens and text: what the model reads, what ends it, and what a reward gets to see."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from leadline.data import uses_template
from leadline.decoding import decode
from leadline.errors import ConfigError, DataError, ModelError
from leadline.models import plain_model
from leadline.probes.preflight.parts import Parts, Undecided
from leadline.types import Completion, FinishReason, Prompt

MARKER = re.compile(r"<\|[\w ./:-]+\|>")
"""A special token as templates write them."""
TAG = re.compile(r"(?<!\?P)(?<!\?)(?:</?[A-Za-z][\w:.-]*>|<\|[\w ./:-]+\|>)")
"""Markup that a reward may look for; no group name of a regular expression."""
REASONING = ("think", "thinking", "thought", "thoughts", "reasoning", "reason", "analysis", "scratchpad")
TAG_PARAMS = ("tag", "tags")
"""Parameters of rewards that hold names of tags without their brackets."""


# Tokenizer and template -----------------------------------------------------------------------------------------------


def tokenizer(parts: Parts) -> str:
    """The first prompts' token ids spell their text again, with no BOS too many, no EOS at the end, nothing unknown.

    Raises DataError.
    """
    prompts = parts.first_prompts
    for prompt in prompts:
        _check_ends(parts, prompt)
        _check_spelling(parts, prompt)
    split = _split_markers(parts, prompts)
    said = f"{len(prompts)} prompts are spelled the same by their tokens; {_beginning(parts, prompts[0])}"
    return f"{said}; the model reads {', '.join(split)} as ordinary text" if split else said


def _check_ends(parts: Parts, prompt: Prompt) -> None:
    ids, bos = prompt.token_ids, parts.tokenizer.bos_token_id
    if bos is not None and ids[:2] == (bos, bos):
        raise DataError(
            f"data.chat is {parts.config.data.chat}, but prompt {prompt.index} begins with {parts.tokenizer.bos_token!r} "
            "twice: the tokenizer adds one to a text that has it. The model has never seen such a beginning. Remove it "
            "from the prompts, or let the chat template write it (data.chat = true)."
        )
    if ids[-1] in parts.loaded.eos_ids and not prompt.text.rstrip().endswith(_spelled(parts, ids[-1])):
        raise DataError(
            f"model.tokenizer is {_tokenizer_name(parts)!r}, but it puts {_spelled(parts, ids[-1])!r} behind a prompt. "
            "The model would continue a text that has ended. Set add_eos_token = false in tokenizer_config.json."
        )


def _check_spelling(parts: Parts, prompt: Prompt) -> None:
    tokenizer, ids = parts.tokenizer, list(prompt.token_ids)
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown in ids and tokenizer.unk_token not in prompt.text:
        raise DataError(
            f"model.tokenizer is {_tokenizer_name(parts)!r}, but it does not know {ids.count(unknown)} of the "
            f"{len(ids)} tokens of prompt {prompt.index}. The model would not see what is asked. Use the model's own "
            "tokenizer, or prompts in an alphabet that it knows."
        )
    if ids[0] == tokenizer.bos_token_id and not prompt.text.startswith(tokenizer.bos_token):
        ids = ids[1:]
    again = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _plain(again) != _plain(prompt.text):
        raise DataError(
            f"model.tokenizer is {_tokenizer_name(parts)!r}, but the tokens of prompt {prompt.index} spell "
            f"{_difference(prompt.text, again)}. The model would answer another question. Use the model's own tokenizer."
        )


def _plain(text: str) -> str:
    """Tokenizers may write spaces and compatible characters in their own way."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _difference(text: str, again: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(text, again, strict=False)) if a != b), min(len(text), len(again)))
    begin = max(0, place - 10)
    return f"{again[begin : place + 20]!r} where its text is {text[begin : place + 20]!r}"


def _split_markers(parts: Parts, prompts: Sequence[Prompt]) -> list[str]:
    """Markers of the template that the tokenizer has no token for."""
    known = parts.tokenizer.get_vocab()
    found = chain.from_iterable(MARKER.findall(prompt.text) for prompt in prompts)
    return [marker for marker in dict.fromkeys(found) if marker not in known]


def _beginning(parts: Parts, prompt: Prompt) -> str:
    templated = "the chat template writes them" if uses_template(parts.tokenizer, parts.config.data) else "plain text"
    return f"{templated}, the first token is {_spelled(parts, prompt.token_ids[0])!r}"


# Terminators ----------------------------------------------------------------------------------------------------------


def terminators(parts: Parts) -> str:
    """What ends a completion: at least one EOS id that the model can draw, among them the one that the template ends a
    turn with.

    Raises ModelError, ConfigError.
    """
    sampling, eos_ids = parts.config.sampling, parts.loaded.eos_ids
    if not (eos_ids or sampling.stop or sampling.stop_token_ids):
        raise ModelError(
            f"model.name is {parts.config.model.name!r}, but neither its config, its generation config nor its tokenizer "
            "has an EOS id, and sampling.stop is empty. Every completion would run into sampling.max_tokens. Set "
            "sampling.stop or sampling.stop_token_ids, or eos_token_id in generation_config.json."
        )
    beyond = sorted(i for i in (*eos_ids, *sampling.stop_token_ids) if not 0 <= i < parts.embedded)
    if beyond:
        raise ModelError(
            f"model.name is {parts.config.model.name!r}, but {beyond[0]}, which is to end completions, is no token of its "
            f"{parts.embedded}. It can never be drawn. Correct sampling.stop_token_ids, or eos_token_id in the model's "
            "generation_config.json."
        )
    turn_end = _turn_end(parts)
    _check_turn_end(parts, turn_end)
    return f"{_by_source(parts)}; {_turn_words(parts, turn_end)}"


def _turn_end(parts: Parts) -> int | None:
    """The special token with which the chat template ends the assistant's turn; None if there is none."""
    from jinja2 import TemplateError

    tokenizer, data = parts.tokenizer, parts.config.data
    if not uses_template(tokenizer, data):
        return None
    turn = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "IT-IS-5"}]
    try:
        text = str(tokenizer.apply_chat_template(turn, tokenize=False, **parts.config.model.chat_template_kwargs))
    except TemplateError:
        return None
    _, there, tail = text.rpartition("IT-IS-5")
    ids = tokenizer(tail.strip(), add_special_tokens=False)["input_ids"] if there else []
    return ids[0] if ids and ids[0] in _special_ids(tokenizer) else None


def _special_ids(tokenizer: Any) -> set[int]:
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}


def _check_turn_end(parts: Parts, turn_end: int | None) -> None:
    sampling, eos_ids = parts.config.sampling, parts.loaded.eos_ids
    if turn_end is None or turn_end in eos_ids or turn_end in sampling.stop_token_ids:
        return
    spelled = _spelled(parts, turn_end)
    if any(stop in spelled for stop in sampling.stop):
        return
    raise ConfigError(
        f"sampling.stop_token_ids is {list(sampling.stop_token_ids)}, but the chat template ends a turn with {spelled!r} "
        f"({turn_end}), which is none of the model's EOS ids ({_listed(parts, eos_ids)}). Completions would run on into "
        f"sampling.max_tokens and count as truncated. Set sampling.stop_token_ids = [{turn_end}]."
    )


def _by_source(parts: Parts) -> str:
    """Which EOS ids each source names; completions end at any of them."""
    model = plain_model(parts.policy.model)
    sources = {
        "config": getattr(model.config.get_text_config(), "eos_token_id", None),
        "generation config": getattr(model.generation_config, "eos_token_id", None),
        "tokenizer": parts.tokenizer.eos_token_id,
    }
    named = {name: _ids(value) for name, value in sources.items()}
    ends = f"completions end at {_listed(parts, parts.loaded.eos_ids) or 'what sampling.stop says'}"
    if len(set(map(frozenset, named.values()))) == 1:
        return f"{ends}, as config, generation config and tokenizer agree"
    differ = ", ".join(f"{name} {_listed(parts, ids) or 'none'}" for name, ids in named.items())
    return f"{ends}, any of them, for the sources differ ({differ})"


def _turn_words(parts: Parts, turn_end: int | None) -> str:
    pad = parts.tokenizer.pad_token_id
    padding = (
        "; padding is an EOS too, so a completion's end is only what the engine says" if _is_eos(parts, pad) else ""
    )
    turn = "the template ends no turn" if turn_end is None else f"{_spelled(parts, turn_end)} ends a turn"
    return turn + padding


def _is_eos(parts: Parts, id: int | None) -> bool:
    return id in parts.loaded.eos_ids


def _ids(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _listed(parts: Parts, ids: Collection[int]) -> str:
    return ", ".join(f"{_spelled(parts, id)} ({id})" for id in sorted(ids))


# What a reward gets to see --------------------------------------------------------------------------------------------


def special_tokens(parts: Parts) -> str:
    """Each tag that a reward's params name is still in the text after decoding. Raises ConfigError."""
    named = {tag: reward.resolved_label for reward in parts.config.rewards for tag in _tags(reward.params)}
    if not named:
        raise Undecided("no reward's params name a tag")
    for tag, label in named.items():
        if not _survives(parts, tag):
            raise ConfigError(_lost(parts, tag, label))
    known = parts.tokenizer.get_vocab()
    single = [tag for tag in named if tag in known]
    said = f"{', '.join(named)} are still there after decoding"
    return f"{said}; single tokens: {', '.join(single)}" if single else said


def _tags(value: Any, param: str = "") -> Iterator[str]:
    """Of all strings in the params."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _tags(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tags(inner, param)
    elif isinstance(value, str) and param in TAG_PARAMS and value.isidentifier():
        yield from (f"<{value}>", f"</{value}>")
    elif isinstance(value, str):
        yield from TAG.findall(value)


def _survives(parts: Parts, tag: str) -> bool:
    """Whether a completion that ends with the tag keeps it."""
    sampling, eos_ids = parts.config.sampling, parts.loaded.eos_ids
    ids = list(parts.tokenizer(f"5{tag}", add_special_tokens=False)["input_ids"])
    if any(stop in tag or tag in stop for stop in sampling.stop) or ids[-1] in sampling.stop_token_ids:
        reason = FinishReason.STOP
    else:
        reason = FinishReason.EOS
        ids += [] if ids[-1] in eos_ids else sorted(eos_ids)[:1]
    completion = Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), reason)
    settings = parts.config.decoding
    text = decode(parts.tokenizer, completion, prompt_text="", settings=settings, sampling=sampling, eos_ids=eos_ids)
    return tag in text


def _lost(parts: Parts, tag: str, label: str) -> str:
    decoding, sampling = parts.config.decoding, parts.config.sampling
    if decoding.strip_reasoning and tag in (decoding.reasoning_open, decoding.reasoning_close):
        cause, fix = "decoding.strip_reasoning is true", "Set decoding.strip_reasoning = false, or leave it out"
    elif any(stop in tag or tag in stop for stop in sampling.stop):
        cause = f"sampling.stop is {list(sampling.stop)} and include_stop = false"
        fix = "Set sampling.include_stop = true"
    else:
        cause = f"sampling ends completions with it (EOS ids {_listed(parts, parts.loaded.eos_ids)})"
        fix = "Look for a tag that is neither padding nor a terminator"
    return (
        f"rewards.params of {label!r} names {tag}, but {cause}, which strips it before the reward sees the text. The "
        f"reward would never find it. {fix}."
    )


def reasoning(parts: Parts) -> str:
    """Reasoning that the template opens is recognised by `decoding`. Raises ConfigError."""
    decoding = parts.config.decoding
    prompts = parts.first_prompts
    if not decoding.strip_reasoning:
        return "decoding.strip_reasoning is false: rewards see reasoning and all"
    for prompt in prompts:
        _check_opened(parts, prompt)
    opened = sum(prompt.text.rstrip().endswith(decoding.reasoning_open) for prompt in prompts)
    closed = sum(prompt.text.rstrip().endswith(decoding.reasoning_close) for prompt in prompts)
    if opened:
        return (
            f"{opened} of {len(prompts)} prompts end with {decoding.reasoning_open}: rewards see what follows "
            f"{decoding.reasoning_close}, and nothing of a completion without it"
        )
    return (
        f"no prompt ends inside a reasoning block{' (the template closes an empty one)' if closed else ''}; rewards see "
        f"what follows {decoding.reasoning_close}, if it is there"
    )


def _check_opened(parts: Parts, prompt: Prompt) -> None:
    decoding = parts.config.decoding
    last = re.search(r"<\|?(\w+)\|?>$", prompt.text.rstrip())
    if last is None or last[1].lower() not in REASONING or last[0] == decoding.reasoning_open:
        return
    raise ConfigError(
        f"decoding.reasoning_open is {decoding.reasoning_open!r}, but prompt {prompt.index} ends with {last[0]!r}, as the "
        "chat template has it. Rewards would take unfinished reasoning for the answer. Set decoding.reasoning_open = "
        f"{last[0]!r} and decoding.reasoning_close to what closes it ('</{last[1]}>'?)."
    )


# Lengths --------------------------------------------------------------------------------------------------------------


def lengths(parts: Parts) -> str:
    """The longest prompt and `sampling.max_tokens` together fit into the context. Raises ConfigError."""
    train = parts.data.train
    prompts = [*(train.prompt(i) for i in range(len(train))), *parts.data.held_out]
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    prompt, most, context = len(longest.token_ids), parts.config.sampling.max_tokens, parts.loaded.context_length
    sizes = f"the longest of {len(prompts)} prompts has {prompt} tokens, and {prompt + most} with sampling.max_tokens"
    if context is None:
        raise Undecided(f"{sizes}; the model states no context")
    if prompt + most > context:
        raise ConfigError(
            f"sampling.max_tokens is {most}, but prompt {longest.index} has {prompt} tokens and the model's context is "
            f"{context}. Its completions would be cut short. Use at most {context - prompt}, or set "
            f"data.max_prompt_tokens = {context - most} to find the rows."
        )
    return f"{sizes}, of a context of {context}"


def _spelled(parts: Parts, id: int) -> str:
    return str(parts.tokenizer.convert_ids_to_tokens(id))


def _tokenizer_name(parts: Parts) -> str:
    return parts.config.model.tokenizer or parts.config.model.name
