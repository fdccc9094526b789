"""The public functions on fake tensors of a GPU: a value read on the host raises here.

So do tensors on two devices. Neither kernels nor backward run; tests/test_gpu.py covers these.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from bapo_kernels import (
    BAPOConfig,
    ClipBoundSearch,
    SamplingMask,
    bapo_linear_loss,
    bapo_loss,
    bapo_loss_from_log_probs,
    find_clip_bounds,
    log_probs,
)
from bapo_kernels.backends import native, triton
from bapo_kernels.config import SURROGATES, LossAggMode

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="builds as on Linux"),
]
B, S, V = 2, 6, 100
ALL_TERMS = dict(entropy_coef=0.1, kl_loss_coef=0.1, clip_ratio_c=3.0)
# A torch without CUDA has no device guard, so that it cannot index GPU tensors, not even fake ones.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


@pytest.fixture(scope="module", autouse=True)
def guard(tmp_path_factory):
    if torch.version.cuda is None:
        folder = tmp_path_factory.mktemp("guard")
        (folder / "guard.cpp").write_text(GUARD)
        torch_folder = Path(torch.__file__).parent
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "guard.cpp", "-o", "guard.so", "-lc10"]
        command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
        subprocess.run(command, cwd=folder, check=True)
        torch.ops.load_library(folder / "guard.so")
    elif not torch.cuda.is_available():
        pytest.skip("a torch built for CUDA needs a GPU for these tensors")


@pytest.fixture(params=["cuda", "triton"])
def backend(request, monkeypatch):
    monkeypatch.setattr(native, "why_no_cuda", lambda: None)
    monkeypatch.setattr(native, "why_no_kernels", lambda device: None)
    monkeypatch.setattr(triton, "why_not", lambda: None)
    monkeypatch.setattr(triton, "INTERPRETED", False)
    with FakeTensorMode(), torch.no_grad():
        yield request.param


def tokens(*shape):
    """Labels, old log-probs, advantages and a mask."""
    labels, mask = torch.randint(0, V, shape, device="cuda"), torch.ones(shape, device="cuda")
    return labels, *torch.randn(2, *shape, device="cuda"), mask


def check_device(out):
    assert {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)} == {"cuda"}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("statistics", ["all", "live"])
@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_loss_and_gradient(backend, mode, statistics, given):
    logits, (labels, old, A, mask) = torch.randn(B, S, V, device="cuda"), tokens(B, S)
    scale = 7.0 if mode == "seq-mean-token-sum-norm" else None
    config = BAPOConfig.recipe(loss_agg_mode=mode, loss_scale_factor=scale, **ALL_TERMS)
    bounds = torch.tensor((0.8, 1.2), device="cuda").unbind() if given else None
    options = dict(config=config, backend=backend, statistics=statistics, bounds=bounds)
    options |= dict(rollout_log_probs=old, rollout_is_weights=mask, ref_log_probs=old)
    options |= dict(temperature=mask.T.contiguous().T, batch_num_tokens=mask.sum(), dp_size=2)
    options |= dict(global_batch_size=torch.tensor(4, device="cuda"))
    check_device(bapo_loss(logits, labels, old, A[:, 0], mask, inplace=True, **options))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_policies(backend, surrogate, packed):
    """Ratios of sequences, and own bounds."""
    shape = (B * S,) if packed else (B, S)
    offsets = torch.tensor([0, 5, 12], device="cuda") if packed else None
    logits = torch.randn(*shape, V, device="cuda", dtype=torch.bfloat16)
    labels, old, A, mask = tokens(*shape)
    of_sequences = A[:B] if packed else A[:, 0]
    bounds = None if surrogate == "sapo" else (of_sequences, A)
    for level, mode in (("token", "token-mean"), ("sequence", "seq-mean-token-mean")):
        config = BAPOConfig(surrogate=surrogate, ratio_level=level, loss_agg_mode=mode)
        options = dict(config=config, bounds=bounds, cu_seqlens=offsets, backend=backend)
        batch = old, of_sequences, mask
        check_device(bapo_loss(logits, labels, *batch, inplace=True, statistics="live", **options))
        check_device(bapo_loss_from_log_probs(old, *batch, **options).loss)


def test_log_probs_and_search(backend):
    labels, old, A, mask = tokens(B, S)
    logits = torch.randn(B, S, V, device="cuda")[:, :, 1:]
    for temperature in (1.0, A[0, 0], A[:, 0], A):
        check_device(log_probs(logits, labels, temperature=temperature, backend=backend))
    check_device(find_clip_bounds(old, old, A, mask))


def test_first_decision_of_a_rank_without_tokens(backend, monkeypatch):
    """Its table is where NCCL can add it to those of the other ranks."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        for backends in ("cpu:gloo,cuda:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl"):
            monkeypatch.setattr(dist, "get_backend_config", lambda group, of=backends: of)
            search = ClipBoundSearch(scope="step", process_group=dist.group.WORLD)
            search.histogram.table = torch.zeros(54, dtype=torch.float64)  # as of a checkpoint
            search.step()
            device = "cuda" if "nccl" in backends else "cpu"
            assert search.bounds.upper.device.type == device, backends
            search.update(*tokens(B, S)[1:])
            assert search.histogram.table.device.type == "cuda"
    finally:
        dist.destroy_process_group()


def test_sampling_mask(backend):
    """Nothing is read to make one of tensors on a GPU, nor in a call that has it."""
    labels, *batch = tokens(B, S)
    ids, offsets = torch.arange(3 * B * S), 3 * torch.arange(B * S + 1)
    sets = SamplingMask(ids.to("cuda") % V, offsets.to("cuda"))
    logits, options = torch.randn(B, S, V, device="cuda"), dict(sampling_mask=sets, backend=backend)
    check_device(log_probs(logits, labels, **options))
    out = bapo_loss(logits, labels, *batch, inplace=True, **options)
    check_device(out)
    assert "label_outside_mask" in out.metrics


def test_read_on_the_host_raises(backend):
    """The loss from hidden states reads the number of rows, which must raise here."""
    hidden = torch.randn(B, S, 16, device="cuda")
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        bapo_linear_loss(hidden, torch.randn(V, 16, device="cuda"), *tokens(B, S), backend=backend)
