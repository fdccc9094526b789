"""Adapters against the losses of SkyRL and Trinity-RFT themselves, where these are installed.

With fixed bounds an adapter must give the loss and the gradient of the framework's own function,
which is fetched from the framework's registry, as is the adapter's.
"""

import pytest
import torch
from helpers import fixed_bounds, needs_native

from bapo_kernels import BAPOConfig
from bapo_kernels.integrations import skyrl, trinity

pytestmark = needs_native

LOW, HIGH = 0.2, 0.28
FIXED = fixed_bounds(1 - LOW, 1 + HIGH)
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def tokens():
    """Log-probs, old and rollout log-probs, advantages and mask ``[5, 8]``; one row is masked."""
    g = torch.Generator().manual_seed(7)
    logp = -3 * torch.rand(5, 8, generator=g) - 0.1
    old, rollout = (
        logp + scale * torch.randn(5, 8, generator=g) + shift
        for scale, shift in ((0.3, torch.tensor([[0.4], [-0.4], [0.0], [0.2], [0.0]])), (0.3, 0))
    )
    A = torch.tensor([[1.0], [-0.8], [0.6], [-1.2], [0.9]]).expand(5, 8)
    lengths = torch.tensor([8, 3, 5, 6, 0])
    return logp, old, rollout, A, (torch.arange(8) < lengths[:, None]).float()


def assert_same(ours, theirs, of_ours, of_theirs):
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_ours.grad, of_theirs.grad, rtol=1e-5, atol=1e-7)
    assert of_theirs.grad.abs().sum() > 0.01


CORRECTIONS = {
    "none": {},
    "token TIS": dict(tis_ratio_type="token", token_tis_ratio_clip_high=1.2),
    "sequence TIS": dict(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.2),
    "product": dict(sequence_mask_metric="product", product_mask_low=0.7, product_mask_high=1.6),
    "geometric": dict(sequence_mask_metric="geometric", geo_mask_low=0.9, geo_mask_high=1.1),
    "tokens": dict(token_mask_is_threshold_low=0.8, token_mask_is_threshold_high=1.25),
    "outliers": dict(outlier_token_is_threshold_low=0.6, outlier_token_is_threshold_high=1.8),
}
SKYRL = {
    "regular": {},
    "dual_clip": dict(clip_ratio_c=1.5),
    "gspo": dict(ratio_level="sequence"),
    "cispo": dict(surrogate="cispo"),
    "sapo": dict(surrogate="sapo"),
}


@pytest.mark.parametrize("kind", SKYRL)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_skyrl(correction, kind):
    if kind == "gspo" and correction in ("token TIS", "tokens"):
        pytest.skip("SkyRL's GSPO differentiates every token's ratio by its own log-prob alone")
    utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    from skyrl.train.config import AlgorithmConfig
    from skyrl.train.config.config import CISPOConfig, OffPolicyCorrectionConfig

    registry = utils.PolicyLossRegistry
    if "bapo" not in registry.list_available():
        skyrl.register()
    logp, old, rollout, A, mask = tokens()
    A = utils.apply_loss_reduction_to_advantages_minibatch(A, mask, "sequence_mean", 5, 8)
    config = AlgorithmConfig(
        policy_loss_type=kind,
        eps_clip_low=LOW,
        eps_clip_high=HIGH,
        clip_ratio_c=1.5,
        loss_reduction="sequence_mean",
        cispo=CISPOConfig(cispo_eps_clip_low=LOW, cispo_eps_clip_high=HIGH),
        off_policy_correction=OffPolicyCorrectionConfig(**CORRECTIONS[correction]),
    )
    bapo = BAPOConfig(loss_agg_mode="token-sum", **(FIXED | SKYRL[kind]))
    leaf, true = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    options = dict(config=config, loss_mask=mask, rollout_logprobs=rollout)
    ours, metrics = registry.get("bapo")(leaf, old, A, bapo=bapo, **options)
    theirs, their_metrics = registry.get(kind)(true, old, A, **options)
    assert_same(ours, theirs, leaf, true)
    assert set(their_metrics) <= set(metrics)
    for name in set(their_metrics) - {"clip_ratio"}:
        assert metrics[name] == pytest.approx(their_metrics[name]), name
    if correction == "none" and kind in ("regular", "gspo"):
        assert metrics["clip_ratio"] == pytest.approx(their_metrics["clip_ratio"])


# Trinity's own SAPO is another loss: its gate is a weight without gradient.
TRINITY = {
    "ppo": dict(clip_ratio_c=1.5),
    "gspo": dict(ratio_level="sequence"),
    "cispo": dict(surrogate="cispo"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TRINITY)
def test_trinity(kind, mode):
    """Through the names of the trainer, with which Trinity calls a loss."""
    module = pytest.importorskip("trinity.algorithm.policy_loss_fn")
    registry = module.POLICY_LOSS_FN
    if "bapo" not in registry.modules:
        trinity.register()
    arguments = dict(loss_agg_mode=mode, clip_range_low=LOW, clip_range_high=HIGH)
    if kind == "ppo":
        arguments["clip_ratio_c"] = 1.5
    logp, old, _, A, mask = tokens()
    batch = dict(old_log_probs=old, response_mask=mask.bool(), advantages=A, unused=None)
    leaf, true = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    function = registry.get("bapo")(loss_agg_mode=mode, options=FIXED | TRINITY[kind])
    assert function.select_keys == ["old_log_probs", "response_mask", "advantages"]
    ours, metrics = function(logprob=leaf, **batch)
    theirs, their_metrics = registry.get(kind)(**arguments)(logprob=true, **batch)
    assert_same(ours, theirs, leaf, true)
    if kind == "ppo":
        for name, value in their_metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
