"""Adapters for frameworks that cannot be installed here, called as their sources call a loss.

The sources: slime 624b824 (0.3.1), SkyRL 0.3.0, ROLL 8eb27cc (0.3.0), Trinity-RFT 0.6.0. Where
SkyRL or Trinity-RFT is installed, its own losses are run too (slime's: test_slime.py). The authors'
function: tests/data/authors_recipe.json. OpenRLHF: test_openrlhf.py.
"""

import json
import math
import re
import runpy
import subprocess
import sys
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import recipes
import slime_case
import torch
from helpers import fixed_bounds, make_case, needs_native, unmasked_tokens
from parity import (
    OF_DIGITS,
    Found,
    assert_gradient,
    assert_parity,
    compare,
    found,
    in_both,
    recorded,
)
from slime_case import stand_in

from bapo_kernels import (
    BAPOConfig,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss_from_log_probs,
    reference,
)
from bapo_kernels.integrations import (
    DECISION_METRICS,
    config_of,
    names_of_metrics,
    require_version,
    skyrl,
    trinity,
)
from bapo_kernels.integrations.openrlhf import PolicyLoss
from bapo_kernels.integrations.roll import bapo_pg_loss
from bapo_kernels.integrations.slime import bapo_loss_function
from bapo_kernels.tools.budget import error_and_budget, in_some_orders, largest

pytestmark = needs_native
AUTHORS = json.loads((Path(__file__).parents[1] / "data/authors_recipe.json").read_text())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_recipe_matches_the_authors_function(backend):
    """The expected numbers come from the authors' own function."""
    dtype = torch.float32 if backend == "cpu" else torch.float64
    reached = set()
    for case in AUTHORS["cases"]:
        options = case["options"] | dict(loss_agg_mode=case["loss_agg_mode"])
        config = BAPOConfig.recipe(target=options.pop("adv_ratio_target"), **options)
        names = ("log_prob", "old_log_prob", "advantages", "response_mask", "rollout_is_weights")
        logp, *others, weights = (
            case[name] and torch.tensor(case[name], dtype=dtype) for name in names
        )
        given = dict(config=config, rollout_is_weights=weights)
        ours = partial(loss_and_metrics, bapo_loss_from_log_probs, others, given, backend=backend)
        theirs = partial(loss_and_metrics, reference.bapo_loss_from_log_probs, others, given)
        log = dict(case["expected"])
        loss, gradient = recorded(log.pop("loss")), recorded(log.pop("dlog_prob"))
        got, (same, _) = found(ours, logp), in_both(theirs, logp)
        assert_parity(got, same, Found(loss, log, gradient), largest(logp), OF_DIGITS)
        reached.add((log["clip_low"], log["clip_high"]))
    assert len(reached) >= 6


def loss_and_metrics(function, others, given, leaf, **options):
    out = function(leaf, *others, **given, **options)
    return out.loss, {name.removeprefix("bapo_"): value for name, value in out.metrics.items()}


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def tokens_of(seed=0, shape=(4, 9)):
    """Log-probs, old log-probs, advantages and mask."""
    case = make_case(shape, 33, staleness=0.4, seed=seed, poison=False)
    logp = reference.log_probs(case.logits, case.labels)[0].detach()
    return logp, case.old_log_probs, case.advantages, unmasked_tokens(case).float()


@pytest.mark.parametrize("dual_clip", [False, True])
def test_skyrl(dual_clip, monkeypatch):
    """SkyRL's factors (one per sequence, or per token), and the tokens that it masks."""
    logp, old, A, mask = tokens_of(1)
    A = A / mask.sum()  # SkyRL scales advantages so that the loss is a sum
    rollout, kept, registry = old - 0.05, mask.clone(), {}
    kept[:, 1] = 0
    factors = torch.tensor([[0.5], [1.0], [2.0], [0.3]])

    def correction(old_log_probs, rollout_logprobs, loss_mask, config):
        assert old_log_probs is old
        assert rollout_logprobs is rollout
        assert config == "correction"
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


def roll_agg_loss(loss_mat, mask, mode, tokens, samples, weights):
    """ROLL's masked reduction, in its own terms."""
    loss_mat, of_sample = loss_mat * mask * weights[:, None], mask.sum(1).clamp(min=1)
    return {
        "token-mean": loss_mat.sum() / tokens,
        "seq-mean-token-sum": loss_mat.sum() / samples,
        "seq-mean-token-mean": (loss_mat.sum(1) / of_sample).sum() / samples,
        "seq-mean-token-sum-norm": loss_mat.sum() / mask.shape[1],
    }[mode]


