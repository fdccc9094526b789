"""The loss and the head inside the installed verl."""

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import needs_native

pytest.importorskip("verl")

from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.nn.functional import pad
from transformers import Qwen3ForCausalLM
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl_engine import V, padded, tiny_model

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.core.checks import warn_once
from bapo_kernels.integrations.verl import BAPOPolicyLossConfig, compute_policy_loss_bapo

pytestmark = needs_native
VERLS_HEAD = FusedLinearForPPO.forward  # before it is replaced
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
NORMALISED = dict(dp_size=2, batch_num_tokens=41, global_batch_size=9, loss_scale_factor=16)
B, P, R = 4, 3, 8


def actor(policy_loss, **options):
    sizes = dict(rollout_n=1, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=4)
    return ActorConfig(strategy="fsdp", policy_loss=policy_loss, **sizes, **options)


def batch(seed=0, is_weights=False):
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(B, R, generator=g)
    tokens = dict(
        old_log_prob=old,
        log_prob=old + 0.3 * torch.randn(B, R, generator=g),
        advantages=torch.randn(B, 1, generator=g).expand(B, R).contiguous() - 0.3,
        response_mask=torch.arange(R)[None] < torch.tensor([[8], [3], [6], [1]]),
    )
    if is_weights:
        tokens["rollout_is_weights"] = 0.5 + torch.rand(B, R, generator=g)
    return tokens


def expected(tokens, config, **options):
    """The reference's output and gradient, in float64."""
    true = tokens["log_prob"].double().requires_grad_()
    others = (tokens[name] for name in ("old_log_prob", "advantages", "response_mask"))
    weights = tokens.get("rollout_is_weights")
    given = dict(config=config, rollout_is_weights=weights, **options)
    out = reference.bapo_loss_from_log_probs(true, *others, **given)
    out.loss.backward()
    return out, true.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("is_weights", [False, True])
@pytest.mark.parametrize("preset", ["paper", "recipe"])
def test_registered_loss(preset, is_weights, normalised, mode):
    """Padded tensors, as verl calls it, with and without global counts."""
    tokens = batch(is_weights=is_weights)
    loss = BAPOPolicyLossConfig(preset=preset, target={"paper": 0.6, "recipe": 1.3}[preset])
    config = actor(loss, loss_agg_mode=mode)
    if normalised:
        config.global_batch_info.update(NORMALISED)
    leaf = tokens["log_prob"].clone().requires_grad_()
    given = tokens | dict(log_prob=leaf, loss_agg_mode=mode, config=config)
    got, metrics = POLICY_LOSS_REGISTRY["bapo"](**given)
    got -= 0.0  # as ppo_loss does
    got.backward()

    info = dict(config.global_batch_info)
    options = dict(loss_agg_mode=mode, loss_scale_factor=info.pop("loss_scale_factor", None))
    expected_config = getattr(BAPOConfig, preset)(target=loss.target, **options)
    out, gradient = expected(tokens, expected_config, **info)
    torch.testing.assert_close(got.detach().double(), out.loss.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-6, atol=1e-8)
    assert metrics["actor/bapo_clip_low"] == out.bounds.lower.item()
    assert metrics["actor/bapo_clip_high"] == out.bounds.upper.item()
    assert out.bounds.upper > 1.2 or out.bounds.lower > 0.6, "the case must need a search"
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "bapo_pos_share"):
        assert metrics[f"actor/{name}"] == pytest.approx(out.metrics[name].item(), abs=1e-6)


def nested(rows, lengths):
    return torch.nested.as_nested_tensor(
        [row[: int(n)] for row, n in zip(rows, lengths, strict=True)], layout=torch.jagged
    )


