"""What adapters share, called as the sources of their frameworks call a loss.

Also SkyRL 0.3.0, ROLL 8eb27cc (0.3.0) and Trinity-RFT 0.6.0, which cannot be installed here: where
SkyRL or Trinity-RFT is installed, its own losses are run too. The authors' function:
tests/data/authors_recipe.json.
"""

import json
import re
import subprocess
import sys
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import test_slime
import torch
from helpers import fixed_bounds, make_case, needs_native, unmasked_tokens
from parity import DIGITS, Found, assert_parity, compare, found, in_both, recorded
from test_slime import stand_in

from bapo_kernels import BAPOConfig, bapo_loss_from_log_probs, integrations, reference
from bapo_kernels.bounds import TABLE_FIELDS
from bapo_kernels.integrations import openrlhf, roll, skyrl, slime, trinity
from bapo_kernels.tools.budget import largest

pytestmark = needs_native
ROOT = Path(__file__).parents[2]
HAS_TRINITY = find_spec("trinity") is not None
AUTHORS = json.loads((ROOT / "tests/data/authors_recipe.json").read_text())["cases"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_recipe_matches_the_authors_function(backend):
    """The expected numbers come from the authors' own function."""
    dtype = torch.float32 if backend == "cpu" else torch.float64
    reached = set()

    def run(function, leaf, **options):
        out = function(leaf, *others, config=config, rollout_is_weights=weights, **options)
        return out.loss, {name.removeprefix("bapo_"): x for name, x in out.metrics.items()}

    for case in AUTHORS:
        options = case["options"] | dict(loss_agg_mode=case["loss_agg_mode"])
        config = BAPOConfig.recipe(target=options.pop("adv_ratio_target"), **options)
        names = ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")
        logp, *others, weights = (
            case[name] and torch.tensor(case[name], dtype=dtype) for name in names
        )
        log = dict(case["expected"])
        truth = Found(recorded(log.pop("loss")), log, recorded(log.pop("dlog_prob")))
        got = found(partial(run, bapo_loss_from_log_probs, backend=backend), logp)
        same, _ = in_both(partial(run, reference.bapo_loss_from_log_probs), logp)
        assert_parity(got, same, truth, largest(logp), DIGITS)
        reached.add((log["clip_low"], log["clip_high"]))
    assert len(reached) >= 6


def tokens_of(seed=0):
    """Log-probs, old log-probs, advantages and mask."""
    case = make_case((4, 9), 33, staleness=0.4, seed=seed, poison=False)
    logp = reference.log_probs(case.logits, case.labels)[0].detach()
    return logp, case.old_log_probs, case.advantages, unmasked_tokens(case).float()


# Adapters by the same arguments: loss and metrics.


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """They replace Trinity, and Megatron for slime."""
    kind = type("PolicyLossFn", (), {"__init__": lambda self, backend: None})
    registry = Namespace(register_module=lambda name: lambda made: {"bapo": made}[name])
    if not HAS_TRINITY:
        name = "trinity.algorithm.policy_loss_fn"
        stand_in(monkeypatch, name, PolicyLossFn=kind, POLICY_LOSS_FN=registry)
    test_slime.megatron(monkeypatch)


def openrlhf_loss(tokens, level="token", **options):
    kind = "ppo" if level == "token" else "gspo"
    function = openrlhf.PolicyLoss(token_level_loss=False, policy_loss_type=kind, options=options)
    return function(*tokens)[0], function.metrics


def roll_loss(tokens, level="token", **options):
    unmasked, options = tokens[-1].sum().clamp(min=1), options | dict(ratio_level=level)
    return roll.bapo_pg_loss(*tokens, "token-mean", unmasked, options=options)


def skyrl_loss(tokens, level="token", **options):
    *others, mask = tokens
    bapo = BAPOConfig(loss_agg_mode="token-sum", ratio_level=level, **options)
    return skyrl.bapo_policy_loss(*others, None, mask, bapo=bapo)


def trinity_loss(tokens, level="token", **options):
    leaf, old, A, mask = tokens
    return trinity.register()(options=options | dict(ratio_level=level))(leaf, old, mask, A)


def verl_loss(tokens, level="token", **options):
    from test_verl import actor

    from bapo_kernels.integrations import verl

    config = actor(verl.BAPOPolicyLossConfig(ratio_level=level, **options))
    leaf, old, A, mask = tokens
    return verl.compute_policy_loss_bapo(old, leaf, A, mask, config=config)


def slime_loss(tokens, **options):
    args = test_slime.arguments(bapo_options=options)
    batch, logits, *_ = test_slime.batch_of(args)
    return slime.bapo_loss_function(args, batch, logits, torch.sum)


LOSSES = dict(
    OpenRLHF=openrlhf_loss, ROLL=roll_loss, SkyRL=skyrl_loss, Trinity=trinity_loss, verl=verl_loss
)
REDUCTIONS = dict(OpenRLHF="seq-mean-token-mean", SkyRL="token-sum")
FRAMEWORKS = pytest.mark.parametrize("framework", LOSSES)


@FRAMEWORKS
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "mask"])
def test_surrogates(framework, level, surrogate):
    logp, *others = tokens_of(5)
    mode = REDUCTIONS.get(framework, "token-mean")
    config = BAPOConfig(loss_agg_mode=mode, surrogate=surrogate, ratio_level=level)

    def ours(leaf):
        loss, log = LOSSES[framework]((leaf, *others), level, surrogate=surrogate)
        return loss, {name.rpartition("/")[2]: value for name, value in log.items()}

    def theirs(leaf):
        out = reference.bapo_loss_from_log_probs(leaf, *others, config=config)
        names = ("bapo_clip_high", "bapo_pos_share") if config.has_bounds else ()
        return out.loss, {name: out.metrics[name] for name in names}

    got, truth = compare(ours, theirs, logp)
    assert any("bapo" in name for name in got.log) == config.has_bounds
    if config.has_bounds:
        assert got.log["bapo_clip_high"] == truth.log["bapo_clip_high"] > 1.2, "it must search"


