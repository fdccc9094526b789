"""What other kernels got wrong: extreme values, unusual layouts, results that vary."""

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from accuracy import assert_as_reference, assert_rounded, assert_same
from helpers import (
    LAYOUTS,
    PTX,
    Case,
    Result,
    check_against_reference,
    make_case,
    plain_result,
    poisoned_memory,
    run_kernel,
    run_reference,
    unmasked_tokens,
)

from bapo_kernels import BAPOConfig, bapo_loss, bapo_loss_from_log_probs, log_probs, reference


def clean_case(device, shape=(2, 4), V=100, **options):
    options = dict(masked=0.0, poison=False, device=device) | options
    return make_case(shape, V, **options)


def late_outliers(x):
    x[:, 0, 8999], x[:, 1, 5000] = 900.0, 300.0
    return x


def flat_with_spikes(x):
    """No block is crowded enough for its maximum to be looked for, but for the first."""
    x *= 0
    x[:, 0, 4_100::4_000], x[:, 1, 8_999] = 8.3, 6.7
    return x


ASCENDING = torch.linspace(-200, 50, 9000)
EXTREME = {
    # A maximum that starts at 0, or a log-prob computed as x - logsumexp, fails here.
    **{f"offset of {offset}": (lambda x, by=offset: x + by) for offset in (1e4, -1e4, 3e4)},
    "spread": lambda x: 20 * x,
    # The maximum moves in every block, or in none.
    "ascending": lambda x: torch.stack([ASCENDING, ASCENDING.flip(0)]).to(x)[None],
    # They outweigh all sums before them, also in the entropy.
    "late outliers": late_outliers,
    "flat with spikes": flat_with_spikes,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_rows(backend, device, dtype, name):
    case = clean_case(device, (1, 2), 9000)
    case.logits = EXTREME[name](case.logits).to(dtype)
    truth = reference.log_probs(case.logits.double(), case.labels)[0]
    case.old_log_probs = (truth + 0.1 * torch.randn(truth.shape, device=device)).float()
    check_against_reference(case, backend)


FORBIDDEN = {
    "random": lambda x: x.masked_fill_(torch.rand(x.shape, device=x.device) < 0.5, -torch.inf),
    "first_block": lambda x: x[:5000].fill_(-torch.inf),
    "last_block": lambda x: x[5000:].fill_(-torch.inf),
    "all_but_label": lambda x: x.fill_(-torch.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("softcap", "entropy_coef"),  # without and with exp kept for the gradient
    [(None, 0.0), (10.0, 0.1)],
)
@pytest.mark.parametrize("where", FORBIDDEN)
def test_forbidden_tokens(backend, device, dtype, softcap, entropy_coef, where):
    config = BAPOConfig(entropy_coef=entropy_coef, final_logit_softcapping=softcap)
    case = clean_case(device, (1, 3), 10_000, dtype=dtype, config=config, idle=0.0)
    for logits, label in zip(case.logits[0], case.labels[0], strict=True):
        if label != -100:
            kept = logits[label].clone()
            FORBIDDEN[where](logits)
            logits[label] = kept
    logp = reference.log_probs(case.logits.double(), case.labels, final_logit_softcapping=softcap)
    case.old_log_probs = (logp[0] + 0.05).float()
    got = check_against_reference(case, backend)
    assert not got.gradient[case.logits == -torch.inf].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [0, 17, 99])  # first, middle, tail of a vector
def test_bad_logit_makes_the_loss_nan(backend, device, dtype, value, at):
    case = clean_case(device, idle=0.0, dtype=dtype)
    case.logits[0, 1, at] = value
    got = run_kernel(case, backend)
    assert got.output.loss.isnan()
    assert got.gradient[0, 1].isnan().all()
    assert got.gradient.isfinite().sum() == got.gradient.numel() - 100, "of the other rows"


def test_bad_values_make_the_loss_nan(backend, device):
    """Unless they are masked: a row of -inf, labels outside of the vocabulary, old log-probs."""
    numbers = torch.nan, torch.inf, -torch.inf
    bad = {"logits": [-torch.inf], "labels": [100, 2**40, -1, -(2**40)], "old_log_probs": numbers}
    for name, value in ((name, value) for name, values in bad.items() for value in values):
        case = clean_case(device)
        getattr(case, name)[0, 0] = value
        case.advantages[0, 0] = 1.0
        got = run_kernel(case, backend).output
        assert got.loss.isnan()
        assert got.log_probs[0, 0].isnan() == (name != "old_log_probs")
        assert name == "labels" or run_reference(case).output.loss.isnan()
        case.response_mask[0, 0] = False
        assert run_kernel(case, backend).output.loss.isfinite()


RATIOS = list(product((100.0, -100.0, 20.0, -20.0, 19.9, 1e30), (1.0, -1.0)))
ADVANTAGES = [(-0.1, A) for A in (0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30)]


@pytest.mark.parametrize(("delta", "advantage"), RATIOS + ADVANTAGES)
def test_extreme_ratios_and_advantages(backend, device, delta, advantage):
    case = clean_case(device)
    case.old_log_probs = reference.log_probs(case.logits, case.labels)[0] - delta
    case.advantages[:] = advantage
    assert check_against_reference(case, backend).gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [4.6, 6.9, 11.5, 16.0])  # p of the label .99 .. 1 - 1e-7
