"""Correct functions with the signatures and habits of TRL, verl, OpenRLHF, Hugging Face and plain scripts."""

import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Losses -------------------------------------------------------------------------------------------------------------------


def trl_grpo(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon_low=0.2, epsilon_high=0.2):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    clipped = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages.unsqueeze(1), clipped * advantages.unsqueeze(1))
    return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def trl_dapo_kl(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask, beta):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    a = advantages.unsqueeze(1)
    loss = -torch.min(ratio * a, torch.clamp(ratio, 0.8, 1.28) * a)
    difference = ref_per_token_logps - per_token_logps
    loss = loss + beta * (torch.exp(difference) - difference - 1)
    return (loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)


def trl_gspo(per_token_logps, old_per_token_logps, advantages, completion_mask, epsilon_low=3e-4, epsilon_high=4e-4):
    log_ratio = per_token_logps - old_per_token_logps
    weight = (log_ratio * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)
    ratio = torch.exp(weight).unsqueeze(-1)
    a = advantages.unsqueeze(1)
    loss = -torch.min(ratio * a, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * a)
    return ((loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def trl_dr_grpo(per_token_logps, old_per_token_logps, advantages, completion_mask, max_completion_length, epsilon=0.2):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    a = advantages.unsqueeze(1)
    loss = -torch.min(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)
    return (loss * completion_mask).sum() / (loss.size(0) * max_completion_length)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def verl_vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    low, high, c = config.clip_ratio_low, config.clip_ratio_high, config.get("clip_ratio_c", 3.0)
    negative_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    ratio = torch.exp(negative_kl)
    first = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - low, 1 + high))
    dual = torch.min(-advantages * c, first)
    losses = torch.where(advantages < 0, dual, first)
    return masked_mean(losses, response_mask), masked_mean((ratio > 1).float(), response_mask)


def verl_sequence_mean(
    old_log_prob, log_prob, advantages, response_mask, cliprange=0.2, cliprange_low=None, cliprange_high=None
):
    ratio = torch.exp(log_prob - old_log_prob)
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return torch.mean((losses * response_mask).sum(-1) / (response_mask.sum(-1) + 1e-8))


class OpenRLHFPolicyLoss(nn.Module):
    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.2, token_level_loss=True):
        super().__init__()
        self.low, self.high, self.token_level = clip_eps_low, clip_eps_high, token_level_loss

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None):
        ratio = (log_probs - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - self.low, 1 + self.high) * advantages)
        return (loss * action_mask).sum() / action_mask.sum().clamp(min=1)


def plain_reinforce(logp, adv, mask):
    return -(logp * adv[:, None] * mask).sum() / mask.sum().clamp(min=1)


def plain_cispo(logprobs, old_logprobs, advantages, loss_mask):
    weight = (logprobs - old_logprobs).detach().exp().clamp(max=1.28)
    loss = torch.where(loss_mask, -weight * advantages[:, None] * logprobs, 0.0)
    return loss.sum() / loss_mask.sum().clamp(min=1)


def from_a_batch(batch):
    ratio = torch.exp(batch["logprobs"] - batch["old_logprobs"])
    a = batch["advantages"].unsqueeze(-1)
    loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * batch["loss_mask"]
    return {"loss": loss.sum() / batch["loss_mask"].sum().clamp(min=1), "ratio": ratio.mean()}


# Advantages ------------------------------------------------------------------------------------------------------------------


def trl_advantages(rewards, num_generations, scale_rewards=True):
    mean = rewards.view(-1, num_generations).mean(dim=1).repeat_interleave(num_generations)
    std = rewards.view(-1, num_generations).std(dim=1).repeat_interleave(num_generations)
    return (rewards - mean) / (std + 1e-4)


def verl_grpo(token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True):
    scores = token_level_rewards.sum(dim=-1)
    groups = {}
    for i, label in enumerate(index):
        groups.setdefault(label, []).append(i)
    with torch.no_grad():
        advantages = torch.zeros_like(scores)
        for members in groups.values():
            values = scores[members]
            std = values.std() if len(members) > 1 else torch.tensor(1.0, dtype=scores.dtype)
            mean = values.mean() if len(members) > 1 else torch.tensor(0.0, dtype=scores.dtype)
            advantages[members] = (values - mean) / (std + epsilon)
        return advantages.unsqueeze(-1) * response_mask, scores


def openrlhf_rloo(rewards, n_samples_per_prompt):
    r = rewards.reshape(-1, n_samples_per_prompt)
    baseline = (r.sum(-1, keepdim=True) - r) / (n_samples_per_prompt - 1)
    return (r - baseline).flatten()


def plain_dr_grpo(rewards):
    return rewards - rewards.mean(dim=-1, keepdim=True)


def numpy_groups(rewards, group_ids):
    r, ids = rewards.numpy(), group_ids.numpy()
    advantages = np.zeros_like(r)
    for group in np.unique(ids):
        inside = ids == group
        if inside.sum() > 1:
            advantages[inside] = (r[inside] - r[inside].mean()) / (r[inside].std(ddof=1) + 1e-6)
    return advantages


