"""docs/distillation.md, and what plugs into TRL and verl, against their losses.

All have to agree with the same loss of PyTorch's log-softmax in float64.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accuracy import assert_as_reference
from helpers import needs_native
from recipes import gradients, plain, plug_in, run

from bapo_kernels import linear_log_probs
from bapo_kernels.distillation import jsd, kl, masked, renormalised, with_tail
from bapo_kernels.tools.budget import largest

pytestmark = needs_native

N, V, H, K = 7, 40, 12, 4
TRANSFORM = dict(temperature=0.7, logit_scale=1.25, final_logit_softcapping=6.0)
TRL = "trl.experimental.async_distillation.async_distillation_trainer"


def case(k):
    g = torch.Generator().manual_seed(0)
    names = dict(hidden=torch.randn(N, H, generator=g), weight=torch.randn(V, H, generator=g) / 2)
    names["teacher_hidden"] = names["hidden"] + torch.randn(N, H, generator=g) / 4
    full = (names["teacher_hidden"] @ names["weight"].T).log_softmax(-1)
    names["teacher"], names["ids"] = full.topk(k) if k < V else (full, torch.arange(V).expand(N, V))
    return names


def recipe(log_probs, names, beta, entries, transform):
    """Sums over tokens of the loss and of both entropies, and the gradients of the loss."""
    made = run(names)
    student, entropy = log_probs(made["hidden"], made["weight"], made["ids"], **transform)
    s, t = (entries(masked(x, made["ids"])) for x in (student, made["teacher"]))
    loss = jsd(s, t, beta) if 0 < beta < 1 else kl(s, t) if beta else kl(t, s)
    sums = [x.detach().sum() for x in (loss, entropy, -kl(t, torch.zeros_like(t)))]
    return sums + gradients(made, loss)


def assert_parity(names, theirs, beta, entries=torch.clone, **transform):
    """Of what each of theirs, or ``None`` for ours, found of the same, where it has it."""

    def expected(kind, log_probs=plain):
        cast = {name: x if name == "ids" else x.to(kind) for name, x in names.items()}
        return recipe(log_probs, cast, beta, entries, transform)

    # Of log-probs, and of the mass that they leave, in sums over tokens.
    left = 1 - names["teacher"].exp().sum(-1).max().item() if entries is with_tail else 1.0
    size = max(map(largest, plain(names["hidden"], names["weight"], names["ids"], **transform)))
    mine = expected(torch.float32, linear_log_probs)
    for found in (mine, *theirs):
        got = [x if y is None else y for x, y in zip(mine, found, strict=True)]
        assert_as_reference(got, expected, roundings=N * (K + 2 * size) / left)


@pytest.mark.parametrize("entries", [with_tail, renormalised])
@pytest.mark.parametrize("beta", [0, 0.25, 1])
def test_trl_of_k_ids(monkeypatch, beta, entries):
    names, found, (temperature, *transform) = case(K), [], TRANSFORM.values()
    names["ids"][2, 3:], names["ids"][5, 1:] = -100, -100
    given = names["ids"] >= 0
    teacher = names["ids"].where(given, -1), names["teacher"].where(given, -math.inf), given
    options = beta, temperature, entries is with_tail, None, 1, 3
    for loss in plug_in(monkeypatch, "trl.md", pytest.importorskip(TRL), "_chunked_jsd_loss"):
        made = run(names)
        head = made["hidden"], made["weight"], None, *transform
        value, *logged, each = loss(*head, *teacher, *options)
        assert each.tolist() == [0.0] * 3
        found.append([*logged, *gradients(made, value)])
    assert_parity(names, found, beta, entries, **TRANSFORM)


@pytest.mark.parametrize("beta", [0, 0.25, 1])
def test_trl_and_liger_over_the_vocabulary(beta):
    """With all ids, of teachers with hidden states."""
    trl_loss = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    liger = pytest.importorskip("liger_kernel.transformers").LigerFusedLinearJSD(float(beta))
    names = case(V)
    made, ligers, teacher = run(names), run(names), (names["teacher_hidden"], names["weight"])
    value, entropy = trl_loss.apply(made["hidden"], made["weight"], None, *teacher, None, beta)
    found = [[value.detach().sum(), entropy.sum(), None, *gradients(made, value)]]
    value = N * liger(ligers["hidden"], ligers["weight"], *teacher, None)
    found.append([value.detach(), None, None, *gradients(ligers, value)])
    assert_parity(names, found, beta)


def test_verl(monkeypatch):
    losses = pytest.importorskip("verl.trainer.distillation.fsdp.losses")
    names, found, nested = case(K), [], partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    teacher = nested([names["teacher"]]), nested([names["ids"]])
    theirs, ours = plug_in(monkeypatch, "verl.md", losses, "_chunked_topk_log_probs")
    for chunked, function in ((False, None), (True, theirs), (True, ours)):
        monkeypatch.setattr(losses, "_chunked_topk_log_probs", function)
        options = SimpleNamespace(log_prob_min_clamp=None, use_chunked_topk=chunked)
        made, config = run(names), SimpleNamespace(distillation_loss=options)
        logits = (made["hidden"] @ made["weight"].T)[None]
        out = losses.compute_forward_kl_topk(logits, *teacher, config, "thd")
        value = out["distillation_losses"].sum()
        found.append([value.detach(), None, None, *gradients(made, value)])
    assert_parity(names, found, 0)
