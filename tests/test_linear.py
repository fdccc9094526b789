"""Losses and log-probs of hidden states against the float64 reference, gradient by gradient."""

import math

import pytest
import torch
from helpers import (
    EPS,
    Case,
    assert_within_budget,
    make_case,
    needs_native,
    per_token,
    transform_of,
    unmasked_tokens,
)

from bapo_kernels import (
    BAPOConfig,
    BAPOLinearLoss,
    bapo_linear_loss,
    linear_log_probs,
    reference,
)
from bapo_kernels.core import gemm
from bapo_kernels.core.head import Head, HeadGradients
from bapo_kernels.core.hidden import Compaction

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, S, H, V = 3, 7, 24, 193


@pytest.fixture(autouse=True)
def chunks_as_asked_for(monkeypatch):
    """Also where one would take less memory, because the sum of several does."""
    monkeypatch.setattr("bapo_kernels.core.head.SUM_BYTES", 0)


CONFIGS = {
    "paper": {},
    "recipe": dict(preset="recipe"),
    "far": dict(target=0.9),
    "entropy": dict(entropy_coef=0.01),
    "kl": dict(kl_loss_coef=0.1),
    "k1": dict(kl_loss_coef=0.1, kl_loss_type="k1", loss_agg_mode="token-sum"),
    "k2": dict(kl_loss_coef=0.1, kl_loss_type="k2", loss_agg_mode="seq-mean-token-sum-norm"),
    "softcap": dict(final_logit_softcapping=8.0, logit_scale=0.7, temperature=0.9),
    "sequences": dict(loss_agg_mode="seq-mean-token-mean", clip_ratio_c=3.0),
    "cispo": dict(surrogate="cispo", target=0.9),
    "mask": dict(surrogate="mask", target=0.9),
    "ratio of sequences": dict(ratio_level="sequence", kl_loss_coef=0.1, target=0.9),
}


def build(name):
    options = dict(CONFIGS[name])
    preset = getattr(BAPOConfig, options.pop("preset", "paper"))
    return preset(**options)


