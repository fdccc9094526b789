"""The loss and the head inside the installed verl."""

import os
import re
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accuracy import assert_same
from forked import in_fork
from helpers import allowed_by, assert_within_budget, needs_native, sets_of
from parity import assert_gradients

pytest.importorskip("verl")

from omegaconf import OmegaConf
from transformers import Qwen3ForCausalLM
from verl import DataProto
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl_engine import TEMPERATURE, V, logits, padded, tiny_model

from bapo_kernels import BAPOConfig
from bapo_kernels.checks import warn_once
from bapo_kernels.integrations import OPTIONS, left_to, verl
from bapo_kernels.integrations.verl import BAPOPolicyLossConfig, compute_policy_loss_bapo
from bapo_kernels.tools.budget import in_some_orders, largest

pytestmark = needs_native
B, P, R = 4, 3, 8


def actor(policy_loss, **options):
    sizes = dict(rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=4)
    return ActorConfig(strategy="fsdp", policy_loss=policy_loss, **sizes, **options)


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(B, R, generator=g)
    return dict(
        old_log_prob=old,
        log_prob=old + 0.3 * torch.randn(B, R, generator=g),
        advantages=torch.randn(B, 1, generator=g).expand(B, R).contiguous() - 0.3,
        response_mask=torch.arange(R)[None] < torch.tensor([[8], [3], [6], [1]]),
    )


AUTHORS = dict(ratio_lower_start=0.8, ratio_lower_max=0.95)  # and their name of the target
TAUS = dict(sapo_tau_pos=0.9, sapo_tau_neg=1.2)  # verl's, with any surrogate
LOSSES = [
    (None, BAPOConfig()),  # verl's own class
    (dict(preset="paper", target=0.6), BAPOConfig(target=0.6)),
    (dict(target=1.3), BAPOConfig.recipe(target=1.3)),
    (dict(adv_ratio_target=0.5, **AUTHORS), BAPOConfig.recipe(target=0.5, **AUTHORS)),
    (dict(preset="paper", adv_ratio_target=0.5), BAPOConfig(target=0.5, target_kind="ratio")),
    (dict(target=1.1, surrogate="vanilla"), BAPOConfig.recipe(target=1.1)),
    (dict(target=1.1, surrogate="gspo"), BAPOConfig.recipe(target=1.1, ratio_level="sequence")),
    (dict(target=1.1, surrogate="cispo"), BAPOConfig.recipe(target=1.1, surrogate="cispo")),
    (dict(target=1.1, surrogate="mask"), BAPOConfig.recipe(target=1.1, surrogate="mask")),
    (dict(target=1.1, surrogate="sapo"), BAPOConfig.recipe(target=1.1, surrogate="sapo")),
]


@pytest.mark.parametrize(("fields", "true"), LOSSES)
def test_config_of_the_registered_loss(fields, true, monkeypatch):
    """The dual clip of the recipe is that of the clip alone. For the loss see test_adapters.py."""
    loss = PolicyLossConfig(loss_mode="bapo")
    if fields is not None:
        loss = BAPOPolicyLossConfig(**({"preset": "recipe"} | fields))
    called = Mock(wraps=verl.bapo_loss_from_log_probs)
    monkeypatch.setattr(verl, "bapo_loss_from_log_probs", called)
    tokens, config = batch(), actor(loss, tau_pos=0.9, tau_neg=1.2)
    tokens["log_prob"].requires_grad_()
    POLICY_LOSS_REGISTRY["bapo"](**tokens, config=config)[0].sub_(0.0)  # as ppo_loss does
    assert called.call_args.kwargs["config"] == replace(true, **TAUS)


def test_every_option_is_a_field_or_has_an_owner():
    """A new field of ``BAPOConfig`` is in neither set until somebody decides."""
    decided = {"clip_ratio_c", "loss_agg_mode", "loss_scale_factor", *TAUS}
    assert verl._OPTIONS | decided | left_to("verl").keys() == OPTIONS


