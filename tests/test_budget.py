"""The error budget is narrow: what is wrong by little exceeds it, on every backend."""

from dataclasses import replace

import pytest
import torch
from helpers import DEVICES, KERNELS, Result, check_result, make_case, run_kernel

from bapo_kernels import BAPOConfig

V, BLOCK = 5_000, 4_096  # of the CPU kernels


def wrong_coefficient(case, backend):
    """By 1e-3, of the row with the smallest gradient."""
    got = run_kernel(case, backend)
    sizes = got.gradient.abs().amax(-1, keepdim=True)
    smallest = sizes == sizes[sizes > 0].min()
    return Result(got.output, (got.gradient * torch.where(smallest, 1.001, 1.0),))


def dropped_block(case, backend):
    """The labels' logits are left in the sums."""
    kept = torch.nn.functional.one_hot(case.labels.clamp(min=0), V).bool()
    kept[..., :BLOCK] = True
    return run_kernel(replace(case, logits=case.logits.where(kept, -torch.inf)), backend)


def wrong_temperature(case, backend):
    return run_kernel(case, backend, config=BAPOConfig(temperature=1.01))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", *KERNELS])
def test_faults_exceed_the_budget(backend, dtype):
    device = DEVICES.get(backend, "cpu")
    case = make_case((2, 3), V, dtype, device, masked=0.0, poison=False)
    check_result(case, run_kernel(case, backend))
    faults = [dropped_block, wrong_temperature]
    if dtype == torch.float32:  # half of a unit of bfloat16 is 2e-3
        faults.append(wrong_coefficient)
    for fault in faults:
        with pytest.raises(AssertionError, match="over budget"):
            check_result(case, fault(case, backend))
