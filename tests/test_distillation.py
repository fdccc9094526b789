"""The recipes of docs/distillation.md, as a reader copies them, against the whole vocabulary."""

import math
from functools import partial

import pytest
import recipes
import torch
from accuracy import assert_as_reference, assert_same
from helpers import EPS, needs_native
from recipes import gradients, run

from bapo_kernels import log_probs, reference
from bapo_kernels.distillation import jsd, kl, masked, renormalised, with_tail
from bapo_kernels.tools.budget import largest

pytestmark = [needs_native, pytest.mark.skipif(not recipes.BLOCKS, reason="the page is absent")]

N, V, H, K = 8, 53, 16, 5
ALL = partial(masked, ids=torch.arange(K).expand(N, K))


def case():
    """Names of the page: the first token has no ids, and the second has fewer."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g) / 2, torch.randn(V, H, generator=g)
    names = dict(hidden=hidden, weight=weight, teacher_weight=weight.roll(1, 1) / 3 + weight)
    names["teacher_hidden"] = hidden + torch.randn(N, H, generator=g) / 8
    logits = names["teacher_hidden"] @ names["teacher_weight"].T
    names["teacher"], names["ids"] = logits.log_softmax(-1).topk(K)
    names["ids"][0], names["ids"][1, 2:] = -100, -100
    return names


def distributions(names, kind=torch.float64):
    """Student and teacher over the vocabulary in this dtype, and the leaves."""
    cast = {name: x.to(kind, copy=True) for name, x in names.items() if name != "ids"}
    q = cast["hidden"].requires_grad_() @ cast["weight"].requires_grad_().T
    return q.softmax(-1), (cast["teacher_hidden"] @ cast["teacher_weight"].T).softmax(-1), cast


def inside(ids):
    return (ids[..., None] == torch.arange(V)).any(-2)


def divergence(q, p, ids, support, beta):
    """From probabilities: of the entries of S, and of one for all others."""
    given = torch.nn.functional.pad(inside(ids), (0, 1), value=support == "tail")
    entries = []
    for x in (q, p):
        left, x = (x * ~inside(ids)).sum(-1, keepdim=True), x * inside(ids)
        if support == "renormalised":
            x = x / x.sum(-1, keepdim=True).clamp(min=1e-15)
        entries.append(torch.where(given, torch.cat([x, left], -1), 1.0))
    q, p = entries
    m = beta * p + (1 - beta) * q  # with beta 0 or 1 one of the two terms vanishes
    terms = (beta or 1) * p * (p / m).log() + (1 - beta or 1) * q * (q / m).log()
    return (terms + (p - q if support == "generalised" else 0.0)).sum(-1)


def roundings(names, ids):
    """Of log-probs and of the mass that they leave, which is the smaller."""
    q, p, _ = distributions(names)
    left = min((x * ~inside(ids)).sum(-1).min().item() for x in (p, q))
    return (K + largest(q.log()) + largest(p.log())) / left


def assert_exact(names, made, value, truth):
    def expected(kind):
        q, p, leaves = distributions(names, kind)
        loss = truth(q, p, leaves)
        return [loss.detach(), *gradients(leaves, loss)]

    got = [value.detach(), *gradients(made, value)]
    assert_as_reference(got, expected, roundings=roundings(names, made["ids"]))


CASES = {
    "forward": ("FORWARD", "loss", "tail", 0),
    "plain": ("FORWARD", "kl(teacher, student)", "", 0),
    "renormalised": ("FORWARD", "kl(*map(renormalised, (teacher, student)))", "renormalised", 0),
    "reverse": ("REVERSE", "loss", "tail", 1),
    "generalised": ("REVERSE", "generalised", "generalised", 1),
    "jsd": ("FORWARD", "jsd(with_tail(student), with_tail(teacher), 0.5)", "tail", 0.5),
    "jsd 0.1": ("FORWARD", "jsd(*map(renormalised, (student, teacher)), 0.1)", "renormalised", 0.1),
}


@pytest.mark.parametrize(("source", "code", "support", "beta"), CASES.values(), ids=CASES)
def test_divergences(source, code, support, beta):
    names = case()
    made = run(names, getattr(recipes, source))
    assert beta < 1 or torch.equal(made["ids"], distributions(names)[0].topk(2).indices)
    truth = lambda q, p, _: divergence(q, p, made["ids"], support, beta)  # noqa: E731
    assert_exact(names, made, eval(code, made), truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entries", [ALL, with_tail, renormalised, torch.clone])
def test_teachers_in_half_precision(entries, dtype):
    """As they are stored, with the losses of their values in float32."""
    student, stored = entries(-torch.rand(N, K)), case()["teacher"].to(dtype)
    for loss in (kl, partial(jsd, beta=0.3)):
        values = [loss(entries(x), student) for x in (stored, stored.float())]
        assert_same(*values)


@pytest.mark.parametrize(("code", "of_set", "of_others"), recipes.TABLE)
def test_table_of_gradients(code, of_set, of_others):
    names = {name: x[1:] if len(x) == N else x for name, x in case().items()}  # where P is not 0
    logits, ids = (names["hidden"] @ names["weight"].T).requires_grad_(), names["ids"]
    made = run(names) | dict(student=log_probs(logits, ids)[0])
    made |= {x: made["masked"](made[x], ids) for x in ("student", "teacher")}

    def expected(kind):
        q, p, _ = distributions(names, kind)
        Q, P = ((x * inside(ids)).sum(-1, keepdim=True) for x in (q, p))
        formulas = (eval(formula, dict(q_j=q, p_j=p, Q=Q, P=P)) for formula in (of_set, of_others))
        return torch.where(inside(ids), *formulas).detach()

    got = torch.autograd.grad(eval(code, made).sum(), logits, retain_graph=True)
    assert_as_reference(got[0], expected, roundings=roundings(names, ids))
    of_one = eval(code, made | {x: made[x][:, :1] for x in ("student", "teacher")})
    assert torch.autograd.grad(of_one.sum(), logits)[0].any() == (of_others != "0")


def test_expected_gradients():
    """Over the sampled token: of two recipes that of the reverse KL, of two mistakes none."""
    q, p, _ = distributions(names := case())
    q, gap = q.detach().flatten(), (q / p).log().detach().flatten()
    rows = {name: x.repeat_interleave(V, 0) for name, x in names.items() if len(x) == N}
    rows |= dict(
        labels=torch.arange(V).repeat(N), response_mask=torch.ones(N * V), old_log_probs=q.log()
    )
    # An advantage times its probability and the number of rows: their mean is the expectation.
    rows["teacher_log_probs"] = q.log() - N * V * q * gap
    made, of_policy = run(names | rows, recipes.SAMPLED), run(names | rows, recipes.POLICY)
    logp, _ = log_probs(made["hidden"] @ made["weight"].T, rows["labels"])
    detached = made["kl"](made["student"], made["teacher"]).detach()
    losses = dict(sampled=made["loss"], detached=detached * logp, k1=logp + gap - logp.detach())
    found = {name: gradients(made, loss * q) for name, loss in losses.items()}
    found["policy"] = gradients(of_policy, of_policy["out"].loss)
    # The size of the terms, and the roundings of a log-prob and of a sum.
    size = 2 * ((1 + gap.abs() + detached.abs()) * q).sum().item()
    size *= largest(q.log()) + largest(gap) + math.log2(N * V)
    operands = tuple(size * largest(names[name]) for name in ("weight", "hidden"))

    def expected(is_zero, kind):
        q, p, leaves = distributions(names, kind)
        return gradients(leaves, q * (q / p).log() * (not is_zero))

    for name, (of_rows, of_weight) in found.items():
        truth = partial(expected, name in ("detached", "k1"))
        assert_as_reference((of_rows.view(N, V, H).sum(1), of_weight), truth, operand=operands)


def test_with_reinforcement_learning():
    names, labels, mask = case(), torch.arange(N), torch.ones(N)
    labels[3:5], mask[5] = names["ids"][3:5, 0], 0.0  # two that are in S
    old = log_probs(names["hidden"] @ names["weight"].T, labels)[0] + torch.randn(N) / 3
    batch = dict(old_log_probs=old, advantages=torch.randn(N), response_mask=mask)
    made = run(names | batch | dict(labels=labels), recipes.WITH_RL)

    def truth(q, p, leaves):
        kl = (divergence(q, p, names["ids"], "tail", 0) * mask).sum() / mask.sum()
        logits = leaves["hidden"] @ leaves["weight"].T
        return reference.bapo_loss(logits, labels, *batch.values()).loss + 0.1 * kl

    assert_exact(names, made, made["loss"], truth)


@pytest.mark.parametrize("entries", [with_tail, renormalised, torch.clone])
def test_nothing_outside_of_s(entries):
    """Nor at some entries: losses and gradients are finite."""
    logits = torch.full((2, V), -200.0)
    logits[:, [3, 7]], logits[:, 9] = 0.0, -torch.inf  # the last is forbidden
    ids, logits = torch.tensor([[3, 7, 9, -100], [-100] * 4]), logits.requires_grad_()
    teacher = torch.tensor([-0.1, -2.352168, -torch.inf, 0.0]).expand(2, 4)
    s, t = (entries(masked(x, ids)) for x in (log_probs(logits, ids)[0], teacher))
    for loss in (kl(t, s), kl(s, t), jsd(s, t, 0.3)):
        assert loss[1].abs() <= 2 * EPS[torch.float32]
        (gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
        assert torch.cat([loss, gradient.flatten()]).isfinite().all()
