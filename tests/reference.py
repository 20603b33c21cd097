"""The objectives again, one token at a time, in plain Python floats.

Slow and obvious: what `leadline/objective` must equal. Written from the papers' formulas, sharing no code with the
package: lists, loops and `math` only. NaN is `math.nan`; a token is an index.
"""

import math

CAP = 20.0
"""Log ratios above this count as this."""


def exp(x):
    return math.exp(min(x, CAP))


def members(of, which):
    return [i for i, w in enumerate(of) if w == which]


def mean(values):
    return sum(values) / len(values) if values else 0.0


def sample_std(values):
    if len(values) < 2:
        return 0.0
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def group_advantages(rewards, group_of, scaling, epsilon):
    advantages = []
    for i, reward in enumerate(rewards):
        group = [rewards[j] for j in members(group_of, group_of[i]) if math.isfinite(rewards[j])]
        if not math.isfinite(reward) or len(group) < 2:
            advantages.append(0.0)
            continue
        if abs(reward - mean(group)) <= 1e-6 * max(abs(r) for r in group):
            advantages.append(0.0)
            continue
        if scaling == "group_std":
            advantages.append((reward - mean(group)) / (sample_std(group) + epsilon))
        elif scaling == "batch_std":
            everyone = [r for r in rewards if math.isfinite(r)]
            advantages.append((reward - mean(group)) / (sample_std(everyone) + epsilon))
        elif scaling == "none":
            advantages.append(reward - mean(group))
        elif scaling == "leave_one_out":
            advantages.append(reward - (sum(group) - reward) / (len(group) - 1))
        else:
            raise KeyError(scaling)
    return advantages


def rollout_weights(old, rollout, completion_of, level, action, low, high, veto):
    """(weights, masked, truncated), each a list over tokens."""
    results = []
    for t in range(len(old)):
        scored = [u for u in members(completion_of, completion_of[t]) if not math.isnan(rollout[u])]
        logs = {u: min(old[u] - rollout[u], CAP) for u in scored}
        values = {
            u: {
                "token": exp(logs[u]),
                "sequence": exp(sum(logs.values())),
                "geometric": exp(mean(list(logs.values()))),
            }[level]
            for u in scored
        }
        bad = [u for u in scored if not low <= values[u] <= high]
        vetoed = any(exp(logs[u]) < veto for u in scored)
        if action == "off":
            results.append((1.0, False, False))
        elif vetoed or (action == "mask" and (t in bad if level == "token" else bad)):
            results.append((0.0, True, False))
        elif t not in scored:
            results.append((1.0, False, False))
        else:
            results.append((min(max(values[t], low), high), False, t in bad))
    weights, masked, truncated = zip(*results, strict=True)
    return list(weights), list(masked), list(truncated)


def surrogate(ratio, advantage, clip_low, clip_high, clip_delta):
    if clip_delta is not None:
        ratio = min(ratio, clip_delta)
    clipped_ratio = min(max(ratio, 1 - clip_low), 1 + clip_high)
    return -min(ratio * advantage, clipped_ratio * advantage)


def token_losses(name, logprobs, fixed, old, advantages, completion_of, mask, clip_low, clip_high, clip_delta):
    """One loss per token, 0 outside the mask. `fixed` stands for logprobs where the paper writes stop-gradient."""
    losses = []
    for t in range(len(logprobs)):
        if not mask[t]:
            losses.append(0.0)
        elif name in ("grpo", "dapo", "dr_grpo", "bnpo"):
            ratio = exp(logprobs[t] - old[t])
            losses.append(surrogate(ratio, advantages[t], clip_low, clip_high, clip_delta))
        elif name == "gspo":
            tokens = [u for u in members(completion_of, completion_of[t]) if mask[u]]
            ratio = exp(mean([logprobs[u] - old[u] for u in tokens]))
            losses.append(surrogate(ratio, advantages[t], clip_low, clip_high, clip_delta))
        elif name == "cispo":
            losses.append(-min(exp(fixed[t] - old[t]), 1 + clip_high) * advantages[t] * logprobs[t])
        elif name == "reinforce":
            losses.append(-advantages[t] * logprobs[t])
        else:
            raise KeyError(name)
    return losses


