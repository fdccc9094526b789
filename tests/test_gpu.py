"""What only a GPU can show: large sizes, graphs, streams, no synchronisation, memory."""

import gc
import re
from functools import partial

import helpers
import pytest
import torch
from accuracy import assert_same
from helpers import KERNELS, check_against_reference, make_case, run_kernel
from launches import LAUNCHES
from torch.profiler import DeviceType

from bapo_kernels import SamplingMask, bapo_loss, log_probs, warm_up
from bapo_kernels.backends import self_check
from bapo_kernels.core.operators import ops_of
from bapo_kernels.tools.budget import Result

pytestmark = pytest.mark.gpu
GPU_KERNELS = [name for name in KERNELS if name != "cpu"]
# In forward and in backward, where the gradient is computed.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=GPU_KERNELS or ["none"])
def backend(request):
    yield request.param
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.skipif("cuda" not in KERNELS, reason="needs the CUDA backend")
def test_self_check():
    assert self_check.first_failure(ops_of("cuda"), torch.device("cuda", 0)) is None


@pytest.mark.xdist_group("gpu memory")
def test_more_elements_than_32_bits_can_count(backend, gpu_memory):
    """2.5e9 logits; the last rows are those whose offsets overflow."""
    N, V = 16_640, 151_936
    gpu_memory(3 * N * V * 2 / 1e9 + 1)  # logits, a copy, and its gradient
    logits = torch.empty(N, V, dtype=torch.bfloat16, device="cuda")
    for rows in logits.split(1024):
        rows.normal_().mul_(3)
    labels = torch.randint(0, V, (N,), device="cuda")
    old = log_probs(logits, labels, backend=backend)[0]
    case = make_case((N,), 8, device="cuda", poison=False)
    case.logits, case.labels, case.old_log_probs = logits, labels, old + 0.3 * torch.randn_like(old)
    got = run_kernel(case, backend, batch_num_tokens=1.0)
    last = slice(N - 64, N)
    case.logits, case.labels = logits[last], labels[last]
    case.old_log_probs, case.advantages = case.old_log_probs[last], case.advantages[last]
    case.response_mask = case.response_mask[last]
    options = dict(bounds=got.output.bounds, batch_num_tokens=1.0)
    expected = partial(helpers.run_reference, case, **options)
    same = [result.gradient for result in helpers.in_some_orders(expected)]
    truth = expected(torch.float64).gradient
    helpers.assert_within_budget("gradient", got.gradient[last], same, truth)
    assert got.gradient[last].any()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_no_synchronisation(backend, dtype, given):
    case = make_case((4, 16), 4096, dtype, "cuda", staleness=0.4)
    bounds = torch.tensor([0.8, 1.2], device="cuda").unbind() if given else None
    options = dict(bounds=bounds, backend=backend)
    x = case.logits.clone().requires_grad_()
    bapo_loss(x, *case.arguments(), **options).loss.backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bapo_loss(x, *case.arguments(), **options).loss.backward()
        logp, entropy = log_probs(x, case.labels, backend=backend)
        (logp.sum() + entropy.sum()).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", [(2, 512), (16, 1_024)])
def test_launches_that_a_profiler_sees(backend, shape):
    """Of ours as many as in the table by which ``test_launches.py`` counts."""
    case = make_case(shape, 1_000, torch.bfloat16, "cuda", staleness=0.3)
    run_kernel(case, backend)  # compiles
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    logits = case.logits.detach().requires_grad_()
    with torch.profiler.profile(activities=activities) as profiler:
        bapo_loss(logits, *case.arguments(), backend=backend).loss.backward()
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
    ours = [name for name in names if re.search(r"bapo|^_\w+_kernel", name)]
    operators = "prepare", "row_pass", "search", "token_loss", "row_gradient", "scale_"
    assert 5 <= len(ours) <= sum(LAUNCHES[name] for name in operators), names
    # Zeros for the counts of tokens, the incoming gradient, and two that another torch may add.
    assert len(names) - len(ours) <= 4, names


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_graph_capture(backend, dtype, masked):
    """Forward and backward, replayed on other inputs, for which the search finds other bounds."""
    cases = [
        make_case((4, 32), 4096, dtype, "cuda", staleness=s, seed=seed, poison=False)
        for seed, s in enumerate((0.0, 0.4, 1.0))
    ]
    options = {}
    if masked:  # every other row, by all tokens
        counts = 4096 * (torch.arange(4 * 32, device="cuda") % 2)
        ids = torch.arange(64 * 4096, device="cuda") % 4096
        options["sampling_mask"] = SamplingMask.from_counts(ids, counts)
    fixed = [t.clone() for t in (cases[0].logits, *cases[0].arguments())]
    x = fixed[0].requires_grad_()

    warm_up(bapo_loss, x, *fixed[1:], backend=backend, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bapo_loss(x, *fixed[1:], backend=backend, **options)
        (0.5 * out.loss).backward()
    uppers = set()
    for case in cases:
        with torch.no_grad():
            for static, value in zip(fixed, (case.logits, *case.arguments()), strict=True):
                static.copy_(value)
        graph.replay()
        expected = run_kernel(case, backend, scale=0.5, **options)
        assert_same(Result(out, (x.grad,)), expected)
        assert_same(out.bounds.upper, expected.output.bounds.upper)
        uppers.add(out.bounds.upper.item())
    assert len(uppers) > 1, "the cases must find different bounds"


def test_two_streams(backend):
    cases = [make_case((4, 64), 50_000, torch.bfloat16, "cuda", seed=s) for s in range(2)]
    expected = [run_kernel(case, backend).gradient for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(10):
        torch.cuda.synchronize()
        got = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(run_kernel(case, backend).gradient)
        torch.cuda.synchronize()
        assert_same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_the_current_one(backend):
    case = make_case((4, 16), 4096, torch.bfloat16, "cuda:1")
    check_against_reference(case, backend)
    assert torch.cuda.current_device() == 0


def test_peak_memory(backend):
    """In place, nothing of the size of the logits is allocated; otherwise only the gradient."""
    case = make_case((4, 256), 151_936, torch.bfloat16, "cuda", poison=False)
    size = case.logits.numel() * 2
    for inplace, allowed in ((True, 0.02), (False, 1.02)):
        x = case.logits.clone()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x = x if inplace else x.requires_grad_()
        bapo_loss(x, *case.arguments(), inplace=inplace, backend=backend)
        assert torch.cuda.max_memory_allocated() - before <= allowed * size