def trinitys_kind(monkeypatch):
    """What the adapter registers with Trinity."""
    kind = type("PolicyLossFn", (), {"__init__": lambda self, backend: None})
    registry = Namespace(register_module=lambda name: lambda made: {"bapo": made}[name])
    name = "trinity.algorithm.policy_loss_fn"
    stand_in(monkeypatch, name, PolicyLossFn=kind, POLICY_LOSS_FN=registry)
    return trinity.register()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("framework", ["ROLL", "Trinity"])
def test_reductions(framework, mode, monkeypatch):
    """Trinity's means over sequences count one that is masked."""
    logp, old, A, mask = tokens_of(2)
    options = {"target": 0.6}
    if framework == "ROLL":
        weights, correction = torch.tensor([0.5, 1.0, 2.0, 0.0]), torch.rand_like(logp) + 0.5
        tokens = dict(old_log_probs=old, advantages=A, response_mask=mask.long(), options=options)
        counts = dict(loss_agg_mode=mode, batch_num_tokens=60, global_valid_samples=9)
        factors = dict(weights=weights, train_infer_is_weight=correction)
        ours = partial(bapo_pg_loss, **tokens, **counts, **factors)
        divisors, prefix = (60, 9), "actor/"
    else:
        mask[3] = 0
        weights, correction = torch.ones(4), torch.ones_like(logp)
        kind = trinitys_kind(monkeypatch)
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
        of_tokens = dict(config=config, loss_mask=mask_, rollout_logprobs=rollout_)
        loss, metrics = registry.get(kind)(leaf, old_, A_, **of_tokens)
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", TRINITY)
def test_trinitys_own_losses(kind, mode):
    """Through the names of the trainer, with which Trinity calls a loss."""
    module = pytest.importorskip("trinity.algorithm.policy_loss_fn")
    registry = module.POLICY_LOSS_FN
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
        of_tokens = batch | dict(old_log_probs=old.to(leaf), advantages=A.to(leaf))
        loss, metrics = registry.get(kind)(**arguments)(logprob=leaf, **of_tokens)
        return loss, metrics if kind == "ppo" else {}

    compare(lambda leaf: function(logprob=leaf, **batch), theirs, logp)


# Adapters by the same arguments: loss and metrics.


def openrlhf_loss(tokens, options, monkeypatch, kind="ppo"):
    function = PolicyLoss(token_level_loss=False, policy_loss_type=kind, options=options)
    return function(*tokens)[0], function.metrics


def roll_loss(tokens, options, monkeypatch):
    unmasked = float((tokens[-1] != 0).sum())
    return bapo_pg_loss(*tokens, "token-mean", unmasked, options=options)


def skyrl_loss(tokens, options, monkeypatch):
    *others, mask = tokens
    bapo = BAPOConfig(loss_agg_mode="token-sum", **options)
    return skyrl.bapo_policy_loss(*others, None, mask, bapo=bapo)


def trinity_loss(tokens, options, monkeypatch):
    leaf, old, A, mask = tokens
    return trinitys_kind(monkeypatch)(options=options)(leaf, old, mask, A)


def slime_loss(tokens, options, monkeypatch):
    slime_case.megatron(monkeypatch)
    batch, _, logits, *_ = slime_case.case()
    args = slime_case.arguments(bapo_options=options)
    bapo_loss_function(args, batch, logits, torch.sum)


LOSSES = dict(OpenRLHF=openrlhf_loss, ROLL=roll_loss, SkyRL=skyrl_loss, Trinity=trinity_loss)
REDUCTIONS = dict(OpenRLHF="seq-mean-token-mean", SkyRL="token-sum")


