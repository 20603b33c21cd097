"""The distribution that is sampled, and drawing from it. Engine and trainer call the same function, so they agree."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def processed_logits(
    logits: Float[Tensor, "token vocab"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seen: Bool[Tensor, "token vocab"] | None = None,
    keep: Int[Tensor, " token"] | None = None,
) -> Float[Tensor, "token vocab"]:
    """The float32 logits whose softmax is the distribution that is sampled; -inf where it has no mass.

    In vLLM's order: repetition penalty (entries in `seen`: positive logits divided, negative multiplied), division by
    the temperature, min_p (entries below min_p times the largest probability fall), top_k (all but the k largest
    fall), top_p (of what is left, renormalised, the smallest set of largest entries with a mass of at least top_p
    stays). Entries that tie with the last one that stays, stay too: the support depends on the values alone.
    Off: 1.0, 1.0, 0.0, 0, 1.0 in that order; with everything off and float32 input, the input itself comes back.

    `keep` is one entry per row that always stays: a token sampled earlier has a finite log-probability even when the
    policy has moved. Differentiable; which entries fall carries no gradient.

    Raises ValueError for a temperature that is not above 0 (greedy is argmax, not a distribution) and for a penalty
    without `seen`.
    """
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}, but logits are divided by it. Greedy decoding is no distribution. "
            "Take the argmax of the logits."
        )
    scaled = scaled_logits(logits, temperature=temperature, repetition_penalty=repetition_penalty, seen=seen)
    floor = support_floor(scaled.detach(), top_k=top_k, top_p=top_p, min_p=min_p)
    return scaled if floor is None else within(scaled, floor, keep)


def scaled_logits(
    logits: Float[Tensor, "*shape"],
    *,
    temperature: float,
    repetition_penalty: float,
    seen: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """`processed_logits` before any entry falls: each entry depends on its own logit alone, and its gradient too."""
    scaled = logits.float()
    if repetition_penalty != 1:
        if seen is None:
            raise ValueError(
                f"repetition_penalty is {repetition_penalty}, but seen is None. Nothing says which entries to penalise. "
                "Pass seen."
            )
        scaled = torch.where(seen, penalised(scaled, repetition_penalty), scaled)
    return scaled if temperature == 1 else scaled / temperature


def support_floor(
    scaled: Float[Tensor, "token vocab"], *, top_k: int, top_p: float, min_p: float
) -> Float[Tensor, "token 1"] | None:
    """Per row the smallest logit inside the support: each rule is a threshold on the logit. None = nothing falls."""
    floor = None
    if min_p > 0:
        floor = scaled.amax(-1, keepdim=True) + math.log(min_p)
    candidates = scaled
    if 0 < top_k < scaled.shape[1]:
        candidates = _largest(scaled, top_k)
        smallest = candidates[:, top_k - 1 : top_k]
        floor = smallest if floor is None else torch.maximum(floor, smallest)
    if top_p < 1:
        above = candidates if floor is None else candidates.masked_fill(candidates < floor, -math.inf)
        nucleus = _nucleus_floor(above, top_p)
        floor = nucleus if floor is None else torch.maximum(floor, nucleus)
    return floor


def within(
    scaled: Float[Tensor, "token vocab"],
    floor: Float[Tensor, "token 1"],
    keep: Int[Tensor, " token"] | None = None,
) -> Float[Tensor, "token vocab"]:
    """-inf below the row's floor, but for the row's entry in `keep`."""
    excluded = scaled.detach() < floor
    if keep is not None:
        excluded = excluded.scatter(-1, keep.long()[:, None], False)
    return scaled.masked_fill(excluded, -math.inf)


def draw(logits: Float[Tensor, "token vocab"], uniforms: Float[Tensor, " token"]) -> Int[Tensor, " token"]:
    """One entry per row, distributed as softmax(logits) if the uniforms are independent and uniform on [0, 1).

    The first entry whose cumulative probability exceeds the row's uniform. Cumulative sums are float64. An entry
    without mass is never drawn, whatever the uniform and however a parallel cumulative sum rounds.

    Raises ValueError when a row has a NaN or +inf logit, or nothing but -inf: a broken model must not go on sampling.
    """
    exact = logits.double()
    mass = (exact - exact.amax(-1, keepdim=True)).exp()
    cumulative = mass.cumsum(-1).masked_fill(mass == 0, 0.0)
    total = cumulative.amax(-1, keepdim=True)
    if not bool((total > 0).all()):
        row = int((~(total > 0)).nonzero()[0, 0])
        raise ValueError(
            f"logits has no distribution in row {row}: they are NaN, +inf, or all -inf. A token drawn from them would "
            "mean nothing. Check the weights for NaN."
        )
    # A float32 uniform can round up to 1: the largest target still lies below the total.
    target = torch.minimum(uniforms.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target).to(torch.uint8).argmax(-1)


def _largest(scaled: Float[Tensor, "token vocab"], top_k: int) -> Float[Tensor, "token candidate"]:
    """In order, all that can stay: the k largest, what ties with the last of them (in half precision much does), and more."""
    count = top_k
    while True:
        count = min(2 * count, scaled.shape[1])
        largest = scaled.topk(count).values
        if count == scaled.shape[1] or not bool((largest[:, -1] == largest[:, top_k - 1]).any()):
            return largest


def penalised(logits: Float[Tensor, "*shape"], penalty: float) -> Float[Tensor, "*shape"]:
    """The repetition penalty of CTRL (Keskar et al. 2019) for entries that were seen: less likely, if it is above 1."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


NUCLEUS_CANDIDATES = 1024
"""So many largest entries are looked at first: a nucleus is seldom larger, and sorting all takes eight times as long."""


def _nucleus_floor(scaled: Float[Tensor, "token vocab"], top_p: float) -> Float[Tensor, "token 1"]:
    """Per row the smallest logit of the nucleus (Holtzman et al. 2020)."""
    probs = scaled.softmax(-1)
    floor, complete = _nucleus_among(scaled, probs, min(NUCLEUS_CANDIDATES, scaled.shape[1]), top_p)
    wide = ~complete[:, 0]
    if bool(wide.any()):
        floor[wide] = _nucleus_among(scaled[wide], probs[wide], scaled.shape[1], top_p)[0]
    return floor


def _nucleus_among(
    scaled: Float[Tensor, "token vocab"], probs: Float[Tensor, "token vocab"], count: int, top_p: float
) -> tuple[Float[Tensor, "token 1"], Bool[Tensor, "token 1"]]:
    """The floor, looking at the `count` largest entries, and whether that is enough to know."""
    ordered, places = scaled.topk(count)
    mass = probs.gather(-1, places).double()
    reached = mass.cumsum(-1)
    size = (reached - mass < top_p).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, size - 1), reached[:, -1:] >= top_p