BAD_FIELDS = [
    (dict(search_ranks="all"), "policy_loss.search_ranks must be 'own' or 'world', got 'all'"),
    (dict(preset="author"), "preset must be 'paper' or 'recipe', got 'author'"),
    (dict(preset=""), "preset must be 'paper' or 'recipe', got ''"),
    (dict(adv_ratio_target=0.5, target=0.4), "target must not be given together with adv_ratio"),
    (dict(adv_ratio_target=0.5, target_kind="share"), "target_kind must be 'ratio' with adv_ratio"),
    (dict(target_kind="shares"), "target_kind must be one of"),
    (dict(raise_first="both"), "raise_first must be one of"),
    (dict(token_weight="none"), "token_weight must be one of"),
    (dict(contribution="all"), "contribution must be one of"),
    (dict(surrogate="gpg"), "surrogate must be one of .*'sapo'"),
    (dict(surrogate=""), "surrogate must be one of"),
    (dict(ratio_level="batch"), "ratio_level must be one of"),
    (dict(surrogate="gspo", ratio_level="token"), "ratio_level must be 'sequence' with surrogate="),
    (dict(surrogate="sapo", search_ranks="world"), "search_ranks must be 'own' with surrogate='sa"),
    (dict(search_ranks="world"), r"search_ranks must be 'own' after use_process_group\(\)"),
]
CLASS_FIELDS = [  # these fields have no meaning in another class
    (dict(scope="epoch"), "scope must be call, step or lagged, got epoch"),
    (dict(scope="lagged", surrogate="sapo"), "scope must be 'call' with surrogate='sapo'"),
    (dict(scope="step", search_ranks="world"), "search_ranks must be 'own' with scope='step'"),
    (dict(scope="lagged"), r"scope must be 'call' after use_process_group\(\)"),
    (dict(loss_mode="vanilla"), "loss_mode must be 'bapo' with BAPOPolicyLossConfig, got 'vanilla"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS + CLASS_FIELDS)
def test_bad_fields_are_refused(fields, message, monkeypatch):
    """Where the config is made, or in the call if the config is of another class."""
    if "use_process_group" in message:
        monkeypatch.setattr(verl, "_group", object())
    with pytest.raises(ValueError, match=message):
        BAPOPolicyLossConfig(**fields)
    if (fields, message) in CLASS_FIELDS:
        return
    other = OmegaConf.create(fields)
    with pytest.raises(ValueError, match=message):
        compute_policy_loss_bapo(**batch(), config=actor(other))


UNUSED = [
    ("paper", {}, []),
    ("paper", dict(clip_ratio=0.3), ["clip_ratio=0.3"]),
    ("recipe", dict(clip_ratio_low=0.1, clip_ratio_high=0.28), ["low=0.1", "high=0.28"]),
    ("paper", dict(clip_ratio_c=10.0), ["clip_ratio_c=10.0"]),
    ("recipe", dict(clip_ratio_c=10.0), []),
    ("recipe", dict(clip_ratio_c=10.0, surrogate="cispo"), ["clip_ratio_c=10.0"]),
    ("paper", dict(clip_ratio=0.3, surrogate="sapo"), []),  # nor does verl use it there
]


@pytest.mark.parametrize(("preset", "options", "warned"), UNUSED)
def test_unused_clip_options_of_verl_warn(preset, options, warned):
    warn_once.cache_clear()
    fields = dict(preset=preset, surrogate=options.pop("surrogate", None))
    config = actor(BAPOPolicyLossConfig(**fields), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # micro-batches
            compute_policy_loss_bapo(**batch(), config=config)
    for warning, name in zip(caught, warned, strict=True):
        assert f"{name} is not used by the policy loss 'bapo'" in str(warning.message)
        assert (warning.category, warning.filename) == (UserWarning, __file__)


COMMANDS = [
    ("verl.md", 5, dict(preset="recipe", scope="lagged", adv_ratio_target=0.5)),
    ("migrating.md", 8, dict(preset="recipe", ratio_lower_max=0.8, ratio_upper_max=1.28)),
]


@pytest.mark.parametrize(("page", "count", "expected"), COMMANDS)
def test_commands_of_the_docs(page, count, expected):
    """Every override composes with verl's own configuration."""
    from hydra import compose, initialize_config_module

    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    text = text.replace("=\\\n", "=")  # a value on a line of its own
    overrides = sorted(set(re.findall(r"^  (\S*policy_loss\.\S+)", text, re.MULTILINE)))
    assert len(overrides) == count
    with initialize_config_module("verl.trainer.config", version_base=None):
        composed = compose("ppo_trainer", overrides)
    loss = omega_conf_to_dataclass(composed.actor_rollout_ref.actor.policy_loss)
    assert isinstance(loss, BAPOPolicyLossConfig)
    assert {name: getattr(loss, name) for name in expected} == expected


def imported_again(folder, variables):
    """Where loss and head come from after an import of verl with these variables, in a fork."""
    os.environ |= variables
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if re.match(r"verl\b|bapo_kernels.integ", name)]:
        del sys.modules[name]
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return f"{POLICY_LOSS_REGISTRY['bapo'].__module__} {FusedLinearForPPO.forward.__module__}"


def test_entry_point(tmp_path):
    """verl finds the loss by itself where the package is installed, and the head when told to."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["verl.plugins"]
    info = tmp_path / "bapo_kernels-0.dist-info"  # as an install leaves it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bapo-kernels\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[verl.plugins]\nbapo = {points['bapo']}\n")
    ours = "bapo_kernels.integrations.verl"
    found = in_fork(partial(imported_again, tmp_path, {}), 300)
    assert found == f"{ours} {FusedLinearForPPO.__module__}"
    named = f"{ours},{ours}_head"
    named = dict(VERL_USE_EXTERNAL_PLUGINS="none", VERL_USE_EXTERNAL_MODULES=named)
    assert in_fork(partial(imported_again, tmp_path, named), 300) == f"{ours} {ours}_head"


def engine_of(monkeypatch, **attributes):
    """verl's FSDP engine around a tiny model: its forward step, without wrappers and devices."""
    from verl.models.transformers.dense_common import forward_with_torch_backend
    from verl.workers.engine.fsdp import transformer_impl as engines

    import bapo_kernels.integrations.verl_head  # noqa: F401  whose head the forward calls

    class Model(Qwen3ForCausalLM):
        forward = forward_with_torch_backend

    for name in ("get_device_id", "get_device_name"):
        monkeypatch.setattr(engines, name, lambda: "cpu")
    engine = object.__new__(engines.FSDPEngineWithLMHead)
    defaults = dict(module=tiny_model(kind=Model), pad_to_length=False, use_ulysses_sp=False)
    defaults |= dict(_autocast_dtype=torch.float32, get_data_parallel_group=lambda: None)
    vars(engine).update(defaults | attributes)
    return engine


def found_by(engine, batches):
    """Log-probs of the responses, ``[B, R]``, and their entropies, from micro-batches."""
    from verl.workers.utils.padding import no_padding_2_padding

    made = []

    def loss(model_output, data, dp_group):
        names = ("log_probs", "entropy")
        made.append([no_padding_2_padding(model_output[name], data) for name in names])
        return made[-1][0].sum(), {}

    for batch in batches:
        engine.forward_step(batch, loss, forward_only=False)
    return [torch.cat(values) for values in zip(*made, strict=True)]


def data_with_sets(given=True, missing=0):
    """A batch of 4 as the trainer has it, with prompts padded on the left."""
    prompts, lengths = torch.tensor([3, 1, 2, 3]), torch.tensor([8, 3, 6, 1])
    tensors = padded(prompts, lengths, V, torch.Generator().manual_seed(0))
    data = DataProto.from_dict(tensors=tensors, meta_info=dict(temperature=TEMPERATURE))
    if given:  # as an agent loop's extra_fields
        sets = sets_of(tensors["responses"], V, outside=False)
        column = data.non_tensor_batch["sampling_mask"] = np.empty(B, dtype=object)
        column[:] = [sets[i * R :][: length - missing] for i, length in enumerate(lengths)]
        column[2] = None
    return data


def micro_batches(data, packed=True, **options):
    from verl.workers.utils.padding import left_right_2_no_padding

    for part in data.chunk(2):  # the ranks
        shard = left_right_2_no_padding(part.to_tensordict())
        options = dict(use_fused_kernels=True, calculate_entropy=True) | options
        tu.assign_non_tensor(shard, use_remove_padding=packed, **options)
        if packed:
            yield from (tu.index_select_tensor_dict(shard, [i]) for i in (0, 1))
        else:
            yield shard


def test_gradient_samples(monkeypatch):
    """The log-probs stay the same, and the head's gradient keeps few of its rows."""
    from bapo_kernels.integrations import verl_head

    def found(samples):
        monkeypatch.setattr(verl_head, "gradient_samples", samples)
        engine = engine_of(monkeypatch)
        log_probs, _ = found_by(engine, micro_batches(data_with_sets(given=False)))
        (gradient,) = torch.autograd.grad(log_probs.sum(), engine.module.lm_head.weight)
        return log_probs.detach(), (gradient != 0).any(1).sum()

    (exact, rows), (same, fewer) = found(None), found(1)
    assert_same(same, exact)
    assert fewer < rows


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_sampling_masks_of_a_batch(monkeypatch, packed, given):
    """From a DataProto through ranks and micro-batches to log-probs and gradients over the sets."""
    engine, data = engine_of(monkeypatch), data_with_sets(given)
    column = data.non_tensor_batch.get("sampling_mask", [None] * B)
    sets = [ids for rows in column for ids in [*(rows or []), *[[]] * R][:R]]
    allowed, batch = allowed_by(sets, V).view(B, R, V), data.batch
    mask = batch["response_mask"].bool()

    def found(model, log_probs, entropy):
        log_probs[mask].sin().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return log_probs[mask].detach(), entropy[mask].detach(), gradients

    def theirs(dtype):
        model = tiny_model().to(dtype)
        log_p = logits(model, batch).masked_fill(~allowed, -torch.inf).log_softmax(-1)
        log_probs = log_p.gather(-1, batch["responses"][..., None]).squeeze(-1)
        return found(model, log_probs, -(log_p.exp() * log_p.masked_fill(~allowed, 0.0)).sum(-1))

    got = found(engine.module, *found_by(engine, micro_batches(data, packed)))
    truth = theirs(torch.float64)
    log_probs, entropies, gradients = zip(
        *in_some_orders(partial(theirs, torch.float32)), strict=True
    )
    size = largest(truth[0])
    assert_within_budget("log_probs", got[0], log_probs, truth[0])
    assert_within_budget("entropy", got[1], entropies, truth[1], operand=size)
    assert_gradients(got[2], gradients, truth[2], size)


IGNORED = [  # attributes of the engine, tokens without a set, options of the batch
    (dict(use_ulysses_sp=True), 0, {}, "sampling_mask must be absent with sequence parallelism"),
    (
        dict(module=tiny_model()), 0, dict(use_fused_kernels=False, calculate_entropy=False),
        "sampling_mask must be absent unless use_fused_kernels",
    ),
    ({}, 1, {}, r"sampling_mask\[0\] must have a set for each of the 8"),
]  # fmt: skip


@pytest.mark.parametrize(("attributes", "missing", "options", "message"), IGNORED)
def test_sampling_masks_that_would_be_ignored_are_refused(
    attributes, missing, options, message, monkeypatch
):
    """A batch with sets, and a forward that does not use them."""
    (first, *_) = micro_batches(data_with_sets(missing=missing), **options)
    loss = lambda **_: (torch.ones(()), {})  # noqa: E731
    with pytest.raises(ValueError, match=message):
        engine_of(monkeypatch, **attributes).forward_step(first, loss, forward_only=False)
