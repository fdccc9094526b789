"""Losses that mask tokens equal those of prime-rl and SkyRL, as recorded, and those of verl 0.9.1.

The recipes are those of docs/policies.md. The reference runs in float64, the kernels in float32.
"""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import EPS, fixed_bounds, needs_native
from parity import Found, assert_gradient, assert_parity, found, in_both
from parity import recorded as numbers

from bapo_kernels import BAPOConfig, bapo_loss_from_log_probs, reference
from bapo_kernels.tools.budget import largest

pytestmark = needs_native

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/data/trust_regions.json").read_text())
CASES = RECORDED.pop("cases")
PAGE = (ROOT / "docs/policies.md").read_text()
RECIPES = {}
exec(re.search(r"^import math\n.*?(?=\n\nbatch = )", PAGE, re.MULTILINE | re.DOTALL)[0], RECIPES)
DTYPES = [torch.float64, torch.float32]


def recorded(dtype):
    """Log-probs, old and rollout log-probs, advantages and mask."""
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
    values = [torch.tensor(RECORDED[name], dtype=dtype) for name in names]
    return *values, torch.tensor(RECORDED["mask"])


def tokens(share, mask):
    """How many of the unmasked tokens; shares are float32 in the frameworks."""
    return round(float(share) * mask.sum().item())


def shares(function, others, given, leaf):
    out = function(leaf, *others, **given)
    names = dict(masked="pg_clipfrac", below="pg_clipfrac_lower")
    return out.loss, {key: out.metrics[name] for key, name in names.items()}


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
    given["config"] = BAPOConfig(**config)
    functions = bapo_loss_from_log_probs, reference.bapo_loss_from_log_probs
    ours, same = (partial(shares, function, (old, A, mask), given) for function in functions)
    got, (same, _) = found(ours, logp), in_both(same, logp)
    truth = Found(numbers(case["loss"]), {}, numbers(case["gradient"]))
    rounding = EPS[torch.float32] if "SkyRL" in case["origin"] else 0.0  # which are float32
    assert_parity(got, same, truth, largest(logp), rounding)
    for key in {"masked", "below"} & case.keys():
        assert tokens(got.log[key], mask) == tokens(case[key], mask)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("mode", "low", "high"), [("dppo_tv", 0.05, 0.1), ("dppo_kl", 0.01, 0.02)])
def test_verl(mode, low, high, dtype):
    """The gradient of tokens up to ``clip_ratio_c``."""
    pytest.importorskip("verl")
    from test_verl import actor
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.workers.config import PolicyLossConfig

    logp, old, _, A, mask = (x.reshape(6, 8) for x in recorded(dtype))
    assert float((logp - old).exp().max()) < 20
    clip = dict(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=20.0)
    config = actor(PolicyLossConfig(loss_mode=mode), **clip)

    def verls(leaf):
        batch = old.to(leaf), leaf, A.to(leaf), mask
        loss, metrics = POLICY_LOSS_REGISTRY[mode](*batch, "token-mean", config)
        assert metrics["actor/pg_clipfrac"] > 0.1
        return loss, {"masked": metrics["actor/pg_clipfrac"]}

    recipe = RECIPES["total_variation" if mode == "dppo_tv" else "binary_kl"]
    bounds = RECIPES["one_sided"](recipe(old.double(), low, high), A)
    given = dict(config=BAPOConfig(surrogate="mask"), bounds=bounds)
    got = found(partial(shares, bapo_loss_from_log_probs, (old, A, mask), given), logp)
    same, truth = in_both(verls, logp)
    gradients = got.gradient, [x.gradient for x in same], truth.gradient
    assert_gradient("gradient", *gradients, largest(logp))
    assert tokens(got.log["masked"], mask) == tokens(truth.log["masked"], mask)
