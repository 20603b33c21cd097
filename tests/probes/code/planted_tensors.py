"""Advantages, logprobs, KL and rollout weights as users write them, each with one bug."""

import math

import torch

# Advantages: (rewards, num_generations) -> [completion] ---------------------------------------------------------------


def by_group(body):
    """`body` gets rewards as [prompt, completion]."""

    def advantages(rewards, num_generations):
        return body(rewards.view(-1, num_generations)).reshape(-1)

    return advantages


def standardised(r, epsilon=1e-6):
    return (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + epsilon)


def grouped_across(rewards, num_generations):
    r = rewards.view(num_generations, -1)
    return ((r - r.mean(0)) / (r.std(0) + 1e-6)).view(-1)


def one_group(rewards, num_generations):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def baseline_of_batch(rewards, num_generations):
    std = rewards.view(-1, num_generations).std(1).repeat_interleave(num_generations)
    return (rewards - rewards.mean()) / (std + 1e-6)


def tiled(rewards, num_generations):
    r = rewards.view(-1, num_generations)
    return (rewards - r.mean(1).repeat(num_generations)) / (r.std(1).repeat(num_generations) + 1e-6)


ADVANTAGES = {
    "advantage_sign": by_group(lambda r: standardised(-r)),
    "epsilon_dominates": by_group(lambda r: standardised(r, 1.0)),
    "epsilon_on_the_other_side": by_group(lambda r: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True) + 1e-4),
    "population_std": by_group(lambda r: (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True, correction=0) + 1e-6)),
    "variance_for_std": by_group(lambda r: (r - r.mean(1, keepdim=True)) / (r.var(1, keepdim=True) + 1e-6)),
    "grouped_across_prompts": grouped_across,
    "one_group": one_group,
    "baseline_of_batch": baseline_of_batch,
    "statistics_tiled": tiled,
    "baseline_missing": by_group(lambda r: r / (r.std(1, keepdim=True) + 1e-6)),
    "baseline_is_another_statistic": by_group(lambda r: r - r.max(1, keepdim=True).values),
    "own_reward_in_leave_one_out": by_group(lambda r: r - (r.sum(1, keepdim=True) - r) / r.shape[1]),
    "multiplied_by_spread": by_group(lambda r: (r - r.mean(1, keepdim=True)) * (r.std(1, keepdim=True) + 1e-6)),
    "advantages_clipped": by_group(lambda r: standardised(r).clamp(-1, 1)),
    "rounded": by_group(lambda r: standardised(r).sign()),
}

# Logprobs: (logits, token_ids, temperature) -> [completion, token] ----------------------------------------------------


def scored(body):
    """`body` gets scaled logits and ids."""

    def logprobs(logits, token_ids, temperature):
        return body(logits / temperature, token_ids)

    return logprobs


def pick(logp, ids):
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def lsm(x):
    return x.log_softmax(-1)


LOGPROBS = {
    "logprobs_negated": scored(lambda x, i: -pick(lsm(x), i)),
    "gather_axis": scored(lambda x, i: lsm(x).gather(1, i.unsqueeze(-1)).squeeze(-1)),
    "off_by_one": scored(lambda x, i: pick(lsm(x), torch.roll(i, -1, 1))),
    "not_normalised": scored(pick),
    "softmax_axis": scored(lambda x, i: pick(x.log_softmax(1), i)),
    "log_missing": scored(lambda x, i: pick(x.softmax(-1), i)),
    "epsilon_in_log": scored(lambda x, i: pick((x.softmax(-1) + 1e-4).log(), i)),
    "half_precision": scored(lambda x, i: pick(x.bfloat16().log_softmax(-1), i).to(x.dtype)),
    "temperature_ignored": lambda logits, token_ids, temperature: pick(lsm(logits), token_ids),
    "temperature_multiplied": lambda logits, token_ids, temperature: pick(lsm(logits * temperature), token_ids),
    "temperature_on_logprobs": lambda logits, token_ids, temperature: pick(lsm(logits), token_ids) / temperature,
    "log_base": scored(lambda x, i: pick(lsm(x), i) / math.log(2)),
    "logprobs_clamped": scored(lambda x, i: pick(lsm(x), i).clamp(min=-2.0)),
    "graph_cut": scored(lambda x, i: pick(lsm(x), i).detach()),
}

