"""BAPO in plain PyTorch, as a trainer would write it: the README's Before, to the letter.

Imports torch alone. The demo and the benchmarks time it; the specification is ``reference``.
"""

import torch


def plain_log_probs(logits, labels, temperature):
    """Log-probs of the labels ``[B, S]``."""
    logp = torch.log_softmax(logits.float() / temperature, -1)
    return logp.gather(-1, labels[..., None]).squeeze(-1)


def plain_bapo_loss(logp, old_log_probs, advantages, response_mask):
    """BAPO's loss and its bounds; ``advantages`` are ``[B, S]`` here."""
    ratio = torch.exp(logp - old_log_probs)
    mass = response_mask * old_log_probs.exp() * advantages.abs()

    def share(low, high):  # of the tokens with A > 0
        pos = (mass * ratio.clamp(max=high))[advantages > 0].sum()
        neg = (mass * ratio.clamp(min=low))[advantages < 0].sum()
        return pos / (pos + neg)

    low, high = 0.6, 1.2
    while share(low, high) < 0.4 and high < 3.0:
        high = min(high + 0.05, 3.0)
    while share(low, high) < 0.4 and low < 0.9:
        low = min(low + 0.02, 0.9)
    loss = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    return (loss * response_mask).sum() / response_mask.sum(), low, high
