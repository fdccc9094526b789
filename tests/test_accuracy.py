"""What a check says that fails."""

import re

import pytest
import torch
from accuracy import assert_quantities, assert_same
from helpers import make_case, run_reference
from ptx.executor import poison


def test_quantity_place_values_and_token():
    case = make_case((2, 3), 5, masked=0.0, poison=False)
    got, truth = run_reference(case), run_reference(case, torch.float64)
    got.gradient[1, 2, 3] = 9.0
    wrong = "gradient: 1 of 30 entries differ, {} (1, 2, 3): 9 / "
    with pytest.raises(AssertionError, match=re.escape(wrong.format("worst"))) as raised:
        assert_quantities(case, got, lambda: run_reference(case), truth)
    assert f"\n  label {case.labels[1, 2]}, old log-prob -" in str(raised.value)
    with pytest.raises(AssertionError, match=re.escape(wrong.format("first"))):
        assert_same(got, run_reference(case))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_memory_that_nobody_wrote(dtype):
    zeros = torch.zeros(4, dtype=dtype)
    filled = zeros.clone().view(torch.uint8).fill_(255).view(dtype)
    unwritten = "NaN of memory that nobody wrote / 0"
    for got, what in (poison(zeros.clone()), unwritten), (filled, unwritten), (zeros / 0, "NaN"):
        with pytest.raises(AssertionError, match=rf"^x: 4 of 4 .* \(0,\): {what}"):
            assert_same(got, zeros, "x")
