"""Loss, gradient and metrics equal those of TRL 1.16 and verl 0.9.1 on the same inputs.

Their functions run in float64, ours in float64 (the reference) and in float32 (the kernels). What
differs by intention: ``BAPOPolicyLossConfig`` lists it for verl.
"""
# ruff: noqa: E402  # the frameworks are imported after a check that they are installed

import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import fixed_bounds, needs_native
from parity import Found, assert_parity

from bapo_kernels import BAPOConfig, ClipBoundSearch

pytestmark = [needs_native, pytest.mark.filterwarnings("ignore:.* is not used")]
pytest.importorskip("trl")
pytest.importorskip("verl")

from test_verl import actor
from trl import GRPOTrainer
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

from bapo_kernels.integrations.trl import BAPOTrainer, BAPOTrainerConfig
from bapo_kernels.integrations.trl_config import bapo_config
from bapo_kernels.integrations.verl import BAPOPolicyLossConfig
from bapo_kernels.tools.budget import in_some_orders, largest

LOW, HIGH = 0.25, 0.28125  # epsilons whose ratio bounds are float32 numbers, as ours are
BOUNDS = (1 - LOW, 1 + HIGH)
FIXED = fixed_bounds(*BOUNDS)
B, T = 6, 9
DTYPES = torch.float64, torch.float32
MODES = [
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]  # fmt: skip
NORMALISED = dict(dp_size=2, batch_num_tokens=41, global_batch_size=9, loss_scale_factor=16)


def batch(per_token=False):
    """Numbers of float32 in float64: ratios on both sides of both bounds, also those of sequences.

    The last sequence has no unmasked token.
    """
    g = torch.Generator().manual_seed(0)
    shift = torch.tensor([0.5, -0.5, 0.02, -0.02, 0.4, 0.1])[:, None]
    old = -3 * torch.rand(B, T, generator=g)
    A = torch.tensor([1.0, -0.75, 0.5, -1.5, -2.0, 0.0])
    mask = torch.arange(T) < torch.tensor([9, 4, 7, 9, 1, 0])[:, None]
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


def compare(ours, theirs, data, relative=0.0):
    """In both dtypes what ours finds, and the framework's function in float64."""
    made, truth = [], theirs()
    for dtype in DTYPES:
        made.append(ours(dtype=dtype))
        same = in_some_orders(partial(theirs, dtype=dtype))
        assert_parity(made[-1], same, truth, largest(data["log_probs"]), relative)
    return made, truth


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


def trl_inputs(data):
    ids = torch.zeros(B, T, dtype=torch.long)
    return dict(
        prompt_ids=ids[:, :2], prompt_mask=ids[:, :2], completion_ids=ids,
        completion_mask=(torch.arange(T) < 20 * data["mask"].sum(1, keepdim=True)).long(),
        tool_mask=data["mask"], advantages=data["A"], old_per_token_logps=data.get("old"),
        ref_per_token_logps=data["ref"], importance_sampling_ratio=data["weights"],
        num_items_in_batch=torch.tensor(123),
    )  # fmt: skip


def trl_loss(kind, args, data, dtype=torch.float64):
    data = {k: x if k == "mask" else x.to(dtype) for k, x in data.items()}
    data["leaf"] = data["log_probs"].clone().requires_grad_()
    trainer = trl_trainer(kind, args, data)
    loss = trainer._compute_loss(None, trl_inputs(data))
    loss.backward()
    logged = {name: value for name, (value,) in trainer._metrics["train"].items()}
    return Found(loss.detach(), logged, data["leaf"].grad)


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


def check_trl(args, data):
    """TRL's ``_compute_loss``, whose loss is returned, and the trainer of this package."""
    ours, theirs = (partial(trl_loss, kind, args, data) for kind in (BAPOTrainer, GRPOTrainer))
    made, truth = compare(ours, theirs, data)
    for got in made:
        names = {name for name in got.log if not name.startswith("bapo/")}
        assert names == set(truth.log)
        assert bool(names ^ set(got.log)) == (args.loss_type != "sapo")
    return truth.loss


TRL_CASES = {
    "plain": {},
    "on-policy": {},  # without old log-probs, as with num_iterations=1
    "KL": dict(beta=0.1, use_bias_correction_kl=False),
    "KL with the ratio": dict(beta=0.1, use_bias_correction_kl=True),
    "importance weights": dict(use_vllm=True),
}


@pytest.mark.parametrize("case", TRL_CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo"])
def test_trl(loss_type, level, case):
    for data in (batch(), batch(per_token=True)):
        if case == "on-policy":
            del data["old"]
        check_trl(trl_args(loss_type, level, **TRL_CASES[case]), data)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_dual_clip(level):
    """``delta`` above the upper bound is the dual clip."""
    data = batch()
    data["log_probs"][4] += 0.4  # a negative advantage, and a ratio above delta
    loss = check_trl(trl_args("grpo", level, delta=1.75), data)
    assert loss < trl_loss(GRPOTrainer, trl_args("grpo", level), data).loss, "it must act"


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


def verl_loss(loss, mode, normalised, data, weights, dtype=torch.float64):
    """Of the registered loss that a config of verl, or of the adapter, names."""
    # verl takes the two that are named low and high.
    clip = dict(clip_ratio=0.9, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=1.75)
    config = actor(loss, loss_agg_mode=mode, tau_pos=1.1, tau_neg=1.3, **clip)
    config.global_batch_info.update(NORMALISED if normalised else {})
    leaf = data["log_probs"].to(dtype).clone().requires_grad_()
    A = data["A"] if data["A"].ndim == 2 else data["A"][:, None].expand(B, T)
    value, metrics = POLICY_LOSS_REGISTRY[loss.loss_mode](
        old_log_prob=data["old"].to(dtype),
        log_prob=leaf,
        advantages=A.to(dtype),
        response_mask=data["mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=data["weights"].to(dtype).expand(B, T) if weights else None,
    )
    value.backward()
    return Found(value.detach(), metrics, leaf.grad)


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
    added = 1e-8 if own == "seq-mean-token-mean" else 0.0
    for per_token, weights in ((False, True), (name != "gspo", False)):
        data = batch(per_token)
        if name == "vanilla":
            data["log_probs"][4] += 0.4
        given = normalised, data, weights
        ours = partial(verl_loss, loss, own, *given)
        theirs = partial(verl_loss, PolicyLossConfig(loss_mode=name), mode, *given)
        made, truth = compare(ours, theirs, data, added)
        for got in made:
            assert ("actor/bapo_clip_high" in got.log) == (name != "sapo")
        if name == "vanilla" and not per_token:
            assert truth.log["actor/pg_clipfrac_lower"] > 0, "the dual clip must act"
