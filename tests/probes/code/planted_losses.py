"""Policy losses as users write them, each with one bug; by the name under which it must be found."""

import torch


def low_high(ratio):
    return ratio.clamp(0.8, 1.28)


def token_mean(loss, mask):
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def sequence_mean(loss, mask):
    return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def surrogate(ratio, a):
    return -torch.min(ratio * a, low_high(ratio) * a)


def k3(ref, lp):
    return (ref - lp).exp() - 1 - (ref - lp)


def user(body):
    """A function of the usual four tensors; `body` gets advantages as a column and the mask as floats."""

    def loss(logprobs, old_logprobs, advantages, mask):
        return body(logprobs, old_logprobs, advantages[:, None], mask.to(logprobs.dtype))

    return loss


def user_kl(body):
    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, beta):
        policy = surrogate(torch.exp(logprobs - old_logprobs), advantages[:, None])
        m = mask.to(logprobs.dtype)
        return token_mean(body(policy, logprobs, ref_logprobs, old_logprobs, beta), m)

    return loss


def user_weighted(body):
    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, rollout_is_weights, beta):
        policy = surrogate(torch.exp(logprobs - old_logprobs), advantages[:, None])
        kl = beta * k3(ref_logprobs, logprobs)
        return token_mean(body(policy, rollout_is_weights, kl), mask.to(logprobs.dtype))

    return loss


def of_ratio(ratio, reduce=token_mean):
    """A bug in the ratio: (lp, old, mask) -> ratio."""
    return user(lambda lp, old, a, m: reduce(surrogate(ratio(lp, old, m), a), m))


def of_surrogate(form):
    """A bug in the surrogate: (ratio, a) -> loss."""
    return user(lambda lp, old, a, m: token_mean(form(torch.exp(lp - old), a), m))


def of_mean(reduce):
    """A bug in the aggregation: (loss, mask) -> number."""
    return user(lambda lp, old, a, m: reduce(surrogate(torch.exp(lp - old), a), m))


def shifted(x):
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def without_first(m):
    m = m.clone()
    m[:, 0] = 0
    return m


def without_last(m):
    return m * (m.cumsum(-1) < m.sum(-1, keepdim=True))


def one_more(m):
    return (torch.arange(m.shape[1]) < m.sum(-1, keepdim=True) + 1).to(m.dtype)


def gspo(mean):
    def loss(logprobs, old_logprobs, advantages, mask, epsilon=0.2):
        m = mask.to(logprobs.dtype)
        ratio = torch.exp(mean(logprobs - old_logprobs, m))[:, None].expand_as(m)
        a = advantages[:, None]
        return sequence_mean(-torch.min(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a), m)

    return loss


def broadcast(logprobs, old_logprobs, advantages, mask):
    m = mask.to(logprobs.dtype)
    return token_mean(surrogate(torch.exp(logprobs - old_logprobs), advantages), m)


def cispo(logprobs, old_logprobs, advantages, mask, clip_high=0.28):
    coefficient = torch.exp(logprobs - old_logprobs).clamp(max=1 + clip_high)
    return token_mean(-coefficient * advantages[:, None] * logprobs, mask.to(logprobs.dtype))


def dr_grpo(logprobs, old_logprobs, advantages, mask, max_tokens):
    loss = surrogate(torch.exp(logprobs - old_logprobs), advantages[:, None])
    return (loss * mask).sum() / (mask.shape[0] * mask.shape[1])


def references_for_old(logprobs, old_logprobs, ref_logprobs, advantages, mask, beta):
    policy = surrogate(torch.exp(logprobs - ref_logprobs), advantages[:, None])
    return token_mean(policy + beta * k3(ref_logprobs, logprobs), mask.to(logprobs.dtype))


def detached_ratio(logprobs, old_logprobs, ref_logprobs, advantages, mask, beta):
    policy = surrogate(torch.exp(logprobs.detach() - old_logprobs), advantages[:, None])
    return token_mean(policy + beta * k3(ref_logprobs, logprobs), mask.to(logprobs.dtype))


def whitened(a):
    return (a - a.mean()) / (a.std() + 1e-8)


def divided_by_group(logprobs, old_logprobs, advantages, mask, num_generations):
    loss = surrogate(torch.exp(logprobs - old_logprobs), advantages[:, None])
    return token_mean(loss, mask.to(logprobs.dtype)) / num_generations


def only_grpo(reduce):
    """To be told that it should be grpo."""
    return of_mean(reduce)


