"""Loss, gradient and metrics equal those of TRL 1.16 and verl 0.9.1 on the same inputs.

Their functions run in float64, ours in float64 (the reference) and in float32 (the kernels). Where
two of the three differ, a test states how.
"""
# ruff: noqa: E402  # the frameworks are imported after a check that they are installed

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import fixed_bounds, needs_native

from bapo_kernels import BAPOConfig, ClipBoundSearch, bapo_loss_from_log_probs

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore:.* is not used")]
pytest.importorskip("trl")
pytest.importorskip("verl")

from test_verl import MODES, NORMALISED, actor
from trl import GRPOTrainer
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig
from bapo_kernels.integrations.trl_config import bapo_config
from bapo_kernels.integrations.verl import BAPOPolicyLossConfig, compute_policy_loss_bapo

LOW, HIGH = 0.25, 0.28125  # epsilons whose ratio bounds are float32 numbers, as ours are
BOUNDS = (1 - LOW, 1 + HIGH)
FIXED = fixed_bounds(*BOUNDS)
B, T = 6, 9
DTYPES = torch.float64, torch.float32


def batch(per_token=False, empty=True, seed=0):
    """Numbers of float32 in float64: ratios on both sides of both bounds, also those of sequences.

    With ``empty`` the last sequence has no unmasked token.
    """
    g = torch.Generator().manual_seed(seed)
    shift = torch.tensor([0.5, -0.5, 0.02, -0.02, 0.4, 0.1])[:, None]
    old = -3 * torch.rand(B, T, generator=g)
    A = torch.tensor([1.0, -0.75, 0.5, -1.5, -2.0, 0.0])
    mask = torch.arange(T) < torch.tensor([9, 4, 7, 9, 1, 0 if empty else 3])[:, None]
    mask[0, 2:5] = False  # tokens of a tool
    made = dict(
        old=old,
        log_probs=old + shift + 0.4 * torch.randn(B, T, generator=g),
        A=A[:, None] + torch.randn(B, T, generator=g) if per_token else A,
        weights=0.5 + torch.rand(B, T if per_token else 1, generator=g),
        ref=old + 0.3 * torch.randn(B, T, generator=g),
        entropy=torch.rand(B, T, generator=g),
    )
    made["weights"][2] = 0.0  # masked by its ratio to the rollout
    return {name: x.double() for name, x in made.items()} | {"mask": mask.long()}


def assert_same(got, expected, dtype, rtol=1e-12):
    """Relative to the largest of the expected values, with the rounding of ``dtype``."""
    rtol = max(rtol, 1e-5 if dtype == torch.float32 else 0.0)
    atol = rtol * float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected.double(), rtol=rtol, atol=atol)


# TRL


def trl_trainer(kind, args, data):
    """A trainer without a model, whose log-probs are ``data["leaf"]``."""
    trainer = object.__new__(kind)
    same = "loss_type importance_sampling_level beta use_vllm max_completion_length"
    vars(trainer).update({name: getattr(args, name) for name in same.split()})
    vars(trainer).update(
        args=args, epsilon_low=args.epsilon, epsilon_high=args.epsilon_high,
        current_gradient_accumulation_steps=args.gradient_accumulation_steps,
        vllm_importance_sampling_correction=True, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, aux_loss_enabled=False, entropy_coef=0.0,
        _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction="sum": x
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (data["leaf"], data["entropy"], None),
    )  # fmt: skip
    if kind is BAPOTrainer:
        trainer.bapo_config = bapo_config(args)
        trainer.search = ClipBoundSearch(trainer.bapo_config, "call")
        trainer._corrected_kl = bool(args.beta and args.use_bias_correction_kl)
        trainer._calls_left, trainer._lm_head = 0, None
    return trainer