def problem(dtype, device, config, staleness=0.4, shape=(B, S), seed=0):
    """Hidden states, weight, bias, and the tokens of a stale batch; NaN wherever it is masked."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, H, generator=g).to(dtype)
    weight = (0.6 * torch.randn(V, H, generator=g)).to(dtype)
    bias = torch.randn(V, generator=g).to(dtype)
    case = make_case(shape, V, config=config, seed=seed, ref_log_probs=per_token(shape))
    logp, _ = reference.linear_log_probs(
        hidden.double(), weight.double(), case.labels, bias=bias.double(), **transform_of(config)
    )
    unmasked = unmasked_tokens(case)
    noise = staleness * torch.randn(shape, generator=g)
    case.old_log_probs = torch.where(unmasked, logp + noise, torch.nan).float()
    hidden[~unmasked] = torch.nan
    tokens = [t.to(device) for t in case.arguments()]
    options = {"config": config, "ref_log_probs": case.options["ref_log_probs"].to(device)}
    return [t.to(device) for t in (hidden, weight, bias)], Case(None, *tokens, options)


def run(function, parameters, case, kind=None, frozen=False, **options):
    leaves = [p.detach().to(kind or p.dtype).clone() for p in parameters]
    for leaf in leaves[: 1 if frozen else 3]:
        leaf.requires_grad_()
    hidden = leaves[0]
    if function is reference.bapo_linear_loss:  # 0*NaN of a masked row would reach the weight
        hidden = torch.where(unmasked_tokens(case)[..., None], hidden, 0.0)
    out = function(hidden, leaves[1], *case.arguments(), bias=leaves[2], **(case.options | options))
    out.loss.backward()
    return out, [leaf.grad for leaf in leaves]


def check(
    parameters,
    case,
    backend,
    statistics="all",
    linear_loss=bapo_linear_loss,
    frozen=False,
    logits_dtype=None,
    **options,
):
    got, same, truth = (
        run(function, parameters, case, kind, frozen, statistics=statistics, **extra)
        for function, kind, extra in (
            (linear_loss, None, {"backend": backend, "logits_dtype": logits_dtype, **options}),
            (reference.bapo_linear_loss, None, {"logits_dtype": logits_dtype}),
            (reference.bapo_linear_loss, torch.float64, {}),
        )
    )
    size = truth[0].log_probs.nan_to_num().abs().max().item()
    named = zip(("hidden", "weight", "bias"), got[1], same[1], truth[1], strict=True)
    for name, *gradients in named:
        if frozen and name != "hidden":
            assert gradients[0] is None
            continue
        assert gradients[0].dtype == parameters[0].dtype
        # r inherits the rounding of the log-prob, as in check_against_reference.
        inherited = EPS[torch.float32] * size * gradients[2].abs().max().item()
        assert_within_budget(f"gradient of {name}", *gradients, inherited=inherited)
    for a, b in zip(got[0].bounds, truth[0].bounds, strict=True):
        assert a.item() == b.item()
    parts = [r[0].log_probs for r in (got, same, truth)]
    assert_within_budget("log_probs", *parts, inherited=2.0**-22 * size)  # sums of 24 products
    if parameters[0].dtype == torch.float32:
        for name in ("loss", "entropy"):
            values = (getattr(r[0], name).double() for r in (got, truth))
            torch.testing.assert_close(*values, rtol=2e-5, atol=1e-6, equal_nan=True)
        assert got[0].metrics.keys() == truth[0].metrics.keys()
        for name, value in truth[0].metrics.items():
            torch.testing.assert_close(
                got[0].metrics[name].double(), value.double(), rtol=2e-5, atol=1e-6
            )
    return got


# The kernels and the reference in their dtype round the logits; the float64 truth does not.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("name", CONFIGS)
def test_options(backend, device, dtype, statistics, name):
    parameters, case = problem(dtype, device, build(name), staleness=0.0)
    case.old_log_probs = None
    check(parameters, case, backend, statistics, chunk_tokens=5)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 21, None])
@pytest.mark.parametrize("name", ["far", "recipe", "cispo", "ratio of sequences"])
def test_stale_batches_in_chunks(backend, device, name, chunk_tokens):
    """Skipped, idle, decided and undecided rows in one batch, in chunks of any size."""
    parameters, case = problem(torch.float32, device, build(name))
    got = check(parameters, case, backend, chunk_tokens=chunk_tokens)
    assert got[0].bounds.upper > 1.2 or got[0].bounds.lower > 0.6, "the case must need a search"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "frozen"),
    [("far", False), ("entropy", False), ("kl", True), ("ratio of sequences", False)],
)
def test_compiled(backend, device, name, frozen):
    """One graph for any number of tokens; its gradient is computed in backward."""
    if backend == "triton" and name in ("far", "kl"):
        pytest.skip("the graph is that of the CPU but for the names of the operators")
    torch._dynamo.reset()
    compiled = torch.compile(bapo_linear_loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for S_ in (S, S + 4):
        parameters, case = problem(torch.float32, device, build(name), shape=(B, S_), seed=S_)
        with torch._dynamo.config.patch(error_on_recompile=S_ != S):
            check(parameters, case, backend, linear_loss=compiled, frozen=frozen, chunk_tokens=9)


def test_packed_with_weights(backend, device):
    config = BAPOConfig.recipe(loss_agg_mode="seq-mean-token-mean")
    parameters, case = problem(torch.float32, device, config, shape=(20,))
    case.options |= dict(
        cu_seqlens=torch.tensor([0, 5, 5, 12, 20], device=device),
        rollout_is_weights=per_token((20,), low=0.2, high=2.0).to(device),
        rollout_log_probs=per_token((20,), seed=3).to(device),
        global_batch_size=7,
    )
    case.options["ref_log_probs"] = None
    case.advantages = torch.tensor([0.5, 2.0, -1.0, 0.7], device=device)
    check(parameters, case, backend, chunk_tokens=6)


@pytest.mark.parametrize(("chunk_tokens", "chunks"), [(None, 1), (4, 4)])
def test_last_chunk_is_not_recomputed(monkeypatch, chunk_tokens, chunks):
    """It stays in memory until the bounds are known; then others are recomputed in its place."""
    parameters, case = problem(torch.float32, "cpu", build("far"))
    made = []

    def logits(self, rows, memory, original=Head.logits):
        h, of_rows = original(self, rows, memory)
        made.append((rows.numel(), of_rows.untyped_storage().data_ptr()))
        return h, of_rows

    monkeypatch.setattr(Head, "logits", logits)
    run(bapo_linear_loss, parameters, case, chunk_tokens=chunk_tokens)
    recomputed = 0 if chunk_tokens is None else 1
    assert len(made) == chunks + recomputed
    assert len({place for _, place in made}) == 1
    sizes = [rows for rows, _ in made[:chunks]]
    assert max(sizes) - min(sizes) < chunks, "the chunks are equal but for the last"


def test_rows_per_chunk(monkeypatch):
    """The fewest equal chunks; one, where a sum of several would take more memory than it."""

    def rows(count, asked=None, H=64, dtype=torch.bfloat16, sums_weight=True, logits_dtype=None):
        weight = torch.empty(2**17, H, dtype=dtype, device="meta")
        head = Head.of(weight[:1], weight, None, dtype, None, logits_dtype)
        return head.rows_per_chunk(count, asked, sums_weight)

    assert [rows(n, asked=5) for n in (0, 1, 5, 6, 11, 15, 16)] == [1, 1, 5, 3, 4, 5, 4]
    monkeypatch.setattr("bapo_kernels.core.head.SUM_BYTES", 4)
    assert [rows(n, asked=5) for n in (0, 6, 128, 129)] == [1, 6, 128, 5]
    assert rows(129, asked=5, sums_weight=False) == rows(129, asked=5, dtype=torch.float32) == 5
    assert rows(4096) == 4096  # 1 GiB
    assert rows(4097) == 2049
    assert rows(4097, dtype=torch.float32) == 1366
    assert rows(4096, logits_dtype=torch.float32) == 1024  # and their gradient in bfloat16
    assert rows(8192, H=4096) == 8192
    assert rows(8193, H=4096) == 2731
    assert rows(8192, H=4096, sums_weight=False) == 4096
    assert rows(2730, H=4096, logits_dtype=torch.float32) == 2730
    assert rows(2731, H=4096, logits_dtype=torch.float32) == 911
    weight = torch.empty(2**17, 64, device="meta")
    head = Head.of(weight[:1], weight, None, torch.bfloat16)  # autocast: the sum is the gradient
    assert head.rows_per_chunk(6, 5, sums_weight=True) == 3


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_rows_that_stay_are_moved_to_the_front(share):
    """In their memory, and none that is there already."""
    torch.manual_seed(0)
    for n in (0, 1, 7, 100):
        keep = torch.rand(n) < share
        values = torch.arange(float(n))[:, None].repeat(1, 3)
        front = Compaction.of(keep)
        moved = front.moved(values)
        assert moved.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        assert torch.equal(moved[:, 0], front.rows.float())
        assert torch.equal(front.rows.sort().values, keep.nonzero().squeeze(1))
        stay = keep[: len(front.rows)].nonzero().squeeze(1)
        assert torch.equal(front.rows[stay], stay)
        assert front.fillers.numel() == len(front.rows) - len(stay)


def test_chunk_size_changes_nothing_but_rounding(backend, device):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    results = [
        run(bapo_linear_loss, parameters, case, backend=backend, chunk_tokens=n)
        for n in (1, 5, 100)
    ]
    for out, gradients in results[1:]:
        # Log-probs are about 20.
        torch.testing.assert_close(out.loss, results[0][0].loss, rtol=4e-6, atol=0)
        assert out.bounds == results[0][0].bounds
        for a, b in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_of_many_chunks(dtype):
    """The error must not grow with the number of chunks, as it would for a sum in bfloat16.

    The products are not rounded; those of bfloat16 are, on a CPU, which is within the budget.
    """
    torch.manual_seed(0)
    parameters = torch.randn(400, H).to(dtype), torch.randn(V, H).to(dtype), None
    dlogits = torch.randn(400, V).to(dtype)
    truth = dlogits.double().T @ parameters[0].double()
    gradients = HeadGradients(Head.of(*parameters, dtype), (True, True, False), one_chunk=False)
    naive = torch.zeros(V, H, dtype=dtype)
    for rows in torch.arange(400).split(2):
        gradients.add(rows, parameters[0][rows], dlogits[rows])
        naive += dlogits[rows].T @ parameters[0][rows]
    assert gradients.weight.dtype == torch.float32
    sums = 1e-5 * truth.abs().max().item()
    if dtype != torch.bfloat16:
        assert (gradients.weight - truth).abs().max() <= sums
    dhidden, dweight, _ = gradients.of(*parameters)
    assert dhidden.dtype == dweight.dtype == dtype
    rounded = truth.to(dtype)
    assert_within_budget("gradient of weight", dweight, rounded, truth, inherited=sums)
    if dtype == torch.bfloat16:
        with pytest.raises(AssertionError):
            assert_within_budget("a sum in bfloat16", naive, rounded, truth)


def test_products_that_add_to_float32(monkeypatch):
    """As on a GPU: the first is written, the others are added, in one product each."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, H).bfloat16(), torch.randn(V, H).bfloat16()
    dlogits = torch.randn(30, V).bfloat16()
    calls = []

    def mm(a, b, out_dtype, out):
        calls.append("mm")
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def addmm(total, a, b, out_dtype, out):
        calls.append("addmm")
        assert out is total
        return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(gemm, "adds_in_float32", lambda operand: True)
    gradients = HeadGradients(
        Head.of(hidden, weight, None, torch.bfloat16), (False, True, False), one_chunk=False
    )
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    for rows in torch.arange(30).split(10):
        gradients.add(rows, hidden[rows], dlogits[rows])
    assert calls == ["mm", "addmm", "addmm"]
    truth = dlogits.double().T @ hidden.double()
    assert (gradients.weight - truth).abs().max() <= 1e-6 * truth.abs().max()


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_rows_without_a_gradient_may_hold_anything(backend, device, chunk_tokens):
    """A frozen head makes vectors that are scaled later: 0*NaN is 0 here, as without them."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, H, device=device), torch.randn(V, H, device=device)
    factors = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0], device=device)
    valid, results = torch.arange(9, device=device), []
    labels = torch.where(factors != 0, valid, -1)
    labels[8], bad = V, torch.where(torch.arange(9, device=device)[:, None] == 7, torch.nan, hidden)
    options = dict(backend=backend, chunk_tokens=chunk_tokens)
    for function, x, of, extra in (
        (linear_log_probs, bad, labels, options),
        (reference.linear_log_probs, hidden, valid, {}),
        (reference.linear_log_probs, hidden.double(), valid, {}),
    ):
        leaf = x.clone().requires_grad_()
        logp, _ = function(leaf, weight.to(x.dtype), of, **extra)
        torch.where(factors != 0, factors * logp, 0.0).sum().backward()
        results.append(leaf.grad)
    assert_within_budget("gradient of hidden", *results)


def test_micro_batches_add_up(backend, device):
    config = BAPOConfig.fixed(0.8, 1.2)
    parameters, case = problem(torch.float32, device, config, shape=(4, 5))
    tokens = int(unmasked_tokens(case).sum())
    whole = run(bapo_linear_loss, parameters, case, backend=backend)[1]
    added = [torch.zeros_like(p) for p in parameters]
    for rows in (slice(0, 1), slice(1, 4)):
        part = Case(None, *(t[rows] for t in case.arguments()), case.options)
        part.options = part.options | {"ref_log_probs": case.options["ref_log_probs"][rows]}
        hidden = parameters[0][rows]
        gradients = run(
            bapo_linear_loss,
            [hidden, *parameters[1:]],
            part,
            backend=backend,
            batch_num_tokens=tokens,
        )[1]
        added[0][rows] = gradients[0]
        added[1] += gradients[1]
        added[2] += gradients[2]
    for a, b in zip(added, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("frozen", [0, 1, 2, (0, 1), (1, 2)])
def test_frozen_parameters_have_no_gradient(backend, device, frozen):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    expected = run(bapo_linear_loss, parameters, case, backend=backend)[1]
    leaves = [p.clone().requires_grad_() for p in parameters]
    for i in frozen if isinstance(frozen, tuple) else (frozen,):
        leaves[i].requires_grad_(False)
    bapo_linear_loss(
        leaves[0], leaves[1], *case.arguments(), bias=leaves[2], backend=backend, **case.options
    ).loss.backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is None if not leaf.requires_grad else torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_frozen_head(backend, device, dtype, name):
    """Undecided rows of earlier chunks get the gradient of their log-prob, to be scaled later."""
    parameters, case = problem(dtype, device, build(name), staleness=0.0)
    case.old_log_probs = None
    check(parameters, case, backend, chunk_tokens=5, frozen=True)
    if dtype == torch.float32:
        for statistics in ("all", "live"):
            parameters, case = problem(dtype, device, build(name))
            check(parameters, case, backend, statistics, chunk_tokens=4, frozen=True)


@pytest.mark.parametrize(("name", "recomputed"), [("far", 0), ("kl", 0), ("entropy", 1)])
def test_frozen_head_recomputes_nothing(monkeypatch, name, recomputed):
    parameters, case = problem(torch.float32, "cpu", build(name))
    rows = []

    def logits(self, of, memory, original=Head.logits):
        rows.append(of.numel())
        return original(self, of, memory)

    monkeypatch.setattr(Head, "logits", logits)
    counted = int(unmasked_tokens(case).sum())
    for frozen, more in ((False, 1), (True, recomputed)):
        rows.clear()
        run(bapo_linear_loss, parameters, case, frozen=frozen, chunk_tokens=4)
        assert len(rows) == -(-counted // 4) + more
        assert (sum(rows) > counted) == bool(more)


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(dtype, False) for dtype in DTYPES]
    + [pytest.param(torch.bfloat16, True, marks=[pytest.mark.compile, pytest.mark.slow])],
)
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_of_a_frozen_head(backend, device, dtype, entropy, compiled, monkeypatch):
    """No logits are made again, unless the entropy has a gradient, and in float16."""
    torch._dynamo.reset()
    parameters, case = problem(dtype, device, BAPOConfig())
    factors, T = torch.randn(B, S, device=device), 0.8 + 0.4 * torch.rand(B, S, device=device)
    made = []

    def logits(self, of, memory, original=Head.logits):
        made.append(of.numel())
        return original(self, of, memory)

    monkeypatch.setattr(Head, "logits", logits)
    function = torch.compile(linear_log_probs, fullgraph=True) if compiled else linear_log_probs
    labels, results = torch.where(unmasked_tokens(case), case.labels, -100), []
    for kind, which, options in (
        (None, function, dict(backend=backend, chunk_tokens=4)),
        (None, reference.linear_log_probs, {}),
        (torch.float64, reference.linear_log_probs, {}),
    ):
        hidden, weight, bias = (p.to(kind or dtype).clone() for p in parameters)
        hidden.requires_grad_()
        logp, token_entropy = which(hidden, weight, labels, bias=bias, temperature=T, **options)
        loss = (factors * logp).sum() + (0.3 * (factors * token_entropy).sum() if entropy else 0)
        loss.backward(retain_graph=True)
        results.append(hidden.grad.clone())
        if kind is None:
            loss.backward()
            assert torch.equal(hidden.grad, 2 * results[-1]), "a second backward is the same"
    assert_within_budget("gradient of hidden", *results)
    unmasked = int((labels != -100).sum())
    again = entropy or dtype == torch.float16
    assert sum(made) == unmasked * (3 if again else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["paper", "kl", "entropy", "softcap"])
def test_float32_logits(backend, device, dtype, name):
    parameters, case = problem(dtype, device, build(name), staleness=0.0)
    for chunk_tokens, frozen in ((None, False), (5, False), (5, True)):
        options = dict(chunk_tokens=chunk_tokens, logits_dtype=torch.float32, frozen=frozen)
        check(parameters, case, backend, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_logits_are_not_rounded(backend, device, dtype):
    """The log-probs are those of the same inputs in float64, but for the sum of the products."""
    torch.manual_seed(0)
    weight = (3 * torch.randn(1_000, 256) / 16).to(device, dtype)
    hidden, labels = torch.randn(30, 256).to(device, dtype), torch.arange(30, device=device)
    expected = reference.linear_log_probs(hidden.double(), weight.double(), labels)[0]
    options = dict(backend=backend, chunk_tokens=8)
    errors = [
        (linear_log_probs(hidden, weight, labels, logits_dtype=kind, **options)[0] - expected)
        .abs()
        .max()
        for kind in (torch.float32, None)
    ]
    assert errors[0] <= 2e-6 < 1e-3 < errors[1]


def test_float32_logits_under_autocast(backend, device):
    """The operands have the dtype of autocast, their products are not rounded to it."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(200, 32, device=device), torch.randn(30, 32, device=device)
    bias = 30 * torch.randn(200, device=device)
    labels = torch.arange(30, device=device)
    options = dict(bias=bias, logits_dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        got = linear_log_probs(hidden, weight, labels, backend=backend, **options)[0]
        same = linear_log_probs(hidden, weight, labels, backend="reference", **options)[0]
    operands = hidden.bfloat16().double(), weight.bfloat16().double()
    expected = reference.linear_log_probs(*operands, labels, bias=bias.double())[0]
    for log_probs in (got, same):
        assert (log_probs - expected).abs().max() <= 4e-7 * expected.abs().max()


def test_without_gradient(backend, device):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    expected = run(bapo_linear_loss, parameters, case, backend=backend)[0]
    with torch.no_grad():
        out = bapo_linear_loss(
            *parameters[:2], *case.arguments(), bias=parameters[2], backend=backend, **case.options
        )
    assert not out.loss.requires_grad
    assert torch.equal(out.loss, expected.loss)
    assert out.bounds == expected.bounds


def test_tied_weight_and_no_bias(backend, device):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    embedding = parameters[1].clone().requires_grad_()
    hidden = embedding[case.labels.clamp(min=0)] * 0.5
    out = bapo_linear_loss(hidden, embedding, *case.arguments(), backend=backend, **case.options)
    out.loss.backward()
    true = parameters[1].double().requires_grad_()
    expected = reference.bapo_linear_loss(
        true[case.labels.clamp(min=0)] * 0.5, true, *case.arguments(), **case.options
    )
    expected.loss.backward()
    assert (embedding.grad - true.grad).abs().max() <= 1e-5 * true.grad.abs().max()


@pytest.mark.parametrize("chunk_tokens", [6, None])
def test_autocast(backend, device, chunk_tokens):
    """float32 parameters, bfloat16 GEMMs, gradients in float32."""
    parameters, case = problem(torch.float32, device, BAPOConfig(), staleness=0.0)
    case.old_log_probs = None
    leaves = [p.clone().requires_grad_() for p in parameters]
    with torch.autocast(device, torch.bfloat16):
        out = bapo_linear_loss(
            leaves[0],
            leaves[1],
            *case.arguments(),
            bias=leaves[2],
            backend=backend,
            chunk_tokens=chunk_tokens,
            **case.options,
        )
    out.loss.backward()
    truth = run(reference.bapo_linear_loss, parameters, case, torch.float64)[1]
    for leaf, gradient in zip(leaves, truth, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert (leaf.grad.double() - gradient).norm() <= 2e-2 * gradient.norm()
    if chunk_tokens is not None or device == "cuda":  # one product on a CPU has bfloat16
        assert not torch.equal(leaves[1].grad, leaves[1].grad.bfloat16().float())


def test_all_masked_and_no_tokens(backend, device):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    case.response_mask = torch.zeros_like(case.response_mask)
    out, gradients = run(bapo_linear_loss, parameters, case, backend=backend)
    assert out.loss == 0
    assert not any(g.any() for g in gradients)
    empty = Case(None, *(t[:0] for t in case.arguments()), {"config": BAPOConfig()})
    out, gradients = run(
        bapo_linear_loss, [parameters[0][:0], *parameters[1:]], empty, backend=backend
    )
    assert out.loss == 0
    assert gradients[0].shape == (0, S, H)
    assert not gradients[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("temperature", [0.8, torch.linspace(0.8, 2.0, B * S).view(S, B).T])
def test_linear_log_probs(backend, device, dtype, entropy, temperature):
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(device)
    parameters, case = problem(dtype, device, BAPOConfig())
    unmasked = unmasked_tokens(case)
    labels = torch.where(unmasked, case.labels, -100)
    weights = torch.where(torch.rand(B, S) < 0.4, 0.0, torch.randn(B, S)).to(device)

    def gradients(function, kind=dtype, order=slice(None), **options):
        """``order``: in which the products add up the columns of hidden states and weight."""
        leaves = [p.to(kind).clone().requires_grad_() for p in parameters]
        hidden = torch.where(unmasked[..., None], leaves[0], 0.0)
        logp, token_entropy = function(
            hidden[..., order],
            leaves[1][:, order],
            labels,
            bias=leaves[2],
            temperature=temperature,
            return_entropy=entropy,
            **options,
        )
        loss = (weights * logp).sum()
        if entropy:
            loss = loss + 0.3 * (weights * token_entropy).sum()
        else:
            assert token_entropy is None
        loss.backward()
        return [leaf.grad for leaf in leaves]

    got = gradients(linear_log_probs, backend=backend, chunk_tokens=4)
    truth = gradients(reference.linear_log_probs, torch.float64)
    orders = torch.arange(H), torch.arange(H).flip(0), torch.randperm(H)
    same = [gradients(reference.linear_log_probs, order=order) for order in orders]
    named = zip(("hidden", "weight", "bias"), got, truth, *same, strict=True)
    for name, mine, exact, *theirs in named:
        farthest = max(theirs, key=lambda gradient: (gradient - exact).abs().max())
        assert_within_budget(f"gradient of {name}", mine, farthest, exact)


def test_recomputed_logits_have_statistics_of_their_own(monkeypatch):
    """Products of other rows may round a logit differently, but p has to add up to 1.

    All logits of a row that are made again are higher by 0.01, which changes no softmax.
    """
    parameters, case = problem(torch.float32, "cpu", build("far"))
    labels = torch.where(unmasked_tokens(case), case.labels, -100)
    made = torch.zeros(B * S)

    def logits(self, rows, memory, original=Head.logits):
        h, of_rows = original(self, rows, memory)
        of_rows += made[rows, None]
        made[rows] = 0.01
        return h, of_rows

    def of_log_probs():
        leaves = [p.clone().requires_grad_() for p in parameters]
        logp, entropy = linear_log_probs(*leaves[:2], labels, bias=leaves[2], chunk_tokens=4)
        (logp + 0.3 * entropy).sum().backward()
        return [leaf.grad for leaf in leaves]

    def of_loss():
        return run(bapo_linear_loss, parameters, case, chunk_tokens=4)[1]

    for gradients in of_log_probs, of_loss:
        expected = gradients()
        with monkeypatch.context() as patch:
            patch.setattr(Head, "logits", logits)
            made.zero_()
            got = gradients()
        for mine, true in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("shape", [(), (B,), (B, S)])
def test_temperatures(backend, device, dtype, statistics, shape):
    """Of the rows of every chunk, of those whose logits are recomputed too."""
    parameters, case = problem(dtype, device, build("softcap"), staleness=0.0)
    case.old_log_probs = None
    T = torch.linspace(0.5, 2.0, math.prod(shape), device=device).view(shape)
    if shape == (B, S):
        T = torch.where(unmasked_tokens(case), T, torch.nan)
    case = case.with_options(temperature=T)
    check(parameters, case, backend, statistics, chunk_tokens=5)


def test_temperatures_of_undecided_rows(backend, device):
    """Chunks of any size find the same rows; equal temperatures have the bits of one number."""
    parameters, case = problem(torch.float32, device, BAPOConfig(temperature=0.75))
    options = dict(backend=backend, chunk_tokens=4)
    expected = run(bapo_linear_loss, parameters, case, **options)
    case.options["config"] = BAPOConfig()
    T = torch.full((B, S), 0.75, device=device)
    got = run(bapo_linear_loss, parameters, case, temperature=T, **options)
    for mine, true in zip(got[1], expected[1], strict=True):
        assert torch.equal(mine, true)
    T *= torch.linspace(0.9, 1.1, B * S, device=device).view(B, S)
    for frozen in (False, True):
        check(parameters, case.with_options(temperature=T), backend, frozen=frozen, chunk_tokens=4)


def test_module(backend, device):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    module = BAPOLinearLoss(backend=backend, chunk_tokens=8, statistics="live")
    out = module(*parameters[:2], *case.arguments())
    assert "chunk_tokens=8" in repr(module)
    assert out.metrics["live_tokens"] > 0


ERRORS = {
    "weight": (dict(lm_head_weight=torch.ones(5, 3)), r"lm_head_weight must have shape \(V, 4\)"),
    "dtype": (
        dict(lm_head_weight=torch.ones(5, 4).bfloat16()),
        "lm_head_weight must have the dtype",
    ),
    "bias": (dict(bias=torch.ones(4)), r"bias must have shape \(5,\), got \(4,\)"),
    "chunk": (dict(chunk_tokens=0), "chunk_tokens must be None or an integer >= 1, got 0"),
    "logits": (
        dict(logits_dtype=torch.bfloat16),
        r"logits_dtype must be None, or torch.float32 for hidden states of half precision "
        r"\(here torch.float32\), got torch.bfloat16",
    ),
    "labels": (dict(labels=torch.zeros(3, dtype=torch.long)), "labels must have the leading shape"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_head(name):
    given, message = ERRORS[name]
    arguments = dict(
        hidden_states=torch.ones(2, 4),
        lm_head_weight=torch.ones(5, 4),
        labels=torch.zeros(2, dtype=torch.long),
    )
    with pytest.raises(ValueError, match=message):
        linear_log_probs(**(arguments | given))
    with pytest.raises(ValueError, match=message):
        bapo_linear_loss(
            **(arguments | given),
            old_log_probs=None,
            advantages=torch.ones(len(given.get("labels", "ab"))),
        )


@needs_native
def test_few_rows_of_a_large_vocabulary():
    """Three of twenty rows have a gradient: their sums over 151,936 terms must be as accurate.

    Of four draws together, because the order of the reference's sums may be exact for one.
    """
    large = 151_936
    case = make_case((1, 20), large, masked=0, idle=0, poison=False)
    case.advantages[0, 3:] = 0.0
    case.old_log_probs = None
    results = [], [], []
    for seed in range(4):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(1, 20, 16), 0.3 * torch.randn(large, 16)
        for gradients, function, dtype in (
            (results[0], bapo_linear_loss, torch.float32),
            (results[1], reference.bapo_linear_loss, torch.float32),
            (results[2], reference.bapo_linear_loss, torch.float64),
        ):
            leaf = hidden.to(dtype, copy=True).requires_grad_()
            function(leaf, weight.to(dtype), *case.arguments()).loss.backward()
            gradients.append(leaf.grad)
    assert_within_budget("gradient of hidden", *map(torch.stack, results))