@pytest.mark.parametrize("preset", ["paper", "recipe"])
def test_ppo_loss_on_nested_data(preset):
    """verl's own ppo_loss, from nested model output to loss and metrics, with entropy and KL."""
    tokens = batch()
    lengths = tokens["response_mask"].sum(1)
    loss = BAPOPolicyLossConfig(preset=preset, target={"paper": 0.6, "recipe": 1.3}[preset])
    config = actor(loss, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
    ref = tokens["log_prob"] + 0.2
    entropy = torch.rand(B, R)
    leaf = tokens["log_prob"].clone().requires_grad_()

    def whole(values):  # a token's value stands one position earlier, at the prompt's last
        rows = [pad(row[:n], (P - 1, 1)) for row, n in zip(values, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    data = TensorDict(
        {
            "prompts": nested(torch.ones(B, P, dtype=torch.long), torch.full((B,), P)),
            "responses": nested(torch.ones(B, R, dtype=torch.long), lengths),
            "input_ids": nested(torch.ones(B, P + R, dtype=torch.long), P + lengths),
            "response_mask": nested(torch.ones(B, R), lengths),
            "old_log_probs": nested(tokens["old_log_prob"], lengths),
            "advantages": nested(tokens["advantages"], lengths),
            "ref_log_prob": nested(ref, lengths),
        },
        batch_size=[B],
    )
    counts = dict(dp_size=2, batch_num_tokens=40, global_batch_size=8)
    tu.assign_non_tensor(data, **counts, max_response_len=R)
    total, metrics = ppo_loss(config, {"log_probs": whole(leaf), "entropy": whole(entropy)}, data)
    total.backward()

    options = dict(entropy_coef=0.01, kl_loss_coef=0.1, kl_loss_type="low_var_kl")
    true_config = getattr(BAPOConfig, preset)(target=loss.target, **options)
    terms = dict(entropy=entropy.double(), ref_log_probs=ref)
    out, gradient = expected(tokens, true_config, **terms, **counts)
    torch.testing.assert_close(total.detach().double(), out.loss.detach(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-8)
    assert metrics["actor/bapo_clip_high"].aggregate() == out.bounds.upper.item()


AUTHORS = dict(ratio_lower_start=0.8, ratio_lower_max=0.95)  # and their name of the target
TAUS = dict(sapo_tau_pos=0.9, sapo_tau_neg=1.2)  # verl's
LOSSES = [
    (dict(adv_ratio_target=0.5, **AUTHORS), BAPOConfig.recipe(target=0.5, **AUTHORS)),
    (dict(target=1.1, surrogate="vanilla"), BAPOConfig.recipe(target=1.1)),
    (dict(target=1.1, surrogate="gspo"), BAPOConfig.recipe(target=1.1, ratio_level="sequence")),
    (dict(target=1.1, surrogate="cispo"), BAPOConfig.recipe(target=1.1, surrogate="cispo")),
    (dict(target=1.1, surrogate="sapo"), BAPOConfig(surrogate="sapo", **TAUS)),
    (None, BAPOConfig.paper()),  # verl's own class
]


@pytest.mark.parametrize(("fields", "config"), LOSSES)
def test_policy_losses(fields, config):
    """The dual clip of the recipe is that of the clip alone."""
    loss = PolicyLossConfig(loss_mode="bapo")
    if fields is not None:
        loss = BAPOPolicyLossConfig(preset="recipe", **fields)
    tokens = batch()
    given = dict(config=actor(loss, tau_pos=0.9, tau_neg=1.2))
    got, metrics = compute_policy_loss_bapo(**tokens, **given)
    out, _ = expected(tokens, config)
    torch.testing.assert_close(got.double(), out.loss.detach(), rtol=1e-6, atol=1e-7)
    if config.surrogate == "sapo":
        assert not any("bapo" in key for key in metrics)
        return
    assert metrics["actor/bapo_clip_low"] == out.bounds.lower.item()
    assert metrics["actor/bapo_clip_high"] == out.bounds.upper.item()
    assert fields is None or out.bounds.lower > 0.6, "the case must need a search"


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
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_bad_fields_are_refused(fields, message):
    """Where the config is made, or in the call if the config is of another class."""
    with pytest.raises(ValueError, match=message):
        BAPOPolicyLossConfig(**fields)
    other = OmegaConf.create(fields)
    with pytest.raises(ValueError, match=message):
        compute_policy_loss_bapo(**batch(), config=actor(other))


def test_other_loss_modes_are_refused():
    """``_target_`` alone leaves verl's default, under which BAPO would not run."""
    message = "policy_loss.loss_mode must be 'bapo' with BAPOPolicyLossConfig, got 'vanilla'"
    with pytest.raises(ValueError, match=message):
        BAPOPolicyLossConfig(loss_mode="vanilla")


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        (dict(search_ranks="world"), "search_ranks must be 'own' after use_process_group()"),
        (dict(scope="lagged"), "scope must be 'call' after use_process_group()"),
    ],
)
def test_fields_with_a_process_group_are_refused(fields, rule, monkeypatch):
    monkeypatch.setattr("bapo_kernels.integrations.verl._group", object())
    with pytest.raises(ValueError, match=re.escape(rule)):
        BAPOPolicyLossConfig(**fields)


@pytest.mark.parametrize(
    ("preset", "options", "warned"),
    [
        ("paper", {}, []),
        ("paper", dict(clip_ratio=0.3), ["clip_ratio=0.3"]),
        ("recipe", dict(clip_ratio_low=0.1, clip_ratio_high=0.28), ["low=0.1", "high=0.28"]),
        ("paper", dict(clip_ratio_c=10.0), ["clip_ratio_c=10.0"]),
        ("recipe", dict(clip_ratio_c=10.0), []),
        ("recipe", dict(clip_ratio_c=10.0, surrogate="gspo"), []),
        ("recipe", dict(clip_ratio_c=10.0, surrogate="cispo"), ["clip_ratio_c=10.0"]),
        ("paper", dict(clip_ratio=0.3, surrogate="sapo"), []),  # nor does verl use it there
    ],
)
def test_unused_clip_options_of_verl_warn(preset, options, warned):
    warn_once.cache_clear()
    of_loss = dict(preset=preset, surrogate=options.pop("surrogate", None))
    config = actor(BAPOPolicyLossConfig(**of_loss), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # micro-batches
            compute_policy_loss_bapo(**batch(), config=config)
    assert len(caught) == len(warned)
    for warning, name in zip(caught, warned, strict=True):
        assert f"{name} is not used by the policy loss 'bapo'" in str(warning.message)
        assert (warning.category, warning.filename) == (UserWarning, __file__)


@pytest.mark.parametrize(
    ("page", "count", "expected"),
    [
        ("verl.md", 5, dict(preset="recipe", scope="lagged", adv_ratio_target=0.5)),
        ("migrating.md", 8, dict(preset="recipe", ratio_lower_max=0.8, ratio_upper_max=1.28)),
    ],
)
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
    assert loss.loss_mode == "bapo"
    assert {name: getattr(loss, name) for name in expected} == expected


def test_entry_point(tmp_path):
    """verl finds the loss by itself where the package is installed, and the head when told to."""
    tomllib = pytest.importorskip("tomllib")
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["verl.plugins"]
    for point in importlib.metadata.entry_points(group="verl.plugins", name="bapo"):
        assert point.value == points["bapo"]
    info = tmp_path / "bapo_kernels-0.dist-info"  # as an install leaves it
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bapo-kernels\nVersion: 0\n")
    lines = ["[verl.plugins]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    code = """
import json, verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as losses
from verl.utils.experimental.torch_functional import FusedLinearForPPO as head
loss = losses["bapo"].__module__ if "bapo" in losses else None
print(json.dumps([loss, head.forward.__module__]))
"""

    def modules(**environment):
        environment = os.environ | {"PYTHONPATH": f"{root}:{tmp_path}"} | environment
        command, options = [sys.executable, "-c", code], dict(text=True, timeout=300)
        done = subprocess.run(command, capture_output=True, env=environment, **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    ours = "bapo_kernels.integrations.verl"
    assert modules() == [ours, FusedLinearForPPO.__module__]
    off = dict(VERL_USE_EXTERNAL_PLUGINS="none")
    named = modules(VERL_USE_EXTERNAL_MODULES=f"{ours},{ours}_head", **off)
    assert named == [ours, f"{ours}_head"]


@pytest.mark.parametrize("shape", [(21,), (3, 7)])
def test_head(shape):
    """verl's FusedLinearForPPO against the forward that takes its place."""
    import bapo_kernels.integrations.verl_head as head

    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*shape, 16, generator=g), torch.randn(97, 16, generator=g)
    labels = torch.randint(0, 97, shape, generator=g)
    original = FusedLinearForPPO.__dict__["forward"]
    assert original is head.forward, "importing the module must replace it"
    results = []
    for function in (head.forward, VERLS_HEAD):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = function(FusedLinearForPPO(), *leaves, labels, temperature=0.7)
        (logp.sin().sum() + 0.1 * entropy.sum()).backward()
        results.append([logp.detach(), entropy.detach(), *(x.grad for x in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


class Engine:
    """verl's FSDP engine around a tiny model: its forward step, without wrappers and devices."""

    def __init__(self, monkeypatch, **attributes):
        from verl.models.transformers.dense_common import forward_with_torch_backend
        from verl.workers.engine.fsdp import transformer_impl as engines

        import bapo_kernels.integrations.verl_head  # noqa: F401  whose head the forward calls

        class Model(Qwen3ForCausalLM):
            forward = forward_with_torch_backend

        self.model, self.dense = tiny_model(kind=Model), tiny_model()
        monkeypatch.setattr(engines, "get_device_id", lambda: "cpu")
        monkeypatch.setattr(engines, "get_device_name", lambda: "cpu")
        self.engine = object.__new__(engines.FSDPEngineWithLMHead)
        defaults = dict(module=self.model, pad_to_length=False, use_ulysses_sp=False)
        vars(self.engine).update(defaults | attributes)
        self.engine._autocast_dtype = torch.float32
        self.engine.get_data_parallel_group = lambda: None

    def log_probs(self, batches):
        """Of the responses, ``[B, R]``, and their entropies, from micro-batches."""
        from verl.workers.utils.padding import no_padding_2_padding

        made = []

        def loss(model_output, data, dp_group):
            names = ("log_probs", "entropy")
            made.append([no_padding_2_padding(model_output[name], data) for name in names])
            return made[-1][0].sum(), {}

        for batch in batches:
            self.engine.forward_step(batch, loss, forward_only=False)
        return [torch.cat(values) for values in zip(*made, strict=True)]


def data_with_sets(sets):
    """A batch of 4 as the trainer has it, with prompts padded on the left."""
    from verl import DataProto

    g = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor([3, 1, 2, 3]), torch.tensor([8, 3, 6, 1])
    data = DataProto.from_dict(
        tensors=padded(prompts, responses, V, g), meta_info=dict(temperature=0.8)
    )
    made = sets(data.batch["responses"], responses)
    if made is not None:  # as an agent loop's extra_fields
        column = np.empty(B, dtype=object)
        column[:] = made
        data.non_tensor_batch["sampling_mask"] = column
    return data


def drawn_sets(responses, lengths):
    """Sets of every size with the label in them; none for some tokens and for one sequence."""
    made = []
    for ids, length in zip(responses.tolist(), lengths.tolist(), strict=True):
        of_others = [[j for j in range(1, 4 * t, 3) if j != label] for t, label in enumerate(ids)]
        sets = [[*others, label] for others, label in zip(of_others, ids, strict=True)]
        made.append(sets[:length])
    made[0][2] = []
    made[2] = None
    return made


def micro_batches(data, packed=True, **options):
    from verl.workers.utils.padding import left_right_2_no_padding

    for part in data.chunk(2):  # the ranks
        of_rank = left_right_2_no_padding(part.to_tensordict())
        options = dict(use_fused_kernels=True, calculate_entropy=True) | options
        tu.assign_non_tensor(of_rank, use_remove_padding=packed, **options)
        yield from (
            (tu.index_select_tensor_dict(of_rank, [i]) for i in (0, 1)) if packed else [of_rank]
        )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_sampling_masks_of_a_batch(monkeypatch, packed, given):
    """From a DataProto through ranks and micro-batches to log-probs and gradients over the sets."""
    engine = Engine(monkeypatch)
    data = data_with_sets(drawn_sets if given else lambda *_: None)
    got, entropy = engine.log_probs(micro_batches(data, packed))
    allowed = torch.ones(B, R, V, dtype=torch.bool)
    for i, sets in enumerate(data.non_tensor_batch.get("sampling_mask", [])):
        for t, ids in enumerate(sets or []):
            if ids:
                allowed[i, t] = False
                allowed[i, t, ids] = True
    batch = data.batch
    whole = dict(attention_mask=batch["attention_mask"], position_ids=batch["position_ids"])
    logits = engine.dense(input_ids=batch["input_ids"], **whole).logits[:, P - 1 : -1] / 0.8
    log_p = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    mask = batch["response_mask"].bool()
    expected = log_p.gather(-1, batch["responses"][..., None]).squeeze(-1)
    H = -(log_p.exp() * log_p.masked_fill(~allowed, 0.0)).sum(-1)
    torch.testing.assert_close(got[mask], expected[mask], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[mask], H[mask], rtol=1e-5, atol=1e-5)
    expected[mask].sin().sum().backward()
    got[mask].sin().sum().backward()
    for mine, theirs in zip(engine.model.parameters(), engine.dense.parameters(), strict=True):
        atol = 1e-5 * float(theirs.grad.abs().max())
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=atol)


def test_sampling_masks_that_would_be_ignored_are_refused(monkeypatch):
    """A batch with sets, and a forward that does not use them."""
    (first, *_) = micro_batches(data_with_sets(drawn_sets))
    loss = lambda **_: (torch.ones(()), {})  # noqa: E731
    with pytest.raises(ValueError, match="sampling_mask must be absent with sequence parallelism"):
        Engine(monkeypatch, use_ulysses_sp=True).engine.forward_step(first, loss, False)
    plain = dict(use_fused_kernels=False, calculate_entropy=False)
    (first, *_) = micro_batches(data_with_sets(drawn_sets), **plain)
    engine = Engine(monkeypatch)
    del type(engine.model).forward
    with pytest.raises(ValueError, match="sampling_mask must be absent unless use_fused_kernels"):
        engine.engine.forward_step(first, loss, False)
    short = data_with_sets(lambda *given: [sets and sets[:-1] for sets in drawn_sets(*given)])
    with pytest.raises(ValueError, match=r"sampling_mask\[0\] must have a set for each of the 8"):
        Engine(monkeypatch).log_probs(micro_batches(short))


def test_example(capsys):
    path = Path(__file__).parents[2] / "examples/verl_bapo.py"
    example = runpy.run_path(str(path), run_name="example")
    example["main"](preset="recipe", staleness=0.3)
    lines = capsys.readouterr().out.splitlines()
    assert any("bapo_clip_low" in line for line in lines)
    assert any("gradient norm" in line for line in lines)
