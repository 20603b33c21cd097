"""Functions that are not of tensors, examined: decoding and collating."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.errors import ConfigError
from leadline.probes.code import collating, decoding
from leadline.probes.code.binding import given_arguments
from leadline.probes.code.collate_call import COLLATE_WORDS, arguments, collate_call
from leadline.probes.code.findings import Finding, Report, sentence
from leadline.probes.code.load import where
from leadline.probes.code.mutations import collating as collating_mutations
from leadline.probes.code.mutations import decoding as decoding_mutations
from leadline.probes.code.search import Comparison, Match, Mutation, Variant, exact, pair, single

DECODE_WORDS = {
    "tokenizer": "tokenizer processing_class processor tok",
    "ids": "ids token_ids completion_ids input_ids output_ids tokens response_ids sequences sequence responses "
    "completion_ids_list",
    "text": "text completion output response solution_str s content generation raw completions texts outputs",
    "pad": "pad_token_id pad_id pad",
    "eos": "eos_token_id eos_id",
    "eos_ids": "eos_ids eos_token_ids stop_token_ids",
    "opened": "opened_by_prompt",
    "open": "open open_tag start_tag think_start reasoning_open",
    "close": "close close_tag end_tag think_end reasoning_close",
}


@dataclass(frozen=True, slots=True)
class Form:
    """One way to call the function, and what came of it for each case; an error stands for a result."""

    words: str
    results: Sequence[Any]

    @property
    def works(self) -> bool:
        """It does not fail on everything."""
        return any(not isinstance(result, Exception) for result in self.results)


def examine_decode(function: Callable[..., Any], target: str, given: Sequence[str]) -> Report:
    """The report on a function from token ids (or text) to the text that is scored. Raises ConfigError."""
    function, parameters = _understood(function, DECODE_WORDS, given, "decode")
    meanings = set(parameters.values())
    if not {"ids", "text"} & meanings:
        raise _nothing("decode", "ids or text")
    from_ids = "ids" in meanings
    forms = [_decoded(function, parameters, words, shape) for words, shape in _shapes(from_ids).items()]
    form = next((form for form in forms if form.works), forms[0])
    variants = decoding.variants(from_ids=from_ids)
    matches = _search(form, variants, decoding_mutations.MUTATIONS, decoding.CASES, decoding.same_texts)
    findings = list(_findings(form, matches, variants, decoding.CASES))
    if matches and matches[0].variant.name.endswith("keeps reasoning") and not matches[0].mutations:
        findings.append(KEEPS_REASONING)
    return _report(function, target, "decode", parameters, form, matches, findings, len(decoding.CASES))


def examine_collate(function: Callable[..., Any], target: str, given: Sequence[str]) -> Report:
    """The report on a function from samples to a padded batch. Raises ConfigError."""
    function, parameters = _understood(function, COLLATE_WORDS, given, "collate")
    meanings = set(parameters.values())
    if "samples" not in meanings and not {"prompts", "completions"} <= meanings:
        raise _nothing("collate", "samples, or prompt_ids and completion_ids")
    forms = [
        Form(words, [_attempted(collate_call(function, parameters, tensors), case) for case in collating.CASES])
        for words, tensors in (("samples of lists", False), ("samples of tensors", True))
    ]
    form = next((form for form in forms if form.works), forms[0])
    keys = sorted({key for result in form.results if isinstance(result, dict) for key in result})
    variants = collating.variants(keys)
    matches = _search(form, variants, collating_mutations.MUTATIONS, collating.CASES, _same_batches)
    findings = list(_findings(form, matches, variants, collating.CASES))
    report = _report(function, target, "collate", parameters, form, matches, findings, len(collating.CASES))
    report.facts["outputs compared"] = ", ".join(keys) or "none of a known name"  # type: ignore[index]
    return report


KEEPS_REASONING = Finding(
    "note",
    "reasoning_kept",
    "Reasoning is left in the text",
    "For a model that reasons, the reward scores its reasoning too.",
    "Take what follows the first closing marker, nothing if a block is open; or leave it to the reward.",
)


def _understood(
    function: Callable[..., Any], words: Mapping[str, str], given: Sequence[str], role: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function (of a class: its instance), and what each parameter stands for; `--arg` values as they are."""
    own = given_arguments(given)
    if inspect.isclass(function):
        wanted = [name for name in inspect.signature(function).parameters if name in words["pad"].split()]
        instance: Any = function(**dict.fromkeys(wanted, collating.PAD))
        function = instance
    meanings: dict[str, Any] = {}
    for p in inspect.signature(function).parameters.values():
        meaning: Any = next((key for key, spelled in words.items() if p.name in spelled.split()), None)
        if p.name in own:
            quantity, value = own[p.name]
            meaning = quantity or (value if value in words else ("=", value))
        if meaning is not None and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            meanings[p.name] = meaning
        elif p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ConfigError(
                f"The function takes {p.name}, but nothing of that name is known for --as {role}. It could not be "
                f"called. Say what it stands for: --arg {p.name}={'|'.join(words)} (or a value)."
            )
    return function, meanings


def _nothing(role: str, needed: str) -> ConfigError:
    return ConfigError(
        f"--as is {role}, but no parameter of the function is known to be {needed}. It could not be compared. "
        "Choose another role, or say which parameter it is with --arg NAME=MEANING."
    )


