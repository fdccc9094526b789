"""OpenRLHF's ``PolicyLoss`` and its corrections, called as ``ActorPPOTrainer`` calls it.

``data/openrlhf.json`` has what OpenRLHF's own function returns, with fixed bounds.
"""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import fixed_bounds, make_case, needs_native, unmasked_tokens

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.integrations.openrlhf import PolicyLoss

pytestmark = needs_native
DATA = json.loads((Path(__file__).parents[1] / "data/openrlhf.json").read_text())
OUTPUTS = ("loss", "clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
CLIP = dict(clip_eps_low=0.2, clip_eps_high=0.28)
FIXED = fixed_bounds(0.8, 1.28)
SEARCH = {"target": 0.6}


def tokens_of_data(dtype):
    return {name: torch.tensor(values, dtype=dtype) for name, values in DATA["tokens"].items()}


def call(function, tokens, counts):
    """The outputs by name, and the gradient."""
    leaf = tokens["log_probs"].clone().requires_grad_()
    outputs = function(**(tokens | {"log_probs": leaf}), **counts)
    outputs[0].backward()
    return dict(zip(OUTPUTS, outputs, strict=False)), leaf.grad


def check_outputs(got, expected):
    assert got.keys() == expected.keys(), "as many outputs as this version unpacks"
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            value = float(torch.as_tensor(value).detach())
            assert got[name].item() == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["version"])
def test_numbers_of_openrlhf(case, dtype):
    """Loss, gradient and what is logged, of every correction of every version."""
    function = PolicyLoss(**CLIP, **case["arguments"], options=FIXED)
    got, gradient = call(function, tokens_of_data(dtype), case["counts"])
    check_outputs(got, case["expected"])
    expected = torch.tensor(case["dlog_probs"], dtype=dtype)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda case: case["version"])
def test_openrlhfs_own_function(case):
    """Where OpenRLHF can be imported, in whichever version it is."""
    loss = pytest.importorskip("openrlhf.models.loss", exc_type=ImportError)
    if not case["arguments"].keys() <= inspect.signature(loss.PolicyLoss).parameters.keys():
        pytest.skip("of another version")
    tokens, options = tokens_of_data(torch.float64), CLIP | case["arguments"]
    theirs, their_gradient = call(loss.PolicyLoss(**options), tokens, case["counts"])
    got, gradient = call(PolicyLoss(**options, options=FIXED), tokens, case["counts"])
    if "enable_vllm_is_correction" in case["arguments"] or len(theirs) == 5:
        check_outputs(got, theirs)
    torch.testing.assert_close(gradient, their_gradient)


def trainer_tokens(seed=0):
    """A batch that needs a search, with log-probs of the rollout's engine."""
    case = make_case((4, 9), 33, staleness=0.4, seed=seed, poison=False)
    g = torch.Generator().manual_seed(seed + 1)
    old = -3 * torch.rand(4, 9, generator=g) - 0.05
    spread = torch.tensor([0.02, 0.3, 0.6, 0.1])[:, None]
    return dict(
        log_probs=old + 0.4 * torch.randn(4, 9, generator=g),
        old_log_probs=old,
        advantages=case.advantages,
        action_mask=unmasked_tokens(case).float(),
        rollout_log_probs=(old + spread * (torch.randn(4, 9, generator=g) + 0.7)).clamp(max=-1e-3),
    )