@pytest.mark.parametrize("framework", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo"])
def test_surrogates(framework, level, surrogate, monkeypatch):
    logp, *others = tokens_of(5)
    options, function = dict(surrogate=surrogate, ratio_level=level), LOSSES[framework]
    config = BAPOConfig(loss_agg_mode=REDUCTIONS.get(framework, "token-mean"), **options)
    if framework == "OpenRLHF":  # which has a name for the level
        del options["ratio_level"]
        function = partial(function, kind="ppo" if level == "token" else "gspo")

    def theirs(leaf):
        return reference.bapo_loss_from_log_probs(leaf, *others, config=config).loss, {}

    got, _ = compare(lambda leaf: function((leaf, *others), options, monkeypatch), theirs, logp)
    assert any("bapo" in name for name in got.log) == (surrogate != "sapo")


@pytest.mark.parametrize("A", [1.0, 0.0, -1.0])
def test_metrics_can_be_averaged(A, monkeypatch):
    """Also those of tokens without negative or positive mass: infinity would be the mean."""
    logp, old, _, mask = tokens_of(5)
    tokens = logp, old, torch.full_like(logp, A), mask
    for function in LOSSES.values():
        log = function(tokens, {}, monkeypatch)[1]
        assert log
        assert all(torch.as_tensor(value).isfinite() for value in log.values())
    for surrogate in ("clip", "cispo", "sapo", "mask"):
        config = BAPOConfig(surrogate=surrogate)
        for of_mask in (mask, torch.zeros_like(mask)):
            metrics = bapo_loss_from_log_probs(*tokens[:3], of_mask, config=config).metrics
            names = names_of_metrics(config, metrics)
            assert surrogate == "sapo" or set(names) >= set(DECISION_METRICS)
            assert all(metrics[name].isfinite() for name in names)


OWNED = {  # options that a framework decides, and by which of its own
    "OpenRLHF": dict(
        loss_agg_mode="token_level_loss", clip_ratio_c="dual_clip", temperature="OpenRLHF",
        ratio_level="policy_loss_type",
    ),
    "ROLL": dict(loss_agg_mode="loss_agg_mode", kl_loss_coef="ROLL"),
    "slime": dict(
        loss_agg_mode="slime's reduction", clip_ratio_c="eps_clip_c",
        temperature="rollout_temperature", entropy_coef="slime's entropy_coef",
    ),
    "Trinity": dict(loss_agg_mode="loss_agg_mode", final_logit_softcapping="Trinity"),
}  # fmt: skip


@pytest.mark.parametrize("framework", OWNED)
def test_options_are_refused(framework, monkeypatch):
    tokens = tokens_of()
    refused = [
        ({name: 0.5}, rf"\['{name}'\] must be left to {owner}\b.*, got 0.5")
        for name, owner in OWNED[framework].items()
    ]
    refused += [({"targte": 0.5}, " must name options of BAPOConfig, got 'targte'")]
    for options, rule in [*refused, ("target", " must be a dict or None, got 'target'")]:
        with pytest.raises(ValueError, match=f"options{rule}"):
            (LOSSES | {"slime": slime_loss})[framework](tokens, options, monkeypatch)


def test_options_that_skyrl_owns_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="bapo.temperature must be left to SkyRL, got 0.7"):
        skyrl_loss(tokens_of(), {"temperature": 0.7}, monkeypatch)


def test_none_is_a_value_of_an_option():
    """It turns the recipe's dual clip off; where a framework has no value, the preset's is used."""
    assert config_of("recipe", {"clip_ratio_c": None}).clip_ratio_c is None
    assert config_of("recipe", clip_ratio_c=None).clip_ratio_c == 3.0


def test_versions_are_checked(monkeypatch):
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


DOCS = Path(__file__).parents[2] / "docs"


def test_modules_that_the_pages_name_exist():
    """Also those in commands; test_doctests.py resolves the imports of the blocks of Python."""
    pages = "".join(page.read_text() for page in DOCS.glob("*.md"))
    names = set(re.findall(r"bapo_kernels\.integrations\.\w+", pages))
    assert len(names) >= 8
    assert all(find_spec(name) for name in names)


MASKS = (DOCS / "sampling_masks.md").read_text()


def vllm(model, return_sampling_mask, logprobs_mode):
    """``LLM`` of vLLM 0.28 and later, as its documentation of ``return_sampling_mask`` shows it."""
    assert return_sampling_mask
    assert logprobs_mode == "processed_logprobs"

    def completion(prompt):
        ids, mask = GENERATED[prompt], Namespace(token_ids=SETS[prompt])
        logprobs = [{i: Namespace(logprob=-float(t)), 99: None} for t, i in enumerate(ids)]
        return Namespace(token_ids=ids, logprobs=logprobs, sampling_mask=mask)

    def generate(prompts, params):
        assert params.top_k > 0, "vLLM returns no mask without"
        return [Namespace(outputs=[completion(prompt)]) for prompt in prompts]

    return Namespace(generate=generate)


def sglang(prompt, return_sampling_mask):
    assert return_sampling_mask
    logprobs = [-float(t) for t in range(len(GENERATED[prompt]))]
    names = ("output_token_sampling_mask", "output_token_sampling_logprobs")
    return {"meta_info": dict(zip(names, (SETS[prompt], logprobs), strict=True))}


GENERATED = {"a": [4, 5, 6], "b c": [7]}
SETS = {"a": [[4], [9, 5], [6, 1, 2]], "b c": [[7, 8]]}


