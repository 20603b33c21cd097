"""What parameter names mean: the words of leadline, TRL, verl, OpenRLHF and of everybody else."""

import re
from collections.abc import Mapping
from typing import Any

TOKEN_QUANTITIES = (
    "logits",
    "token_ids",
    "logprobs",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "rollout_weights",
    "loss_mask",
)
"""Tensors of [completion, token]."""

SIZES = ("group_size", "max_tokens", "num_completions", "num_groups", "num_tokens")
SETTINGS = ("clip", "clip_low", "clip_high", "delta", "beta", "epsilon", "temperature", "low", "high", "veto")
CHOICES = ("estimator", "aggregation", "level", "action", "scaling")
QUANTITIES = (
    *TOKEN_QUANTITIES,
    "rewards",
    "token_rewards",
    "advantages",
    "advantages_by_completion",
    "advantages_by_token",
    "group_of_completion",
    "group_labels",
    "completion_of_token",
    "row_starts",
    *SIZES,
    *SETTINGS,
    *CHOICES,
    "config",
)
"""What a parameter may stand for."""

PASSED: Mapping[str, Any] = {
    "clip": 0.2,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "delta": None,
    "beta": 0.04,
    "epsilon": 1e-6,
    "temperature": 0.7,
    "low": 0.5,
    "high": 2.0,
    "veto": 0.0,
    "estimator": "k3",
    "aggregation": "token-mean",
    "level": "token",
    "action": "truncate",
    "scaling": "group_std",
}
"""Settings, where the function has no default of its own."""

ALWAYS_PASSED = ("beta", "temperature", "low")
"""Passed even where there is a default: the usual ones (0, 1 and none) would hide the term."""

_OWNERS = {
    "old_logprobs": "old oldaction oldpolicy prox proximal",
    "ref_logprobs": "ref reference base refpolicy referencepolicy refmodel baseaction",
    "rollout_logprobs": "rollout sampling sampler vllm sglang inference behavior behaviour generator engine mu sample",
    "logprobs": "new policy current curr cur action pi theta train trainer model",
}

_EVERYWHERE = {
    "logits": "logits scores_logits shiftlogits lmlogits",
    "token_ids": "tokenids inputids labels completionids targets ids tokens sequences actions responseids responses",
    "rollout_weights": "rolloutweights rolloutisweights importanceweights isweights tisweights importancesamplingratio "
    "rolloutcorrectionweights weights",
    "loss_mask": "lossmask mask responsemask completionmask actionmask eosmask attentionmask labelmask tokenmask masks",
    "rewards": "rewards reward scores score r sequencerewards returns",
    "token_rewards": "tokenlevelrewards tokenrewards tokenlevelscores",
    "advantages": "advantages advantage adv advs a",
    "group_labels": "index uid uids",
    "group_of_completion": "groupofcompletion groupids groupid groups group promptindex promptids groupindices",
    "completion_of_token": "completionoftoken segmentoftoken segmentids sequenceids seqids",
    "row_starts": "cuseqlens",
    "group_size": "groupsize numgenerations n g nsamplesperprompt nsamples numreturnsequences k rolloutn nresponses",
    "max_tokens": "maxtokens maxcompletionlength maxresponselength lossscalefactor maxlen maxlength maxnewtokens",
    "num_completions": "numcompletions numsequences batchsize",
    "num_groups": "numgroups numprompts",
    "num_tokens": "numlosstokens numtokens numitemsinbatch totaltokens",
    "clip": "clip epsilon eps clipeps cliprange clipratio epsclip clipepsilon clipparam ppoclip",
    "clip_low": "cliplow epsilonlow clipepslow cliprangelow clipratiolow epslow epscliplow",
    "clip_high": "cliphigh epsilonhigh clipepshigh cliprangehigh clipratiohigh epshigh epscliphigh",
    "delta": "delta clipdelta clipratioc dualclip epsclipc",
    "beta": "beta klcoef klcoeff kllosscoef initklcoef klbeta klweight klpenaltycoef",
    "temperature": "temperature temp tau",
    "estimator": "estimator klestimator klpenalty kltype kllosstype klmode",
    "aggregation": "aggregation lossaggmode aggregationmode lossreduction",
    "level": "level rolloutislevel",
    "action": "action rolloutismode",
    "scaling": "scaling",
    "low": "low rolloutisthresholdlower clipmin mincap tisclipmin lowerbound minweight isclipmin",
    "high": "high cap rolloutisthreshold clipmax maxcap tisclip threshold rolloutisthresholdupper upperbound maxweight "
    "c imprratiocap tisimpratiocap isclipmax isthreshold",
    "veto": "veto rolloutisvetothreshold",
    "config": "config cfg args inputs batch data experience",
}

_BY_ROLE = {
    "advantages": {"epsilon": "epsilon eps stdeps normeps clipepsilon"},
    "logprobs": {"token_ids": "index"},
    "importance": {"clip": ""},
}
"""Names that mean something else in one role; they come first."""


def quantity_of(parameter: str, role: str) -> str | None:
    """What the parameter of a function with this role stands for; None: not known."""
    name = _plain(parameter)
    for table in (_BY_ROLE.get(role, {}), _EVERYWHERE):
        for quantity, words in table.items():
            if name in words.split():
                return quantity
    for quantity, owners in _OWNERS.items():
        if name in {spelled for owner in owners.split() for spelled in (f"{owner}logprobs", f"logprobs{owner}")}:
            return quantity
    return "logprobs" if name == "logprobs" else None


def _plain(parameter: str) -> str:
    """`old_per_token_logps`, `oldLogProbs` and `old_log_prob` are one word."""
    name = parameter.lower().replace("_", "").replace("pertoken", "")
    return re.sub(r"logp(robs?|s)?", "logprobs", name)