@pytest.mark.parametrize("token_level_loss", [True, False])
@pytest.mark.parametrize(
    "counts", [{}, dict(dp_size=2, batch_num_tokens=50.0, global_batch_size=7)]
)
def test_loss(token_level_loss, counts):
    tokens = trainer_tokens()
    level = dict(token_level_loss=token_level_loss)
    function = PolicyLoss(**CLIP, **level, dual_clip=2.5, options=SEARCH)
    got, gradient = call(function, tokens, counts)
    mode = "token-mean" if token_level_loss else "seq-mean-token-mean"
    true, *others, rollout = tokens.values()
    true = true.double().requires_grad_()
    given = dict(rollout_log_probs=rollout, **counts)
    given["config"] = BAPOConfig.paper(target=0.6, clip_ratio_c=2.5, loss_agg_mode=mode)
    out = reference.bapo_loss_from_log_probs(true, *others, **given)
    out.loss.backward()
    logged = dict(clip_ratio=out.metrics["pg_clipfrac"], ppo_kl=out.metrics["ppo_kl"])
    check_outputs(got, dict(loss=out.loss, **logged, vllm_kl=None, is_filter_ratio=None))
    torch.testing.assert_close(gradient.double(), true.grad, rtol=1e-5, atol=1e-7)
    assert out.bounds.upper > 1.2, "the case must need a search"
    assert function.metrics["bapo_clip_high"] == out.bounds.upper
    names = "log_probs old_log_probs advantages action_mask rollout_log_probs dp_size"
    signature = inspect.signature(PolicyLoss.forward).parameters
    assert list(signature)[1:] == [*names.split(), "batch_num_tokens", "global_batch_size"]


