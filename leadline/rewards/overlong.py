"""The soft overlong penalty of DAPO."""


def soft_overlong(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """What is added to the reward of a completion of `length` tokens: 0, then linearly down to -penalty.

    0 up to max_tokens - buffer; penalty * ((max_tokens - buffer) - length) / buffer up to max_tokens; -penalty from
    there on (DAPO, arXiv 2503.14476, eq. 13, with penalty = 1).
    """
    excess = length - (max_tokens - buffer)
    if excess <= 0:
        return 0.0
    return -penalty if excess >= buffer else -penalty * excess / buffer