def trl_inputs(data, on_policy=False):
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = dict(
        prompt_ids=ids[:, :2],
        prompt_mask=ids[:, :2],
        completion_ids=ids,
        completion_mask=(torch.arange(T) < 20 * data["mask"].sum(1, keepdim=True)).long(),
        tool_mask=data["mask"],
        advantages=data["A"],
        ref_per_token_logps=data["ref"],
        importance_sampling_ratio=data["weights"],
        num_items_in_batch=torch.tensor(123),
    )
    return inputs if on_policy else inputs | {"old_per_token_logps": data["old"]}


def trl_loss(kind, args, data, dtype=torch.float64, on_policy=False):
    """Loss, gradient, and the metrics that were logged."""
    data = {k: x if k == "mask" else x.to(dtype) for k, x in data.items()}
    data["leaf"] = data["log_probs"].clone().requires_grad_()
    trainer = trl_trainer(kind, args, data)
    loss = trainer._compute_loss(None, trl_inputs(data, on_policy))
    loss.backward()
    logged = {name: value for name, (value,) in trainer._metrics["train"].items()}
    return loss.detach(), data["leaf"].grad, logged


def trl_args(loss_type, level="token", **options):
    cispo = loss_type == "cispo"  # whose epsilon_high is the bound itself
    bounds = fixed_bounds(0.0 if cispo else BOUNDS[0], BOUNDS[1])
    given = dict(
        output_dir="out", use_cpu=True, bf16=False, report_to="none",
        per_device_train_batch_size=32, gradient_accumulation_steps=2, steps_per_generation=6,
        num_generations=2, max_completion_length=T + 3, epsilon=LOW,
        epsilon_high=BOUNDS[1] if cispo else HIGH,
        loss_type=loss_type, importance_sampling_level=level,
        # TRL's tau is a number of float32.
        sapo_temperature_pos=torch.tensor(1.1).item(),
        sapo_temperature_neg=torch.tensor(1.3).item(),
        bapo_options=None if loss_type == "sapo" else bounds, bapo_scope="call",
    )  # fmt: skip
    return BAPOTrainerConfig(**(given | options))


def check_trl(args, data, on_policy=False):
    """TRL's ``_compute_loss``, whose loss is returned, and the trainer of this package."""
    loss, gradient, logged = trl_loss(GRPOTrainer, args, data, on_policy=on_policy)
    for dtype in DTYPES:
        got, its_gradient, its_logged = trl_loss(BAPOTrainer, args, data, dtype, on_policy)
        assert_same(got, loss, dtype)
        assert_same(its_gradient, gradient, dtype)
        names = {name for name in its_logged if not name.startswith("bapo/")}
        assert names == set(logged)
        assert bool(names ^ set(its_logged)) == (args.loss_type != "sapo")
        for name in names:
            assert its_logged[name] == pytest.approx(logged[name], rel=1e-5, abs=1e-7), name
    return loss


TRL_CASES = {
    "plain": {},
    "KL": dict(beta=0.1, use_bias_correction_kl=False),
    "KL with the ratio": dict(beta=0.1, use_bias_correction_kl=True),
    "importance weights": dict(use_vllm=True),
}


