"""Loss, gradient and metrics equal those of verl 0.9.1 on the same inputs; for TRL see test_trl.py.

verl's functions run in float64, ours in float64 (the reference) and in float32 (the kernels). What
differs by intention: ``BAPOPolicyLossConfig`` lists it.
"""

from functools import partial

import pytest
import torch
from helpers import fixed_bounds, needs_native
from parity import assert_parity, found

pytest.importorskip("verl")

from test_verl import actor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

from bapo_kernels.integrations.verl import BAPOPolicyLossConfig
from bapo_kernels.tools.budget import in_some_orders, largest

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore:.* is not used")]

LOW, HIGH = 0.25, 0.28125  # epsilons whose ratio bounds are float32 numbers, as ours are
FIXED = fixed_bounds(1 - LOW, 1 + HIGH)
B, T = 6, 9
MODES = [
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]  # fmt: skip
NORMALISED = dict(dp_size=2, batch_num_tokens=41, global_batch_size=9, loss_scale_factor=16)


def batch(per_token=False, weighted=True):
    """Numbers of float32 in float64: ratios on both sides of both bounds, also those of sequences.

    The last sequence has no unmasked token.
    """
    g = torch.Generator().manual_seed(0)
    shift = torch.tensor([0.5, -0.5, 0.02, -0.02, 0.4, 0.1])[:, None]
    old = -3 * torch.rand(B, T, generator=g)
    A = torch.tensor([1.0, -0.75, 0.5, -1.5, -2.0, 0.0])[:, None].expand(B, T)
    mask = torch.arange(T) < torch.tensor([9, 4, 7, 9, 1, 0])[:, None]
    mask[0, 2:5] = False  # tokens of a tool
    weights = (0.5 + torch.rand(B, 1, generator=g)).repeat(1, T)
    weights[2] = 0.0  # masked by its ratio to the rollout
    made = dict(
        log_prob=old + shift + 0.4 * torch.randn(B, T, generator=g),
        old_log_prob=old,
        advantages=A + torch.randn(B, T, generator=g) if per_token else A,
        rollout_is_weights=weights if weighted else None,
    )
    made = {name: x if x is None else x.double() for name, x in made.items()}
    return made | dict(response_mask=mask.long())


def verl_loss(loss, mode, normalised, data, dtype=torch.float64):
    """Of the registered loss that a config of verl, or of the adapter, names."""
    # verl takes the two that are named low and high.
    clip = dict(clip_ratio=0.9, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1.75)
    config = actor(loss, loss_agg_mode=mode, tau_pos=1.1, tau_neg=1.3, **clip)
    config.global_batch_info.update(NORMALISED if normalised else {})
    function = partial(POLICY_LOSS_REGISTRY[loss.loss_mode], loss_agg_mode=mode, config=config)
    given = {name: x.to(dtype) for name, x in data.items() if x is not None}
    given["response_mask"] = data["response_mask"]
    return found(lambda leaf: function(**(given | dict(log_prob=leaf))), given["log_prob"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
def test_verl(name, normalised, mode):
    """verl's registered losses, and the policy loss ``bapo`` with their names."""
    bounds = {} if name == "sapo" else FIXED
    preset = "recipe" if name == "vanilla" else "paper"  # verl's vanilla loss has a dual clip
    loss = BAPOPolicyLossConfig(surrogate=name, preset=preset, **bounds)
    own = "seq-mean-token-mean" if name == "sapo" else mode  # verl's, whatever it is told
    # verl divides the sum of a sequence by its count + 1e-8.
    of_counts = 1e-8 if own == "seq-mean-token-mean" else 0.0
    # verl's gspo passes each token its own gradient, which is ours where advantages are equal.
    for per_token in {False, name != "gspo"}:
        data = batch(per_token, weighted=not per_token)
        if name == "vanilla":
            data["log_prob"][4] += 0.4
        ours = partial(verl_loss, loss, own, normalised, data)
        theirs = partial(verl_loss, PolicyLossConfig(loss_mode=name), mode, normalised, data)
        truth, size = theirs(), largest(data["log_prob"])
        for dtype in (torch.float64, torch.float32):
            got, same = ours(dtype=dtype), in_some_orders(partial(theirs, dtype=dtype))
            assert_parity(got, same, truth, size, of_counts)
            assert ("actor/bapo_clip_high" in got.log) == (name != "sapo")
        if name == "vanilla" and not per_token:
            assert truth.log["actor/pg_clipfrac_lower"] > 0, "the dual clip must act"