def token_shares(aggregation, mask, completion_of, max_tokens):
    tokens = sum(mask)
    completions = len({c for c, m in zip(completion_of, mask, strict=True) if m})
    shares = []
    for t in range(len(mask)):
        if not mask[t]:
            shares.append(0.0)
        elif aggregation in ("token_mean", "minibatch_token_mean"):
            shares.append(1 / tokens)
        elif aggregation == "sequence_mean":
            own = sum(mask[u] for u in members(completion_of, completion_of[t]))
            shares.append(1 / completions / own)
        elif aggregation == "constant":
            shares.append(1 / completions / max_tokens)
        else:
            raise KeyError(aggregation)
    return shares


def kl(logprob, ref, estimator):
    """Schulman's estimators with r = p_ref / p."""
    log_r = ref - logprob
    if estimator == "k3":
        log_r = min(log_r, CAP)
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": (exp(log_r) - 1) - log_r}[estimator]


def constants(batch, settings):
    """What no gradient flows through: (advantages, shares, weights), each a list over tokens."""
    mask, completion_of = batch["loss_mask"], batch["completion_of_token"]
    by_completion = group_advantages(batch["rewards"], batch["group_of_completion"], settings["scaling"], 1e-6)
    weights, _, _ = rollout_weights(
        batch["old_logprobs"], batch["rollout_logprobs"], completion_of, **settings["importance"]
    )
    shares = token_shares(settings["aggregation"], mask, completion_of, batch["max_tokens"])
    return [by_completion[c] for c in completion_of], shares, weights


def loss_at(logprobs, batch, settings, advantages, shares, weights):
    """The number that is differentiated, as a function of the logprobs that the gradient flows through."""
    mask = batch["loss_mask"]
    losses = token_losses(
        settings["loss"],
        logprobs,
        batch["logprobs"],
        batch["old_logprobs"],
        advantages,
        batch["completion_of_token"],
        mask,
        **settings["clip"],
    )
    total = 0.0
    for t in range(len(mask)):
        if mask[t]:
            total += shares[t] * weights[t] * losses[t]
            total += settings["beta"] * shares[t] * kl(logprobs[t], batch["ref_logprobs"][t], settings["estimator"])
    return total


def whole_loss(batch, settings, step=1e-5):
    """(loss, d loss / d logprobs by central differences), from rewards to loss; batch and settings are plain dicts."""
    fixed = constants(batch, settings)
    gradient = []
    for t in range(len(batch["logprobs"])):
        up, down = list(batch["logprobs"]), list(batch["logprobs"])
        up[t] += step
        down[t] -= step
        gradient.append((loss_at(up, batch, settings, *fixed) - loss_at(down, batch, settings, *fixed)) / (2 * step))
    return loss_at(batch["logprobs"], batch, settings, *fixed), gradient


def processed_logits(row, temperature, top_k, top_p, min_p, repetition_penalty, seen):
    """One row of logits -> the logits of what is sampled, -inf where excluded."""
    penalised = [
        (x / repetition_penalty if x > 0 else x * repetition_penalty) if s else x
        for x, s in zip(row, seen, strict=True)
    ]
    scaled = [x / temperature for x in penalised]
    kept = set(range(len(row)))
    probs = softmax(scaled, kept)
    kept = {i for i in kept if probs[i] >= min_p * max(probs)}
    if top_k:
        smallest = sorted((scaled[i] for i in range(len(row))), reverse=True)[:top_k][-1]
        kept = {i for i in kept if scaled[i] >= smallest}
    if top_p < 1:
        probs = softmax(scaled, kept)
        nucleus, mass = set(), 0.0
        for i in sorted(kept, key=lambda i: -scaled[i]):
            if mass < top_p:
                nucleus.add(i)
            mass += probs[i]
        kept = nucleus
    return [x if i in kept else -math.inf for i, x in enumerate(scaled)]


def softmax(logits, kept):
    top = max(logits[i] for i in kept)
    weights = [math.exp(x - top) if i in kept else 0.0 for i, x in enumerate(logits)]
    return [w / sum(weights) for w in weights]