def divergence(gating, p, q):
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    if gating == "tv":
        return abs(p - q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def weights_of_sequence(old, rollout, mask, level, mode, gating, low, high):
    """The formulas token by token: weights, and whether each token is outside."""
    pairs = list(zip(old, rollout, strict=True))
    if gating == "ratio":
        of_tokens = [o - r for o, r in pairs]
    else:
        of_tokens = [divergence(gating, math.exp(r), math.exp(o)) for o, r in pairs]
    if level == "seq":
        unmasked = [s for s, m in zip(of_tokens, mask, strict=True) if m]
        of_tokens = [sum(unmasked) / len(unmasked)] * len(mask)
    if gating == "ratio":
        of_tokens = [math.exp(s) for s in of_tokens]
    outside = [not low <= s <= high for s in of_tokens]
    if mode == "clip":
        return [min(max(s, low), high) for s in of_tokens], outside
    ratios = [math.exp(o - r) for o, r in pairs]
    return [0.0 if out else ratio for out, ratio in zip(outside, ratios, strict=True)], outside


CORRECTIONS = [
    ("token", "clip", "ratio", [0.8, 1.25]),  # TIS
    ("token", "mask", "ratio", [0.8, 1.25]),  # ICEPOP
    ("seq", "mask", "ratio", [0.8, 1.25]),  # seq-mask-tis
    ("token", "mask", "binary_kl", [0.0, 0.02]),
    ("seq", "mask", "binary_kl", [0.0, 0.05]),
    ("token", "mask", "tv", [0.0, 0.05]),
    ("seq", "mask", "tv", [0.0, 0.05]),
]
TYPES = ["tis", "icepop", "seq-mask-tis"]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: "-".join(c[:3]))
@pytest.mark.parametrize("token_level_loss", [True, False])
def test_corrections_with_the_search(correction, token_level_loss):
    """The weights are factors of the policy term, and change neither divisor nor decision."""
    *names, threshold = correction
    tokens = trainer_tokens()
    options = dict(token_level_loss=token_level_loss, options=SEARCH)
    named = dict(zip(("level", "mode", "gating"), names, strict=True), threshold=threshold)
    named = {f"is_correction_{name}": value for name, value in named.items()}
    got, gradient = call(PolicyLoss(**options, **named), tokens, {})

    true, old, A, mask, rollout = (values.double() for values in tokens.values())
    true.requires_grad_()
    rows = zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True)
    of_rows = [weights_of_sequence(*row, *names, *threshold) for row in rows]
    weights, outside = (torch.tensor(x, dtype=torch.float64) for x in zip(*of_rows, strict=True))
    search = dict(config=BAPOConfig(target=0.6), rollout_log_probs=rollout)
    lower, upper = reference.find_clip_bounds(true, old, A, mask, **search)
    r = (true - old).exp()
    policy = -torch.min(r * A, r.clamp(lower.double(), upper.double()) * A) * weights * mask
    of_sequences = (policy.sum(-1) / mask.sum(-1)).mean()
    loss = policy.sum() / mask.sum() if token_level_loss else of_sequences
    loss.backward()
    mean = lambda values: (values * mask).sum() / mask.sum()  # noqa: E731
    clipped = ((A > 0) & (r > upper)) | ((A < 0) & (r < lower))
    expected = dict(
        loss=loss,
        clip_ratio=mean(clipped),
        ppo_kl=mean(old - true),
        vllm_kl=mean(rollout - old),
        is_filter_ratio=outside[:, 0].mean() if names[0] == "seq" else mean(outside),
    )
    check_outputs(got, expected)
    torch.testing.assert_close(gradient.double(), true.grad, rtol=1e-5, atol=1e-7)
    assert upper > 1.2, "the case must need a search"
    assert 0 < expected["is_filter_ratio"] < 1, "the case must keep some and reject some"

    if names[2] == "ratio":  # the same by the names of 0.11.0
        kind = TYPES[CORRECTIONS.index(correction)]
        of_vllm = dict(vllm_is_correction_type=kind, vllm_is_truncated_threshold=threshold)
        function = PolicyLoss(enable_vllm_is_correction=True, **of_vllm, **options)
        again, same = call(function, tokens, {})
        check_outputs(again, {name: expected[name] for name in OUTPUTS[:4]})
        torch.testing.assert_close(same, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rejected_and_masked_tokens(dtype):
    """A ratio that overflows is rejected, and masked tokens may hold anything."""
    tokens = tokens_of_data(dtype)
    function = PolicyLoss(is_correction_level="token", options=FIXED)
    expected, gradient = call(function, tokens, {})
    row, column = gradient.nonzero()[0].tolist()
    masked = tokens["action_mask"] == 0
    for name in ("log_probs", "old_log_probs", "advantages", "rollout_log_probs"):
        tokens[name][masked] = torch.nan
    check_outputs(call(function, tokens, {})[0], expected)
    tokens["rollout_log_probs"][row, column] = -1000.0
    got, gradient = call(function, tokens, {})
    assert gradient[row, column] == 0
    assert torch.isfinite(gradient).all()
    assert got["loss"].isfinite()


@pytest.mark.parametrize("gating", ["binary_kl", "tv"])
def test_equal_policies_are_kept(gating):
    """A divergence is not negative, however it rounds."""
    shape = 4, 250
    old = -6 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1e-3
    rollout = old + 1e-4 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    given = dict(is_correction_gating=gating, is_correction_threshold=[0.0, 1e-3])
    function = PolicyLoss(is_correction_level="token", **given)
    *_, filtered = function(old, old, torch.ones(shape), torch.ones(shape), rollout)
    assert filtered == 0


def test_levels_of_the_ratio():
    gspo = PolicyLoss(policy_loss_type="gspo", token_level_loss=True).config
    assert gspo == BAPOConfig(ratio_level="sequence", loss_agg_mode="seq-mean-token-mean")


BAD = [
    (dict(policy_loss_type="grpo"), "policy_loss_type must be 'ppo' or 'gspo', got 'grpo'"),
    (dict(is_correction_level="geo"), "level must be one of 'off', 'token', 'seq', got 'geo'"),
    (dict(is_correction_mode="drop"), "mode must be one of 'mask', 'clip', got 'drop'"),
    (dict(is_correction_gating="kl"), "gating must be one of 'ratio', 'binary_kl', 'tv', got 'kl'"),
    (dict(is_correction_level="seq", is_correction_mode="clip"), "mode must be 'mask' unless"),
    (dict(is_correction_mode="clip", is_correction_gating="tv"), "mode must be 'mask' unless"),
    (
        dict(is_correction_level="seq", is_correction_gating="tv"),
        "threshold must have a lower bound <= 0 with is_correction_gating='tv'",
    ),
    (
        dict(is_correction_level="token", is_correction_threshold=[2.0, 0.5]),
        r"is_correction_threshold must be two numbers, low <= high, got \[2.0, 0.5\]",
    ),
    (
        dict(enable_vllm_is_correction=True),
        "vllm_is_truncated_threshold must be two numbers, low <= high, got None",
    ),
    (
        dict(enable_vllm_is_correction=True, vllm_is_correction_type="token"),
        "vllm_is_correction_type must be one of 'tis', 'icepop', 'seq-mask-tis', got 'token'",
    ),
    (
        dict(enable_vllm_is_correction=False, is_correction_level="token"),
        "is_correction_level must be 'off' with enable_vllm_is_correction, got 'token'",
    ),
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
