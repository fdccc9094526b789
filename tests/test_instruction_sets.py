"""The CPU kernels for every instruction set of this processor, not only for the widest."""

import math

import pytest
import torch
from accuracy import assert_rounded
from helpers import EPS, check_against_reference, make_case, needs_native

from bapo_kernels import BAPOConfig, log_probs, reference
from bapo_kernels.debug import instruction_set

pytestmark = needs_native


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
