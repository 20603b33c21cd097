"""Looks that worry people and are healthy, each said with the numbers that show it."""

import numpy as np

from leadline.doctor.series import paired
from leadline.doctor.signals import CLIP, GAP, GRAD, KL, ZERO_SIGNAL, has_signal
from leadline.doctor.view import View


def reassurances(run: View) -> dict[str, str]:
    """Name -> one sentence, for each harmless oddity that the log shows."""
    checks = (_loss_zero, _loss_tracks_kl, _loss_negative, _clip_zero, _clipped_norm, _no_kl, _kl_only, _noise_floor)
    return {name: text for check in checks for name, text in check(run)}


def _loss_zero(run: View) -> list[tuple[str, str]]:
    loss, grad = run["loss"].finite, run.first_of(*GRAD).finite
    if not len(loss) or abs(loss.median) > 1e-3 or not len(grad) or grad.median < 1e-6 or not len(has_signal(run)):
        return []
    text = f"A loss of about 0 is normal on policy: the gradient norm is {grad.median:.3g}, so the run learns."
    return [("healthy-on-policy-zero-loss", text)]


def _loss_tracks_kl(run: View) -> list[tuple[str, str]]:
    _, loss, kl = paired(run["loss"], run.first_of(*KL))
    usable = (np.abs(kl) > 1e-3) & (loss > 0)
    if usable.sum() < 2:
        return []
    ratio = loss[usable] / kl[usable]
    if np.ptp(ratio) > 0.15 * np.median(ratio):
        return []
    text = f"The loss is {np.median(ratio):.2g} x KL: on policy only the KL term has a value. It is no divergence."
    return [("healthy-loss-tracks-beta-kl", text)]


def _loss_negative(run: View) -> list[tuple[str, str]]:
    loss = run["loss"].finite
    if not len(loss) or loss.median >= 0 or loss.low < -1:
        return []
    return [
        ("healthy-negative-loss", f"A negative loss ({loss.median:.3g}) is normal: a policy loss has no zero point.")
    ]


def _clip_zero(run: View) -> list[tuple[str, str]]:
    clip, grad = run.first_of(*CLIP).finite, run.first_of(*GRAD).finite
    if not len(clip) or clip.high > 0 or not len(grad) or grad.median < 1e-6:
        return []
    text = "A clip fraction of 0 is normal with one optimizer step per batch: the policy ratio is then exactly 1."
    return [("healthy-clip-ratio-zero-on-policy", text)]


def _clipped_norm(run: View) -> list[tuple[str, str]]:
    grad, bound = run.first_of(*GRAD).finite, run.number("optimizer.max_grad_norm")
    if not len(grad) or not bound > 0 or grad.median <= bound:
        return []
    name = "healthy-tight-grad-clip-by-design" if bound < 0.05 else "healthy-preclip-grad-norm"
    text = f"A gradient norm of {grad.median:.3g} above {run.option('optimizer.max_grad_norm')} = {bound:g} is normal: "
    return [(name, text + "it is measured before clipping.")]


def _no_kl(run: View) -> list[tuple[str, str]]:
    if run.number("objective.beta") != 0 or any(len(run[name].finite) for name in KL):
        return []
    return [("healthy-kl-absent-beta0", "No KL is logged because beta is 0: there is no reference model.")]


def _kl_only(run: View) -> list[tuple[str, str]]:
    zero, grad = run.first_of(*ZERO_SIGNAL).finite, run.first_of(*GRAD).finite
    steps, _, norm = paired(zero.where(zero.values >= 0.999), grad)
    beta = run.number("objective.beta")
    if not len(steps) or norm.max() < 1e-9 or not (beta > 0 or any(len(run[name].finite) for name in KL)):
        return []
    text = f"At {len(steps)} steps no group had a signal and the gradient norm was above 0: that is the KL term alone."
    return [("healthy-kl-gradient-on-zero-std", text)]


def _noise_floor(run: View) -> list[tuple[str, str]]:
    gap = run.first_of(*GAP).finite
    if not len(gap) or not 0 < gap.high <= 0.05:
        return []
    text = f"Engine and trainer differ by {gap.median:.2g} nats per token: the noise of two computations."
    return [("healthy-logprob-noise-floor", text)]