def test_gradient_at_a_likely_label(backend, device, dtype, gap):
    """1 - p is computed before the only rounding: the relative error is that of the dtype."""
    x = torch.tensor([[0.0, gap]], device=device, dtype=dtype, requires_grad=True)
    label, A = torch.ones(1, dtype=torch.long, device=device), torch.ones(1, device=device)
    bapo_loss(x, label, None, A, backend=backend).loss.backward()
    p = torch.softmax(x.detach().double(), -1)
    assert_rounded(x.grad[0, 1], -p[0, 0], gap + 4)  # the exponent, exp, sum, quotient, product


@pytest.mark.parametrize("name", ["kernel", "reference"])
def test_bounds_are_inclusive(backend, device, name):
    """On-policy the ratio is exactly 1: bounds at 1 keep the gradient, bounds inside drop it."""
    backend = backend if name == "kernel" else name
    below, above = 1 - 2.0**-24, 1 + 2.0**-23
    bounds = torch.tensor([(1.0, 1.0), (0.5, below), (above, 2.0)])  # plain numbers must enclose 1
    for surrogate, A, kept in (
        ("clip", 1.0, [True, False, True]),
        ("clip", -1.0, [True, True, False]),
        ("mask", 1.0, [True, False, False]),
        ("mask", -1.0, [True, False, False]),
        ("cispo", 1.0, [True, True, True]),
    ):
        config, advantages = BAPOConfig(surrogate=surrogate), torch.tensor([A], device=device)
        labels, logits = torch.tensor([0], device=device), torch.randn(1, 4, device=device)
        case = Case(logits, labels, None, advantages, None, dict(config=config))
        results = [run_kernel(case, backend, bounds=pair.to(device).unbind()) for pair in bounds]
        assert [bool(result.gradient.any()) for result in results] == kept
        at_bounds = results[0].output.metrics
        assert at_bounds["pg_clipfrac"] == at_bounds["pg_clipfrac_lower"] == 0


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_same_bits_in_every_run_with_any_threads(backend, device, interpreted, entropy_coef):
    shape = (3, 8) if interpreted or PTX else (16, 16)
    V, times = (151_936, 10) if device == "cuda" else (9000, 1)
    config = BAPOConfig(entropy_coef=entropy_coef)
    case = make_case(shape, V, torch.bfloat16, device, staleness=0.4, config=config)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 4, 2) * times:
        torch.set_num_threads(count)
        results.append(run_kernel(case, backend))
    torch.set_num_threads(threads)
    first, *others = results
    for other in others:
        assert_same(other, first)
        assert_same(other.output.entropy, first.output.entropy)
        metrics = other.output.metrics, first.output.metrics
        torch.testing.assert_close(*metrics, rtol=0, atol=0)