@pytest.mark.parametrize("case", TRL_CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo"])
def test_trl(loss_type, level, case):
    args = trl_args(loss_type, level, **TRL_CASES[case])
    for per_token in (False, True):
        check_trl(args, batch(per_token))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo"])
def test_trl_on_policy(loss_type, level):
    """Without old log-probs, as with ``num_iterations=1``."""
    check_trl(trl_args(loss_type, level), batch(), on_policy=True)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_dual_clip(level):
    """``delta`` above the upper bound is the dual clip."""
    data = batch()
    data["log_probs"][4] += 0.4  # a negative advantage, and a ratio above delta
    loss = check_trl(trl_args("grpo", level, delta=1.75), data)
    assert loss < trl_loss(GRPOTrainer, trl_args("grpo", level), data)[0], "it must act"


CONFIGS = {
    "grpo": BAPOConfig.fixed(*BOUNDS, loss_agg_mode="seq-mean-token-mean"),
    "cispo": BAPOConfig.fixed(0.0, BOUNDS[1], surrogate="cispo"),
    "sapo": BAPOConfig(
        surrogate="sapo",
        sapo_tau_pos=torch.tensor(1.1).item(),
        sapo_tau_neg=torch.tensor(1.3).item(),
        loss_agg_mode="seq-mean-token-mean",
    ),
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", CONFIGS)
def test_trl_without_the_trainer(loss_type, level):
    """The same from a config, and from bounds that are given."""
    args = trl_args(loss_type, level, gradient_accumulation_steps=1)
    data = batch()
    loss, gradient, _ = trl_loss(GRPOTrainer, args, data)
    counts = dict(global_batch_size=B)
    if loss_type == "cispo":
        counts = dict(batch_num_tokens=123 / args.steps_per_generation)
    config = replace(CONFIGS[loss_type], ratio_level=level)
    calls = [dict(config=config)]
    if config.has_bounds:
        searching = replace(config, **{name: getattr(BAPOConfig, name) for name in FIXED})
        lower = 0.0 if loss_type == "cispo" else BOUNDS[0]
        per_sequence = tuple(torch.full((B,), bound) for bound in (lower, BOUNDS[1]))
        calls += [dict(config=searching, bounds=b) for b in ((lower, BOUNDS[1]), per_sequence)]
    tokens = [data[name] for name in ("log_probs", "old", "A", "mask")]
    for dtype in DTYPES:
        for call in calls:
            leaf, *others = (x.to(dtype) if x.is_floating_point() else x for x in tokens)
            leaf = leaf.clone().requires_grad_()
            out = bapo_loss_from_log_probs(leaf, *others, **call, **counts)
            out.loss.backward()
            assert_same(out.loss.detach(), loss, dtype)
            assert_same(leaf.grad, gradient, dtype)


@pytest.mark.parametrize(
    ("page", "heading", "expected"),
    [
        ("trl.md", "## CISPO, SAPO and GSPO", BAPOConfig.fixed(0.0, 5.0, surrogate="cispo")),
        ("migrating.md", "After, the same loss in `BAPOTrainer`", BAPOConfig.fixed(0.8, 1.28)),
    ],
)
def test_fixed_bounds_of_the_docs(page, heading, expected):
    """The options that are TRL's CISPO with ``epsilon_high=5.0``, and DAPO's bounds."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    block = re.search(r"```python\n(.*?)```", text.partition(heading)[2], re.DOTALL).group(1)
    code = block.replace("output_dir=folder", "output_dir='out', use_cpu=True, bf16=False")
    names = dict(BAPOTrainerConfig=BAPOTrainerConfig)
    exec(code, names)
    assert bapo_config(names["args"]) == replace(expected, kl_loss_type="k3")


# verl


def verl_actor(policy_loss, mode, normalised=True, **options):
    # verl takes the two that are named low and high.
    clip = dict(clip_ratio=0.9, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1.75)
    taus = dict(tau_pos=1.1, tau_neg=1.3)
    config = actor(policy_loss, loss_agg_mode=mode, **clip, **taus, **options)
    if normalised:
        config.global_batch_info.update(NORMALISED)
    return config


def verl_loss(function, config, data, dtype=torch.float64, weights=True):
    """Loss, gradient, metrics."""
    leaf = data["log_probs"].to(dtype).clone().requires_grad_()
    A = data["A"] if data["A"].ndim == 2 else data["A"][:, None].expand(B, T)
    loss, metrics = function(
        old_log_prob=data["old"].to(dtype),
        log_prob=leaf,
        advantages=A.to(dtype),
        response_mask=data["mask"],
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=data["weights"].to(dtype).expand(B, T) if weights else None,
    )
    loss.backward()
    return loss.detach(), leaf.grad, metrics


def verl_pair(name, mode="token-mean", normalised=True, preset="paper"):
    """verl's function and its config; the adapter's config for the same loss."""
    theirs = verl_actor(PolicyLossConfig(loss_mode=name), mode, normalised)
    options = dict(surrogate=name, preset=preset) | ({} if name == "sapo" else FIXED)
    ours = verl_actor(BAPOPolicyLossConfig(**options), mode, normalised)
    return POLICY_LOSS_REGISTRY[name], theirs, ours


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
def test_verl(name, normalised, mode):
    """verl's registered losses, and the policy loss ``bapo`` with their names."""
    if name == "sapo":  # whatever it is told
        mode = "seq-mean-token-mean"
    preset = "recipe" if name == "vanilla" else "paper"  # verl's vanilla loss has a dual clip
    function, theirs, ours = verl_pair(name, mode, normalised, preset)
    # verl divides the sum of a sequence by its count + 1e-8, and masked means likewise.
    rtol = 2e-8 if mode == "seq-mean-token-mean" else 1e-12
    for per_token, weights in ((False, True), (name != "gspo", False)):
        data = batch(per_token)
        if name == "vanilla":
            data["log_probs"][4] += 0.4
        loss, gradient, metrics = verl_loss(function, theirs, data, weights=weights)
        for dtype in DTYPES:
            got = verl_loss(compute_policy_loss_bapo, ours, data, dtype, weights)
            assert_same(got[0], loss, dtype, rtol)
            assert_same(got[1], gradient, dtype, rtol)
            for key, value in metrics.items():
                assert got[2][key] == pytest.approx(value, abs=1e-6), key
            assert ("actor/bapo_clip_high" in got[2]) == (name != "sapo")
        if name == "vanilla" and not per_token:
            assert metrics["actor/pg_clipfrac_lower"] > 0, "the dual clip must act"


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(dtype):
    """By both adapters: inside of the bounds the gradient is that of the clip, outside it is 0."""
    data = batch(empty=False)
    r = (data["log_probs"] - data["old"]).exp()
    outside = (r < BOUNDS[0]) | (r > BOUNDS[1])
    masking = FIXED | dict(surrogate="mask")
    args = (trl_args("dapo", bapo_options=options) for options in (FIXED, masking))
    clip, mask = (trl_loss(BAPOTrainer, each, data, dtype)[1] for each in args)
    assert_same(mask, clip.masked_fill(outside, 0.0), dtype)
    assert not torch.equal(mask, clip), "it must act on both sides"
    made = (BAPOPolicyLossConfig(**options) for options in (FIXED, masking))
    actors = [verl_actor(each, "token-mean", True) for each in made]
    clip, mask = (verl_loss(compute_policy_loss_bapo, each, data, dtype)[1] for each in actors)
    assert_same(mask, clip.masked_fill(outside, 0.0), dtype)
    with pytest.raises(ValueError, match="delta must be None for surrogate='mask' with BAPO"):
        trl_args("dapo", bapo_options=masking, delta=2.0)
    with pytest.raises(ValueError, match="'surrogate'.* be left to TRL's loss_type, got 'mask'"):
        trl_args("cispo", bapo_options=masking)


# Where they differ


def test_cispo_of_trl_clips_from_above_alone():
    """verl's lower bound is ours; in TRL it is 0, and its clip ratio counts one side, A > 0."""
    data = batch(empty=False)
    mask, A = data["mask"].bool(), data["A"][:, None].expand(B, T)
    r = (data["log_probs"] - data["old"]).exp()
    low, high = mask & (r < BOUNDS[0]), mask & (r > BOUNDS[1])
    assert low.any(), "the bound must act"
    _, theirs, _ = verl_pair("cispo", "token-sum", normalised=False)
    _, verls, metrics = verl_loss(POLICY_LOSS_REGISTRY["cispo"], theirs, data, weights=False)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(float((low | high).sum() / mask.sum()))
    steps = dict(gradient_accumulation_steps=1, steps_per_generation=123)
    args = trl_args("cispo", **steps)
    _, trls, logged = trl_loss(GRPOTrainer, args, data)
    assert logged["cispo_clip_ratio"] == pytest.approx(float((high & (A > 0)).sum() / mask.sum()))
    different = (trls - verls).abs() > 1e-12
    assert torch.equal(different, low & (A != 0))
    assert_same(verls[different], -BOUNDS[0] * A[different], torch.float64)
    _, ours, with_both = trl_loss(BAPOTrainer, trl_args("cispo", **steps, bapo_options=FIXED), data)
    assert_same(ours, verls, torch.float64)
    assert with_both["cispo_clip_ratio"] == pytest.approx(logged["cispo_clip_ratio"])


def test_gspo_of_verl_passes_each_token_its_own_gradient():
    """With advantages of the tokens the loss is the same; ours is TRL's, the derivative of it."""
    data = batch(per_token=True)
    function, theirs, ours = verl_pair("gspo", "token-sum", normalised=False)
    loss, own, _ = verl_loss(function, theirs, data)
    got, gradient, _ = verl_loss(compute_policy_loss_bapo, ours, data)
    assert_same(got, loss, torch.float64)
    mask = data["mask"]
    mean = own.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) * mask
    assert (mean - own).abs().max() > 0.1, "the case must tell them apart"
    assert_same(gradient, mean, torch.float64)


def far(log_ratio, level):
    """The loss of one sequence of equal tokens with A = -1, by TRL, verl and this package."""
    data = batch(empty=False)
    data["A"] = -torch.ones(B).double()
    data["log_probs"] = data["old"] + log_ratio
    data["mask"][1:] = 0
    args = trl_args("luspo", level, gradient_accumulation_steps=1)
    trl, *_ = trl_loss(GRPOTrainer, args, data)
    name = "gspo" if level == "sequence" else "vanilla"
    function, theirs, ours = verl_pair(name, "token-sum", normalised=False)
    theirs = verl_actor(PolicyLossConfig(loss_mode=name), "token-sum", normalised=False)
    object.__setattr__(theirs, "clip_ratio_c", 1e30)
    verl, *_ = verl_loss(function, theirs, data, weights=False)
    mine, gradient, _ = verl_loss(compute_policy_loss_bapo, ours, data, weights=False)
    n = float(data["mask"].sum())
    return [B * trl.item() / n, verl.item() / n, mine.item() / n], gradient


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_log_ratios_are_clamped(level):
    """Ours at 20 at both levels, verl's at 20 and at 10 of a sequence, TRL's never."""
    e = torch.tensor([12.0, 20.0, 23.0]).double().exp().tolist()
    losses, gradient = far(12.0, level)
    verls = torch.tensor(10.0).double().exp().item() if level == "sequence" else e[0]
    assert losses == pytest.approx([e[0], verls, e[0]], rel=1e-9)
    assert gradient.any()
    losses, gradient = far(23.0, level)
    assert losses == pytest.approx([e[2], min(verls, e[1]) if level == "sequence" else e[1], e[1]])
    assert not gradient.any()


def test_sapo_of_trl_rounds_its_temperature():
    """To float32: its default for A <= 0 is off by 5e-8."""
    data = batch()
    default = dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    args = trl_args("sapo", **default)
    _, gradient, _ = trl_loss(GRPOTrainer, args, data)
    _, ours, _ = trl_loss(BAPOTrainer, args, data)
    assert bapo_config(args).sapo_tau_neg == 1.05
    off = ((ours - gradient) / gradient)[(gradient != 0) & (data["A"] < 0)[:, None]].abs()
    assert 1e-9 < off.max() < 1e-7
    args = trl_args("sapo", **(default | dict(sapo_temperature_neg=torch.tensor(1.05).item())))
    assert_same(trl_loss(BAPOTrainer, args, data)[1], gradient, torch.float64)


def test_sapo_of_verl_aggregates_in_one_way():
    """Whatever ``loss_agg_mode`` is; the policy loss ``bapo`` does what it says."""
    data = batch()
    function, theirs, ours = verl_pair("sapo", "token-mean", normalised=False)
    _, _, like = verl_pair("sapo", "seq-mean-token-mean", normalised=False)
    loss, *_ = verl_loss(function, theirs, data)
    assert_same(verl_loss(compute_policy_loss_bapo, like, data)[0], loss, torch.float64, 2e-8)
    assert abs(verl_loss(compute_policy_loss_bapo, ours, data)[0] - loss) > 0.01
