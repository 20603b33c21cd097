"""Drawing a token and scoring it, in one pass over the logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

BLOCK = 256
"""Entries that are summed up, in float32 as they are, before anything is cumulated, in float64: no large copy is made."""


def draw_scored(
    logits: Float[Tensor, "token vocab"], uniforms: Float[Tensor, " token"]
) -> tuple[Int[Tensor, " token"], Float[Tensor, " token"]]:
    """One entry per row, distributed as softmax(logits) if the uniforms are uniform on [0, 1), and its logprob in nats.

    The entry that `sampling.draw` finds, the first whose cumulative probability exceeds the row's uniform, but from sums
    over blocks, and then within one block. An entry without mass is never drawn.

    Raises ValueError when a row has a NaN or +inf logit, or nothing but -inf: a broken model must not go on sampling.
    """
    top = logits.amax(-1, keepdim=True)
    mass = (logits - top).exp_()
    missing = -mass.shape[1] % BLOCK
    blocks = (nn.functional.pad(mass, (0, missing)) if missing else mass).unflatten(1, (-1, BLOCK))
    cumulative = blocks.sum(-1).double().cumsum(-1)
    total = cumulative[:, -1:]
    _check(total)
    # A float32 uniform can round up to 1: the largest target still lies below the total.
    target = torch.minimum(uniforms.double()[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = (cumulative > target).to(torch.uint8).argmax(-1, keepdim=True)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double()
    within = inside.cumsum(-1)
    reached = (within > target - cumulative.gather(1, block) + within[:, -1:]) & (inside > 0)
    places = torch.arange(BLOCK, device=logits.device)
    last = torch.where(inside > 0, places, 0).amax(-1, keepdim=True)
    reached.scatter_(1, last, True)  # rounding at the very edge of the block must not leave it empty
    ids = (block * BLOCK + reached.to(torch.uint8).argmax(-1, keepdim=True))[:, 0]
    return ids, (logits.gather(1, ids[:, None]) - top)[:, 0] - total[:, 0].log().to(logits.dtype)


def _check(total: Float[Tensor, "token 1"]) -> None:
    broken = ~(total.isfinite() & (total > 0))
    if bool(broken.any()):
        raise ValueError(
            f"logits has no distribution in row {int(broken.nonzero()[0, 0])}: they are NaN, +inf, or all -inf. A token "
            "drawn from them would mean nothing. Check the weights for NaN."
        )
