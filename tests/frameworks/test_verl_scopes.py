"""The scopes of the search in verl's own engine, on two ranks, against plain PyTorch."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_within_budget, needs_native
from parity import assert_trained

pytest.importorskip("verl")

import verl_engine
from omegaconf import OmegaConf
from test_verl import actor, batch
from verl.utils import device
from verl_engine import LR, B, rollout, tiny_model

from bapo_kernels import BAPOConfig, reference
from bapo_kernels.integrations import verl
from bapo_kernels.integrations.verl import BAPOPolicyLossConfig, compute_policy_loss_bapo
from bapo_kernels.tools.budget import in_some_orders, largest

pytestmark = [needs_native, pytest.mark.xdist_group("world")]
SEARCH = dict(target=0.55, token_weight="uniform")
EPOCHS = 2
DECISION = ("bapo_pos_share", "bapo_pos_share_start", "bapo_saturated")


def plain_training(scope, dtype):
    """Bounds and metrics of each optimizer step, and the parameters after them."""
    whole, model, config = rollout(), tiny_model().to(dtype), BAPOConfig(**SEARCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    made, decided = [], dict(bounds=torch.tensor([0.6, 1.2]).tolist(), metrics={})
    for first in (0, 2) * EPOCHS:
        rows = torch.tensor([first, first + 1, B // 2 + first, B // 2 + first + 1])
        part = {name: values[rows] for name, values in whole.items()}
        logp = verl_engine.log_probs(model, part)
        tokens = logp, *(part[n] for n in ("old_log_probs", "advantages", "response_mask"))
        found = reference.bapo_loss_from_log_probs(*tokens, config=config)
        found = dict(bounds=[float(b) for b in found.bounds], metrics=found.metrics)
        used, decided = found if scope == "step" else decided, found
        made.append(used)
        out = reference.bapo_loss_from_log_probs(*tokens, config=config, bounds=used["bounds"])
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return made, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_training(worlds, tmp_path, scope):
    """Two epochs of two mini-batches, each of two micro-batches a rank."""
    loss = dict(scope=scope, **SEARCH)
    results = worlds(2).run(verl_engine.train, str(tmp_path), loss, EPOCHS)
    steps, parameters = plain_training(scope, torch.float64)
    # Over the steps, errors of 2e-6 to 3e-5 grow in the reference, by the order of its sums.
    same = in_some_orders(lambda: plain_training(scope, torch.float32), others=8)
    assert len({tuple(step["bounds"]) for step in steps}) > 2, "the decisions must differ"
    before, size = dict(tiny_model().named_parameters()), largest(rollout()["old_log_probs"])
    for logged, full in results:
        for n, (metrics, step) in enumerate(zip(logged, steps, strict=True)):
            bounds = metrics["actor/bapo_clip_low"], metrics["actor/bapo_clip_high"]
            assert [*bounds] == step["bounds"]
            for name in DECISION if step["metrics"] else ():
                got = torch.tensor(metrics[f"actor/{name}"], dtype=torch.float32)
                others = [made[n]["metrics"][name] for made, _ in same]
                # The steps before have their roundings, too.
                exact, operand = step["metrics"][name].double(), len(steps) * size
                assert_within_budget(name, got, others, exact, operand)
            assert all(value == value for value in metrics.values()), "no NaN"
        theirs = [parameters for _, parameters in same]
        assert_trained(full, theirs, parameters, before, len(steps), size)
    decided = [{k: v for k, v in of[-1].items() if "bapo" in k} for of, _ in results]
    assert len(decided[0]) == 7
    assert decided[0] == decided[1], "it is made by both ranks"


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(device, "get_device_name", lambda: "cpu")


def engine_of(loss):
    """An engine of verl that is not FSDP's, whose micro-batch is the log-probs of a test.

    With ``fails`` a step raises after its first loss.
    """
    from verl.workers.engine.base import BaseEngine

    function = partial(compute_policy_loss_bapo, config=actor(loss))

    class Engine(BaseEngine):
        fails = False
        modes = ()  # of the module and the generator in each call

        def __init__(self):
            self.module = torch.nn.Dropout()

        def get_data_parallel_group(self):
            return None

        optimizer_zero_grad = optimizer_step = get_data_parallel_group

        def is_mp_src_rank_with_outputs(self):
            return False

        def forward_backward_batch(self, data, loss_function, forward_only=False):
            self.modes += ((self.module.training, torch.get_rng_state().tolist()),)
            self.module(torch.ones(3))
            outputs = loss_function(**data)
            if self.fails:
                raise RuntimeError("out of memory")
            return outputs

        def step(self, seed=0):
            return self.train_batch(batch(seed), function)

    return Engine()


def test_engines_have_searches_of_their_own():
    """Two actors in a process; a loss without a scope, and one of a critic, are left alone."""
    loss = BAPOPolicyLossConfig(scope="lagged", **SEARCH)
    first, second = engine_of(loss), engine_of(loss)
    first.step(), first.step()
    assert second.step()[1]["actor/bapo_clip_high"] == torch.tensor(1.2).item()
    assert first.step()[1]["actor/bapo_clip_high"] > 1.2
    assert len(first.modes) == 3, "no forward but those of the losses"
    loss = BAPOPolicyLossConfig(**SEARCH)
    plain = engine_of(loss)
    assert plain.step()[1] == compute_policy_loss_bapo(**batch(), config=actor(loss))[1]
    critic = lambda **data: (torch.ones(()), {})  # noqa: E731
    assert plain.train_batch(batch(), critic)[1] == {}


@pytest.fixture
def any_engine_is_fsdp(monkeypatch):
    """Lets the scope ``step`` run on the engine of :func:`engine_of`."""
    monkeypatch.setattr(verl, "_check_engine", lambda engine, scope: None)


@pytest.mark.usefixtures("any_engine_is_fsdp")
@pytest.mark.parametrize("first_fails", [True, False])
@pytest.mark.parametrize("scope", ["step", "lagged"])
def test_a_failed_step_leaves_nothing_behind(scope, first_fails):
    """Neither a step to be in, nor tokens for a later decision, nor bounds without metrics."""
    loss = BAPOPolicyLossConfig(scope=scope, **SEARCH)
    failed, clean = engine_of(loss), engine_of(loss)
    if not first_fails:
        assert failed.step() == clean.step()
    failed.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.step(1)
    failed.fails = False
    with pytest.raises(ValueError, match="scope must be 'call' outside of the optimizer step"):
        compute_policy_loss_bapo(**batch(), config=actor(loss))
    for seed in (2, 3):
        got, expected = failed.step(seed), clean.step(seed)
        assert got == expected
        assert all(value == value for value in got[1].values()), "no NaN"


@pytest.mark.usefixtures("any_engine_is_fsdp")
@pytest.mark.parametrize("training", [True, False])
def test_the_extra_forward_is_in_eval_mode(training):
    engine = engine_of(BAPOPolicyLossConfig(scope="step", **SEARCH))
    engine.module.train(training)
    engine.step()
    (extra, before), (trains, after) = engine.modes
    assert (extra, trains) == (False, training)
    assert before == after, "dropout must not have drawn"
    engine.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert engine.module.training is training


REFUSED = [
    (BAPOPolicyLossConfig(scope="step"), False, "'call' or 'lagged' with Engine, got 'step'"),
    (BAPOPolicyLossConfig(scope="lagged"), True, "'call' with dynamic_context_parallel=True"),
    # not of our class: nothing opens its steps
    (OmegaConf.create(dict(scope="lagged")), False, "'call' outside of the optimizer step"),
]


@pytest.mark.parametrize(("loss", "splits", "message"), REFUSED)
def test_scopes_that_an_engine_does_not_have_are_refused(loss, splits, message):
    engine = engine_of(loss)
    engine.engine_config = SimpleNamespace(dynamic_context_parallel=splits)
    with pytest.raises(ValueError, match=f"scope must be {message}"):
        engine.step()
