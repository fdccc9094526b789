"""The loss of many tokens, with sequences longer than a block, against the reference."""

import torch
from accuracy import assert_as_reference, assert_same
from helpers import per_token

from bapo_kernels import BAPOConfig, bapo_loss_from_log_probs

# Offsets of packed tokens: sequences longer than a block, short and empty ones, and tokens behind
# the last one.
SEQUENCES = {"padded": None, "packed": (0, 0, 1, 40, 40, 1_000, 1_090, 1_090)}
SEQUENCE_CONFIGS = {
    "search": dict(target=0.5),
    "dual clip": dict(clip_ratio_c=1.1, contribution="gradient"),
    "cispo": dict(surrogate="cispo", target=0.5),
    "sapo": dict(surrogate="sapo"),
    "kl": dict(kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean"),
}


def tokens(*shape):
    """Log-probs, old ones, advantages and a mask."""
    old, step, A = -3 * torch.rand(shape), 0.4 * torch.randn(shape), torch.randn(shape)
    return old + step, old, A, torch.rand(shape) < 0.8


def batch_of_sequences(offsets):
    """Every third sequence has no advantage, so that with ``statistics="live"`` it is skipped."""
    logp, old, A, mask = tokens(3, 700) if offsets is None else tokens(1_100)
    if offsets is None:
        A[::3] = 0.0
        mask[-1] = False
    else:
        sequence = torch.searchsorted(torch.tensor(offsets), torch.arange(1_100), right=True)
        A[sequence % 3 == 0] = 0.0
    logp[~mask] = old[~mask] = A[~mask] = torch.nan
    return logp, old, A, mask


def sequence_options(name, of, shape):
    """Of a loss by the ratio of sequences; with a KL term also weights and bounds of tokens."""
    offsets = SEQUENCES[of] and torch.tensor(SEQUENCES[of])
    config = BAPOConfig(ratio_level="sequence", **SEQUENCE_CONFIGS[name])
    options = dict(config=config, cu_seqlens=offsets)
    if config.kl_loss_coef:
        options |= dict(
            ref_log_probs=per_token(shape),
            rollout_is_weights=per_token(shape, 2, 0, 2),
            bounds=(per_token(shape, 3, 0.9, 1.0), per_token(shape, 4, 1.0, 1.1)),
        )
    return options


def check_log_probs(backend, logp, *batch, **options):
    """Checks loss, gradient, bounds and metrics; returns what the call does, and the gradient."""

    def values(kind, backend="reference"):
        x = logp.to(kind, copy=True).requires_grad_()
        out = bapo_loss_from_log_probs(x, *batch, backend=backend, **options)
        bounds = [bound.float() for bound in out.bounds]
        return [*torch.autograd.grad(out.loss, x), *bounds, out.loss, *out.metrics.values()], out

    got, out = values(torch.float32, backend)
    assert_same(got[1:3], values(torch.float64)[0][1:3])
    # The log-ratio, exp, and products with advantage and weight.
    assert_as_reference(got, lambda kind: values(kind)[0], roundings=4)
    return out, got[0]