@FRAMEWORKS
@pytest.mark.parametrize("A", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "mask"])
def test_metrics_can_be_averaged(framework, surrogate, A):
    """Also those of tokens without negative or positive mass: infinity would be the mean."""
    logp, old, _, mask = tokens_of(5)
    for counted in (mask, torch.zeros_like(mask)):
        tokens = logp, old, torch.full_like(logp, A), counted
        log = LOSSES[framework](tokens, surrogate=surrogate)[1]
        assert log
        assert all(torch.as_tensor(value).isfinite() for value in log.values())


@FRAMEWORKS
def test_masked_tokens_may_hold_anything(framework):
    *tokens, mask = tokens_of()
    logp, *others = (x.masked_fill(mask == 0, torch.nan) for x in tokens)
    got = found(lambda leaf: LOSSES[framework]((leaf, *others, mask)), logp)
    expected = found(lambda leaf: LOSSES[framework]((leaf, *tokens[1:], mask)), tokens[0])
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Options that a framework decides, and by which of its own.
OWNERS = dict(
    OpenRLHF=openrlhf._OWNERS, ROLL=roll._OWNERS, slime=slime._OWNERS, Trinity=trinity._OWNERS
)
REFUSED = [(framework, name) for framework in OWNERS for name in (*OWNERS[framework], "targte")]


@pytest.mark.parametrize(("framework", "name"), [*REFUSED, ("SkyRL", "temperature")])
def test_options_are_refused(framework, name):
    owners = OWNERS.get(framework, {"temperature": "SkyRL"})
    rule = rf"{name}\b.* must be left to {owners.get(name)}, got 0.5"
    if name == "targte":
        rule = "options must name options of BAPOConfig, got 'targte'"
    with pytest.raises(ValueError, match=rule):
        (LOSSES | {"slime": slime_loss})[framework](tokens_of(), **{name: 0.5})


def test_every_option_is_the_users_or_has_an_owner():
    """A new field of ``BAPOConfig`` fails until somebody decides."""
    policy = {"surrogate", "sapo_tau_pos", "sapo_tau_neg"}
    users = {*TABLE_FIELDS, "target", "target_kind", "raise_first", *policy}
    others = dict(OpenRLHF={"ratio_level"}, ROLL={"clip_ratio_c"})  # what differs from these
    others["slime"] = {"logit_scale", "final_logit_softcapping"}
    others["Trinity"] = {"clip_ratio_c", "loss_scale_factor"}
    owners_of = dict(OWNERS)
    if find_spec("trl"):
        from bapo_kernels.integrations import trl_config

        others["TRL"], owners_of["TRL"] = {"ratio_level", *policy}, trl_config._OWNERS
    for name, owners in owners_of.items():
        assert integrations.OPTIONS - owners.keys() == users ^ others[name], name


def test_options_of_a_preset():
    """``None`` turns the recipe's dual clip off; from a framework it means the preset's."""
    config_of = integrations.config_of
    assert config_of("recipe", {"clip_ratio_c": None}).clip_ratio_c is None
    assert config_of("recipe", clip_ratio_c=None).clip_ratio_c == 3.0
    for arguments, rule in (
        (("authors",), "preset must be 'paper' or 'recipe', got 'authors'"),
        (("paper", "target"), "options must be a dict or None, got 'target'"),
    ):
        with pytest.raises(ValueError, match=rule):
            config_of(*arguments)


# SkyRL, ROLL and Trinity.