ALL_LAYOUTS = LAYOUTS | {
    "vocabulary first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("V", [100, 4099])
def test_layouts_give_the_same_bits(backend, device, dtype, layout, V):
    """Unusual strides and offsets give the bits of the plain layout."""
    case = make_case((3, 5), V, dtype, device)
    expected = plain_result(backend, (3, 5), V, dtype)
    x = ALL_LAYOUTS[layout](case.logits).detach().requires_grad_()
    out = bapo_loss(x, *case.arguments(), backend=backend, **case.options)
    assert_same(Result(out, torch.autograd.grad(out.loss, x)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_addresses_and_columns_after_aligned_rows(backend, device, dtype):
    """Of rows of 16 KB, whose aligned loads must not be made of others."""
    V = 16_384 // dtype.itemsize
    x = torch.randn(3, V, device=device).to(dtype)
    labels = torch.tensor([0, 5, V - 5], device=device)
    expected = log_probs(x, labels, backend=backend)
    elsewhere = x.new_empty(3 * V + 1)[1:].view(3, V).copy_(x)
    for got, wanted in zip(log_probs(elsewhere, labels, backend=backend), expected, strict=True):
        assert_same(got, wanted, "one element further in memory")

    def expected_of(kind):
        return reference.log_probs(x[:, :-3].to(kind), labels)[0]

    got = log_probs(x[:, :-3], labels, backend=backend)[0]
    assert_as_reference(got, expected_of, names=["log-prob without the last three columns"])


def test_expanded_logits(backend, device):
    labels = torch.randint(0, 50, (2, 3), device=device)
    x = torch.randn(1, 1, 50, device=device).expand(2, 3, 50)
    expanded, plain = (log_probs(y, labels, backend=backend)[0] for y in (x, x.contiguous()))
    assert_same(expanded, plain)


@pytest.mark.xdist_group("gpu memory")
def test_offsets_beyond_32_bits(backend, device, gpu_memory):
    """Row offsets past 2^31 bytes; the memory between the rows is never read."""
    rows, V = 5, 262_208
    stride = (2**31 // 2 // V) + 1  # in rows of bfloat16
    if device == "cuda":
        gpu_memory((rows - 1) * stride * V * 2 / 1e9 + 1)
    storage = torch.empty((rows - 1) * stride * V + V, dtype=torch.bfloat16, device=device)
    logits = storage.as_strided((rows, V), (stride * V, 1))
    logits.copy_(torch.randn(rows, V))
    labels = torch.randint(0, V, (rows,), device=device)
    got = log_probs(logits, labels, backend=backend)
    expected = log_probs(logits.contiguous(), labels, backend=backend)
    assert_same(got[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_fresh_memory_reaches_no_result(backend, device, interpreted, dtype, entropy_coef):
    """Every element is written, of skipped, idle, decided and undecided rows."""
    config, shape = BAPOConfig(entropy_coef=entropy_coef), (3, 8) if interpreted else (6, 8)
    case = make_case(shape, 333, dtype, device, staleness=0.4, config=config)

    def results():
        for statistics, inplace in product(("all", "live"), (False, True)):
            leaf = case.logits.clone().requires_grad_()
            options = dict(statistics=statistics, inplace=inplace, backend=backend, **case.options)
            out = bapo_loss(leaf * 1.0 if inplace else leaf, *case.arguments(), **options)
            yield Result(out, torch.autograd.grad(out.loss, leaf))

    expected = list(results())
    with poisoned_memory():
        check_against_reference(case, backend)
        for got, result in zip(results(), expected, strict=True):
            assert_same(got, result)
        x = case.logits.nan_to_num(0.0).requires_grad_()
        logp, entropy = log_probs(x, case.labels, backend=backend)
        (logp.sum() + entropy.sum()).backward()
        for values in (logp, entropy, x.grad):
            assert not values.isnan().any()
        leaf = case.old_log_probs.clone().requires_grad_()
        tokens = case.old_log_probs, case.advantages, unmasked_tokens(case)
        bapo_loss_from_log_probs(leaf, *tokens, backend=backend).loss.backward()
        assert not leaf.grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])  # without and with exp kept for the gradient
@pytest.mark.parametrize("V", [5000, 100, 151_936, 151_669])
def test_row_alone_has_the_bits_of_the_batch(backend, device, dtype, entropy_coef, V):
    """At any address. With token-sum and given bounds, only a fault in the kernel could couple the
    rows, or let the width of a load change the order of a sum."""
    if V > 5000 and PTX:
        pytest.skip("takes minutes")
    config = BAPOConfig(loss_agg_mode="token-sum", entropy_coef=entropy_coef)
    case = make_case((9,), V, dtype, device, config=config, staleness=0.4)
    case.advantages[0] = 1e6
    together = run_kernel(case, backend, bounds=(0.8, 1.2))
    values = log_probs(case.logits, case.labels, backend=backend)
    for i in range(9):
        tokens = [t[i : i + 1] for t in case.arguments()]
        memory = torch.empty(V + 3, dtype=dtype, device=device)
        logits = memory[3:].copy_(case.logits[i])[None]
        alone = run_kernel(Case(logits, *tokens, case.options), backend, bounds=(0.8, 1.2))
        assert_same(alone.gradient[0], together.gradient[i])
        assert alone.output.log_probs[0] == together.output.log_probs[i]
        assert alone.output.entropy[0] == together.output.entropy[i]
        for one, of_all in zip(log_probs(logits, tokens[0], backend=backend), values, strict=True):
            assert_same(one.nan_to_num(9.0), of_all[i : i + 1].nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("softcap", "spread"),
    # saturated; far saturated; hardly bent at all; a cap without effect; Gemma's cap, in its range
    [(5.0, 60.0), (0.5, 100.0), (50.0, 1e-3), (1e4, 3.0), (30.0, 30.0)],
)
def test_softcap_in_every_range(backend, device, dtype, softcap, spread):
    config = BAPOConfig(final_logit_softcapping=softcap, entropy_coef=0.01)
    case = make_case((3, 5), 257, dtype, device, spread=spread, config=config)
    check_against_reference(case, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-3, 1e-2, 1e2, 1e4])
def test_extreme_temperatures(backend, device, dtype, temperature):
    """From a single token to a flat distribution; bfloat16 logits are not divided in bfloat16."""
    config = BAPOConfig(temperature=temperature, entropy_coef=0.01)
    check_against_reference(make_case((3, 5), 257, dtype, device, config=config), backend)


@pytest.mark.parametrize("A", [1.0, -1.0])
@pytest.mark.parametrize("c", [None, 1.25])
def test_given_bounds_are_not_rounded(backend, device, A, c):
    """Bounds at the float32 neighbours of a float64 ratio: on it, just inside, just outside."""
    logits = torch.zeros(1, 2, device=device)  # logp = -log 2 exactly rounded in any precision
    labels = torch.zeros(1, dtype=torch.long, device=device)
    old, advantages = torch.tensor([-0.9], device=device), torch.tensor([A], device=device)
    r = (-torch.tensor(2.0).double().log() - old.double()).exp().item()
    for ulps in (-2, -1, 0, 1, 2):
        bound = torch.tensor(r).float() + ulps * 2.0**-23
        bounds = (torch.tensor(0.5), bound) if A > 0 else (bound, torch.tensor(9.0))
        kept = (r <= bound.item()) if A > 0 else (r >= bound.item() and r <= (c or 99))
        options = dict(bounds=bounds, config=BAPOConfig(clip_ratio_c=c))
        got = run_kernel(Case(logits, labels, old, advantages, None, options), backend)
        assert bool(got.gradient.any()) == kept, (ulps, bound)


def test_calls_from_several_python_threads(backend, device, interpreted):
    """Rows keep their exp in memory of their thread, which concurrent calls must not share."""
    if interpreted:
        pytest.skip("Triton's interpreter keeps the index of a program in a global variable")
    cases = [make_case((6, 8), 5001, torch.bfloat16, device, seed=s) for s in range(4)]
    expected = [run_kernel(case, backend).gradient for case in cases]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: run_kernel(case, backend).gradient, cases * 5))
    assert_same(results, expected * 5)


def test_successive_calls_with_other_row_lengths(backend, device):
    """What a longer or an earlier row left in memory must not be read."""
    for V in (9000, 100, 2, 4096, 17, 20_000, 5, 8192):
        check_against_reference(make_case((2, 3), V, torch.bfloat16, device, masked=0.0), backend)
