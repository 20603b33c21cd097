"""The objective: tensors in, tensors out. Pure functions of torch; nothing here knows a model, a config or a run.

All tensors are flat. The axis "token" holds the completion tokens of some completions one after another, and
`completion_of_token` says which token belongs to which; nothing is padded. In reading order:

    segments    sums and means per completion
    ratios      exp that cannot overflow
    sampling    logits -> the distribution that is sampled -> a token
    logprobs    logits -> log-probability and entropy per token
    advantages  rewards -> advantage per completion
    importance  pi_old / mu -> a constant weight per token
    kl          policy against reference, per token
    losses      one loss per token, and each token's share in the one number that is differentiated:

        loss = sum over tokens of share * weight * token_loss  (+ beta * share * kl)
"""