def test_recipes_of_sampling_masks():
    """The blocks of docs/sampling_masks.md, with stand-ins for the engines."""
    B, S, V, H = 4, 5, 20, 8
    hidden, weight = torch.randn(B, S, H, requires_grad=True), torch.randn(V, H)
    labels, old, A = torch.randint(V, (B, S)), torch.full((B, S), -2.0), torch.rand(B, S)
    blocks = re.findall(r"```python\n(.*?)```", MASKS, re.DOTALL)
    first, of_vllm, of_sglang, function, slices = blocks
    names = dict(LLM=vllm, SamplingParams=Namespace, model="m", generate=sglang)
    names |= dict(SamplingMask=SamplingMask, bapo_linear_loss=bapo_linear_loss)
    names |= dict(prompts=list(GENERATED), B=B, S=S, weight=weight)
    tokens = dict(hidden=hidden[0, :4], labels=torch.tensor([3, 0, 5, 9]), old=old[0, :4])
    exec(first, made := names | tokens | dict(advantages=A[0, :4]))
    assert made["out"].metrics["label_outside_mask"] == 0
    assert made["out"].loss.isfinite()
    for source in (of_vllm, of_sglang):
        exec(source, names)
        assert names["sets"] == list(SETS.values())
        assert names["old_log_probs"] == [[0.0, -1.0, -2.0], [0.0]]

    # prompts of 2 and 3 tokens, padded by 1 and 0 on the left, and the labels shifted
    exec(function, names)
    mask = names["mask_of_batch"](names["sets"], [2, 2], S)
    expected = SamplingMask.from_lists([[], [], *SETS["a"], [], [], *SETS["b c"], [], []])
    assert torch.equal(mask.offsets, expected.offsets)
    assert torch.equal(mask.token_ids, expected.token_ids)

    sets = [[*{j, (j + 3) % V, *range(j % 3)}] for j in labels.flatten().tolist()]
    mask = SamplingMask.from_lists(sets)
    exec(slices, names | dict(hidden=hidden, labels=labels, old=old, advantages=A, mask=mask))
    assert hidden.grad.isfinite().all()

    def whole(leaf):
        out = reference.bapo_linear_loss(leaf, weight.to(leaf), labels, old, A, sampling_mask=mask)
        return out.loss, {"size": largest(out.log_probs)}

    same, truth = in_both(whole, hidden)
    gradients = hidden.grad, [x.gradient for x in same], truth.gradient
    assert_gradient("gradient", *gradients, truth.log["size"])


def test_formats_of_teachers():
    """vLLM's entries with a further token and a NaN, and SGLang's, become ``[..., K]``."""
    tops = [None, {4: -3.0, 9: -0.5, 2: -1.0}, {1: -0.25, 8: math.nan}, None]
    vllm = [t and {id: Namespace(logprob=x) for id, x in t.items()} for t in tops]
    sglang = [None, [(-0.5, 9, None), (-1.0, 2, None)], [(-0.25, 1, None)], None]
    made = dict(request=Namespace(prompt_logprobs=vllm), k=2, torch=torch)
    exec(recipes.TEACHERS, made := made | dict(meta_info=dict(input_top_logprobs=sglang)))
    for ids, teacher in ((made["ids"], made["teacher"]), made["padded"](made["sglang"][1:], 2)):
        assert ids.tolist() == [[9, 2], [1, -100], [-100, -100]]
        assert teacher.tolist() == [[-0.5, -1.0], [-0.25, -math.inf], [-math.inf] * 2]


def test_example_of_sampling_masks(capsys):
    """Before the first update every ratio is 1 with the sets; without, it is the mass kept."""
    for package in ("transformers", "typer", "rich"):
        pytest.importorskip(package)
    path = Path(__file__).parents[2] / "examples/sampling_mask.py"
    example = runpy.run_path(str(path), run_name="example")
    example["main"](seeds=1, rollouts=2)
    lines = capsys.readouterr().out.splitlines()
    model, tokens = example["build_model"](0), torch.arange(16).expand(8, 16) * 50
    logits = in_some_orders(lambda: model(tokens).logits)
    same, truth = [x.log_softmax(-1) for x in logits], model.double()(tokens).logits.log_softmax(-1)
    # A ratio is that of two log-probs, and is printed with six decimals.
    of_ratio = 2 * error_and_budget(same[0], same, truth)[1] + 5e-7
    for name, low, high in (("mean ratio", 0.8, 0.95), ("smallest", 0.7999, 0.801)):
        (line,) = (line for line in lines if name in line)
        with_sets, without = (float(x) for x in re.findall(r"\d\.\d+", line))
        assert abs(with_sets - 1) <= of_ratio
        assert low < without < high


def test_example_of_distillation(capsys):
    """Gradients of one pass and of two agree, and what disagrees is not timed."""
    pytest.importorskip("typer")
    path = Path(__file__).parents[2] / "examples/distillation.py"
    example = runpy.run_path(str(path), run_name="example")
    sizes = dict(tokens=12, vocabulary=60, hidden=16, k=4)
    example["main"](**sizes)
    assert re.search(r"one pass: \d.* s, two passes: \d.* s", capsys.readouterr().out)
    one_pass = example["WAYS"]["one pass"]
    example["WAYS"]["one pass"] = lambda b: 1.0001 * one_pass(b)
    with pytest.raises(SystemExit, match="the gradients of hidden differ"):
        example["main"](**sizes)