# Logprobs, KL, weights ---------------------------------------------------------------------------------------------------------


def trl_logps(logits, index):
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def hf_labels(logits, labels):
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return -loss


def scaled(logits, token_ids, temperature=1.0):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def openrlhf_kl(log_probs, log_probs_base, kl_estimator="k1"):
    log_ratio = log_probs - log_probs_base
    if kl_estimator == "k2":
        return log_ratio**2 / 2.0
    if kl_estimator == "k3":
        return (-log_ratio).exp() - 1 + log_ratio
    return log_ratio


def verl_low_var_kl(logprob, ref_logprob, kl_penalty="low_var_kl"):
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    return (torch.exp(kl) - kl - 1).contiguous()


def trl_kl_mean(per_token_logps, ref_per_token_logps, completion_mask):
    d = ref_per_token_logps - per_token_logps
    kl = torch.exp(d) - d - 1
    return (kl * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)


def trl_token_truncate(old_per_token_logps, sampling_per_token_logps, completion_mask, cap=2.0):
    difference = torch.nan_to_num((old_per_token_logps - sampling_per_token_logps) * completion_mask, nan=0.0)
    return torch.clamp(torch.exp(difference), max=cap)


def verl_sequence_mask(old_log_prob, rollout_log_prob, response_mask, rollout_is_threshold=2.0):
    log_ratio = torch.nan_to_num(torch.where(response_mask, old_log_prob - rollout_log_prob, 0.0))
    ratio = torch.exp(log_ratio.sum(-1, keepdim=True).clamp(-20, 20))
    return (ratio * (ratio <= rollout_is_threshold)).expand_as(log_ratio).detach()


TENSORS = {
    "loss": [
        trl_grpo, trl_dapo_kl, trl_gspo, trl_dr_grpo, verl_vanilla, verl_sequence_mean, OpenRLHFPolicyLoss,
        plain_reinforce, plain_cispo, from_a_batch,
    ],
    "advantages": [trl_advantages, verl_grpo, openrlhf_rloo, plain_dr_grpo, numpy_groups],
    "logprobs": [trl_logps, hf_labels, scaled],
    "kl": [openrlhf_kl, verl_low_var_kl, trl_kl_mean],
    "importance": [trl_token_truncate, verl_sequence_mask],
}  # fmt: skip

# Decoders, collators, rewards ---------------------------------------------------------------------------------------------------


def trl_decode(processing_class, completion_ids):
    ids = list(completion_ids)
    while ids and ids[-1] == processing_class.pad_token_id:
        ids.pop()
    if ids and ids[-1] == processing_class.eos_token_id:
        ids.pop()
    text = processing_class.decode(ids, skip_special_tokens=False)
    if "</think>" in text:
        return text.split("</think>", 1)[-1].strip()
    return "" if "<think>" in text else text


def batch_of_texts(texts):
    pattern = re.compile(r"</think>(.*)", re.DOTALL)
    found = [(text, pattern.search(text)) for text in texts]
    return [match[1].strip() if match else ("" if "<think>" in text else text) for text, match in found]


def trl_collate(prompt_ids, completion_ids, pad_token_id):
    def padded(rows, left):
        width = max(map(len, rows))
        ids = [[pad_token_id] * (width - len(r)) + r if left else r + [pad_token_id] * (width - len(r)) for r in rows]
        mask = [[0] * (width - len(r)) + [1] * len(r) if left else [1] * len(r) + [0] * (width - len(r)) for r in rows]
        return torch.tensor(ids), torch.tensor(mask)

    prompts, prompt_mask = padded(prompt_ids, True)
    completions, completion_mask = padded(completion_ids, False)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
    }


class HFCollator:
    def __init__(self, pad_token_id):
        self.pad_token_id = pad_token_id

    def __call__(self, features):
        width = max(len(f["input_ids"]) for f in features)

        def pad(key, value):
            return torch.tensor([list(f[key]) + [value] * (width - len(f[key])) for f in features])

        return {
            "input_ids": pad("input_ids", self.pad_token_id),
            "attention_mask": pad("attention_mask", 0),
            "labels": pad("labels", -100),
        }


def extracted(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text.split("</think>")[-1])
    return found[-1] if found else None


def trl_reward(completions, answer, **kwargs):
    return [1.0 if extracted(c) == a else 0.0 for c, a in zip(completions, answer, strict=True)]


def trl_chat_reward(completions, solution, **kwargs):
    return [1.0 if extracted(c[0]["content"]) == a else 0.0 for c, a in zip(completions, solution, strict=True)]


def verl_compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if extracted(solution_str) == ground_truth else 0.0}


def openrlhf_reward(queries, prompts, labels):
    answers = [extracted(q[len(p) :]) for q, p in zip(queries, prompts, strict=True)]
    return {"rewards": torch.tensor([float(a == label) for a, label in zip(answers, labels, strict=True)])}


async def awaited(prompt, completion, answer):
    return float(extracted(completion) == answer)


DECODERS = [trl_decode, batch_of_texts]
COLLATORS = [trl_collate, HFCollator]
REWARDS = [trl_reward, trl_chat_reward, verl_compute_score, openrlhf_reward, awaited]
