"""Losses that mask tokens equal those of prime-rl and SkyRL, as recorded, and those of verl 0.9.1.

The recipes are those of docs/policies.md. The reference runs in float64, the kernels in float32.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import fixed_bounds, needs_native

from bapo_kernels import BAPOConfig, bapo_loss_from_log_probs

pytestmark = needs_native

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/data/trust_regions.json").read_text())
CASES = RECORDED.pop("cases")
PAGE = (ROOT / "docs/policies.md").read_text()
RECIPES = {}
exec(re.search(r"^import math\n.*?(?=\n\nbatch = )", PAGE, re.MULTILINE | re.DOTALL)[0], RECIPES)
DTYPES = [torch.float64, torch.float32]


def recorded(dtype):
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
    return *(torch.tensor(RECORDED[name], dtype=dtype) for name in names), torch.tensor(
        RECORDED["mask"]
    )


def assert_same(got, expected, dtype):
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_recorded(name, dtype):
    logp, old, rollout, A, mask = recorded(dtype)
    case, given = CASES[name], {}
    options = case["options"]
    config = dict(surrogate="mask", loss_agg_mode="token-sum")
    if "token mask" in name:  # tokens whose old policy is far from the rollout's are masked
        weights, clip = (old - rollout).exp(), options["eps_clip"]
        mask = mask & (weights >= options["low"]) & (weights <= options["high"])
        config |= fixed_bounds(1 - clip, 1 + clip) | dict(surrogate="clip")
        if options["cap"] is not None:
            given["rollout_is_weights"] = weights.clamp(max=options["cap"])
    elif "IcePop" in name:
        config |= fixed_bounds(*options.values())
    else:  # bounds of p, on both sides or on that of the advantage
        recipe = RECIPES["binary_kl" if "binary_kl" in name else "total_variation"]
        bounds = recipe(old.double(), options["low"], options["high"])
        given["bounds"] = bounds if "IPO" in name else RECIPES["one_sided"](bounds, A)
    if "kl_tau" in options:
        config |= dict(kl_loss_coef=2 * options["kl_tau"], kl_loss_type="k2")
        given["ref_log_probs"] = old
    leaf = logp.requires_grad_()
    out = bapo_loss_from_log_probs(leaf, old, A, mask, config=BAPOConfig(**config), **given)
    out.loss.backward()
    if "SkyRL" in case["origin"]:  # whose ratios are float32
        dtype = torch.float32
    assert_same(out.loss.detach(), torch.tensor(case["loss"], dtype=torch.float64), dtype)
    assert_same(leaf.grad, torch.tensor(case["gradient"], dtype=torch.float64), dtype)
    # "masked" is the share of the unmasked tokens
    for metric, key in (("pg_clipfrac", "masked"), ("pg_clipfrac_lower", "below")):
        assert key not in case or out.metrics[metric].item() == pytest.approx(case[key])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "low", "high"), [("dppo_tv", 0.05, 0.1), ("dppo_kl", 0.01, 0.02)])
@pytest.mark.parametrize("surrogate", ["mask", "clip"])
def test_verl(surrogate, mode, low, high, dtype):
    """The gradient of tokens up to ``clip_ratio_c``, also that of the clip with the same bounds."""
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import ActorConfig

    logp, old, _, A, mask = (
        x.reshape(6, 8) if x.dtype == torch.bool else x.double().reshape(6, 8)
        for x in recorded(dtype)
    )
    assert float((logp - old).exp().max()) < 20
    leaf = logp.clone().requires_grad_()
    given = dict(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config = ActorConfig(**given, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=20.0)
    loss, metrics = POLICY_LOSS_REGISTRY[mode](old, leaf, A, mask, "token-mean", config)
    loss.backward()

    bounds = RECIPES["total_variation" if mode == "dppo_tv" else "binary_kl"](old, low, high)
    if surrogate == "mask":
        bounds = RECIPES["one_sided"](bounds, A)
    got = logp.to(dtype).requires_grad_()
    batch = got, old.to(dtype), A.to(dtype), mask
    out = bapo_loss_from_log_probs(*batch, config=BAPOConfig(surrogate=surrogate), bounds=bounds)
    out.loss.backward()
    assert_same(got.grad, leaf.grad, dtype)
    masked = metrics["actor/pg_clipfrac"]
    assert masked > 0.1
    assert surrogate == "clip" or out.metrics["pg_clipfrac"].item() == pytest.approx(masked)
