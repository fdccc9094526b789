"""Losses and log-probs of hidden states against the float64 reference, gradient by gradient."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from accuracy import assert_as_reference, assert_quantities, assert_same, inputs_of
from helpers import (
    Case,
    evaluate,
    exhaustive_unless,
    in_some_orders,
    make_case,
    needs_native,
    per_token,
    real_in_turns,
    sets_of,
    transform_of,
    unmasked_tokens,
)

import bapo_kernels
from bapo_kernels import (
    BAPOConfig,
    BAPOLinearLoss,
    SamplingMask,
    bapo_linear_loss,
    linear_log_probs,
    reference,
)
from bapo_kernels.core.call import Products
from bapo_kernels.core.head import gemm, head
from bapo_kernels.core.head.head import Head, HeadGradients
from bapo_kernels.tools.budget import GRADIENTS
from bapo_kernels.tools.real_rows import real_head

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, S, H, V = 3, 7, 24, 193


@pytest.fixture(autouse=True)
def chunks_as_asked_for(monkeypatch):
    """Also where one would take less memory, because the sum of several does."""
    monkeypatch.setattr(head, "SUM_BYTES", 0)


@pytest.fixture
def products(monkeypatch):
    """Of every product that makes logits: how many rows it has, and its memory."""
    made = []

    def logits(self, rows, memory, original=Head.logits):
        h, of_rows = original(self, rows, memory)
        made.append((rows.numel(), of_rows.untyped_storage().data_ptr()))
        return h, of_rows

    monkeypatch.setattr(Head, "logits", logits)
    return made


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


def problem(dtype, device, config, staleness=0.4, shape=(B, S), seed=0, sets=False, real=None):
    """Hidden states, weight, bias, and the tokens of a stale batch; NaN wherever it is masked.

    ``staleness=None``: of a batch on policy; ``sets``: with a sampling mask; ``real``: the
    temperature of real rows.
    """
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(*shape, H, generator=g), 0.6 * torch.randn(V, H, generator=g)
    bias, labels = torch.randn(V, generator=g).to(dtype), None
    if real:
        hidden, weight, labels = real_head(shape, V, H, real, seed)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    options = dict(config=config, seed=seed, ref_log_probs=per_token(shape))
    case = make_case(shape, V, labels=labels, **options)
    options = transform_of(config) | dict(sampling_mask=mask_of(case) if sets else None)
    logp, _ = reference.linear_log_probs(
        hidden.double(), weight.double(), case.labels, bias=bias.double(), **options
    )
    unmasked = unmasked_tokens(case)
    old = logp + (staleness or 0.0) * torch.randn(shape, generator=g)
    old = torch.where(unmasked, old.masked_fill(logp == -torch.inf, -3.0), torch.nan).float()
    case.old_log_probs = None if staleness is None else old
    hidden[~unmasked] = torch.nan
    tokens = [t if t is None else t.to(device) for t in case.arguments()]
    options = {"config": config, "ref_log_probs": case.options["ref_log_probs"].to(device)}
    if sets:
        options["sampling_mask"] = mask_of(case).to(device)
    return [t.to(device) for t in (hidden, weight, bias)], Case(None, *tokens, options)


def mask_of(case):
    """Sets of every size, some without their label, unless the KL term is then infinite."""
    outside = case.options["config"].kl_loss_type not in ("k1", "k2")
    return SamplingMask.from_lists(sets_of(case.labels.cpu(), V, outside))


def run(function, parameters, case, kind=None, frozen=False, **options):
    hidden, *head = (p.to(kind or p.dtype) for p in parameters)

    def loss(hidden, *given, **more):
        weight, bias, *tokens = (*head, *given) if frozen else given
        return function(hidden, weight, *tokens, bias=bias, **more)

    leaves = (hidden,) if frozen else (hidden, *head)
    return evaluate(loss, case.with_options(**options), leaves)


def check(parameters, case, backend, statistics="all", function=bapo_linear_loss, **options):
    given = parameters, case.with_options(statistics=statistics)
    got = run(function, *given, backend=backend, **options)
    of_reference = {name: options[name] for name in ("frozen", "logits_dtype") if name in options}
    sampled = dict(gradient_samples=options.get("gradient_samples"))
    expected = partial(run, reference.bapo_linear_loss, *given, **sampled)
    truth = expected(torch.float64, frozen=options.get("frozen", False))
    assert {gradient.dtype for gradient in got.gradients} == {parameters[0].dtype}
    assert not any(value.isnan() for value in truth.output.metrics.values())
    outside = [r.output.metrics.get("label_outside_mask") for r in (got, truth)]
    assert outside[0] == outside[1]
    same, sums = partial(expected, **of_reference), parameters[0].dtype == torch.float32
    assert_quantities(given[1], got, same, truth, sums)
    return got


# The kernels and the reference in their dtype round the logits; the float64 truth does not, so that
# ratios may be on either side of a bound.
def staleness_of(dtype):
    return 0.4 if dtype == torch.float32 else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("statistics", "sets"), [("all", False), ("live", True)])
@pytest.mark.parametrize("name", CONFIGS)
def test_options(backend, device, dtype, statistics, name, sets):
    """Skipped, idle, decided and undecided rows in one batch, with sets or without."""
    options = dict(sets=sets, real=real_in_turns(CONFIGS, name, sets))
    given = problem(dtype, device, build(name), staleness_of(dtype), **options)
    check(*given, backend, statistics, chunk_tokens=5)


@pytest.mark.parametrize(
    ("chunk_tokens", "sets"), [*product([1, 4, 21, None], [False]), (None, True)]
)
@pytest.mark.parametrize("name", ["far", "recipe", "cispo", "ratio of sequences"])
def test_stale_batches_in_chunks(backend, device, name, chunk_tokens, sets):
    given = problem(torch.float32, device, build(name), sets=sets)
    got = check(*given, backend, chunk_tokens=chunk_tokens)
    lower, upper = got.output.bounds
    assert upper > 1.2 or lower > 0.6, "the case must need a search"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "frozen", "sets"),
    exhaustive_unless(
        lambda name, frozen, sets: sets,
        [("far", False, False), ("entropy", False, False), ("kl", True, False)]
        + [("ratio of sequences", False, False), ("paper", False, True)],
    ),
)
def test_compiled(backend, device, name, frozen, sets):
    """One graph for any number of tokens and sets; its gradient is computed in backward."""
    if backend == "triton" and name in ("far", "kl", "paper"):
        pytest.skip("the graph is that of the CPU but for the names of the operators")
    torch._dynamo.reset()
    compiled = torch.compile(bapo_linear_loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for S_ in (S, S + 4):
        given = problem(torch.float32, device, build(name), shape=(B, S_), seed=S_, sets=sets)
        with torch._dynamo.config.patch(error_on_recompile=S_ != S):
            check(*given, backend, function=compiled, frozen=frozen, chunk_tokens=9)


@pytest.mark.parametrize("sets", [True, False])
def test_packed_with_weights(backend, device, sets):
    config = BAPOConfig.recipe(loss_agg_mode="seq-mean-token-mean")
    parameters, case = problem(torch.float32, device, config, shape=(20,), sets=sets)
    case = case.with_options(
        ref_log_probs=None,
        cu_seqlens=torch.tensor([0, 5, 5, 12, 20], device=device),
        rollout_is_weights=per_token((20,), low=0.2, high=2.0).to(device),
        rollout_log_probs=per_token((20,), seed=3).to(device),
        global_batch_size=7,
    )
    case.advantages = torch.tensor([0.5, 2.0, -1.0, 0.7], device=device)
    check(parameters, case, backend, chunk_tokens=6)


@pytest.mark.parametrize(
    ("config", "frozen", "chunk_tokens", "recomputed"),
    [
        (build("far"), False, None, 0),
        (build("far"), False, 4, 1),
        (build("kl"), False, 4, 1),
        (build("entropy"), False, 4, 1),
        (build("ratio of sequences"), False, 4, 3),
        (BAPOConfig(surrogate="sapo"), False, 4, 0),
        (build("far"), True, 4, 0),
        (build("kl"), True, 4, 0),
        (build("entropy"), True, 4, 1),
        (build("ratio of sequences"), True, 4, 0),
    ],
)
def test_logits_that_are_made_again(products, config, frozen, chunk_tokens, recomputed):
    """Not the last chunk, which stays in memory until the bounds are known; then others are
    recomputed in its place: undecided rows, of sequences all. With a frozen head none, unless the
    entropy has a gradient."""
    parameters, case = problem(torch.float32, "cpu", config)
    run(bapo_linear_loss, parameters, case, frozen=frozen, chunk_tokens=chunk_tokens)
    counted = int(unmasked_tokens(case).sum())
    chunks = -(-counted // (chunk_tokens or counted))
    assert len(products) == chunks + recomputed
    assert len({place for _, place in products}) == 1
    sizes = [rows for rows, _ in products]
    assert sum(sizes[:chunks]) == counted
    assert max(sizes[:chunks]) - min(sizes[:chunks]) < chunks, "equal but for the last"
    if config.ratio_level == "sequence" and not frozen:
        assert sizes[chunks:] == sizes[: chunks - 1]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("surrogate", "level", "sets"),
    [("cispo", "token", False), ("sapo", "sequence", False)]
    + [("clip", "sequence", sets) for sets in (False, True)],
)
def test_bounds_of_tokens(backend, device, surrogate, level, sets, frozen):
    """Where no row is undecided; SAPO has none."""
    config = BAPOConfig(surrogate=surrogate, ratio_level=level)
    parameters, case = problem(torch.float32, device, config, sets=sets)
    if config.has_bounds:
        bounds = per_token((B,), 5, 0.7, 0.95), per_token((B, S), 6, 1.05, 1.3)
        case.options["bounds"] = tuple(bound.to(device) for bound in bounds)
    for chunk_tokens in (5, 1, None):
        check(parameters, case, backend, frozen=frozen, chunk_tokens=chunk_tokens)


def test_rows_per_chunk(monkeypatch):
    """The fewest equal chunks; one, where a sum of several would take more memory than it."""

    def rows(count, asked=None, H=64, dtype=torch.bfloat16, sums_weight=True, logits_dtype=None):
        weight = torch.empty(2**17, H, dtype=dtype, device="meta")
        head = Head.of(weight[:1], weight, None, Products(dtype, logits_dtype or dtype, asked))
        return head.rows_per_chunk(count, sums_weight)

    assert [rows(n, asked=5) for n in (0, 1, 5, 6, 11, 15, 16)] == [1, 1, 5, 3, 4, 5, 4]
    monkeypatch.setattr(head, "SUM_BYTES", 4)
    assert [rows(n, asked=5) for n in (0, 6, 128, 129)] == [1, 6, 128, 5]
    assert rows(129, asked=5, sums_weight=False) == rows(129, asked=5, dtype=torch.float32) == 5
    assert [rows(n) for n in (4096, 4097)] == [4096, 2049]  # 1 GiB
    assert rows(4096, logits_dtype=torch.float32) == 1024  # and their gradient in bfloat16
    assert [rows(n, H=4096) for n in (8192, 8193)] == [8192, 2731]


def rounded_product(a, b, bias=0.0):
    """As a function of the dtype to which it is rounded."""

    def product(kind):
        work = torch.promote_types(kind, torch.float32)
        return (a.to(work) @ b.to(work) + bias).to(kind)

    return product


def sums_of_chunks(dtype, rows, needed=(True, True, False)):
    """Operands of a weight's gradient, what is to add up the chunks, and what it should be."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, H).to(dtype), torch.randn(V, H).to(dtype)
    dlogits = torch.randn(rows, V).to(dtype)
    head = Head.of(hidden, weight, None, Products(dtype, dtype))
    gradients = HeadGradients(head, needed, one_chunk=False)
    return hidden, weight, dlogits, gradients, rounded_product(dlogits.T, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_gradient_of_many_chunks(dtype):
    """The error must not grow with the number of chunks, as it would for a sum in bfloat16.

    The products are not rounded; those of bfloat16 are, on a CPU, which is within the budget.
    """
    hidden, weight, dlogits, gradients, expected = sums_of_chunks(dtype, 400)
    naive = torch.zeros(V, H, dtype=dtype)
    for rows in torch.arange(400).split(2):
        gradients.add(rows, hidden[rows], dlogits[rows])
        naive += dlogits[rows].T @ hidden[rows]
    assert gradients.weight.dtype == torch.float32
    if dtype != torch.bfloat16:
        assert_as_reference(gradients.weight, expected)
    dhidden, dweight, _ = gradients.like(hidden, weight, None)
    assert dhidden.dtype == dweight.dtype == dtype
    assert_as_reference(dweight, expected, dtype)
    if dtype == torch.bfloat16:
        with pytest.raises(AssertionError):
            assert_as_reference(naive, expected, dtype)


def test_products_that_add_to_float32(monkeypatch):
    """As on a GPU: the first is written, the others are added, in one product each."""
    only_weight = False, True, False
    hidden, _, dlogits, gradients, expected = sums_of_chunks(torch.bfloat16, 30, only_weight)
    calls = []

    def mm(a, b, out_dtype, out):
        calls.append("mm")
        return out.copy_(a.to(out_dtype) @ b.to(out_dtype))

    def addmm(total, a, b, out_dtype, out):
        calls.append("addmm")
        assert out is total
        return out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(gemm, "adds_in_float32", lambda operand: True)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    for rows in torch.arange(30).split(10):
        gradients.add(rows, hidden[rows], dlogits[rows])
    assert calls == ["mm", "addmm", "addmm"]
    assert_as_reference(gradients.weight, expected)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_rows_without_a_gradient_may_hold_anything(backend, device, chunk_tokens):
    """A frozen head makes vectors that are scaled later: 0*NaN is 0 here, as without them."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, H, device=device), torch.randn(V, H, device=device)
    factors = torch.tensor([1.0, 2.0, 0.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0], device=device)
    valid, bad = torch.arange(9, device=device), hidden.clone()
    labels = torch.where(factors != 0, valid, -1)
    labels[8], bad[7] = V, torch.nan

    def gradient(kind, x=hidden, of=valid, function=reference.linear_log_probs, **options):
        leaf = x.to(kind, copy=True).requires_grad_()
        logp, _ = function(leaf, weight.to(kind), of, **options)
        loss = torch.where(factors != 0, factors * logp, 0.0).sum()
        return torch.autograd.grad(loss, leaf)[0]

    options = dict(backend=backend, chunk_tokens=chunk_tokens)
    got = gradient(torch.float32, bad, labels, linear_log_probs, **options)
    assert_as_reference(got, gradient)


@pytest.mark.parametrize("frozen", [{0}, {1}, {2}, {0, 1}, {1, 2}], ids=str)
def test_frozen_parameters_have_no_gradient(backend, device, frozen):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    expected = run(bapo_linear_loss, parameters, case, backend=backend).gradients
    leaves = [p.clone().requires_grad_(i not in frozen) for i, p in enumerate(parameters)]
    options = dict(bias=leaves[2], backend=backend, **case.options)
    bapo_linear_loss(*leaves[:2], *case.arguments(), **options).loss.backward()
    for i, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
        assert (leaf.grad is None) == (i in frozen)
        if i not in frozen:
            assert_same(leaf.grad, gradient, GRADIENTS[i])


@pytest.mark.parametrize(
    ("dtype", "name", "sets"),
    [*product([torch.float32], CONFIGS, [False])]
    + [*product(DTYPES, ["far", "entropy", "kl"], [True])]
    + [*product(DTYPES[1:], ["recipe", "softcap", "ratio of sequences"], [False])],
)
def test_frozen_head(backend, device, dtype, name, sets):
    """Undecided rows of earlier chunks get the gradient of their log-prob, to be scaled later."""
    given = problem(dtype, device, build(name), None, sets=sets)
    check(*given, backend, chunk_tokens=5, frozen=True)
    for statistics, chunk_tokens in [("all", 4), ("live", None)] if dtype == torch.float32 else []:
        given = problem(dtype, device, build(name), sets=sets)
        check(*given, backend, statistics, chunk_tokens=chunk_tokens, frozen=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "sets"),
    [("paper", False), ("kl", False), ("entropy", True), ("entropy", False), ("softcap", True)],
)
def test_float32_logits(backend, device, dtype, name, sets):
    given = problem(dtype, device, build(name), staleness=0.0, sets=sets)
    for chunk_tokens, frozen in ((None, False), (5, False), (5, True)):
        options = dict(chunk_tokens=chunk_tokens, logits_dtype=torch.float32, frozen=frozen)
        check(*given, backend, **options)


def test_float32_logits_under_autocast(backend, device):
    """The operands have the dtype of autocast, their products are not rounded to it."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(200, 32, device=device), torch.randn(30, 32, device=device)
    bias, one = 30 * torch.randn(200, device=device), torch.arange(30, device=device)

    def expected(kind):
        operands = [x.bfloat16().to(kind) for x in (hidden, weight)]
        return reference.linear_log_probs(*operands, labels, bias=bias.to(kind))[0]

    several = torch.stack([one, one + 100], -1)
    for name, labels in product((backend, "reference"), (one, several)):
        options = dict(bias=bias, logits_dtype=torch.float32, backend=name)
        with torch.autocast(device, torch.bfloat16):
            log_probs = linear_log_probs(hidden, weight, labels, **options)[0]
        assert_as_reference(log_probs, expected)


@pytest.mark.parametrize("sets", [False, True])
def test_without_gradient(backend, device, sets):
    """A call with the counts of a larger batch."""
    parameters, case = problem(torch.float32, device, BAPOConfig(), sets=sets)
    case = case.with_options(batch_num_tokens=100, dp_size=2)
    hidden, weight, bias = parameters
    expected = check(parameters, case, backend).output
    with torch.no_grad():
        out = bapo_linear_loss(
            hidden, weight, *case.arguments(), bias=bias, backend=backend, **case.options
        )
    assert not out.loss.requires_grad
    assert_same((out.loss, *out.bounds), (expected.loss, *expected.bounds), "loss or bound")


@pytest.mark.parametrize("sets", [True, False])
def test_tied_weight_and_no_bias(backend, device, sets):
    parameters, case = problem(torch.float32, device, BAPOConfig(), sets=sets)

    def tied(function, kind=torch.float32):
        def loss(embedding, labels, *tokens, **options):
            hidden = embedding[labels.clamp(min=0)] * 0.5
            return function(hidden, embedding, labels, *tokens, **options)

        return evaluate(loss, case, parameters[1:2], kind)

    got, expected = tied(partial(bapo_linear_loss, backend=backend)), reference.bapo_linear_loss
    assert_quantities(case, got, lambda: tied(expected), tied(expected, torch.float64))


@pytest.mark.parametrize(("chunk_tokens", "sets"), [(6, False), (None, False), (None, True)])
def test_autocast(backend, device, chunk_tokens, sets):
    """float32 parameters, bfloat16 GEMMs, gradients in float32."""
    parameters, case = problem(torch.float32, device, BAPOConfig(), None, sets=sets)
    expected = partial(run, reference.bapo_linear_loss, parameters, case)
    with torch.autocast(device, torch.bfloat16):
        options = dict(backend=backend, chunk_tokens=chunk_tokens)
        got = run(bapo_linear_loss, parameters, case, **options)
        same = in_some_orders(expected)
    assert {gradient.dtype for gradient in got.gradients} == {torch.float32}
    assert_quantities(case, got, same, expected(torch.float64), sums=False)
    one_product_on_a_cpu = chunk_tokens is None and device == "cpu"  # in bfloat16
    if not sets and not one_product_on_a_cpu:
        assert not torch.equal(got.gradients[1], got.gradients[1].bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("temperature", [0.8, torch.linspace(0.8, 2.0, B * S).view(S, B).T])
@pytest.mark.parametrize("sets", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_linear_log_probs(backend, device, dtype, entropy, temperature, sets, frozen, products):
    """A frozen head has no logits made again, but for the entropy's gradient and in float16."""
    T = temperature.to(device) if isinstance(temperature, torch.Tensor) else temperature
    parameters, case = problem(dtype, device, BAPOConfig(), sets=sets)
    unmasked = unmasked_tokens(case)
    labels, mask = torch.where(unmasked, case.labels, -100), case.options.get("sampling_mask")
    weights = torch.where(torch.rand(B, S) < 0.4, 0.0, torch.randn(B, S)).to(device)

    def gradients(kind, function=reference.linear_log_probs, **options):
        leaves = [p.to(kind).clone() for p in parameters]
        wanted = [leaf.requires_grad_() for leaf in leaves[: 1 if frozen else 3]]
        hidden = torch.where(unmasked[..., None], leaves[0], 0.0)
        options |= dict(bias=leaves[2], temperature=T, return_entropy=entropy, sampling_mask=mask)
        logp, token_entropy = function(hidden, leaves[1], labels, **options)
        assert (token_entropy is not None) == entropy
        loss = (weights * logp).sum()
        if entropy:
            loss = loss + 0.3 * (weights * token_entropy).sum()
        return [torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2)]

    first, second = gradients(dtype, linear_log_probs, backend=backend, chunk_tokens=4)
    assert_same(first, second, "gradient")
    if frozen and not sets:
        counted = labels != -100
        again = (counted & (weights != 0)) * (entropy or dtype == torch.float16)
        assert sum(rows for rows, _ in products) == counted.sum() + 2 * again.sum()
    given = dict(names=GRADIENTS, inputs=inputs_of(case))
    assert_as_reference(first, lambda kind: gradients(kind)[0], dtype, **given)


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

    def of_log_probs(kind, module=reference, **options):
        leaves = [p.to(kind, copy=True).requires_grad_() for p in parameters]
        logp, entropy = module.linear_log_probs(*leaves[:2], labels, bias=leaves[2], **options)
        return torch.autograd.grad((logp + 0.3 * entropy).sum(), leaves)

    def of_loss(kind, module=reference, **options):
        return run(module.bapo_linear_loss, parameters, case, kind, **options).gradients

    monkeypatch.setattr(Head, "logits", logits)
    for gradients in of_log_probs, of_loss:
        made.zero_()
        got = gradients(torch.float32, bapo_kernels, chunk_tokens=4)
        # Logits below 16 that are made again are rounded once more, which changes p in proportion,
        # as the sum that divides it does.
        assert_as_reference(got, gradients, roundings=2 * 16, names=GRADIENTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("statistics", "sets"), [("all", False), ("live", False), ("all", True)])
@pytest.mark.parametrize("shape", [(), (B,), (B, S)])
def test_temperatures(backend, device, dtype, statistics, shape, sets):
    """Of the rows of every chunk, of those whose logits are recomputed too."""
    parameters, case = problem(dtype, device, build("softcap"), None, sets=sets)
    T = torch.linspace(0.5, 2.0, math.prod(shape), device=device).view(shape)
    if shape == (B, S):
        T = torch.where(unmasked_tokens(case), T, torch.nan)
    case = case.with_options(temperature=T)
    check(parameters, case, backend, statistics, chunk_tokens=5)


def test_temperatures_of_undecided_rows(backend, device):
    """Chunks of any size find the same rows; equal temperatures have the bits of one number."""
    parameters, case = problem(torch.float32, device, BAPOConfig(temperature=0.75))
    options = dict(backend=backend, chunk_tokens=4)
    expected = run(bapo_linear_loss, parameters, case, **options).gradients
    T = torch.full((B, S), 0.75, device=device)
    case = case.with_options(config=BAPOConfig(), temperature=T)
    got = run(bapo_linear_loss, parameters, case, **options).gradients
    assert_same(got, expected, "gradient")
    T *= torch.linspace(0.9, 1.1, B * S, device=device).view(B, S)
    for frozen in (False, True):
        check(parameters, case, frozen=frozen, **options)


def test_module(backend, device, products):
    parameters, case = problem(torch.float32, device, BAPOConfig())
    options = dict(backend=backend, chunk_tokens=8, statistics="live")
    given = *parameters[:2], *case.arguments()
    out, chunks = BAPOLinearLoss(**options)(*given), len(products)
    expected = bapo_linear_loss(*given, **options)
    assert out.loss == expected.loss
    assert out.metrics["live_tokens"] == expected.metrics["live_tokens"] > 0
    assert 1 < chunks == len(products) / 2


@needs_native
def test_few_rows_of_a_large_vocabulary():
    """Three of twenty rows have a gradient: their sums over 151,936 terms must be as accurate."""
    large = 151_936
    case = make_case((1, 20), large, masked=0, idle=0, poison=False)
    case.advantages[0, 3:] = 0.0
    case.old_log_probs = None
    torch.manual_seed(0)
    parameters = torch.randn(1, 20, 16), 0.3 * torch.randn(large, 16), torch.zeros(large)
    check(parameters, case, "cpu", frozen=True)
