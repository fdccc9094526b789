"""The CPU kernels for every instruction set of this processor, not only for the widest."""

import math

import pytest
import sample_operators as samples
import torch
from accuracy import assert_rounded
from helpers import EPS, check_against_reference, make_case, needs_native

from bapo_kernels import (
    BAPOConfig,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    log_probs,
    reference,
)
from bapo_kernels.core.head import gemm
from bapo_kernels.core.operators import ops_of
from bapo_kernels.debug import instruction_set

pytestmark = needs_native
TINIEST = 2.0**-126  # the least float32 that is not denormal


@pytest.fixture(params=["avx512bf16", "avx512", "avx2", "portable"])
def chosen(request):
    try:
        with instruction_set(request.param):
            yield request.param
    except RuntimeError:
        pytest.skip(f"needs a processor with {request.param}")


def got_and_expected(logits, labels, **options):
    """The log-probs of the kernels, and those of float64."""
    got, _ = log_probs(logits, labels, **options)
    return got, reference.log_probs(logits.double(), labels, **options)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("V", "softcap"),  # tails of every width; more than a block
    [(1, None), (3, 6.0), (4, None), (9, 6.0), (31, None), (4099, 6.0), (4099, None)],
)
def test_against_reference(chosen, dtype, softcap, V):
    config = BAPOConfig(entropy_coef=0.01, final_logit_softcapping=softcap, temperature=0.9)
    check_against_reference(make_case((3, 5), V, dtype, config=config, idle=0.1), "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_values(chosen, dtype):
    case = make_case((2, 4), 5000, dtype, masked=0.0, poison=False)
    case.labels.clamp_(min=0)
    case.logits[0, 0] -= 1e4
    case.logits[0, 1, ::2] = -torch.inf
    case.logits[0, 2] = torch.linspace(-300, 20, 5000)
    case.logits[0, 3, 4999] = 900.0
    case.old_log_probs = None
    got = check_against_reference(case, "cpu")
    assert not got.gradient[case.logits == -torch.inf].any()
    case.logits[1, 1, 4321] = torch.nan
    check_against_reference(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transform", [{}, dict(final_logit_softcapping=30.0)])
def test_samples(chosen, dtype, transform):
    logits, labels = samples.case(ops_of("cpu"), (24, 9_013), dtype)
    samples.check_samples(ops_of("cpu"), logits, labels, 64, **transform)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_float_is_read_exactly(chosen, dtype):
    """The log-prob of 0 beside x is that of float64, for every x."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    logits = torch.stack([x, torch.zeros_like(x)], -1)
    got, expected = got_and_expected(logits, torch.ones(len(x), dtype=torch.long))
    # Below 0 it is that of exp(x), whose exponent is rounded; 1 + exp(x) is a sum in float64.
    of = expected.abs() + EPS[torch.float64] / EPS[torch.float32]
    assert_rounded(got, expected, 5 - x.double().clamp(max=0.0), of)


def denormals(values):
    """How many values are denormal in float32; the others are not all 0."""
    size = values.float().abs()
    assert (size >= TINIEST).any()
    return int(((size > 0) & (size < TINIEST)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}, {"final_logit_softcapping": 200.0}])
def test_no_denormal_leaves_or_reaches_a_product(monkeypatch, chosen, dtype, options):
    """Where probabilities pass through 2^-126, and where backward scales a gradient."""
    z = torch.linspace(-140, 0, 4099).repeat(6, 1).to(dtype)
    z[1, ::2] = -100  # beside numbers that mask
    ids, advantages = torch.arange(4093, 4099), torch.tensor([1.0, -2, 1e-2, 1, -1e-3, 3])
    hidden, tokens = torch.eye(6, dtype=dtype), (ids, None, advantages)
    transform = {name: value for name, value in options.items() if name != "entropy_coef"}
    config, whole = BAPOConfig(**options), SamplingMask.from_lists([list(range(4099))] * 6)
    multiplied = []

    def product(total, dlogits, *others, original=gemm.add_weight_gradient):
        multiplied.append(dlogits.clone())
        original(total, dlogits, *others)

    monkeypatch.setattr(gemm, "add_weight_gradient", product)
    losses = {
        "fresh": lambda x: bapo_loss(x, *tokens, config=config).loss,
        "in place": lambda x: bapo_loss(x * 1.0, *tokens, config=config, inplace=True).loss,
        "sets": lambda x: bapo_loss(x, *tokens, config=config, sampling_mask=whole).loss,
        "log_probs": lambda x: sum(x.sum() for x in log_probs(x, ids, **transform)),
        "labels": lambda x: log_probs(x, torch.stack([ids, ids - 99], 1), **transform)[0].sum(),
        "hidden": lambda x: bapo_linear_loss(hidden, x.T, *tokens, config=config).loss,
    }
    for loss in losses.values():
        for scale in (1.0, 1e-34):
            leaf = z.clone().requires_grad_()
            (loss(leaf) * scale).backward()
            assert not denormals(leaf.grad)
    assert multiplied
    assert not any(map(denormals, multiplied))


def test_flushing_ends_with_the_kernels(chosen):
    """On every thread, and where the user has asked for it, it goes on."""
    tiny = torch.full((2**18,), TINIEST)
    for flushes in (False, True):
        torch.set_flush_denormal(flushes)
        logits = torch.randn(64, 4099, requires_grad=True)
        bapo_loss(logits, torch.arange(64), None, torch.ones(64)).loss.mul(0.5).backward()
        assert (tiny[:99] * 0.5 == 0).all() == flushes
        assert flushes or (tiny * 0.5 != 0).all()
    torch.set_flush_denormal(False)


def test_denormals_of_float16_stay(chosen):
    """Most gradients of a long row are such, and a loss's own scale."""
    case = make_case((3, 5), 4099, torch.float16)
    got = check_against_reference(case, "cpu").gradient.abs()
    assert (got[got > 0] < torch.finfo(torch.float16).tiny).float().mean() > 0.5


def test_weights_of_the_search_may_be_denormal(chosen):
    """The probability of a token is its weight, also below 2^-126."""
    case = make_case((3, 5), 4099, spread=60.0, masked=0.0)
    assert (case.old_log_probs < -126 * math.log(2)).float().mean() > 0.5
    check_against_reference(case, "cpu")


def test_unknown_instruction_set_is_refused():
    with (
        pytest.raises(RuntimeError, match="instruction set must be one that runs here, got sse9"),
        instruction_set("sse9"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_certain_labels(chosen, dtype):
    """A sum of many small terms and a large one loses no more than 16 float32 additions."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(200, 32_000)).to(dtype)
    labels = torch.randint(0, 32_000, (200,))
    certain = logits.float().logsumexp(-1) + 6 * torch.rand(200)
    logits[torch.arange(200), labels] = certain.to(dtype)
    got, expected = got_and_expected(logits, labels)
    assert (got - expected).abs().max() < 16 * EPS[torch.float32] / 2  # of sums from 0.5 to 1


def test_rounding_of_the_scale_does_not_bias_log_probs(chosen):
    """float32 log2(e)/temperature is off by half a unit here, but log-probs have no such bias."""

    def rounding(temperature):
        scale = 1 / (temperature * math.log(2))
        return abs(torch.tensor(scale).item() / scale - 1)

    temperature = max((0.5 + k / 1000 for k in range(500)), key=rounding)
    assert rounding(temperature) > 0.8 * EPS[torch.float32]
    torch.manual_seed(0)
    rows = 4_000  # the mean of their float32 roundings is about 1e-8
    logits, labels = 3 * torch.randn(rows, 2_000), torch.randint(0, 2_000, (rows,))
    got, expected = got_and_expected(logits, labels, temperature=temperature)
    assert (got - expected).mean().abs() < rounding(temperature)
