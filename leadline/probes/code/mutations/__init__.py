"""What goes wrong, role by role: each mutation changes one step of the reference and says what follows from it."""

from leadline.probes.code.mutations import advantages, importance, kl, logprobs, masks, ratio, surrogate, terms
from leadline.probes.code.search import Mutation

TENSOR_MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "loss": surrogate.MUTATIONS + ratio.MUTATIONS + masks.MUTATIONS + terms.MUTATIONS,
    "kl": kl.MUTATIONS,
    "logprobs": logprobs.MUTATIONS,
    "importance": importance.MUTATIONS,
    "advantages": advantages.MUTATIONS,
}
"""By role, likeliest first."""