@pytest.mark.parametrize("dual_clip", [False, True])
def test_skyrl(dual_clip, monkeypatch):
    """SkyRL's factors (one per sequence, or per token), and the tokens that it masks."""
    logp, old, A, mask = tokens_of(1)
    A = A / mask.sum()  # SkyRL scales advantages so that the loss is a sum
    rollout, kept, registry = old - 0.05, mask.clone(), {}
    kept[:, 1] = 0
    factors = torch.tensor([[0.5], [1.0], [2.0], [0.3]])

    def correction(old_log_probs, rollout_logprobs, loss_mask, config):
        assert (old_log_probs, rollout_logprobs, config) == (old, rollout, "correction")
        return factors, {"is_ratio_mean": 1.5}, kept

    utils, register = "skyrl.backends.skyrl_train.utils", partial(partial, registry.setdefault)
    stand_in(monkeypatch, f"{utils}.ppo_utils", register_policy_loss=register)
    name = f"{utils}.off_policy_correction_utils"
    stand_in(monkeypatch, name, compute_off_policy_correction=correction)
    skyrl.register()
    config = Namespace(policy_loss_type="dual_clip" if dual_clip else "bapo", clip_ratio_c=1.1)
    config.off_policy_correction = "correction"
    paper = BAPOConfig.paper(loss_agg_mode="token-sum", clip_ratio_c=1.1 if dual_clip else None)
    corrected = dict(rollout_log_probs=rollout, rollout_is_weights=factors.expand_as(A))

    def theirs(leaf):
        given = dict(config=paper, **corrected)
        out = reference.bapo_loss_from_log_probs(leaf, old, A * kept, mask, **given)
        clip_high, clip_ratio = out.bounds.upper, out.metrics["pg_clipfrac"]
        return out.loss, dict(bapo_clip_high=clip_high, clip_ratio=clip_ratio, is_ratio_mean=1.5)

    ours = lambda leaf: registry["bapo"](leaf, old, A, config, mask, rollout)  # noqa: E731
    got, truth = compare(ours, theirs, logp)
    assert got.log["bapo_clip_high"] == truth.log["bapo_clip_high"]
    assert not got.gradient[:, 1].any()


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def roll_agg_loss(loss_mat, mask, mode, tokens, samples, weights):
    """ROLL's masked reduction, in its own terms."""
    loss_mat, counts = loss_mat * mask * weights[:, None], mask.sum(1).clamp(min=1)
    return {
        "token-mean": loss_mat.sum() / tokens,
        "seq-mean-token-sum": loss_mat.sum() / samples,
        "seq-mean-token-mean": (loss_mat.sum(1) / counts).sum() / samples,
        "seq-mean-token-sum-norm": loss_mat.sum() / mask.shape[1],
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("framework", ["ROLL", "Trinity"])
def test_reductions(framework, mode):
    """Trinity's means over sequences count one that is masked."""
    logp, old, A, mask = tokens_of(2)
    options = {"target": 0.6}
    if framework == "ROLL":
        weights, correction = torch.tensor([0.5, 1.0, 2.0, 0.0]), torch.rand_like(logp) + 0.5
        tokens = dict(old_log_probs=old, advantages=A, response_mask=mask.long(), options=options)
        counts = dict(loss_agg_mode=mode, batch_num_tokens=60, global_valid_samples=9)
        factors = dict(weights=weights, train_infer_is_weight=correction)
        ours = partial(roll.bapo_pg_loss, **tokens, **counts, **factors)
        divisors, prefix = (60, 9), "actor/"
    else:
        mask[3] = 0
        weights, correction, kind = torch.ones(4), torch.ones_like(logp), trinity.register()
        assert kind.default_args() == {"preset": "paper", "loss_agg_mode": "token-mean"}
        assert kind(backend="verl", preset="recipe").config == BAPOConfig.recipe()
        function = kind(options=options, loss_agg_mode=mode)
        tokens = dict(old_logprob=old, action_mask=mask.bool(), advantages=A)
        ours, divisors, prefix = partial(function, **tokens, step=1), (mask.sum(), 4), ""

    def theirs(leaf):
        low, high = reference.find_clip_bounds(leaf, old, A, mask, config=BAPOConfig(**options))
        r = (leaf - old).exp()
        policy = -torch.min(r * A, r.clamp(low.to(r), high.to(r)) * A) * correction
        loss = roll_agg_loss(policy, mask, mode, *divisors, weights)
        return loss, {f"{prefix}bapo_clip_high": high, f"{prefix}pg_loss": loss}

    got, truth = compare(ours, theirs, logp)
    upper = got.log[f"{prefix}bapo_clip_high"]
    assert upper == truth.log[f"{prefix}bapo_clip_high"] > 1.2, "the case must need a search"


# With fixed bounds an adapter must give the loss and the gradient of the framework's own function,
# which is fetched from the framework's registry, as is the adapter's.
LOW, HIGH = 0.2, 0.28
FIXED = fixed_bounds(1 - LOW, 1 + HIGH)


def tokens_with_rollout():
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
def test_skyrls_own_losses(correction, kind):
    if kind == "gspo" and correction in ("token TIS", "tokens"):
        pytest.skip("SkyRL's GSPO differentiates every token's ratio by its own log-prob alone")
    utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    from skyrl.train.config import AlgorithmConfig
    from skyrl.train.config.config import CISPOConfig, OffPolicyCorrectionConfig

    registry = utils.PolicyLossRegistry
    if "bapo" not in registry.list_available():
        skyrl.register()
    logp, old, rollout, A, mask = tokens_with_rollout()
    A = utils.apply_loss_reduction_to_advantages_minibatch(A, mask, "sequence_mean", 5, 8)
    clip = dict(eps_clip_low=LOW, eps_clip_high=HIGH, clip_ratio_c=1.5)
    parts = dict(
        cispo=CISPOConfig(cispo_eps_clip_low=LOW, cispo_eps_clip_high=HIGH),
        off_policy_correction=OffPolicyCorrectionConfig(**CORRECTIONS[correction]),
    )
    config = AlgorithmConfig(policy_loss_type=kind, loss_reduction="sequence_mean", **clip, **parts)
    bapo = BAPOConfig(loss_agg_mode="token-sum", **(FIXED | SKYRL[kind]))

    def theirs(leaf):
        old_, A_, mask_, rollout_ = (x.to(leaf) for x in (old, A, mask, rollout))
        named = dict(config=config, loss_mask=mask_, rollout_logprobs=rollout_)
        loss, metrics = registry.get(kind)(leaf, old_, A_, **named)
        if correction != "none" or kind not in ("regular", "gspo"):
            del metrics["clip_ratio"]
        return loss, metrics

    options = dict(config=config, loss_mask=mask, rollout_logprobs=rollout, bapo=bapo)
    compare(lambda leaf: registry.get("bapo")(leaf, old, A, **options), theirs, logp)


# Trinity's own SAPO is another loss: its gate is a weight without gradient.
TRINITY = {
    "ppo": dict(clip_ratio_c=1.5),
    "gspo": dict(ratio_level="sequence"),
    "cispo": dict(surrogate="cispo"),
}


@pytest.mark.skipif(not HAS_TRINITY, reason="needs Trinity-RFT")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TRINITY)
def test_trinitys_own_losses(kind, mode):
    """Through the names of the trainer, with which Trinity calls a loss."""
    from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN as registry  # noqa: N811

    if "bapo" not in registry.modules:
        trinity.register()
    arguments = dict(loss_agg_mode=mode, clip_range_low=LOW, clip_range_high=HIGH)
    if kind == "ppo":
        arguments["clip_ratio_c"] = 1.5
    logp, old, _, A, mask = tokens_with_rollout()
    batch = dict(old_log_probs=old, response_mask=mask.bool(), advantages=A, unused=None)
    function = registry.get("bapo")(loss_agg_mode=mode, options=FIXED | TRINITY[kind])
    assert function.select_keys == ["old_log_probs", "response_mask", "advantages"]

    def theirs(leaf):
        named = batch | dict(old_log_probs=old.to(leaf), advantages=A.to(leaf))
        loss, metrics = registry.get(kind)(**arguments)(logprob=leaf, **named)
        return loss, metrics if kind == "ppo" else {}

    compare(lambda leaf: function(logprob=leaf, **batch), theirs, logp)


