"""OpenRLHF's ``PolicyLoss`` and its corrections, called as ``ActorPPOTrainer`` calls it.

``data/openrlhf.json`` has what OpenRLHF's own function returns, with fixed bounds.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import fixed_bounds, needs_native
from parity import Found, assert_parity, compare, found, recorded

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.integrations.openrlhf import PolicyLoss
from bapo_kernels.tools.budget import EPS, largest

pytestmark = needs_native
DATA = json.loads((Path(__file__).parents[1] / "data/openrlhf.json").read_text())
OUTPUTS = ("clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
CLIP = dict(clip_eps_low=0.2, clip_eps_high=0.28)
FIXED = fixed_bounds(0.8, 1.28)
SEARCH = {"target": 0.7}
COUNTS = dict(dp_size=2, batch_num_tokens=50.0, global_batch_size=7)


def tokens_of_data(dtype):
    return {name: torch.tensor(values, dtype=dtype) for name, values in DATA["tokens"].items()}


def outputs(function, others, counts, leaf):
    """The loss, and the others by name."""
    loss, *further = function(leaf, *others, **counts)
    return loss, dict(zip(OUTPUTS, further, strict=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["version"])
def test_numbers_of_openrlhf(case, dtype):
    """Loss, gradient and what is logged, of every correction of every version."""
    function = PolicyLoss(**CLIP, **case["arguments"], options=FIXED)
    logp, *others = (tokens := tokens_of_data(dtype)).values()
    got = found(partial(outputs, function, others, case["counts"]), logp)
    log = dict(case["expected"])
    loss, gradient = recorded(log.pop("loss")), recorded(case["dlog_probs"])
    assert got.log.keys() == log.keys(), "as many outputs as this version unpacks"
    given = {name: value for name, value in log.items() if value is not None}
    assert given.keys() == {name for name, value in got.log.items() if value is not None}
    truth = Found(loss, given, gradient)
    size = sum(map(largest, tokens.values()))  # the decimals of all are rounded
    rounding = EPS[torch.float32]  # as which 0.8 and 1.28 are rounded in any dtype
    assert_parity(got, [truth], truth, size, rounding)


CORRECTIONS = {
    "none": {},
    "TIS": dict(level="token", mode="clip", threshold=[0.8, 1.25]),
    "sequences": dict(level="seq", gating="tv", threshold=[0.0, 0.05]),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("counts", [{}, COUNTS])
def test_search(correction, per_token, counts):
    """The weights of a correction are factors, and change neither divisor nor decision."""
    options = {f"is_correction_{name}": x for name, x in CORRECTIONS[correction].items()}
    options |= dict(token_level_loss=per_token, dual_clip=2.5, options=SEARCH)
    function = PolicyLoss(**CLIP, **options)
    logp, *others = tokens_of_data(torch.float32).values()
    mode = "token-mean" if per_token else "seq-mean-token-mean"
    config, uppers = BAPOConfig.paper(clip_ratio_c=2.5, loss_agg_mode=mode, **SEARCH), set()

    def theirs(leaf):
        old, A, mask, rollout = (x.to(leaf) for x in others)
        given = dict(config=config, rollout_log_probs=rollout, **counts)
        if function.correction:
            weights, _ = function.correction.weights(old, rollout, mask != 0)
            assert 0 < (weights == 0).sum() < weights.numel() or correction == "TIS"
            given["rollout_is_weights"] = weights
        out = reference.bapo_loss_from_log_probs(leaf, old, A, mask, **given)
        uppers.add(out.bounds.upper.item())
        return out.loss, dict(clip_ratio=out.metrics["pg_clipfrac"])

    compare(partial(outputs, function, others, counts), theirs, logp)
    assert {function.metrics["bapo_clip_high"].item()} == uppers
    assert min(uppers) > 1.2, "the case must need a search"


def test_rejected_tokens():
    """Also where the ratio overflows."""
    function = PolicyLoss(is_correction_level="token", options=FIXED)
    logp, *others, rollout = tokens_of_data(torch.float32).values()
    run = partial(found, partial(outputs, function, (*others, rollout), {}), logp)
    row, column = run().gradient.nonzero()[0]
    rollout[row, column] = -1000.0
    got = run()
    assert got.gradient[row, column] == 0
    assert got.gradient.isfinite().all()
    assert got.loss.isfinite()


@pytest.mark.parametrize("gating", ["binary_kl", "tv"])
def test_equal_policies_are_kept(gating):
    """A divergence is not negative, however it rounds."""
    old, ones = -6 * torch.rand(4, 250) - 1e-3, torch.ones(4, 250)
    given = dict(is_correction_gating=gating, is_correction_threshold=[0.0, 1e-3])
    function = PolicyLoss(is_correction_level="token", **given)
    *_, filtered = function(old, old, ones, ones, old + 1e-4 * torch.randn(4, 250))
    assert filtered == 0


VLLM = dict(enable_vllm_is_correction=True)
BAD = [
    (dict(policy_loss_type="grpo"), "policy_loss_type must be 'ppo' or 'gspo', got 'grpo'"),
    (dict(is_correction_level="geo"), "level must be one of 'off', 'token', 'seq', got 'geo'"),
    (dict(is_correction_mode="drop"), "mode must be one of 'mask', 'clip', got 'drop'"),
    (dict(is_correction_gating="kl"), "gating must be one of 'ratio', 'binary_kl', 'tv', got 'kl'"),
    (dict(is_correction_level="seq", is_correction_mode="clip"), "mode must be 'mask' unless"),
    (dict(is_correction_mode="clip", is_correction_gating="tv"), "mode must be 'mask' unless"),
    (dict(is_correction_level="seq", is_correction_gating="tv"), "have a lower bound <= 0 with"),
    (dict(is_correction_level="seq", is_correction_threshold=[2, 0.5]), "low <= high, got .2, 0.5"),
    (VLLM, "vllm_is_truncated_threshold must be two numbers, low <= high, got None"),
    (VLLM | dict(vllm_is_correction_type="token"), "one of 'tis', 'icepop', 'seq-mask-tis', got"),
    (dict(enable_vllm_is_correction=False, is_correction_level="token"), "must be 'off' with enab"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**arguments)


def test_a_correction_needs_log_probs_of_the_rollout():
    tokens = tokens_of_data(torch.float32) | {"rollout_log_probs": None}
    for kind in ("ppo", "gspo"):
        function = PolicyLoss(policy_loss_type=kind, is_correction_level="token")
        with pytest.raises(ValueError, match="rollout_log_probs must be given with a correction"):
            function(**tokens)
