"""KL divergence of one policy from another, estimated on sampled tokens."""

from jaxtyping import Float
from torch import Tensor

from leadline.objective.ratios import MAX_LOG_RATIO

ESTIMATORS = ("k1", "k2", "k3")


def kl_divergence(
    logprobs: Float[Tensor, " token"], ref_logprobs: Float[Tensor, " token"], estimator: str
) -> Float[Tensor, " token"]:
    """Per-token estimates, in nats, of KL(policy || reference) for tokens that the policy sampled.

    With d = ref_logprobs - logprobs (Schulman 2020, "Approximating KL divergence"):

        k1  -d             unbiased, may be negative; as a loss its gradient has mean 0 on policy: it penalises nothing
        k2  d^2 / 2        biased, never negative; as a loss its gradient is that of the KL on policy
        k3  e^d - 1 - d    unbiased, never negative

    The gradient flows through `logprobs` only. In k3, d is bounded above by `ratios.MAX_LOG_RATIO` (gradient 0
    there), so e^d is finite; below there is no bound, so a policy that runs away from the reference is pulled back.
    The same function gives statistics: (old_logprobs, logprobs) for KL(old || policy), (rollout_logprobs,
    old_logprobs) for KL(mu || old).

    Raises ValueError for an unknown estimator.
    """
    d = ref_logprobs.detach() - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(max=MAX_LOG_RATIO)
        return d.expm1() - d
    raise ValueError(
        f"estimator is {estimator!r}, but no such KL estimator exists. Use one of: {', '.join(ESTIMATORS)}."
    )