def test_versions_are_checked(monkeypatch):
    require_version = integrations.require_version
    with pytest.raises(ImportError, match="nothing_like_it must be installed"):
        require_version("nothing_like_it", "1.0")
    old = ModuleType("some_framework")
    old.__version__ = "0.5.1"
    monkeypatch.setitem(sys.modules, "some_framework", old)
    with pytest.raises(ImportError, match=r"some_framework must be 0.6.1 or later, got 0.5.1"):
        require_version("some_framework", "0.6.1")
    assert require_version("some_framework", "0.5") is old


def test_package_imports_no_framework_and_no_compiler():
    code = "import sys, bapo_kernels; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    top = {name.split(".")[0] for name in run.stdout.split()}
    assert not top & {"trl", "verl", "transformers", "openrlhf", "slime", "skyrl", "roll", "ray"}
    # Importing the compiler would add 1.5 s to every start.
    assert not {"bapo_kernels.integrations", "torch._dynamo"} & set(run.stdout.split())


def test_modules_that_the_pages_name_exist():
    """Also those in commands; test_doctests.py resolves the imports of the blocks of Python."""
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    names = set(re.findall(r"bapo_kernels\.integrations\.\w+", pages))
    assert len(names) >= 8
    assert all(find_spec(name) for name in names)