LOSSES = {
    # surrogate and advantages
    "sign_flipped": user(lambda lp, old, a, m: -token_mean(surrogate(torch.exp(lp - old), a), m)),
    "advantage_sign": of_surrogate(lambda r, a: surrogate(r, -a)),
    "max_for_min": of_surrogate(lambda r, a: -torch.max(r * a, low_high(r) * a)),
    "clip_missing": of_surrogate(lambda r, a: -r * a),
    "minimum_missing": of_surrogate(lambda r, a: -low_high(r) * a),
    "clip_bounds_swapped": of_surrogate(lambda r, a: -torch.min(r * a, r.clamp(1 - 0.28, 1.2) * a)),
    "clip_bounds_without_one": of_surrogate(lambda r, a: -torch.min(r * a, r.clamp(-0.2, 0.28) * a)),
    "clip_on_log_ratio": of_surrogate(lambda r, a: -torch.min(r * a, r.log().clamp(-0.2, 0.28).exp() * a)),
    "clip_on_product": of_surrogate(lambda r, a: -torch.min(r * a, (r * a).clamp(0.8, 1.28))),
    "advantage_absolute": of_surrogate(lambda r, a: surrogate(r, a.abs())),
    "negative_advantages_dropped": of_surrogate(lambda r, a: surrogate(r, a.clamp(min=0))),
    "advantage_missing": of_surrogate(lambda r, a: surrogate(r, torch.ones_like(a))),
    "advantage_broadcast": broadcast,
    "advantages_whitened_again": of_surrogate(lambda r, a: surrogate(r, whitened(a))),
    "coefficient_not_detached": cispo,
    # ratio and graph
    "old_logprobs_shifted": of_ratio(lambda lp, old, m: torch.exp(lp - shifted(old))),
    "logprobs_shifted": of_ratio(lambda lp, old, m: torch.exp(torch.roll(lp, -1, 1) - old)),
    "old_logprobs_replaced": of_ratio(lambda lp, old, m: torch.exp(lp - lp.detach())),
    "old_logprobs_are_the_references": references_for_old,
    "log_ratio_inverted": of_ratio(lambda lp, old, m: torch.exp(old - lp)),
    "exp_missing": of_ratio(lambda lp, old, m: lp - old),
    "ratio_linearised": of_ratio(lambda lp, old, m: 1 + lp - old),
    "ratio_of_logprobs": of_ratio(lambda lp, old, m: lp / old),
    "graph_cut": user(
        lambda lp, old, a, m: torch.tensor(token_mean(surrogate(torch.exp(lp - old), a), m).item(), dtype=lp.dtype)
    ),
    "ratio_detached": detached_ratio,
    "sequence_ratio_summed": gspo(lambda x, m: (x * m).sum(-1)),
    "sequence_ratio_over_padding": gspo(lambda x, m: (x * m).mean(-1)),
    # masks and means
    "mask_ignored": of_mean(lambda loss, m: loss.mean()),
    "padding_in_denominator": of_mean(lambda loss, m: (loss * m).mean()),
    "padding_in_numerator": of_mean(lambda loss, m: loss.sum() / m.sum()),
    "mask_on_log_ratio": user(lambda lp, old, a, m: surrogate(torch.exp((lp - old) * m), a).sum() / m.sum()),
    "first_token_dropped": of_mean(lambda loss, m: token_mean(loss, without_first(m))),
    "last_token_dropped": of_mean(lambda loss, m: sequence_mean(loss, without_last(m))),
    "mask_too_long": of_mean(lambda loss, m: token_mean(loss, one_more(m))),
    "token_mean_for_sequence_mean": of_mean(token_mean),
    "sequence_mean_for_token_mean": of_mean(sequence_mean),
    "width_for_limit": dr_grpo,
    "not_normalised": of_mean(lambda loss, m: (loss * m).sum()),
    "length_divided_twice": of_mean(lambda loss, m: ((loss * m).sum(-1) / m.sum(-1) ** 2).mean()),
    "divided_by_group_size": divided_by_group,
    # the KL term and the weights
    "kl_subtracted": user_kl(lambda policy, lp, ref, old, beta: policy - beta * k3(ref, lp)),
    "beta_ignored": user_kl(lambda policy, lp, ref, old, beta: policy + k3(ref, lp)),
    "kl_missing": user_kl(lambda policy, lp, ref, old, beta: policy),
    "kl_sign_of_d": user_kl(lambda policy, lp, ref, old, beta: policy + beta * ((ref - lp).exp() - 1 + (ref - lp))),
    "kl_without_one": user_kl(lambda policy, lp, ref, old, beta: policy + beta * ((ref - lp).exp() - (ref - lp))),
    "kl_without_d": user_kl(lambda policy, lp, ref, old, beta: policy + beta * ((ref - lp).exp() - 1)),
    "kl_half_missing": user_kl(lambda policy, lp, ref, old, beta: policy + beta * (lp - ref) ** 2),
    "kl_direction": user_kl(lambda policy, lp, ref, old, beta: policy + beta * k3(lp, ref)),
    "kl_detached": user_kl(lambda policy, lp, ref, old, beta: policy + beta * k3(ref, lp.detach())),
    "kl_of_old_logprobs": user_kl(lambda policy, lp, ref, old, beta: policy + beta * k3(ref, old)),
    "old_for_reference": user_kl(lambda policy, lp, ref, old, beta: policy + beta * k3(old, lp)),
    "ref_logprobs_shifted": user_kl(lambda policy, lp, ref, old, beta: policy + beta * k3(torch.roll(ref, 1, 1), lp)),
    "weight_ignored": user_weighted(lambda policy, w, kl: policy + kl),
    "weight_inverted": user_weighted(lambda policy, w, kl: policy / w + kl),
    "weight_on_kl": user_weighted(lambda policy, w, kl: w * (policy + kl)),
}

GIVEN = {"advantage_broadcast": ["advantages=advantages_by_completion"]}
"""`--arg` words that the finding needs."""

EXPECT = {
    "token_mean_for_sequence_mean": "grpo",
    "sequence_mean_for_token_mean": "dapo",
    "width_for_limit": "dr_grpo",
    "kl_missing": None,
}
"""`--expect`, without which these are right losses of another name."""
