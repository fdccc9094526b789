"""How many kernels a loss and its backward launch on a GPU, counted by the operators they call."""

import pytest
import torch
import torch.distributed as dist
from helpers import make_case, needs_native
from launches import CountLaunches

from bapo_kernels import BAPOConfig, SamplingMask, bapo_loss, bapo_loss_from_log_probs
from bapo_kernels.tools.budget import Case

pytestmark = needs_native
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def launches_of(case, **options):
    """Operators and their launches in forward and backward."""
    logits = case.logits.detach().requires_grad_()
    with CountLaunches() as counted:
        bapo_loss(logits, *case.arguments(), **case.options, **options).loss.backward()
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_at_most_ten(mode, dtype):
    config = BAPOConfig(loss_agg_mode=mode, entropy_coef=0.01)
    case = make_case((2, 6), 33, dtype, config=config, staleness=0.4)
    counts = {"batch_num_tokens": 12, "global_batch_size": 2}
    for options in ({}, {"statistics": "live"}, {"backend": "cpu", **counts}):
        counted = launches_of(case, **options)
        assert counted.total() <= 10, counted.launches
    operators = [name for name, _ in counted.launches]
    search = "search", "token_loss", "row_gradient"
    assert operators == ["prepare", "row_pass", *search, "ones_like", "scale_"]


def test_arguments_of_any_form():
    """Slices, other integers, bfloat16, advantages per sequence: nothing is converted first."""
    tokens = torch.randint(0, 33, (2, 7), dtype=torch.int32)
    mask = torch.ones(2, 7, dtype=torch.int64)[:, 1:]
    old = -torch.rand(2, 7).bfloat16()[:, 1:]
    case = Case(torch.randn(2, 7, 33).bfloat16()[:, :-1], tokens[:, 1:], old, torch.randn(2), mask)
    counted = launches_of(case, batch_num_tokens=torch.tensor(12), ref_log_probs=old, dp_size=2)
    assert counted.total() <= 10, counted.launches


def sets_of(case):
    return SamplingMask.from_lists([[int(label), 0] for label in case.labels.flatten() % 32 + 1])


OTHERS = {
    # Backward makes them, from coefficients that it scales and masks.
    "gradients of float16": (12, torch.float16, lambda case: {}),
    "no search": (8, torch.float32, lambda case: dict(bounds=torch.tensor([0.8, 1.2]).unbind())),
    # Twelve more: labels found, values gathered, passed over and scattered, and a metric.
    "sampling mask": (22, torch.float32, lambda case: dict(sampling_mask=sets_of(case))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    most, dtype, options = OTHERS[name]
    case = make_case((2, 6), 33, dtype, staleness=0.4)
    counted = launches_of(case, **options(case))
    assert counted.total() <= most, counted.launches


def test_log_probs_that_are_given():
    x, old, A = -torch.rand(2, 6), -torch.rand(2, 6), torch.randn(2, 6)
    x.requires_grad_()
    with CountLaunches() as counted:
        bapo_loss_from_log_probs(x, old, A).loss.backward()
    assert counted.total() <= 10, counted.launches


def group_rank(rank):
    case = make_case((2, 6), 33, staleness=0.4)
    launches_of(case, process_group=dist.group.WORLD)  # the first call compares the ranks
    return launches_of(case, process_group=dist.group.WORLD).launches


def test_at_most_twelve_with_a_group(worlds):
    for launches in worlds(2).run(group_rank):
        assert sum(count for _, count in launches) <= 12, launches
        assert [name for name, _ in launches].count("allreduce_") == 1