# Decoding -------------------------------------------------------------------------------------------------------------


def _shapes(from_ids: bool) -> dict[str, Callable[[Any], Any]]:
    if not from_ids:
        return {"one text at a time": lambda text: text, "a list of texts": lambda text: [text]}
    import torch

    return {
        "one completion's ids, a list": lambda ids: ids,
        "one completion's ids, a tensor": lambda ids: torch.tensor(ids, dtype=torch.long),
        "a list of lists of ids": lambda ids: [ids],
        "a tensor of ids [completion, token]": lambda ids: torch.tensor([ids], dtype=torch.long),
    }


def _decoded(function: Any, parameters: Mapping[str, Any], words: str, shape: Callable[[Any], Any]) -> Form:
    tokenizer = decoding.byte_tokenizer()
    fixed = {
        "tokenizer": tokenizer,
        "pad": tokenizer.pad_token_id,
        "eos": tokenizer.eos_token_id,
        "eos_ids": [tokenizer.eos_token_id],
        "opened": False,
        "open": decoding.OPEN,
        "close": decoding.CLOSE,
    }

    def call(case: decoding.TextCase) -> str:
        values = {**fixed, "ids": shape(case.ids), "text": shape(case.body)}
        result = function(**arguments(parameters, values))
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        if not isinstance(result, str):
            raise TypeError(f"it returned a {type(result).__name__}")
        return result

    return Form(words, [_attempted(call, case) for case in decoding.CASES])


def _same_batches(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(isinstance(a, dict) and bool(a) and collating.same_batch(a, b) for a, b in zip(one, other, strict=True))


# Both -----------------------------------------------------------------------------------------------------------------


def _attempted(call: Callable[[Any], Any], case: Any) -> Any:
    try:
        return call(case)
    except Exception as error:  # the user's code runs here
        return error


def _search(
    form: Form,
    variants: Sequence[Variant],
    mutations: Sequence[Mutation],
    cases: Sequence[Any],
    same: Callable[[Sequence[Any], Sequence[Any]], bool],
) -> list[Match]:
    def equal(steps: Any) -> bool:
        return same(form.results, [steps(case) for case in cases])

    comparison = Comparison(lambda steps: True, equal)
    if found := exact(variants, comparison):
        return [found]
    if several := single(variants, mutations, comparison):
        return several
    both = pair(variants, mutations, comparison)
    return [both] if both else []


def _findings(
    form: Form, matches: Sequence[Match], variants: Sequence[Variant], cases: Sequence[Any]
) -> Iterator[Finding]:
    for mutation in matches[0].mutations if matches else ():
        evidence = _first_difference(form, matches[0].variant, cases)
        yield Finding("error", mutation.name, sentence(mutation.phrase), mutation.consequence, mutation.fix, evidence)
    if not matches:
        nearest = min(variants, key=lambda variant: _differences(form, variant, cases))
        yield Finding(
            "error",
            "unknown_difference",
            "It differs from every variant, and no known mistake explains it",
            f"Nearest is {nearest.title}; it differs in {_differences(form, nearest, cases)} places of {len(cases)} cases.",
            "See the first case that differs.",
            _first_difference(form, nearest, cases),
        )


def _equal(result: Any, expected: Any) -> bool:
    if isinstance(result, dict) and isinstance(expected, dict):
        return bool(result) and collating.same_batch(result, expected)
    return bool(result == expected)


def _differences(form: Form, variant: Variant, cases: Sequence[Any]) -> int:
    """The cases that differ; of a batch, the outputs."""
    pairs = [(r, variant.steps(case)) for r, case in zip(form.results, cases, strict=True)]
    return sum(
        sum(not collating.same_batch({key: r[key]}, expected) for key in r) if isinstance(r, dict) else r != expected
        for r, expected in pairs
    )


def _first_difference(form: Form, variant: Variant, cases: Sequence[Any]) -> str:
    for result, case in zip(form.results, cases, strict=True):
        expected = variant.steps(case)
        if _equal(result, expected):
            continue
        if isinstance(result, Exception):
            return f"it raises {type(result).__name__}: {str(result)[:200]}"
        if isinstance(result, dict):
            key = next((key for key in result if not collating.same_batch({key: result[key]}, expected)), "outputs")
            return f"{key} is {str(result.get(key))[:160]}, expected {str(expected.get(key))[:160]}"
        return f"{case.words}: {result!r:.80}, expected {expected!r:.80}"
    return ""


def _report(
    function: Any,
    target: str,
    role: str,
    parameters: Mapping[str, Any],
    form: Form,
    matches: Sequence[Match],
    findings: Sequence[Finding],
    cases: int,
) -> Report:
    meanings = [f"{name} = {m[1]!r}" if isinstance(m, tuple) else f"{name} = {m}" for name, m in parameters.items()]
    match = matches[0] if matches else None
    title = match.variant.title if match else None
    phrases = " and ".join(mutation.phrase for mutation in match.mutations) if match else ""
    verdict = f"Matches {title}" + (f" with {phrases}." if phrases else ".") if match else "Matches no known variant."
    names = [mutation.name for mutation in match.mutations] if match else []
    return Report(
        target,
        role,
        where(function),
        [", ".join(meanings), form.words],
        verdict,
        findings,
        title,
        names,
        {"compared on": f"{cases} cases"},
    )
