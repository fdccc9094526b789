"""The CUDA kernels on sampling masks, executed as PTX (tests/cuda_on_host)."""

import shutil

import pytest
import set_operators as cases
import torch
from cuda_on_host.build import NVCC
from cuda_on_host.emulated import DEVICES
from cuda_on_host.library import Counted
from far_apart import check_far_apart
from helpers import exhaustive_unless, needs_native, per_token
from launches import LAUNCHES
from sample_operators import *  # noqa: F403 - its tests
from sample_operators import Drawn
from set_operators import *  # noqa: F403
from test_linear import CONFIGS, build, check, problem, staleness_of
from test_loss import case_of

pytest_plugins = ("cuda_on_host.fixtures",)
pytestmark = [
    needs_native,
    pytest.mark.slow,
    pytest.mark.xdist_group("on_host"),  # one worker builds the library
    pytest.mark.skipif(shutil.which(NVCC[0]) is None, reason="needs nvcc"),
    pytest.mark.parametrize("on_host", ["H100"], indirect=True),
]


@pytest.fixture
def ops(on_host, library):
    library.sizes, library.shapes = cases.Sizes(), ((4, 9_016), (4, 5_001))
    return library


def test_launches_of_sets(on_host, library):
    ops, sets = Counted(library), cases.random_sets((2, 0, 520, 3), V=600)
    head = cases.head_of(sets, torch.float32, 8)
    cases.check_find_labels(ops, sets, cases.labels_of(sets))
    cases.check_move(ops, sets, torch.float32)
    cases.check_pass(ops, cases.Pass(sets, cases.values_of(sets), cases.PLAIN))
    cases.check_dweight(ops, sets, head, torch.float32)
    cases.check_head_pass(ops, sets, head, cases.PLAIN)
    Drawn(ops, torch.randn(2, 600), torch.tensor([[3], [4]]), 8)
    assert ops.most.keys() >= cases.OPERATORS
    assert ops.most == {name: LAUNCHES[name] for name in ops.most}


@pytest.mark.parametrize(
    "dtype", exhaustive_unless(lambda dtype: dtype == torch.bfloat16, cases.DTYPES)
)
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_with_sampling_masks(on_host, library, dtype, name):
    """The public functions, from logits and from hidden states, against the reference."""
    library.device(*DEVICES["B200"][0])  # above it is the code for sm_90
    library.unwritten = True  # the values of rows that are not counted
    config = build(name)
    kl = dict(ref_log_probs=per_token()) if config.kl_loss_coef else {}
    case_of(True, dtype=dtype, config=config, **kl)[1]("cpu")
    check(*problem(dtype, "cpu", config, staleness_of(dtype), sets=True), "cpu")


@pytest.mark.parametrize("name", ["recipe", "entropy", "softcap"])
def test_losses_from_samples(on_host, library, same_seeds, name):
    given = problem(torch.float32, "cpu", build(name), real=1.0)
    for C, sets in ((16, "all"), (100, "live")):
        options = dict(gradient_samples=C, chunk_tokens=5, logits_dtype=torch.float32)
        check(*given, "cpu", sets, **options)


def test_operands_beyond_32_bits(on_host, library):
    check_far_apart(library, blocks_of_front=1)
