"""What goes wrong between samples and a padded batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from leadline.probes.code.collating import EOS, CollateCase, CollateSteps, Row, padded
from leadline.probes.code.search import Mutation

Change = Callable[[CollateSteps], CollateSteps]


def _step(**new: Any) -> Change:
    return lambda steps: replace(steps, **new)


def _mask(new: Callable[[Row, int], Row]) -> Change:
    return _step(loss_mask=new)


def _last_of(row: Row) -> int:
    return max((i for i, (kind, _) in enumerate(row) if kind == "c"), default=-1)


def _without_eos(row: Row, pad: int) -> Row:
    return [int(kind == "c" and token != EOS) for kind, token in row]


def _not_pad_id(row: Row, pad: int) -> Row:
    return [int(kind == "c" and token != pad) for kind, token in row]


def _by_id(row: Row, pad: int) -> Row:
    return [int(kind != "-" and token != pad) for kind, token in row]


def _without_last(row: Row, pad: int) -> Row:
    return [int(kind == "c" and i != _last_of(row)) for i, (kind, _) in enumerate(row)]


def _shifted(row: Row, pad: int) -> Row:
    inside = [int(kind == "c") for kind, _ in row]
    return [*inside[1:], 0]


def _late(row: Row, pad: int) -> Row:
    inside = [int(kind == "c") for kind, _ in row]
    return [0, *inside[:-1]]


def _gap(steps: CollateSteps) -> CollateSteps:
    return replace(steps, pad=padded(False, False, True))


def _cut(steps: CollateSteps) -> CollateSteps:
    pad = steps.pad

    def shorter(case: CollateCase, prompt_width: int, completion_width: int) -> list[Row]:
        return [row[:-1] for row in pad(case, prompt_width, completion_width)]

    return replace(steps, pad=shorter)


def _longest_first(steps: CollateSteps) -> CollateSteps:
    """The rows are sorted by length, what belongs to them is not."""
    pad = steps.pad

    def ordered(case: CollateCase, prompt_width: int, completion_width: int) -> list[Row]:
        rows = pad(case, prompt_width, completion_width)
        return sorted(rows, key=lambda row: -sum(kind != "-" for kind, _ in row))

    return replace(steps, pad=ordered)


MUTATIONS = (
    Mutation(
        "prompt_in_loss",
        "prompt tokens in the loss mask",
        "The prompt is trained as if the policy had written it.",
        "The mask is 1 on completion tokens only (labels: -100 on the prompt).",
        (_mask(lambda row, pad: [int(kind != "-") for kind, _ in row]), _mask(_by_id)),
    ),
    Mutation(
        "padding_in_loss",
        "padding in the loss mask",
        "Padding is trained.",
        "The mask is 0 on padding (labels: -100).",
        (
            _mask(lambda row, pad: [int(kind != "p") for kind, _ in row]),
            _mask(lambda row, pad: [1] * len(row)),
        ),
    ),
    Mutation(
        "eos_not_in_loss",
        "EOS left out of the loss mask",
        "The policy is never taught when to stop: completions grow until they are cut. Usual cause: ids != pad with "
        "pad = EOS.",
        "Build the mask from lengths, not from ids.",
        (_mask(_without_eos), _mask(_not_pad_id)),
    ),
    Mutation(
        "last_token_not_in_loss",
        "the last token of each completion left out of the loss mask",
        "The policy is never taught when to stop.",
        "Shift logits against labels once, in the loss.",
        (_mask(_without_last),),
    ),
    Mutation(
        "mask_shifted",
        "the loss mask shifted by one",
        "The last prompt token is trained and the last completion token is not, or the other way round.",
        "The mask belongs to the tokens; shift logits against labels once, in the loss.",
        (_mask(_shifted), _mask(_late)),
    ),
    Mutation(
        "attention_on_padding",
        "attention on padding",
        "Logprobs depend on how the batch was padded, and differ from the engine's.",
        "attention_mask is 0 on padding.",
        (_step(attention=lambda row, pad: [1] * len(row)),),
    ),
    Mutation(
        "attention_by_id",
        "the attention mask built from ids != pad",
        "Where padding is the EOS, a real EOS (of a turn, say) is not attended to.",
        "Build the mask from lengths, not from ids.",
        (_step(attention=_by_id),),
    ),
    Mutation(
        "attention_not_on_prompt",
        "no attention on the prompt",
        "The policy is scored as if it had not seen the prompt.",
        "attention_mask is 1 on prompt and completion.",
        (_step(attention=lambda row, pad: [int(kind == "c") for kind, _ in row]),),
    ),
    Mutation(
        "padding_between",
        "prompts padded right: a gap between prompt and completion",
        "Positions and attention jump; logprobs differ from the engine's.",
        "Pad prompts left, or join prompt and completion before padding.",
        (_gap,),
    ),
    Mutation(
        "completion_padded_left",
        "completions padded left",
        "A gap between prompt and completion.",
        "Pad completions right.",
        (_step(pad=padded(True, True, True)),),
    ),
    Mutation(
        "positions_count_padding",
        "positions that count padding",
        "Left-padded rows start at another position than the engine's: with rotary embeddings harmless, else not.",
        "(attention_mask.cumsum(-1) - 1).clamp(min=0).",
        (_step(positions=lambda row: list(range(len(row)))),),
    ),
    Mutation(
        "positions_restart",
        "positions that restart at the completion",
        "The completion is scored as if it began a text.",
        "Positions run on from the prompt.",
        (_step(positions=lambda row: _restarting(row)),),
    ),
    Mutation(
        "last_column_cut",
        "the last column cut off",
        "The longest completion loses its last token, mostly the EOS.",
        "Pad to the longest sequence; shift in the loss.",
        (_cut,),
    ),
    Mutation(
        "rows_reordered",
        "rows sorted by length, but not what belongs to them",
        "Advantages belong to other completions: the gradient is noise.",
        "Sort all of a sample's values together.",
        (_longest_first,),
    ),
    Mutation(
        "values_reordered",
        "advantages in another order than the rows",
        "Advantages belong to other completions: the gradient is noise.",
        "Keep the order of the samples.",
        (_step(order=lambda values: list(values)[::-1]), _step(order=sorted)),
    ),
    Mutation(
        "missing_logprob_is_zero",
        "a missing logprob replaced by 0",
        "0 means probability 1: the ratio of that token is tiny, and nothing shows it.",
        "Keep NaN, and let the loss treat the token as on policy.",
        (_step(missing=0.0), _step(missing=1.0)),
    ),
)


def _restarting(row: Row) -> Row:
    places: Row = []
    counts = {"p": 0, "c": 0}
    for kind, _ in row:
        places.append(None if kind == "-" else counts[kind])
        if kind != "-":
            counts[kind] += 1
    return places