# KL: (logprobs, ref_logprobs, mask) -----------------------------------------------------------------------------------


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


def each(body):
    return lambda log_probs, ref_log_probs: body(log_probs, ref_log_probs)


def mean(body):
    return lambda log_probs, ref_log_probs, mask: body((ref_log_probs - log_probs), mask.to(log_probs.dtype))


def k3(d):
    return d.exp() - 1 - d


KL = {
    "kl_direction": each(lambda lp, ref: k3(lp - ref)),
    "kl_negated": each(lambda lp, ref: -k3(ref - lp)),
    "kl_sign_of_d": each(lambda lp, ref: (ref - lp).exp() - 1 + (ref - lp)),
    "kl_without_one": each(lambda lp, ref: (ref - lp).exp() - (ref - lp)),
    "kl_without_d": each(lambda lp, ref: (ref - lp).exp() - 1),
    "kl_half_missing": each(lambda lp, ref: (ref - lp) ** 2),
    "kl_in_probabilities": each(lambda lp, ref: lp.exp() - ref.exp()),
    "kl_weighted_by_probability": each(lambda lp, ref: lp.exp() * (lp - ref)),
    "kl_detached": each(lambda lp, ref: k3((ref - lp).detach())),
    "ref_logprobs_shifted": each(lambda lp, ref: k3(torch.roll(ref, 1, 1) - lp)),
    "mask_ignored": mean(lambda d, m: k3(d).mean()),
    "padding_in_denominator": mean(lambda d, m: (k3(d) * m).mean()),
}

# Rollout weights ------------------------------------------------------------------------------------------------------


def weighted(body):
    return lambda old_logprobs, rollout_logprobs, mask, cap: body(old_logprobs - rollout_logprobs, mask.double(), cap)


def sequence(d, m):
    return (d * m).sum(-1, keepdim=True).exp().expand_as(d)


def geometric(d, m, count):
    return ((d * m).sum(-1, keepdim=True) / count).exp().expand_as(d)


def current(old_logprobs, logprobs, rollout_logprobs, mask, cap):
    return (logprobs - rollout_logprobs).exp().clamp(max=cap)


def probabilities(old_logprobs, rollout_logprobs, mask, cap):
    return (old_logprobs.exp() - rollout_logprobs.exp()).clamp(max=cap)


IMPORTANCE = {
    "weight_inverted": weighted(lambda d, m, cap: (-d).exp().clamp(max=cap)),
    "current_for_old": current,
    "cap_is_a_floor": weighted(lambda d, m, cap: d.exp().clamp(min=cap)),
    "cap_missing": weighted(lambda d, m, cap: torch.where(d.exp() < 0.5, 0.0, d.exp())),
    "mask_inverted": weighted(lambda d, m, cap: torch.where(d.exp() > cap, d.exp(), 0.0)),
    "kept_weights_are_one": weighted(lambda d, m, cap: (d.exp() <= cap).to(d.dtype)),
    "cap_on_log_ratio": weighted(lambda d, m, cap: d.clamp(max=cap).exp()),
    "mask_ignored": weighted(lambda d, m, cap: d.sum(-1, keepdim=True).exp().expand_as(d).clamp(max=cap)),
    "mean_over_width": weighted(lambda d, m, cap: geometric(d, m, d.shape[1]).clamp(max=cap)),
    "mean_over_batch": weighted(lambda d, m, cap: ((d * m).sum() / m.sum()).exp().clamp(max=cap).expand_as(d)),
    "exp_missing": weighted(lambda d, m, cap: d.clamp(max=cap)),
    "rollout_logprobs_shifted": lambda old_logprobs, rollout_logprobs, mask, cap: (
        (old_logprobs - torch.roll(rollout_logprobs, 1, 1)).exp().clamp(max=cap)
    ),
    "probability_difference": probabilities,
}

PLANTED = {"advantages": ADVANTAGES, "logprobs": LOGPROBS, "kl": KL, "importance": IMPORTANCE}
